"""Who computes how many tokens in the next step.

There are no phases: every sequence has tokens to catch up, one after an answer's last token, many
after a prompt. Answers go before prompts and interactive ones before those in the background, but
whoever has waited for long goes first, so that nothing starves. A sequence that has begun keeps its
place until it ends, so that no more than `max_sequences` ever hold a state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from finback.engine.sequence import Sequence
from finback.models.base import Run, TokenBatch

IMPATIENT, INTERACTIVE, BACKGROUND = range(3)  # in the order of turns
PATIENCE = 32  # steps without a row after which a sequence goes first
PLACES_TO_SHARE = 4  # from so many on, the background leaves one place to others


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What one step may hold. Made from the memory plan."""

    max_rows: int = 256
    max_sequences: int = 64  # that hold a state
    max_resident: int | None = None  # of them, whose states stay in memory; all if None
    # Rows of prompts in a step that an interactive answer waits for; None for no limit of its own.
    prompt_rows: int | None = None
    context: int | None = None  # tokens of one sequence; what the model holds if None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A row whose logits are wanted: they rate, or pick, the token at `index` of a sequence."""

    sequence: Sequence
    index: int
    drafts: tuple[int, ...] = ()  # taken for the tokens before; if they are others, forget this

    @property
    def is_in_vain(self) -> bool:
        """Tell whether this follows a draft that did not stand."""
        tokens, count = self.sequence.tokens, len(self.drafts)
        if count == 0:
            return False
        return len(tokens) != self.index or tuple(tokens[-count:]) != self.drafts


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: the rows, the sequences in the order of runs, and what rows are for."""

    tokens: TokenBatch
    sequences: tuple[Sequence, ...]
    wanted: tuple[Wanted, ...]  # in the order of the wanted rows
    drafts: tuple[int, ...]  # of each sequence


class Scheduler:
    """Holds the live sequences and fills batches within the limits."""

    def __init__(self, limits: StepLimits) -> None:
        """Start without sequences."""
        self._limits = limits
        self.may_spill = True  # begin sequences whose states do not stay in memory
        self._live: dict[int, Sequence] = {}
        self._step = 0

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        sequence.served_at = self._step
        self._live[sequence.number] = sequence

    def remove(self, number: int) -> Sequence | None:
        """Give a sequence up, if it is still here."""
        return self._live.pop(number, None)

    def get(self, number: int) -> Sequence | None:
        """Give a sequence, if it is here."""
        return self._live.get(number)

    @property
    def numbers(self) -> set[int]:
        """Give the numbers of all sequences."""
        return set(self._live)

    def __contains__(self, number: int) -> bool:
        return number in self._live

    def __len__(self) -> int:
        return len(self._live)

    @property
    def has_place(self) -> bool:
        """Tell whether one more state may be held in memory now."""
        held = sum(
            self._holds_state(sequence) and not sequence.state.is_spilled
            for sequence in self._live.values()
        )
        return held < (self._limits.max_resident or self._limits.max_sequences)

    @property
    def answering(self) -> list[Sequence]:
        """List the sequences that would have one row in the next step, and may have drafts."""
        return [
            s
            for s in self._live.values()
            if s.behind == 1 and s.state.position > 0 and not s.state.is_spilled
        ]

    def next_batch(self) -> Batch | None:
        """Fill a batch, or say that there is nothing to do."""
        self._step += 1
        ids: list[int] = []
        runs: list[Run] = []
        rows: list[int] = []
        wanted: list[Wanted] = []
        chosen: list[Sequence] = []
        drafted: list[int] = []
        prompt_rows, is_awaited = self._limits.prompt_rows or self._limits.max_rows, False
        candidates = sorted(self._with_places(), key=self._rank)
        spare = self._limits.max_rows - sum(sequence.behind for sequence in candidates)
        for sequence in candidates:
            room = self._limits.max_rows - len(ids)
            is_prompt = sequence.behind > 1
            if is_prompt and is_awaited:
                room = min(room, prompt_rows)
            # Drafts take rows that nobody needs.
            drafts = sequence.drafts = sequence.drafts[: max(0, spare)]
            count = min(sequence.behind + len(drafts), room)
            if (before_cut := sequence.cut_at - sequence.state.position) > 0:
                count = min(count, before_cut)
            if count <= 0 or (not sequence.state.is_kept and count < sequence.behind):
                continue
            if is_prompt:
                prompt_rows -= count
            else:
                is_awaited |= not sequence.is_background
            start = sequence.state.position
            drafts = sequence.drafts = drafts[: max(0, count - sequence.behind)]
            spare -= len(drafts)
            ends_prompt = start + count == sequence.num_prompt and not sequence.state.is_spilled
            held = len(drafts) or int(sequence.holds_last and ends_prompt)
            runs.append(Run(sequence.state, len(ids), len(ids) + count, held=held))
            drafted.append(len(drafts))
            for index in range(max(start + 1, sequence.rated_from), start + count + 1):
                beyond = index - len(sequence.tokens)
                if index < sequence.num_prompt or beyond >= 0:
                    rows.append(len(ids) + index - start - 1)
                    wanted.append(Wanted(sequence, index, tuple(drafts[: max(0, beyond)])))
            ids += (sequence.tokens + drafts)[start : start + count]
            chosen.append(sequence)
            sequence.served_at = self._step
        if not runs:
            return None
        tokens = TokenBatch(np.array(ids, np.int64), tuple(runs), np.array(rows, np.int64))
        return Batch(tokens, tuple(chosen), tuple(wanted), tuple(drafted))

    def check(self) -> None:
        """Test the invariants: every live sequence has something to compute and none has ended."""
        for sequence in self._live.values():
            assert sequence.finish_reason is None
            assert sequence.behind > 0
        assert sum(self._holds_state(s) for s in self._live.values()) <= self._limits.max_sequences

    def _with_places(self) -> Iterator[Sequence]:
        """Give those that may be computed: with a state begun, or with a place for a new one."""
        places = self._limits.max_sequences
        places -= sum(self._holds_state(sequence) for sequence in self._live.values())
        most = self._limits.max_resident or self._limits.max_sequences
        resident = most - sum(
            self._holds_state(sequence) and not sequence.state.is_spilled
            for sequence in self._live.values()
        )
        kept = 1 if self._limits.max_sequences >= PLACES_TO_SHARE else 0
        for sequence in sorted(self._live.values(), key=self._rank):
            if self._holds_state(sequence) or not sequence.state.is_kept:
                yield sequence
            elif resident <= 0 and not self.may_spill:
                continue
            elif places > (kept if self._rank(sequence)[0] == BACKGROUND else 0):
                places -= 1
                sequence.state.is_spilled = resident <= 0
                resident -= 1
                yield sequence

    def _holds_state(self, sequence: Sequence) -> bool:
        return sequence.state.is_kept and sequence.state.position > 0

    def _rank(self, sequence: Sequence) -> tuple[int, bool, int, int]:
        """Order sequences: the impatient, answers, prompts; the background after all others."""
        is_prompt = sequence.behind > 1
        if self._step - sequence.served_at > PATIENCE:
            urgency = IMPATIENT
        else:
            urgency = BACKGROUND if sequence.is_background else INTERACTIVE
        # Answers take turns; prompts are finished one after the other.
        return (urgency, is_prompt, 0 if is_prompt else sequence.served_at, sequence.number)
