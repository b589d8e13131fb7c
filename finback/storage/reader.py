"""Reads of exact byte ranges: threads with direct reads, a queue a disk, demand before guesses.

A Python thread reaches the disk's ceiling (docs/log.md), because it waits in the kernel with the
interpreter's lock released. What one read needs is a `Ticket`; its memory is the caller's.
"""

import heapq
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from threading import Condition, Lock, Thread

from finback.checkpoint.formats import Bytes
from finback.errors import ReadError
from finback.spans import Spans
from finback.storage.arena import BLOCK, reserve
from finback.storage.extents import Extent, place
from finback.storage.files import DIRECT_REFUSED, Files

PIECE = 8 << 20  # bytes of a request, so that all threads share an expert,
MOST_AT_ONCE = 32 << 20  # or so many, while there is enough for the other threads
DIRECT_FROM = 256 << 10  # smaller reads gain more from the page cache than they cost it
THREADS = 4  # for each disk; two nearly reach a disk's ceiling, arrays of disks want more


class Priority(IntEnum):
    """What is read first."""

    DEMAND = 0  # somebody waits for it
    AHEAD = 1  # certain to be wanted later
    GUESS = 2  # perhaps wanted


@dataclass(slots=True)
class Ticket:
    """A read under way, of one piece for each extent, and for each request made of it."""

    role: str
    priority: Priority
    num_bytes: int
    pieces: "list[_Piece]" = field(default_factory=list)
    left: int = 0
    error: ReadError | None = None
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        """Tell whether every piece has been read, has failed or was given up."""
        return self.left == 0


@dataclass(slots=True)
class _Piece:
    """What is to be read in one go; it shrinks while requests are cut from its start."""

    ticket: Ticket
    path: Path
    offset: int  # on a block's border
    needed: int  # bytes from there that must come
    memory: memoryview  # of the whole ticket
    at: int  # where in it the piece begins
    num_bytes: int  # of whole blocks
    is_taken: bool = False  # or given up

    def cut(self, num_bytes: int) -> "_Piece":
        """Take so many bytes, of whole blocks, from the start."""
        part = _Piece(
            self.ticket, self.path, self.offset, num_bytes, self.memory, self.at, num_bytes, True
        )
        self.offset += num_bytes
        self.at += num_bytes
        self.needed -= num_bytes
        self.num_bytes -= num_bytes
        self.ticket.left += 1
        return part


@dataclass(slots=True)
class _Queue:
    """What is to be read from one disk, with the condition that there is something."""

    filled: Condition
    heap: list[tuple[int, int, _Piece]] = field(default_factory=list)
    waiting: int = 0  # bytes of pieces that nobody has taken or given up

    @property
    def left(self) -> dict[int, _Piece]:
        """Give those pieces."""
        return {id(piece): piece for *_, piece in self.heap if not piece.is_taken}

    def take(self, piece: _Piece) -> None:
        """Take a piece, or give it up; it stays in the heap until its turn."""
        piece.is_taken = True
        self.waiting -= piece.num_bytes


class Reader:
    """Reads extents into memory given by the caller. Owns threads and open files until closed."""

    def __init__(self, spans: Spans, threads: int = THREADS, direct: bool = True) -> None:
        """Start nothing yet.

        Args:
            spans: `read` is the time with reads under way; bytes and reads are counted by role.
            threads: For each disk.
            direct: Read past the page cache where the file system can.
        """
        self._spans, self._threads, self._files = spans, threads, Files(direct)
        self._lock = Lock()
        self._done = Condition(self._lock)
        self._queues: dict[int, _Queue] = {}
        self._devices: dict[Path, int] = {}
        self._serial = itertools.count()
        self._under_way, self._since = 0, 0.0
        self._workers: list[Thread] = []
        self._is_closed = False
        # Told every request, in any thread; must be short and raise nothing.
        self.on_read: Callable[[Extent], None] | None = None

    def submit(
        self,
        extents: Sequence[Extent],
        memory: Bytes,
        priority: Priority = Priority.DEMAND,
        role: str = "spine",
    ) -> Ticket:
        """Begin to read extents into `memory`, laid out as by `place`; see `wait`.

        Args:
            memory: Begins on a block's border, and stays as it is until the ticket is done.
        """
        ticket = Ticket(role, priority, sum(extent.num_bytes for extent in extents))
        view, end = memory.data, 0
        for extent in extents:
            start = extent.offset // BLOCK * BLOCK
            needed = extent.offset + extent.num_bytes - start
            size = -(-needed // BLOCK) * BLOCK
            if size:
                piece = _Piece(ticket, extent.path, start, needed, view, end, size)
                ticket.pieces.append(piece)
            end += size
        ticket.left = len(ticket.pieces)
        with self._lock:
            if self._is_closed:
                raise ReadError(f"{extents[0].path}: the model has been closed")
            self._enqueue(ticket)
            for piece in ticket.pieces:
                self._queues[self._device(piece.path)].waiting += piece.num_bytes
        return ticket

    def promote(self, ticket: Ticket) -> None:
        """Somebody waits now for what was read ahead or guessed."""
        with self._lock:
            if ticket.priority != Priority.DEMAND and not ticket.is_done:
                ticket.priority = Priority.DEMAND
                self._enqueue(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Give up the pieces that have not begun; `wait` before the memory is used again."""
        with self._lock:
            ticket.is_cancelled = True  # what it has read must not be used
            for piece in ticket.pieces:
                if not piece.is_taken:
                    self._queues[self._device(piece.path)].take(piece)
                    ticket.left -= 1
            self._done.notify_all()

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Wait until all are done.

        Raises:
            ReadError: A file ended early, cannot be opened, or the device failed.
        """
        wanted = list(tickets)
        with self._lock:
            while not all(ticket.is_done for ticket in wanted):
                self._done.wait()
        for ticket in wanted:
            if ticket.error is not None:
                raise ticket.error

    def drain(self) -> None:
        """Give up everything that waits, and wait for what is under way."""
        with self._lock:
            for queue in self._queues.values():
                for piece in queue.left.values():
                    queue.take(piece)
                    piece.ticket.is_cancelled = True
                    piece.ticket.left -= 1
            self._done.notify_all()
            while self._under_way:
                self._done.wait()

    def settle(self, tickets: Iterable[Ticket]) -> None:
        """Wait until nothing is written into the tickets' memory any more, well or badly."""
        wanted = list(tickets)
        with self._lock:
            while not all(ticket.is_done for ticket in wanted):
                self._done.wait()

    def wait_any(self, tickets: Sequence[Ticket]) -> None:
        """Wait until at least one is done, well or badly."""
        assert tickets
        with self._lock:
            while not any(ticket.is_done for ticket in tickets):
                self._done.wait()

    def read(self, extent: Extent, role: str = "spine") -> Bytes:
        """Read one extent into new memory.

        Raises:
            ReadError: As `wait`.
        """
        (start,), size = place([extent])
        memory = reserve(size)
        self.wait([self.submit([extent], memory, role=role)])
        return memory[start : start + extent.num_bytes]

    def forget(self, path: Path) -> None:
        """Close a file that may be replaced or deleted."""
        self._files.forget(path)

    @property
    def is_idle(self) -> bool:
        """Tell whether no read is waiting or under way."""
        with self._lock:
            return self._has_nothing_to_do

    def wait_until_idle(self) -> None:
        """Wait until every read has ended, also those that nobody asks about."""
        with self._lock:
            while not self._has_nothing_to_do:
                self._done.wait()

    @property
    def _has_nothing_to_do(self) -> bool:
        return self._under_way == 0 and not any(q.waiting for q in self._queues.values())

    def close(self) -> None:
        """Stop the threads after the pieces under way and close every file; later reads fail."""
        with self._lock:
            self._is_closed = True
            for queue in self._queues.values():
                for piece in queue.left.values():
                    queue.take(piece)
                    piece.ticket.error = ReadError(f"{piece.path}: the model has been closed")
                    piece.ticket.left -= 1
                queue.heap.clear()
                queue.filled.notify_all()
            self._done.notify_all()
        for worker in self._workers:
            worker.join()
        self._files.close()

    def check(self) -> None:
        """Test the invariants: nothing is under way that nobody queued."""
        with self._lock:
            assert self._under_way >= 0
            assert not self._is_closed or self._under_way == 0
            for queue in self._queues.values():
                assert queue.waiting == sum(piece.num_bytes for piece in queue.left.values())

    def _enqueue(self, ticket: Ticket) -> None:
        for piece in ticket.pieces:
            if piece.is_taken:
                continue
            device = self._device(piece.path)
            if device not in self._queues:
                self._queues[device] = _Queue(Condition(self._lock))
                for _ in range(self._threads):
                    worker = Thread(target=self._work, args=(device,), daemon=True)
                    self._workers.append(worker)
                    worker.start()
            queue = self._queues[device]
            heapq.heappush(queue.heap, (int(ticket.priority), next(self._serial), piece))
            queue.filled.notify(min(self._threads, -(-piece.num_bytes // PIECE)))

    def _device(self, path: Path) -> int:
        if path not in self._devices:
            try:
                self._devices[path] = os.stat(path).st_dev
            except OSError:
                self._devices[path] = -1  # the read will say what is wrong
        return self._devices[path]

    def _work(self, device: int) -> None:
        queue, piece, error = self._queues[device], None, None
        while True:
            with self._lock:
                if piece is not None:
                    self._finish(piece, error)
                piece = self._next(queue)
            if piece is None:
                return
            error = self._fill(piece)

    def _next(self, queue: _Queue) -> _Piece | None:
        """Wait for something to read, and take a request's worth of it; None after closing."""
        while True:
            while not queue.heap and not self._is_closed:
                queue.filled.wait()
            if not queue.heap:
                return None
            piece = queue.heap[0][2]
            if not piece.is_taken:
                break
            heapq.heappop(queue.heap)  # given up, or promoted and read
        size = self._request_size(piece, queue.waiting)
        if size < piece.num_bytes:
            queue.waiting -= size
            piece = piece.cut(size)
        else:
            queue.take(piece)
            heapq.heappop(queue.heap)
        if self._under_way == 0:
            self._since = time.perf_counter()
        self._under_way += 1
        return piece

    def _request_size(self, piece: _Piece, waiting: int) -> int:
        """Say how much of a piece one request reads: parts of about the same size.

        More at once costs less, but leaves less for other threads, and a request under way can
        neither be given up nor be overtaken.
        """
        most, size = PIECE, piece.num_bytes
        is_plenty = waiting - min(size, MOST_AT_ONCE) >= self._threads * PIECE
        if is_plenty and piece.ticket.priority == Priority.DEMAND:
            most = MOST_AT_ONCE
        return size if size <= most else -(-size // -(-size // most) // BLOCK) * BLOCK

    def _finish(self, piece: _Piece, error: ReadError | None) -> None:
        """Count a request that has ended, and tell those who wait if it was a ticket's last."""
        self._under_way -= 1
        now = time.perf_counter()
        self._spans.seconds["read"] += now - self._since
        self._since = now
        if self.on_read is not None:
            self.on_read(Extent(piece.path, piece.offset, piece.num_bytes))
        counts, ticket = self._spans.counts, piece.ticket
        counts["reads"] += 1
        counts["bytes_requested"] += piece.num_bytes
        ticket.error = ticket.error or error
        ticket.left -= 1
        if ticket.left == 0:
            if not ticket.is_cancelled:
                counts["bytes_read"] += ticket.num_bytes
                counts[f"bytes_read_{ticket.role}"] += ticket.num_bytes
            self._done.notify_all()

    def _fill(self, piece: _Piece) -> ReadError | None:
        try:
            done = self._fill_from(piece, direct=piece.num_bytes >= DIRECT_FROM)
        except ReadError as error:
            return error
        except OSError as error:
            return ReadError(
                f"{piece.path}: reading at byte {piece.offset} failed ({error.strerror})"
            )
        if done >= piece.needed:
            return None
        return ReadError(
            f"{piece.path}: ended after {piece.offset + done} bytes, "
            f"{piece.offset + piece.needed} are needed; it shrank while in use"
        )

    def _fill_from(self, piece: _Piece, direct: bool) -> int:
        """Read a piece, and give how many bytes came."""
        done, view = 0, piece.memory[piece.at : piece.at + piece.num_bytes]
        file = self._files.acquire(piece.path, direct)
        try:
            while done < piece.needed:
                try:
                    count = file.read(view[done:], piece.offset + done)
                except OSError as error:
                    if file.is_direct and error.errno in DIRECT_REFUSED:
                        break  # accepted at opening, refused at reading
                    raise
                done += count
                if count == 0 or (file.is_direct and done % BLOCK and done < piece.needed):
                    break  # the end, or a direct read cut where the next could not begin
        finally:
            self._files.release(file)
        if done < piece.needed and file.is_direct:
            return self._fill_from(piece, direct=False)
        return done
