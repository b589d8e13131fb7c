"""One sequence's memory: per layer a recurrent matrix with convolution rows, or latent rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar, cast

import numpy as np

from finback.checkpoint.formats import Array, Bytes
from finback.kernels.ops import DeltaRows
from finback.storage.arena import BLOCK, MemoryPool
from finback.storage.spill import Place, SpillFile


@dataclass(slots=True)
class RecurrentState:
    """What a delta-attention layer remembers: a fixed number of bytes, float32.

    A recurrence cannot go back. So drafts do not enter the matrix: what they brought to the layer
    is held in `pending`, and those that stand enter it with the next step's tokens. So it is with
    the last token of a prompt where the state before it is kept.
    """

    matrix: Array  # (H, K, K), key by value
    history: Array  # (3, J-1, C): the last inputs of the convolutions of q, k and v
    memory: Bytes  # both of them, in whole blocks
    pending: DeltaRows | None = None

    @classmethod
    def empty(
        cls, matrix: tuple[int, ...], history: tuple[int, ...], memory: MemoryPool
    ) -> "RecurrentState":
        """Make one of zeros."""
        part = cls.on(memory.take(cls.bytes_of(matrix, history)), matrix, history)
        part.memory[:] = 0
        return part

    @staticmethod
    def bytes_of(matrix: tuple[int, ...], history: tuple[int, ...]) -> int:
        """Count the bytes of both arrays, in whole blocks."""
        return -(-4 * (prod(matrix) + prod(history)) // BLOCK) * BLOCK

    @classmethod
    def on(
        cls, memory: Bytes, matrix: tuple[int, ...], history: tuple[int, ...]
    ) -> "RecurrentState":
        """Make one of the two arrays' values, which lie one after the other."""
        values = memory.view(np.float32)
        end = prod(matrix) + prod(history)
        return cls(
            values[: prod(matrix)].reshape(matrix),
            values[prod(matrix) : end].reshape(history),
            memory,
        )

    def room_for(self, context: int) -> int:
        """Count the bytes of this part after `context` tokens."""
        return self.memory.nbytes

    def copy(self, memory: MemoryPool) -> "RecurrentState":
        """Give the same in memory of its own."""
        taken = memory.take(len(self.memory))
        taken[:] = self.memory
        other = RecurrentState.on(taken, self.matrix.shape, self.history.shape)
        other.pending = None if self.pending is None else self.pending.copy()
        return other

    def take(self, rows: DeltaRows, certain: int) -> tuple[DeltaRows, int, int]:
        """Say what is to be computed for new rows, of which those after `certain` are held.

        Returns:
            All rows, how many of them enter the matrix, and how many are there from before.
        """
        before = self.pending
        count = 0 if before is None else len(before.q)
        self.pending = rows.part(slice(certain, None)).copy() if certain < len(rows.q) else None
        return rows if before is None else before.followed_by(rows), count + certain, count

    def drop_last(self, count: int) -> None:
        """Go back by tokens, which must have been drafts."""
        left = (0 if self.pending is None else len(self.pending.q)) - count
        assert left >= 0
        if count and self.pending is not None:
            self.pending = self.pending.part(slice(left)) if left else None  # of planned memory

    @property
    def num_bytes(self) -> int:
        """Count the bytes held."""
        pending = 0 if self.pending is None else self.pending.num_bytes
        return self.matrix.nbytes + self.history.nbytes + pending


class LatentState:
    """What a latent-attention layer remembers: one row a token, float32."""

    def __init__(self, width: int) -> None:
        """Start with no rows of `width` values."""
        self._buffer = np.empty((0, width), np.float32)
        self.length = 0

    @classmethod
    def on(cls, memory: Bytes, width: int, length: int) -> "LatentState":
        """Make one of `length` rows at the start of `memory`; the rest is room for more."""
        state = cls(width)
        room = len(memory) // (4 * width)
        state._buffer = memory[: 4 * width * room].view(np.float32).reshape(room, width)
        state.length = length
        return state

    def append(self, rows: Array) -> Array:
        """Add rows (T, width) and give all so far (S, width), valid until the next append."""
        needed = self.length + len(rows)
        if needed > len(self._buffer):
            grown = np.empty(
                (max(needed, 2 * len(self._buffer), 64), self._buffer.shape[1]), np.float32
            )
            grown[: self.length] = self._buffer[: self.length]
            self._buffer = grown
        self._buffer[self.length : needed] = rows
        self.length = needed
        return self._buffer[:needed]

    def room_for(self, context: int) -> int:
        """Count the bytes of this part after `context` tokens."""
        return 4 * context * self._buffer.shape[1]

    def copy(self, memory: MemoryPool) -> "LatentState":
        """Give the same in memory of its own."""
        other = LatentState(self._buffer.shape[1])
        other.append(self.rows)
        return other

    @property
    def rows(self) -> Array:
        """Give the rows so far (S, width), valid until the next append."""
        return self._buffer[: self.length]

    def drop_last(self, count: int) -> None:
        """Go back by tokens."""
        assert count <= self.length
        self.length -= count

    @property
    def num_bytes(self) -> int:
        """Count the bytes held, room for later rows included."""
        return self._buffer.nbytes


LayerState = RecurrentState | LatentState
State = TypeVar("State", RecurrentState, LatentState)


@dataclass(slots=True, eq=False)
class SequenceState:
    """All layers' memory of one sequence after `position` tokens. Belongs to its sequence.

    A layer's part is made when the layer first sees the sequence. Where nothing follows what is
    computed now (`is_kept` is false), it is dropped when the layer has seen all of it. Whoever
    ends the sequence calls `release`.
    """

    layers: dict[int, LayerState] = field(default_factory=dict)
    position: int = 0
    is_kept: bool = True
    is_spilled: bool = False  # layers are here only while they compute; see `StateSpill`
    memory: MemoryPool = field(default_factory=MemoryPool, repr=False)  # of parts of fixed size

    def enter(self, layer: int, make: Callable[[MemoryPool], State]) -> State:
        """Give a layer's part, made anew if there is none; the layer always makes one kind."""
        if layer not in self.layers:
            self.layers[layer] = make(self.memory)
        return cast(State, self.layers[layer])

    def leave(self, layer: int) -> None:
        """Tell that a layer has seen all rows of this step."""
        if not self.is_kept:
            self._drop(layer)

    def release(self) -> None:
        """Give the memory back; nothing may look at any part of the state any more."""
        for layer in list(self.layers):
            self._drop(layer)

    def _drop(self, layer: int) -> None:
        part = self.layers.pop(layer)
        if isinstance(part, RecurrentState):
            self.memory.give_back(part.memory)

    def fork(self) -> "SequenceState":
        """Give a copy that goes its own way."""
        layers = {number: layer.copy(self.memory) for number, layer in self.layers.items()}
        return SequenceState(layers, self.position, self.is_kept, memory=self.memory)

    def go_back(self, position: int) -> None:
        """Forget the tokens after a position; they must have been drafts of the last step."""
        count = self.position - position
        for layer in self.layers.values() if count else ():
            layer.drop_last(count)
        self.position = position

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all layers."""
        return sum(layer.num_bytes for layer in self.layers.values())


class StateSpill:
    """Keeps the parts of spilled states in a file, layer by layer. For use by one thread.

    While a layer computes, the parts of the next one come and those of the one before are written.
    """

    def __init__(self, file: SpillFile, num_layers: int, context: int) -> None:
        """Use a file, which is the owner's from now on.

        Args:
            file: Closed with this.
            num_layers: After the last layer comes the first.
            context: Tokens of a sequence at most.
        """
        self._file, self._num_layers, self._context = file, num_layers, context
        self._parts: dict[tuple[SequenceState, int], _Spilled] = {}
        self._writing: list[_Spilled] = []  # of the layer before

    @contextmanager
    def lease(self, layer: int, states: Sequence[SequenceState]) -> Iterator[None]:
        """Have a layer's parts of some states in memory until the block ends.

        Raises:
            ReadError: The device failed.
            CapacityError: The disk is full.
        """
        mine = [state for state in states if state.is_spilled]
        if not mine:
            yield
            return
        for state in mine:
            if (spilled := self._parts.get((state, layer))) is not None:
                state.layers[layer] = spilled.take(self._file)
        for state in mine if self._num_layers > 1 else ():
            following = self._parts.get((state, (layer + 1) % self._num_layers))
            if following is not None:
                following.begin(self._file)
        yield
        before, self._writing = self._writing, []
        for spilled in before:
            spilled.let_go(self._file)
        for state in mine:
            self._writing.append(self._put(state, layer, state.layers.pop(layer)))

    def forget(self, state: SequenceState) -> None:
        """Free what a state has in the file."""
        for key in [key for key in self._parts if key[0] is state]:
            spilled = self._parts.pop(key)
            self._writing = [one for one in self._writing if one is not spilled]
            self._file.give_up(spilled.place)
            spilled.let_go(self._file)

    def close(self) -> None:
        """Delete the file."""
        self._parts.clear()
        self._file.close()

    def _put(self, state: SequenceState, layer: int, part: LayerState) -> "_Spilled":
        spilled = self._parts.get((state, layer))
        if spilled is None:
            spilled = _Spilled(
                self._file.place(part.room_for(self._context), isinstance(part, RecurrentState))
            )
            self._parts[state, layer] = spilled
        spilled.put(self._file, part)
        return spilled


@dataclass(slots=True)
class _Spilled:
    """One layer's part of one state."""

    place: Place
    part: LayerState | None = None  # while it is written
    kind: tuple[int, ...] = ()  # what is needed to make the part again
    length: int = 0  # rows that are in the file

    def put(self, file: SpillFile, part: LayerState) -> None:
        """Begin to write what is new."""
        self.part = part
        if isinstance(part, RecurrentState):
            assert part.pending is None
            self.kind = (*part.matrix.shape, *part.history.shape)
            file.write(self.place, part.memory, 0, part.memory.nbytes)
            return
        rows = part.rows
        self.kind = (rows.shape[1],)
        start, self.length = self.length, len(rows)
        new = np.ascontiguousarray(rows[start:]).reshape(-1).view(np.uint8)
        file.write(self.place, new, start * 4 * rows.shape[1], rows.nbytes)

    def begin(self, file: SpillFile) -> None:
        """Begin to read the part, unless it is still here."""
        if self.part is None:
            file.begin_read(self.place)

    def take(self, file: SpillFile) -> LayerState:
        """Give the part: what is still here, or what is read."""
        part, self.part = self.part, None
        if part is not None:
            file.settle(self.place)
            return part
        memory = file.take(self.place)
        if len(self.kind) > 1:
            return RecurrentState.on(memory, self.kind[:3], self.kind[3:])
        return LatentState.on(memory, self.kind[0], self.length)

    def let_go(self, file: SpillFile) -> None:
        """Drop what is written; the memory is free."""
        part, self.part = self.part, None
        if part is not None:
            file.settle(self.place)
        if isinstance(part, RecurrentState):
            file.recycle(part.memory)
