"""Guessing an answer's next tokens, so that several are verified in one pass over the layers.

A draft stands exactly when it is the token that the sampler picks at its position, so drafts change
no text. What they change is the number of rows in a step, and from a disk each row may ask for
experts of its own: they are only made while they pay.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from finback.checkpoint.formats import Array
from finback.config import SamplingParams
from finback.engine.sampler import pick
from finback.models.base import BLOCK_ROWS, Model, Run, TokenBatch
from finback.models.state import SequenceState
from finback.storage.arena import MemoryPool

GRAM = 3  # tokens that must have occurred before, for what followed them to be drafted
MOST = 16  # drafts of a sequence in a step
FIRST_CHANCE = 0.5  # believed of a draft before anything is known
FIRST_WEIGHT, MOST_WEIGHT = 0.8, 4.0  # believed of the cost of drafts, and the most
LEAST_MORE = 0.01  # of a step, for a row that reads nothing new
CLEARLY = 1.05  # times the rate without drafts is better
MEMORY = 0.8  # how much of the past stays at each measurement
ALLOWED_LOSS = 0.01  # of the time spent so far, on drafts that did not pay


class Drafter(Protocol):
    """Guesses the next tokens of one sequence."""

    is_free: bool  # guesses cost nothing, so that they are made also to see how good they are

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Give at most `most` tokens that may follow `tokens`, which only ever grow."""
        ...

    def release(self) -> None:
        """Free what is held: the sequence has ended."""
        ...


class PromptLookup:
    """Drafts what followed the last tokens when they occurred before, in prompt or answer.

    Source: Saxena 2023, "Prompt lookup decoding". Belongs to one sequence.
    """

    is_free = True

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._ends: dict[tuple[int, ...], int] = {}  # of each group of tokens, where it ended last
        self._seen = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Give at most `most` tokens that may follow `tokens`, which only ever grow."""
        if len(tokens) < GRAM or most < 1:
            return []
        # All groups but the last one, which would find itself.
        for end in range(max(self._seen, GRAM), len(tokens)):
            self._ends[tuple(tokens[end - GRAM : end])] = end
        self._seen = max(GRAM, len(tokens))
        found = self._ends.get(tuple(tokens[-GRAM:]))
        return [] if found is None else list(tokens[found : found + most])

    def release(self) -> None:
        """Do nothing: all that is held is Python's."""


class ModelDrafter:
    """Drafts what a smaller model would write, with the same noise. Belongs to one sequence.

    A draft stands when it is what the large model's sampler picks. The small one picks with the
    same seed at the same position, so that it agrees as often as the two distributions do.
    """

    is_free = False

    def __init__(
        self, model: Model, sampling: SamplingParams, seed: int, memory: MemoryPool
    ) -> None:
        """Start with nothing computed.

        Args:
            model: Of the same vocabulary; stays the caller's.
            sampling: Of the sequence; penalties and limits of its form are not followed here.
            seed: Of the sequence.
            memory: Of states; stays the caller's.
        """
        self._model, self._sampling, self._seed = model, sampling, seed
        self._state = SequenceState(memory=memory)
        self._last = np.empty(0, np.float32)  # logits after what was computed

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter.propose`."""
        room = self._model.shape.max_positions - len(tokens)
        if min(most, room) < 1:
            return []
        for start in range(self._state.position, len(tokens), BLOCK_ROWS):
            part = tokens[start : min(start + BLOCK_ROWS, len(tokens))]
            self._last = self._extend(self._state, part)
        drafts: list[int] = []
        state, last = self._state.fork(), self._last
        try:
            while np.isfinite(last).all():  # damaged weights make no good drafts
                drafts.append(pick(last, self._sampling, self._seed, len(tokens) + len(drafts)))
                if len(drafts) == min(most, room):
                    break
                last = self._extend(state, drafts[-1:])
        finally:
            state.release()
        return drafts

    def release(self) -> None:
        """See `Drafter.release`."""
        self._state.release()

    def _extend(self, state: SequenceState, tokens: Sequence[int]) -> Array:
        """Compute tokens and give the logits (V,) after the last."""
        ids, count = np.array(tokens, np.int64), len(tokens)
        wanted = np.array([count - 1])
        with np.errstate(all="ignore"):
            rows = self._model.forward(TokenBatch(ids, (Run(state, 0, count),), wanted))
            (logits,) = self._model.logits(rows, 1)
        state.position += count
        last: Array = logits[0]
        return last


class DraftController:
    """Says how many drafts pay, from what steps with and without them took.

    n certain rows take c seconds. With d drafts besides, a step reads the experts of n + d rows: of
    uniform routes these are U(r) = 1 − (1 − k/E)^r of a layer, and the step takes
    c · (1 + γ · (U(n+d) / U(n) − 1)), with γ measured (1 where only reading counts). Of drafts that
    stand with chance p each, d bring p + p² + … + p^d tokens; the number with the best rate is
    taken, and none where that is not clearly better than without. What was lost on drafts is
    bounded, whatever was believed.
    """

    def __init__(self, share: float) -> None:
        """Start with nothing measured; `share` of a layer's experts are used by a token, k/E."""
        self._share = min(max(share, 1e-4), 0.999)
        self._base: dict[int, float] = {}  # c by n
        self._weight = FIRST_WEIGHT  # γ
        self._spent, self._won = 0.0, 0.0  # seconds of all steps; won by drafts, or lost

    def width(self, certain: int, chance: float, most: int = MOST) -> int:
        """Say how many drafts a sequence may have in a step.

        Args:
            certain: Rows of the step without drafts.
            chance: That a draft of this sequence stands.
            most: Never more than these.
        """
        base = self._base.get(certain)
        if base is None or self._won < -ALLOWED_LOSS * self._spent - base / 2:
            return 0
        best, width, tokens = CLEARLY * certain, 0, float(certain)
        for count in range(1, most + 1):
            tokens += chance**count
            rate = tokens / (1 + self._weight * self._more(certain, count))
            if rate > best:
                best, width = rate, count
        return width

    def note(self, certain: int, drafts: int, stood: int, seconds: float) -> None:
        """Take in what a step took that had nothing but answers' tokens and drafts."""
        self._spent += seconds
        base = self._base.get(certain)
        if drafts == 0 or base is None:
            self._base[certain] = seconds if base is None else _mix(base, seconds)
            return
        self._won += base * (1 + stood / certain) - seconds
        weight = max(0.0, seconds / base - 1) / self._more(certain, drafts)
        self._weight = _mix(self._weight, min(weight, MOST_WEIGHT))

    def _more(self, certain: int, drafts: int) -> float:
        """Give U(n+d) / U(n) − 1, and a little for each row where all experts are read anyway."""
        kept = 1 - self._share
        more = (1 - kept ** (certain + drafts)) / (1 - kept**certain) - 1
        return max(more, LEAST_MORE * drafts)


def chance_after(chance: float, drafts: int, stood: int) -> float:
    """Learn from verified drafts how likely one stands; those after a wrong one tell nothing."""
    tried = min(drafts, stood + 1)
    return _mix(chance, stood / tried) if tried else chance


def _mix(before: float, now: float) -> float:
    return MEMORY * before + (1 - MEMORY) * now
