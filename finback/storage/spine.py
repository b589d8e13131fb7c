"""What every token uses, in groups of one layer: kept in memory, or read again for every step.

Groups that are read again share two buffers in turn, each group always in the same one, so that a
weight's address never changes. While a layer computes the next one's bytes come.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from finback.checkpoint.formats import Bytes
from finback.checkpoint.safetensors import TensorRef
from finback.spans import Spans
from finback.storage.arena import reserve
from finback.storage.extents import Extent, merge, place
from finback.storage.reader import Priority, Reader, Ticket

NUM_BUFFERS = 2


@dataclass(slots=True)
class Group:
    """The matrices of one layer, or of one end of the model: where they lie, and where they go."""

    name: str
    refs: Sequence[TensorRef]  # in the order in which they lie
    extents: list[Extent] = field(init=False)
    starts: list[int] = field(init=False)
    num_bytes: int = field(init=False)  # in memory, whole blocks

    def __post_init__(self) -> None:
        """Lay the tensors out."""
        self.extents = merge(self.refs)
        self.starts, self.num_bytes = place(self.extents)

    def views(self, memory: Bytes) -> dict[str, Bytes]:
        """Find each tensor in memory laid out for this group."""
        places = [
            (extent.path, extent.offset, start)
            for extent, start in zip(self.extents, self.starts, strict=True)
        ]
        out, at = {}, 0
        for ref in self.refs:
            extent = self.extents[at]
            if ref.path != extent.path or not (
                extent.offset <= ref.offset
                and ref.offset + ref.num_bytes <= extent.offset + extent.num_bytes
            ):
                at += 1
            _, offset, start = places[at]
            begin = start + ref.offset - offset
            out[ref.name] = memory[begin : begin + ref.num_bytes]
        return out


def buffer_sizes(groups: Sequence[Group], streamed: frozenset[str]) -> list[int]:
    """Give the bytes of each buffer: its largest group's, the groups taking turns."""
    sizes = [group.num_bytes for group in groups if group.name in streamed]
    return [max(sizes[buffer::NUM_BUFFERS], default=0) for buffer in range(NUM_BUFFERS)]


@dataclass(slots=True)
class _Held:
    """A group with its memory; `buffer` is None where it stays there."""

    group: Group
    memory: Bytes
    buffer: int | None
    ticket: Ticket | None = None  # read, or being read, and not computed with yet


class Spine:
    """Owns the memory of all groups. For use by one thread."""

    def __init__(
        self, groups: Sequence[Group], streamed: frozenset[str], reader: Reader, spans: Spans
    ) -> None:
        """Reserve memory; nothing is read.

        Args:
            groups: In the order in which a step uses them.
            streamed: Names of the groups that are read again for every step.
            reader: Stays the caller's.
            spans: `wait` is the time in which a group's bytes were waited for.
        """
        self._reader, self._spans = reader, spans
        buffers = [reserve(size) for size in buffer_sizes(groups, streamed)]
        self._held: dict[str, _Held] = {}
        self._order: list[str] = []  # of the streamed ones
        for group in groups:
            buffer = None
            if group.name in streamed:
                buffer = len(self._order) % NUM_BUFFERS
                self._order.append(group.name)
            memory = reserve(group.num_bytes) if buffer is None else buffers[buffer]
            self._held[group.name] = _Held(group, memory, buffer)
        self._in_buffer: list[str | None] = [None] * NUM_BUFFERS
        self._in_use: str | None = None

    def views(self, name: str) -> Mapping[str, Bytes]:
        """Give the memory of each tensor of a group; read by `load`, or when it is leased."""
        held = self._held[name]
        return held.group.views(held.memory)

    @property
    def groups(self) -> list[Group]:
        """List the groups, in the order in which a step uses them."""
        return [held.group for held in self._held.values()]

    def memory(self, name: str) -> Bytes:
        """Give the memory that a group is read into."""
        return self._held[name].memory

    def stays(self, name: str) -> bool:
        """Tell whether a group stays in memory."""
        held = self._held.get(name)
        return held is None or held.buffer is None

    def load(self) -> None:
        """Read every group that stays, and begin with the first of the others.

        Raises:
            ReadError: A file ended early or the device failed.
        """
        tickets = [
            self._reader.submit(held.group.extents, held.memory)
            for held in self._held.values()
            if held.buffer is None
        ]
        self._reader.wait(tickets)
        self._read_ahead(0)

    @contextmanager
    def lease(self, name: str) -> Iterator[None]:
        """Have a group's bytes in memory until the block ends.

        Raises:
            ReadError: A file ended early or the device failed.
        """
        held = self._held.get(name)
        if held is None or held.buffer is None:  # a backend with its own forms, or always there
            yield
            return
        if self._in_buffer[held.buffer] != name or held.ticket is None or held.ticket.is_cancelled:
            self._begin(name)
        assert held.ticket is not None
        self._reader.promote(held.ticket)
        self._in_use = name
        try:
            if not held.ticket.is_done:
                with self._spans.span("wait"):
                    self._reader.wait([held.ticket])
            else:
                self._reader.wait([held.ticket])
            following = self._order.index(name) + 1
            self._read_ahead(following)
            yield
        finally:
            self._in_use = None
            self._drop(held.buffer)
            self._read_ahead(self._order.index(name) + 1)

    def check(self) -> None:
        """Test the invariants: nothing is in use, a buffer holds what it says."""
        assert self._in_use is None
        for buffer, name in enumerate(self._in_buffer):
            assert name is None or self._held[name].buffer == buffer

    def _read_ahead(self, position: int) -> None:
        """Begin to read the next groups, as far as there are buffers that nobody uses."""
        count = len(self._order)
        for n in range(min(count, NUM_BUFFERS)):
            name = self._order[(position + n) % count]
            buffer = self._held[name].buffer
            assert buffer is not None
            if self._in_buffer[buffer] is None:
                self._begin(name)
            elif self._in_buffer[buffer] != name:
                return

    def _begin(self, name: str) -> None:
        held = self._held[name]
        assert held.buffer is not None
        self._drop(held.buffer)
        held.ticket = self._reader.submit(held.group.extents, held.memory, Priority.AHEAD)
        self._in_buffer[held.buffer] = name

    def _drop(self, buffer: int) -> None:
        """Forget what a buffer holds; a read into it ends first."""
        name = self._in_buffer[buffer]
        if name is None:
            return
        held = self._held[name]
        if held.ticket is not None:
            self._reader.cancel(held.ticket)
            while not held.ticket.is_done:
                self._reader.wait_any([held.ticket])
        held.ticket, self._in_buffer[buffer] = None, None
