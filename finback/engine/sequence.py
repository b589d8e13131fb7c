"""One request on its way: its tokens, its state, why it ended."""

import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

from finback.checkpoint.formats import Mask
from finback.config import SamplingParams
from finback.engine.drafts import FIRST_CHANCE, Drafter, chance_after
from finback.engine.sampler import TokenLogprob
from finback.errors import FinbackError
from finback.models.state import SequenceState

FinishReason = Literal["stop", "length", "abort", "error"]


class Constraint(Protocol):
    """What an answer must look like. Belongs to one sequence."""

    def allowed(self) -> Mask:
        """Tell which tokens (V,) may come next; valid until the next call."""
        ...

    def accept(self, token: int) -> bool:
        """Take a token in; true when nothing can follow any more."""
        ...

    def forced(self) -> list[int]:
        """Give the tokens that must come next, if there is no choice. They are not accepted yet."""
        ...


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
    num_prompt: int  # tokens of the prompt
    rated_from: int  # the first token whose likelihood is wanted; beyond the prompt if none is
    constraint: Constraint | None = None
    is_background: bool = False
    drafter: Drafter | None = None  # drafts come from here
    drafts: list[int] = field(default_factory=list)  # for the next step, after `tokens`
    guessed: list[int] = field(default_factory=list)  # after `guessed_at` tokens, to be judged
    guessed_at: int = 0
    chance: float = FIRST_CHANCE  # that a draft stands
    holds_last: bool = False  # so that the state before the prompt's last token can be kept
    held: int = 0  # tokens of the last step that are no part of the state's matrices yet
    cut_at: int = 0  # a step ends there, so that a state of that boundary can be kept
    kept_at: int = 0  # the position of the last state that was kept
    kept_when: float = field(default_factory=time.monotonic)
    stood: int = 0  # drafts of the last step
    served_at: int = 0  # the last step with rows of this sequence, or the one that it came in
    finish_reason: FinishReason | None = None

    @property
    def behind(self) -> int:
        """Count the tokens not computed yet; the last one of a text that is only rated never is."""
        return len(self.tokens) - self.is_only_rated - self.state.position

    def settle_drafts(self, length: int) -> int:
        """Take the drafts that stand as computed and forget the others; tell how many stood.

        Args:
            length: Of `tokens` before the step; drafts were taken for those that follow.
        """
        tried, new = len(self.drafts), self.tokens[length:]
        pairs = zip(self.drafts, new[:-1], strict=False)  # the last token is never computed yet
        most = max(0, min(tried, len(new) - 1))
        self.stood = next((n for n, (a, b) in enumerate(pairs) if a != b), most)
        self.state.go_back(length + self.stood)
        self.drafts = []
        return self.stood

    def judge_guesses(self) -> None:
        """Compare the last guesses, drafted or not, with what came."""
        came = self.tokens[self.guessed_at :]
        pairs = list(zip(self.guessed, came, strict=False))
        right = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        self.chance = chance_after(self.chance, len(pairs), right)
        self.guessed = []

    @property
    def is_only_rated(self) -> bool:
        """Tell whether nothing is to be written."""
        return self.max_length == self.num_prompt

    @property
    def answer(self) -> list[int]:
        """Give the tokens written so far."""
        return self.tokens[self.num_prompt :]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sequence gained by a step; `error` says why it ended with the reason error.

    `rated` has the likelihoods of `token_ids` where they were asked for, `rated_prompt` those of
    prompt tokens. A stop token is the last of `token_ids` and no part of the text.
    """

    number: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: FinbackError | None = None
    ends_with_stop_token: bool = False
    rated: list[TokenLogprob] = field(default_factory=list)
    rated_prompt: list[TokenLogprob] = field(default_factory=list)
