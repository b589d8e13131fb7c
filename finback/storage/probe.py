"""A short measurement of how fast this disk can be read: the ceiling that speeds are held to."""

import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock, Thread

from finback.checkpoint.formats import Bytes
from finback.errors import ReadError
from finback.storage.arena import BLOCK, reserve
from finback.storage.files import OpenFile

PIECE = 8 << 20
MEMORY_BYTES = 128 << 20  # more than a cache, as what is read for use: into 32 MB it is 8 % faster


def measure_ceiling(
    paths: Sequence[Path],
    seconds: float = 0.7,
    threads: int = 4,
    piece: int = PIECE,
    memory: Bytes | None = None,
) -> float | None:
    """Read pieces at random places of files, as fast as they come: GB/s; None without any.

    Plain threads with direct reads into huge pages, none of finback's own reader. The bytes are
    thrown away.

    Args:
        paths: Files to read from.
        seconds: For how long.
        threads: Reads at once.
        piece: Bytes of each.
        memory: Where to; some of its own if None, given back at once.

    Raises:
        ReadError: A file cannot be read.
    """
    places = _places(paths, piece)
    if len(places) < threads:
        return None
    if memory is None or len(memory) < piece * threads:
        memory = reserve(MEMORY_BYTES)
    memory[::BLOCK] = 0  # taken before the clock runs
    slots = itertools.cycle(range(len(memory) // piece))
    lock, done, stop = Lock(), [0], 0.0

    def work() -> None:
        while time.perf_counter() < stop:
            with lock:
                if not places:
                    return
                path, offset = places.pop()
                slot = next(slots)
            part = memory[slot * piece : (slot + 1) * piece]
            count = _read(files[path], part, offset)
            with lock:
                done[0] += count

    files: dict[Path, OpenFile] = {}
    try:
        files.update({path: OpenFile(path, direct=True) for path, _ in places[:64]})
        places = [(path, offset) for path, offset in places if path in files]
        workers = [Thread(target=work) for _ in range(threads)]
        start = time.perf_counter()
        stop = start + seconds
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return done[0] / (time.perf_counter() - start) / 1e9
    except OSError as error:
        raise ReadError(f"{error.filename}: cannot be read ({error.strerror})") from error
    finally:
        for file in files.values():
            file.close()


def _places(paths: Sequence[Path], piece: int) -> list[tuple[Path, int]]:
    """List whole pieces of the files in random order, another each time."""
    found = []
    for path in paths:
        found += [(path, at) for at in range(0, path.stat().st_size - piece, piece)]
    random.Random(time.time_ns()).shuffle(found)
    return [(path, at // BLOCK * BLOCK) for path, at in found]


def _read(file: OpenFile, memory: Bytes, offset: int) -> int:
    done = 0
    while done < len(memory):
        count = file.read(memory.data[done:], offset + done)
        if count == 0:
            break
        done += count
    return done
