"""A short measurement of how fast this disk can be read: the ceiling that speeds are held to."""

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

from finback.checkpoint.formats import Bytes
from finback.errors import ReadError
from finback.storage.arena import BLOCK, huge_bytes, reserve
from finback.storage.extents import Extent
from finback.storage.files import Files

PIECE = 8 << 20
LEAST_MEMORY = 32 << 20  # four pieces
MEMORY_BYTES = 128 << 20  # more than a cache, as what is read for use: into 32 MB it is 8 % faster


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What a disk gives at most here, and whether memory was as good as it can be."""

    gbps: float
    huge_page_share: float | None  # of the memory read into; None where nobody can tell
    core_s_per_gb: float  # of this process


def measure_ceiling(
    paths: Sequence[Path],
    seconds: float = 0.7,
    threads: int = 4,
    piece: int = PIECE,
    memory: Bytes | None = None,
) -> DiskRate | None:
    """Read pieces at random places of files, as fast as they come; None where they are too small.

    Plain threads with direct reads into huge pages, none of finback's own reader. The bytes are
    thrown away.

    Args:
        paths: Files to read from.
        seconds: For how long.
        threads: Reads at once.
        piece: Bytes of each, whole blocks.
        memory: Where to; some of its own if None, given back at once.

    Raises:
        ReadError: A file cannot be read.
    """
    return _read_all(_places(paths, piece), seconds, threads, memory)


def measure_again(
    requests: Sequence[Extent],
    seconds: float = 3.0,
    threads: int = 4,
    memory: Bytes | None = None,
) -> DiskRate | None:
    """Read what was read, request by request in the same order, as `measure_ceiling` does.

    What a disk gives depends on what is read: here by threads that do nothing else. All is read
    directly, also small requests that the reader takes through the page cache.

    Args:
        requests: Of whole blocks, as the reader made them.
        seconds: Until then at most.
        threads: Reads at once.
        memory: Where to; some of its own if None.

    Raises:
        ReadError: A file cannot be read.
    """
    return _read_all(requests, seconds, threads, memory)


def _read_all(
    places: Sequence[Extent], seconds: float, threads: int, memory: Bytes | None
) -> DiskRate | None:
    if len(places) < threads:
        return None
    piece = max(one.num_bytes for one in places)
    if memory is None or len(memory) < piece * threads:
        memory = reserve(max(MEMORY_BYTES, piece * threads))
    memory[::BLOCK] = 0  # taken before the clock runs
    order, slots = iter(places), itertools.cycle(range(len(memory) // piece))
    lock, files, stop = Lock(), Files(), 0.0
    done, errors = [0], list[OSError]()

    def work() -> None:
        while time.perf_counter() < stop and not errors:
            with lock:
                if (one := next(order, None)) is None:
                    return
                start = next(slots) * piece
            try:
                count = _read(files, one, memory[start : start + one.num_bytes])
            except OSError as error:
                errors.append(error)
                return
            with lock:
                done[0] += count

    try:
        workers = [Thread(target=work) for _ in range(threads)]
        start, cpu = time.perf_counter(), time.process_time()
        stop = start + seconds
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        taken, cpu = time.perf_counter() - start, time.process_time() - cpu
    finally:
        files.close()
    if errors:
        path = errors[0].filename or places[0].path.parent
        raise ReadError(f"{path}: cannot be read ({errors[0].strerror})")
    huge = huge_bytes(memory)
    share = None if huge is None else huge / len(memory)
    return DiskRate(done[0] / taken / 1e9, share, cpu / max(done[0] / 1e9, 1e-9))


def _places(paths: Sequence[Path], piece: int) -> list[Extent]:
    """List whole pieces of the files in random order, another each time."""
    found = []
    for path in paths:
        found += [(path, at) for at in range(0, path.stat().st_size - piece, piece)]
    random.Random(time.time_ns()).shuffle(found)
    return [Extent(path, at // BLOCK * BLOCK, piece) for path, at in found]


def _read(files: Files, extent: Extent, memory: Bytes) -> int:
    done, file = 0, files.acquire(extent.path)
    try:
        while done < len(memory):
            count = file.read(memory.data[done:], extent.offset + done)
            done += count
            if count == 0 or done % BLOCK:
                break  # the end
    finally:
        files.release(file)
    return done
