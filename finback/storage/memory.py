"""How much memory this process may still take."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Give what the machine and this process's cgroup leave; None where neither says."""
    limits = [limit for limit in (_of_machine(), _of_cgroup()) if limit is not None]
    return min(limits, default=None)


def _of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # no Linux: nothing to read
    return None


def _of_cgroup() -> int | None:
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
