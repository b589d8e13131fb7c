"""One request on its way: its tokens, its state, why it ended."""

from dataclasses import dataclass, field
from typing import Literal

from finback.config import SamplingParams
from finback.errors import FinbackError
from finback.models.state import SequenceState

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Sequence:
    """A request inside the engine. It has computed `state.position` of its `tokens`.

    A sequence with tokens to catch up is computed in the next step, prompt and answer alike.
    """

    number: int
    tokens: list[int]
    sampling: SamplingParams
    seed: int
    state: SequenceState
    max_length: int  # of prompt and answer together
    stop_ids: frozenset[int]
    finish_reason: FinishReason | None = None

    @property
    def behind(self) -> int:
        """Count the tokens not computed yet."""
        return len(self.tokens) - self.state.position


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sequence gained by a step; `error` says why it ended with the reason error."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: FinbackError | None = None
