"""Memory for what is read from disk: in huge pages where there are some, taken when it is touched.

A disk reads directly into memory two to three times as fast where its pages are large, and kernels
read it faster too (docs/log.md). Nothing is touched in advance: untouched memory costs nothing.
"""

import contextlib
import mmap
import re
import sys
from pathlib import Path

import numpy as np

from finback.checkpoint.formats import Bytes

BLOCK = 4096  # what direct reads align to
HUGE_PAGE = 2 << 20


def reserve(num_bytes: int) -> Bytes:
    """Give memory that begins on a block's border, and on a huge page's if it fills some.

    It lives as long as views of it do.
    """
    if num_bytes < HUGE_PAGE:
        small = np.empty(num_bytes + BLOCK, np.uint8)
        begin = -small.ctypes.data % BLOCK
        return small[begin : begin + num_bytes]
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: all works, more slowly
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + num_bytes]


def release(memory: Bytes) -> None:
    """Give the pages inside `memory` back to the machine; what they held is lost."""
    if sys.platform != "linux" or memory.size == 0:
        return
    import ctypes

    start = -(-memory.ctypes.data // BLOCK) * BLOCK
    end = (memory.ctypes.data + memory.nbytes) // BLOCK * BLOCK
    if end > start:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def huge_bytes(memory: Bytes) -> int | None:
    """Count the bytes of a reservation that lie in huge pages; None where nobody can tell."""
    try:
        text = Path("/proc/self/smaps").read_text()
    except OSError:
        return None
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    total, is_inside = 0, False
    for line in text.splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) < end and int(found[2], 16) > start
        elif is_inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return min(total, memory.nbytes)  # a mapping may be larger, by what begins it on a border


class MemoryPool:
    """Memory that goes round: what is given back is taken again by the next of its size.

    New memory is cleared by the machine when it is first touched, which can take longer than a disk
    needs to fill it (docs/log.md). Of a size, never more is held than was in use at one time. For
    use by one thread.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._idle: dict[int, dict[int, Bytes]] = {}  # by size and address

    def take(self, num_bytes: int) -> Bytes:
        """Give memory as `reserve` does, but holding anything; the caller's until given back."""
        idle = self._idle.get(num_bytes)
        return idle.popitem()[1] if idle else reserve(num_bytes)

    def give_back(self, memory: Bytes) -> None:
        """Take back, from `take`, what nobody looks at any more."""
        self._idle.setdefault(len(memory), {})[memory.ctypes.data] = memory

    @property
    def num_bytes(self) -> int:
        """Count the bytes that nobody uses."""
        return sum(size * len(idle) for size, idle in self._idle.items())


class Arena:
    """Slots of one size in one reservation, each touched when it is first used."""

    def __init__(self, slot_bytes: int, count: int) -> None:
        """Reserve `count` slots; each begins on a block's border."""
        self.slot_bytes = -(-slot_bytes // BLOCK) * BLOCK
        self.count = count
        self.memory = reserve(self.slot_bytes * count)

    def slot(self, number: int) -> Bytes:
        """Give the memory of a slot."""
        return self.memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]
