"""Which expert to give up when a slot is needed. A policy scores; the highest score leaves first.

Experts are numbered `layer · experts + number`. A *step* is one pass over the layers. State is kept
per expert in arrays, so that one choice among thousands of slots is one array operation.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from finback.errors import DamagedFile
from finback.storage.arrays import read_arrays

Keys = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]

HALF_LIFE = 24.0  # steps after which a use counts half
HALF_LIVES = (5.0, 20.0, 80.0, 400.0)  # of the memories that are mixed
MERIT_KEPT = 0.98  # of what is known about a memory, at each lease
HEAT_FORMAT = 1
PRIOR = 0.05  # uses that an expert is credited with before any


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

    def __init__(self, num_layers: int, num_experts: int, num_slots: int = 0) -> None:
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

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_slots: int = 0,
        half_life: float = HALF_LIFE,
    ) -> None:
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

    An expert that a step uses with share p waits (1/p − 1) whole passes, after the layers to its
    next turn. The share is a mixture of decayed frequencies with short and long memories, weighted
    by how well each has foretold the choices of late (Bayesian model averaging with forgetting).
    """

    def __init__(self, num_layers: int, num_experts: int, num_slots: int = 0) -> None:
        """Start with nothing used."""
        self._num_layers, self._num_experts = num_layers, num_experts
        self._half_lives = np.array(HALF_LIVES)[:, None]
        self._weight = np.zeros((len(HALF_LIVES), num_layers * num_experts))
        self._step = np.zeros(num_layers * num_experts)
        self._merit = np.zeros(len(HALF_LIVES))  # log likelihoods, old ones forgotten
        self._last, self._before = 0, 0  # the last step, and those of earlier runs

    def used(self, keys: Keys, step: int) -> None:
        """See `Policy.used`."""
        self._last = step
        layer = int(keys[0]) // self._num_experts
        whole = np.arange(layer * self._num_experts, (layer + 1) * self._num_experts)
        foretold = self._shares(whole, step)
        foretold /= foretold.sum(1, keepdims=True)
        surprise = np.log(foretold[:, keys - layer * self._num_experts]).mean(1)
        self._merit = MERIT_KEPT * self._merit + surprise * len(keys) / self._num_layers
        self._weight[:, keys] = self._decayed(keys, step) + 1
        self._step[keys] = step

    def scores(self, keys: Keys, layer: int, step: int) -> Scores:
        """See `Policy.scores`."""
        ahead = (keys // self._num_experts - layer - 1) % self._num_layers + 1
        trust = np.exp(self._merit - self._merit.max())
        share = (trust / trust.sum()) @ self._shares(keys, step)
        out: Scores = (1 / np.clip(share, 1e-9, 1) - 1) * self._num_layers + ahead
        return out

    def save(self, path: Path) -> None:
        """Keep what was learnt for a later run: whole or not at all."""
        part = path.with_name(path.name + ".part")
        head = np.array([HEAT_FORMAT, self._num_layers, self._num_experts])
        with part.open("wb") as file:
            np.savez_compressed(
                file,
                head=head,
                weight=self._weight.astype(np.float32),
                age=(self._last - self._step).astype(np.float32),
                merit=self._merit,
                steps=np.array([self._before + self._last + 1]),
            )
        part.replace(path)

    def restore(self, path: Path) -> None:
        """Begin with what an earlier run has learnt of the same model.

        Raises:
            DamagedFile: It is no heat file, or one of a model of another shape.
        """
        arrays = read_arrays(path, ("head", "weight", "age", "merit", "steps"))
        head, weight, age, merit, steps = arrays.values()
        if head.tolist() != [HEAT_FORMAT, self._num_layers, self._num_experts]:
            raise DamagedFile(f"{path}: holds the heat of another model, or of another version")
        shapes = (self._weight.shape, self._step.shape, self._merit.shape, (1,))
        found = (weight, age, merit, steps)
        if any(a.shape != s for a, s in zip(found, shapes, strict=True)) or not all(
            np.isfinite(a).all() for a in found
        ):
            raise DamagedFile(f"{path}: the heat contradicts itself")
        self._weight, self._step = weight.astype(float), -age.astype(float)
        self._merit = merit.astype(float)
        self._before = int(np.clip(steps[0], 0, 1 << 40))

    def _decayed(self, keys: Keys, step: int) -> Scores:
        out: Scores = self._weight[:, keys] * np.exp2((self._step[keys] - step) / self._half_lives)
        return out

    def _shares(self, keys: Keys, step: int) -> Scores:
        """Give the share of steps that use each expert, by each memory: (memories, keys)."""
        count = self._before + step + 1
        steps = (1 - 2.0 ** (-count / self._half_lives)) / (1 - 2.0 ** (-1 / self._half_lives))
        out: Scores = (self._decayed(keys, step) + PRIOR) / (steps + PRIOR)
        return out


class Pinned(Distance):
    """As `Distance`, but what earlier runs used most stays: it fills half of the slots.

    What is pinned is chosen when the heat is restored, and does not change in a run.
    """

    def __init__(self, num_layers: int, num_experts: int, num_slots: int = 0) -> None:
        """Start with nothing pinned."""
        super().__init__(num_layers, num_experts, num_slots)
        self._count = num_slots // 2
        self._is_pinned = np.zeros(num_layers * num_experts, bool)

    def restore(self, path: Path) -> None:
        """See `Distance.restore`."""
        super().restore(path)
        keys = np.arange(len(self._is_pinned))
        heat = self._shares(keys, 0)[-1]  # by the longest memory
        self._is_pinned[np.argsort(-heat, kind="stable")[: self._count]] = True

    def scores(self, keys: Keys, layer: int, step: int) -> Scores:
        """See `Policy.scores`; a pinned expert leaves only where there is no other."""
        return np.where(self._is_pinned[keys], -1.0, super().scores(keys, layer, step))


# By name; each is made from the numbers of layers, of experts in a layer, and of slots.
POLICIES: Mapping[str, Callable[[int, int, int], Policy]] = {
    "distance": Distance,
    "frequency": Frequency,
    "pinned": Pinned,
    "recency": Recency,
}
