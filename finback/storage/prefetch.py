"""Which guesses are worth a read: those of layers where guesses have been right of late.

A guess only changes when bytes are read. It is judged whether it was admitted or not, against what
the router chose afterwards, so a layer that becomes predictable is noticed.
"""

from collections.abc import Iterable, Sequence

FIRST_CHANCE = 0.5  # believed of a layer before anything is known
GOOD_ENOUGH = 0.3  # of the guesses of a layer must be right
MEMORY = 0.9  # how much of a layer's past stays at each judgement


class Guesses:
    """Keeps the last guess of each layer and how good its guesses are."""

    def __init__(self, most: int) -> None:
        """Start without experience; `most` experts are guessed for a layer."""
        self.most = most
        self._right: dict[int, float] = {}
        self._last: dict[int, Sequence[int]] = {}

    def admit(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Note what is guessed for a layer, likeliest first, and give what is worth reading."""
        self._last[layer] = experts[: self.most]
        share = self._right.get(layer, FIRST_CHANCE)
        return self._last[layer] if share >= GOOD_ENOUGH else ()

    def judge(self, layer: int, chosen: Iterable[int]) -> None:
        """Compare the last guess of a layer with what was chosen."""
        guessed = self._last.pop(layer, ())
        if guessed:
            wanted = set(chosen)
            share = sum(expert in wanted for expert in guessed) / len(guessed)
            before = self._right.get(layer, FIRST_CHANCE)
            self._right[layer] = MEMORY * before + (1 - MEMORY) * share
