"""Which expert to give up when a slot is needed. A policy scores; the highest score leaves first.

Experts are numbered `layer · experts + number`. A *step* is one pass over the layers. State is kept
per expert in arrays, so that one choice among thousands of slots is one array operation.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

HALF_LIFE = 24.0  # steps after which a use counts half


class Policy(Protocol):
    """Decides by what has been used so far."""

    def used(self, keys: Keys, step: int) -> None:
        """Learn that experts of one layer are used in a step."""
        ...

    def scores(self, keys: Keys, layer: int, step: int) -> Scores:
        """Rate candidates at a layer of a step: the highest is given up first."""
        ...


class Recency:
    """Give up what was used longest ago."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """Start with nothing used."""
        self._last = np.full(num_layers * num_experts, -1, np.int64)
        self._clock = 0

    def used(self, keys: Keys, step: int) -> None:
        """See `Policy.used`."""
        self._clock += 1
        self._last[keys] = self._clock

    def scores(self, keys: Keys, layer: int, step: int) -> Scores:
        """See `Policy.scores`."""
        return -self._last[keys].astype(np.float64)


class Frequency:
    """Give up what was used least, old uses counting less: half after `half_life` steps."""

    def __init__(self, num_layers: int, num_experts: int, half_life: float = HALF_LIFE) -> None:
        """Start with nothing used."""
        self._half_life = half_life
        self.weight = np.zeros(num_layers * num_experts)
        self._step = np.zeros(num_layers * num_experts)

    def used(self, keys: Keys, step: int) -> None:
        """See `Policy.used`."""
        self.weight[keys] = self.decayed(keys, step) + 1
        self._step[keys] = step

    def decayed(self, keys: Keys, step: int) -> Scores:
        """Give how often experts were used, with decay, as of a step."""
        out: Scores = self.weight[keys] * np.exp2((self._step[keys] - step) / self._half_life)
        return out

    def scores(self, keys: Keys, layer: int, step: int) -> Scores:
        """See `Policy.scores`."""
        return -self.decayed(keys, step)


class Distance:
    """Give up what will be wanted last: how often it is used, and how far its layer is ahead.

    An expert with the decayed count w is used in a step with about p = (w + prior) / n, n being the
    decayed number of steps; it waits (1/p − 1) whole passes, after the layers to its next turn.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life: float = HALF_LIFE) -> None:
        """Start with nothing used."""
        self._num_layers, self._num_experts = num_layers, num_experts
        self._frequency = Frequency(num_layers, num_experts, half_life)
        self._most = 1 / (1 - 0.5 ** (1 / half_life))  # the count of what is used in every step

    def used(self, keys: Keys, step: int) -> None:
        """See `Policy.used`."""
        self._frequency.used(keys, step)

    def scores(self, keys: Keys, layer: int, step: int) -> Scores:
        """See `Policy.scores`."""
        ahead = (keys // self._num_experts - layer - 1) % self._num_layers + 1
        share = (self._frequency.decayed(keys, step) + 0.02) / self._most
        out: Scores = (1 / np.minimum(share, 1) - 1) * self._num_layers + ahead
        return out


POLICIES: Mapping[str, Callable[[int, int], Policy]] = {
    "distance": Distance,
    "frequency": Frequency,
    "recency": Recency,
}
