"""Parts of states that memory has no room for: in a file, written and read again for every step.

Each part has a place of its own in one sparse file, which is gone when it is closed. Writing goes
on beside computing; a part is read only after it was written whole.
"""

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from finback.checkpoint.formats import Bytes
from finback.errors import CapacityError
from finback.spans import Spans
from finback.storage.arena import BLOCK, MemoryPool, reserve
from finback.storage.extents import Extent
from finback.storage.files import DIRECT_REFUSED
from finback.storage.reader import Priority, Reader, Ticket

WRITERS = 2


@dataclass(slots=True)
class Place:
    """Where a part lies, how much of it is there, and what is under way."""

    offset: int
    room: int
    num_bytes: int = 0
    writing: "Future[None] | None" = None
    reading: Ticket | None = None
    goes_round: bool = False  # its memory, as all such parts are of one size
    memory: Bytes = field(default_factory=lambda: reserve(0))  # of what is read


class SpillFile:
    """Owns the file and the threads that write to it. For use by one thread."""

    def __init__(self, folder: Path, reader: Reader, spans: Spans, memory: MemoryPool) -> None:
        """Make an empty file.

        Args:
            folder: On a disk with room; made if it is not there.
            reader: Reads parts; stays the caller's.
            spans: `bytes_spilled` counts what is written; `wait` is the time it held things up.
            memory: Of parts that come back; stays the caller's.

        Raises:
            OSError: The folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix="spill-", suffix=".tmp", dir=folder)
        self.path = Path(name)
        self._reader, self._spans = reader, spans
        self._buffered = descriptor
        self._direct, self._name = _open_direct(self.path), name
        if Path("/proc/self/fd").exists():  # gone whatever happens to this process
            self.path.unlink()
            self.path = Path(f"/proc/self/fd/{descriptor}")
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="spill")
        self._end, self._free = 0, dict[int, list[int]]()
        self._memory = memory  # goes round: taken anew each time it would leave holes that stay

    def place(self, room: int, goes_round: bool = False) -> Place:
        """Give a part of at most `room` bytes a place.

        Args:
            room: Bytes.
            goes_round: Whoever takes the part gives its memory to `recycle` in the end.
        """
        size = -(-room // BLOCK) * BLOCK
        free = self._free.get(size)
        if free:
            return Place(free.pop(), size, goes_round=goes_round)
        self._end += size
        return Place(self._end - size, size, goes_round=goes_round)

    def give_up(self, place: Place) -> None:
        """Free a place; what is under way there ends first."""
        self._finish_read(place)
        if place.writing is not None:
            place.writing.exception()
            place.writing = None
        self._free.setdefault(place.room, []).append(place.offset)

    def write(self, place: Place, memory: Bytes, start: int, total: int) -> None:
        """Begin to write bytes from `start` of a part on; `memory` stays as it is until `settle`.

        Args:
            place: Of the part.
            memory: The bytes; on a block's border, and in whole blocks, they are written directly.
            start: Where in the part they begin.
            total: Bytes of the part from now on.
        """
        assert place.reading is None  # or it would be of what was there before
        self.settle(place)
        place.num_bytes = total
        self._spans.count("bytes_spilled", len(memory))
        place.writing = self._pool.submit(self._write, memory, place.offset + start)

    def settle(self, place: Place) -> None:
        """Wait until a part is written.

        Raises:
            CapacityError: The disk is full, or failed.
        """
        if place.writing is None:
            return
        try:
            with self._spans.span("wait"):
                place.writing.result()
            place.writing = None  # but not after Ctrl-C: it goes on
        except OSError as error:
            place.writing = None
            raise CapacityError(
                f"{self._name}: states cannot be written ({error.strerror}); free some room there, "
                "or run fewer sequences together"
            ) from error

    def begin_read(self, place: Place) -> None:
        """Begin to read a part, if it is not under way already."""
        if place.reading is None and place.num_bytes:
            self.settle(place)
            take = self._memory.take if place.goes_round else reserve
            place.memory = take(-(-place.num_bytes // BLOCK) * BLOCK)
            extent = Extent(self.path, place.offset, place.num_bytes)
            place.reading = self._reader.submit([extent], place.memory, Priority.AHEAD, "state")

    def take(self, place: Place) -> Bytes:
        """Give a part's bytes, waiting for them. They are the caller's.

        Raises:
            ReadError: The device failed.
        """
        self.begin_read(place)
        ticket, place.reading = place.reading, None
        assert ticket is not None
        self._reader.promote(ticket)
        if ticket.is_cancelled:  # given up after Ctrl-C
            self._reader.settle([ticket])
            return self.take(place)
        if not ticket.is_done:
            with self._spans.span("wait"):
                self._reader.wait([ticket])
        self._reader.wait([ticket])
        memory, place.memory = place.memory, reserve(0)
        return memory[: place.num_bytes]

    def recycle(self, memory: Bytes) -> None:
        """Take memory back that nobody uses any more, for what is read next."""
        self._memory.give_back(memory)

    def close(self) -> None:
        """Delete the file, after what is being written."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.forget(self.path)
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)
        Path(self._name).unlink(missing_ok=True)

    def _finish_read(self, place: Place) -> None:
        if place.reading is not None:
            self._reader.cancel(place.reading)
            self._reader.settle([place.reading])
            place.reading = None

    def _write(self, memory: Bytes, offset: int) -> None:
        view, done = memory.data, 0
        is_aligned = not (memory.ctypes.data % BLOCK or len(view) % BLOCK or offset % BLOCK)
        descriptor = self._direct if self._direct is not None and is_aligned else self._buffered
        while done < len(view):
            try:
                done += os.pwrite(descriptor, view[done:], offset + done)
            except OSError as error:
                if descriptor == self._buffered or error.errno not in DIRECT_REFUSED:
                    raise
                descriptor = self._buffered


def _open_direct(path: Path) -> int | None:
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        return os.open(path, os.O_WRONLY | flag | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None  # a file system without direct writes
