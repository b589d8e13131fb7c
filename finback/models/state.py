"""One sequence's memory: per layer a recurrent matrix with convolution rows, or latent rows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np

from finback.checkpoint.formats import Array
from finback.kernels.ops import DeltaRows


@dataclass(slots=True)
class RecurrentState:
    """What a delta-attention layer remembers: a fixed number of bytes, float32.

    A recurrence cannot go back. So drafts do not enter the matrix: what they brought to the layer
    is held in `pending`, and those that stand enter it with the next step's tokens.
    """

    matrix: Array  # (H, K, K), key by value
    history: Array  # (3, J-1, C): the last inputs of the convolutions of q, k and v
    pending: DeltaRows | None = None

    def copy(self) -> "RecurrentState":
        """Give the same in memory of its own."""
        pending = None if self.pending is None else self.pending.copy()
        return RecurrentState(self.matrix.copy(), self.history.copy(), pending)

    def take(self, rows: DeltaRows, certain: int) -> tuple[DeltaRows, int, int]:
        """Say what is to be computed for new rows, of which the first `certain` are no drafts.

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
            self.pending = self.pending.part(slice(left)).copy() if left else None

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

    def copy(self) -> "LatentState":
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


@dataclass(slots=True)
class SequenceState:
    """All layers' memory of one sequence after `position` tokens. Belongs to its sequence.

    A layer's part is made when the layer first sees the sequence. Where nothing follows what is
    computed now (`is_kept` is false), it is dropped when the layer has seen all of it.
    """

    layers: dict[int, LayerState] = field(default_factory=dict)
    position: int = 0
    is_kept: bool = True

    def enter(self, layer: int, make: Callable[[], State]) -> State:
        """Give a layer's part, made anew if there is none; the layer always makes one kind."""
        if layer not in self.layers:
            self.layers[layer] = make()
        return cast(State, self.layers[layer])

    def leave(self, layer: int) -> None:
        """Tell that a layer has seen all rows of this step."""
        if not self.is_kept:
            del self.layers[layer]

    def fork(self) -> "SequenceState":
        """Give a copy that goes its own way."""
        layers = {number: layer.copy() for number, layer in self.layers.items()}
        return SequenceState(layers, self.position, self.is_kept)

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
