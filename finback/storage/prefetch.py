"""Which guesses are worth a read: those of layers where guesses have been right of late.

There are two ways to guess what a layer will choose: its own router on what is known one layer
earlier, and what it chose last. Each is judged whether it was followed or not, against what the
router chose afterwards, so that a layer that becomes predictable is noticed and the better way is
taken. A guess only changes when bytes are read.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

FIRST_CHANCE = 0.5  # believed of a way before anything is known
GOOD_ENOUGH = 0.3  # of the guesses of a layer must be right
MEMORY = 0.9  # how much of the past stays at each judgement
AGAIN = "again"  # the way that repeats the last choice


class Guesses:
    """Keeps the last guesses of each layer and how good each way is there."""

    def __init__(self, most: int) -> None:
        """Start without experience; `most` experts are guessed for a layer."""
        self.most = most
        self._right: dict[tuple[int, str], float] = {}
        self._last: dict[int, Mapping[str, Sequence[int]]] = {}
        self._chosen: dict[int, Sequence[int]] = {}

    def admit(
        self,
        layer: int,
        ways: Mapping[str, Sequence[int]],
        is_there: Callable[[int], bool],
        most: int | None = None,
    ) -> Sequence[int]:
        """Note what is guessed for a layer, and give what is worth reading.

        Args:
            layer: Whose choice is guessed.
            ways: Experts by what they are guessed from, likeliest first; the last choice is
                known here and joins them.
            is_there: Tells which experts need no read.
            most: Experts at most; the usual number if None.
        """
        guesses = {}
        for way, some in {**ways, AGAIN: self._chosen.get(layer, ())}.items():
            missing = (expert for expert in some if not is_there(expert))
            guesses[way] = tuple(itertools.islice(missing, most or self.most))
        self._last[layer] = guesses = {way: some for way, some in guesses.items() if some}
        best = max(guesses, key=lambda way: self._chance(layer, way), default="")
        return guesses[best] if best and self._chance(layer, best) >= GOOD_ENOUGH else ()

    def judge(self, layer: int, chosen: Sequence[int]) -> None:
        """Compare the last guesses for a layer with what was chosen."""
        wanted = set(chosen)
        for way, guessed in self._last.pop(layer, {}).items():
            share = sum(expert in wanted for expert in guessed) / len(guessed)
            before = self._chance(layer, way)
            self._right[layer, way] = MEMORY * before + (1 - MEMORY) * share
        self._chosen[layer] = tuple(chosen)

    def _chance(self, layer: int, way: str) -> float:
        # The router's guess is the better one until it is known otherwise.
        first = FIRST_CHANCE if way != AGAIN else FIRST_CHANCE * GOOD_ENOUGH
        return self._right.get((layer, way), first)
