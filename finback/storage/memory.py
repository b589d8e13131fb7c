"""How much memory this process may have: by the machine, and by the control groups it is in."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from finback.units import human_bytes

ROOT = Path("/sys/fs/cgroup")
RESERVE_SHARE, LEAST_RESERVE = 0.05, 256 << 20  # left to the rest of the machine
GROUP_RESERVE = 32 << 20  # of a group's limit: page tables, sockets, the kernel's own
LITTLE_LEFT = 0.1  # of the machine's memory


@dataclass(frozen=True, slots=True)
class Limits:
    """What was found, in bytes; None where nobody says."""

    total: int  # of the machine
    free: int  # what others leave, with what this process holds already, less a reserve
    group: int | None  # the smallest limit of the groups around this process, less a reserve
    resident: int  # what this process holds already

    @property
    def usable(self) -> int:
        """Give the most this process may hold."""
        return self.free if self.group is None else min(self.free, self.group)

    def why(self, asked: str) -> str:
        """Say what the budget comes from."""
        said = f"asked for {asked}, " if asked != "auto" else ""
        group = "" if self.group is None else f", {human_bytes(self.group)} by its control group"
        return f"{said}{human_bytes(self.free)} free on this machine{group}"


def read_limits() -> Limits:
    """Ask the machine and the control groups."""
    resident = resident_bytes()
    total, available = _of_machine()
    reserve = max(LEAST_RESERVE, int(total * RESERVE_SHARE))
    group = min(_group_limits(resident), default=None)
    if group is not None and group >= total:
        group = None  # no limit at all, written as a large one
    return Limits(
        total=total,
        free=max(0, available + resident - reserve),
        group=None if group is None else max(0, group - GROUP_RESERVE),
        resident=resident,
    )


def resident_bytes() -> int:
    """Count what this process holds in memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    import resource

    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """Count the most this process has held in memory so far."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # no Linux
    import resource

    # On Linux this would count what the program that started this one held, too.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def pressure() -> float:
    """Give the share of the last ten seconds in which something waited for memory, 0 if unknown.

    Of this process's own control group where there is one; of the whole machine only where it has
    little left: what another group waits for inside its own limit is nothing to us.
    """
    total, available = _of_machine()
    if available < LITTLE_LEFT * total:
        return _waited(Path("/proc/pressure/memory"))
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0.0
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    return _waited(Path("/sys/fs/cgroup") / own.lstrip("/") / "memory.pressure")


def _waited(path: Path) -> float:
    try:
        line = path.read_text().splitlines()[0]
        return float(line.split()[1].removeprefix("avg10=")) / 100
    except (OSError, ValueError, IndexError):
        return 0.0


def _of_machine() -> tuple[int, int]:
    """Give the machine's memory, and what is available of it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return table["MemTotal"], table["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        import os

        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total * 3 // 4  # no Linux: leave a quarter to the others


def _group_limits(resident: int) -> Iterator[int]:
    """Give the memory limits of the groups this process is in and of those around them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders, name = [ROOT, ROOT / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            folders, name = [ROOT / "memory"], "memory.limit_in_bytes"
        else:
            continue
        for folder in folders:
            inner = folder / path.lstrip("/")
            for place in (inner, *inner.parents):
                if not place.is_relative_to(folder):
                    break
                try:
                    yield int((place / name).read_text()) - _held_by_others(place, resident)
                except (OSError, ValueError):
                    continue  # "max", or not a group of its own


def _held_by_others(group: Path, resident: int) -> int:
    """Count what other processes of a group hold for themselves; cached files can be dropped."""
    held = 0
    for line in (group / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("anon", "total_rss"):
            held = int(value)
    return max(0, held - resident)
