"""The engine: add sequences, step them, abort them. It speaks token ids and never text."""

import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import closing
from math import inf

import numpy as np

from finback.checkpoint.formats import Array
from finback.config import SamplingParams
from finback.engine.drafts import MOST as MOST_DRAFTS
from finback.engine.drafts import DraftController, Drafter, PromptLookup
from finback.engine.sampler import adjust, pick, rate, refuse_no_numbers
from finback.engine.scheduler import Batch, Scheduler, StepLimits, Wanted
from finback.engine.sequence import Constraint, Delta, Sequence
from finback.engine.snapshots import SnapshotStore
from finback.errors import ContextTooLong, FinbackError, RequestError
from finback.models.base import HEAD_ROWS, Model, Run, TokenBatch
from finback.models.state import SequenceState, StateSpill
from finback.spans import Spans
from finback.storage.arena import MemoryPool

KEEP_EVERY = 4096  # tokens between two states that are kept
logger = logging.getLogger(__name__)


class Engine:
    """Pushes sequences through a model, all of them together. For use by one thread."""

    def __init__(
        self,
        model: Model,
        limits: StepLimits,
        spans: Spans,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """Take a loaded model.

        Args:
            stop_ids: Tokens that end an answer unless a request ignores them.
        """
        self.model, self.spans, self._limits = model, spans, limits
        self.stop_ids = frozenset(stop_ids)
        most = model.shape.max_positions
        self.context = min(limits.context or most, most)  # tokens of a sequence
        self._scheduler = Scheduler(limits)
        self.snapshots: SnapshotStore | None = None  # where states are kept, if they are
        self.keep_every, self.keep_every_s = KEEP_EVERY, inf  # tokens, seconds between two of them
        self.max_spill_bytes = inf  # after so many no further state is spilled
        self.spill: StateSpill | None = None  # has the states that are not in memory
        self.make_drafter: Callable[[Sequence], Drafter] = lambda sequence: PromptLookup()
        self.drafts: DraftController | None = None  # says how many pay; none are made without
        self.memory = MemoryPool()  # of states
        self._is_stepping = False
        self._ended: list[Sequence] = []  # what they hold is freed when no step is under way
        self._numbers = itertools.count(1)

    @property
    def is_idle(self) -> bool:
        """Tell whether no sequence is left."""
        return len(self._scheduler) == 0

    def add(
        self,
        token_ids: Seq[int],
        sampling: SamplingParams,
        constraint: Constraint | None = None,
        is_background: bool = False,
        written: Seq[int] = (),
        shared: int = 0,
    ) -> int:
        """Take in a prompt and give the number its deltas will carry.

        Args:
            token_ids: The prompt.
            sampling: How to go on.
            constraint: What the answer must look like; belongs to this sequence from now on.
            is_background: Let others go first.
            written: The answer's tokens so far, where it is gone on with; not given in deltas.
            shared: Tokens at the beginning that other prompts have too, as a system message: where
                states are kept, one is kept of them.

        Raises:
            RequestError: The prompt is empty or holds an id outside the vocabulary.
            ContextTooLong: The prompt leaves no room for one token.
        """
        ids = list(token_ids)
        self.check_prompt(ids, sampling)
        self._check_written(ids, written, sampling)
        if constraint is not None:
            for token in written:
                constraint.accept(token)
        room = self.context - len(ids)
        sequence = Sequence(
            number=next(self._numbers),
            tokens=[*ids, *written],
            sampling=sampling,
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(64),
            state=SequenceState(memory=self.memory),
            max_length=len(ids) + min(room, sampling.max_tokens or room),
            stop_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self.stop_ids),
            num_prompt=len(ids),
            rated_from=len(ids) if sampling.prompt_logprobs is None else 1,
            constraint=constraint,
            is_background=is_background,
            holds_last=self.snapshots is not None,
        )
        self._restore(sequence)
        if self.snapshots is not None and sequence.state.position < shared < len(ids):
            sequence.cut_at = shared
        self._scheduler.add(sequence)
        return sequence.number

    def add_text(self, token_ids: Seq[int], rated_from: int, top: int = 0) -> int:
        """Take in a text to be rated, and give the number its deltas will carry.

        Where it fits into one step its state is dropped layer by layer.

        Args:
            token_ids: At least two tokens.
            rated_from: The first token whose likelihood is wanted, from 1.
            top: How many of the likeliest tokens are wanted with each.

        Raises:
            RequestError: There are too few tokens, or one outside the vocabulary.
            ContextTooLong: There are more than the model holds.
        """
        ids = list(token_ids)
        self._check_ids(ids)
        if not 1 <= rated_from < len(ids):
            raise RequestError("to rate a token there must be one before it")
        self._check_length(ids)
        is_kept = len(ids) - 1 > self._limits.max_rows
        sequence = Sequence(
            number=next(self._numbers),
            tokens=ids,
            sampling=SamplingParams(prompt_logprobs=top),
            seed=0,
            state=SequenceState(is_kept=is_kept, memory=self.memory),
            max_length=len(ids),
            stop_ids=frozenset(),
            num_prompt=len(ids),
            rated_from=rated_from,
            is_background=True,
        )
        self._scheduler.add(sequence)
        return sequence.number

    def check_prompt(self, token_ids: Seq[int], sampling: SamplingParams) -> None:
        """Refuse what `add` would refuse, without adding anything."""
        self._check_ids(token_ids)
        if sampling.logit_bias:
            self._check_ids(list(sampling.logit_bias), "logit_bias: ")
        if len(token_ids) >= self.context:
            raise ContextTooLong(
                f"the prompt has {len(token_ids)} tokens and {self._holder()} holds "
                f"{self.context}, answer included; shorten the prompt"
            )

    def _check_written(self, ids: Seq[int], written: Seq[int], sampling: SamplingParams) -> None:
        """Refuse an answer that cannot be gone on with."""
        if written:
            self._check_ids(written)
        ends = frozenset(sampling.stop_token_ids)
        ends |= frozenset() if sampling.ignore_eos else self.stop_ids
        if written and written[-1] in ends:
            raise RequestError("the answer is complete already: it ends with a stop token")
        if len(written) >= (sampling.max_tokens or self.context) or (
            len(ids) + len(written) >= self.context
        ):
            raise RequestError("the answer is as long as it may be already")

    def keep(self, number: int) -> None:
        """Keep the state of a sequence as it is between two steps, where states are kept."""
        sequence = self._scheduler.get(number)
        if sequence is None or self.snapshots is None or sequence.state.is_spilled:
            return
        if sequence.state.position:
            self._save_state(sequence)

    def step(self) -> list[Delta]:
        """Run one forward pass and give what each sequence gained by it.

        Sequences that are still reading their prompt gain nothing yet and give no delta. A pass
        that fails leaves the states of its sequences half advanced: they all end with that error.
        """
        start = time.perf_counter()
        if self.drafts is not None:
            self._propose(self.drafts)
        spilled = self.spans.counts.get("bytes_spilled", 0)
        self._scheduler.may_spill = spilled < self.max_spill_bytes
        batch = self._scheduler.next_batch()
        if batch is None:
            return []
        with self.spans.span("step"):
            self._is_stepping = True
            try:
                deltas = self._run(batch)
            except FinbackError as error:
                return [self._fail(sequence, error) for sequence in batch.sequences]
            except BaseException:
                for sequence in batch.sequences:
                    self._scheduler.remove(sequence.number)
                raise
            finally:
                self._is_stepping = False
                live = self._scheduler.numbers
                self._ended += [one for one in batch.sequences if one.number not in live]
                self._free_ended()
        if self.drafts is not None:
            self._learn(self.drafts, batch, time.perf_counter() - start)
        self.spans.count("steps", 1)
        self.spans.count("rows", len(batch.tokens.ids))
        logger.debug(
            "step of %d rows for %d sequences", len(batch.tokens.ids), len(batch.sequences)
        )
        return deltas

    def abort(self, number: int) -> Delta | None:
        """Drop a sequence; unknown or finished numbers are no error.

        May come at any time: Python may end a forgotten stream in the middle of a step.
        """
        sequence = self._scheduler.remove(number)
        if sequence is None:
            return None
        sequence.finish_reason = "abort"
        self._ended.append(sequence)
        if not self._is_stepping:
            self._free_ended()
        return Delta(number, finish_reason="abort")

    def logits(self, token_ids: Seq[int]) -> Array:
        """Give the logits after every token: (T,) -> (T, V) float32. Adds no sequence.

        Raises:
            RequestError: An id lies outside the vocabulary.
            ContextTooLong: There are more tokens than the model holds.
        """
        ids = list(token_ids)
        self._check_ids(ids)
        self._check_length(ids)
        state, rows = SequenceState(memory=self.memory), self._limits.max_rows
        parts = []
        try:
            for start in range(0, len(ids), rows):
                chunk = np.array(ids[start : start + rows], np.int64)
                batch = TokenBatch(chunk, (Run(state, 0, len(chunk)),), np.arange(len(chunk)))
                with np.errstate(all="ignore"):
                    hidden = self.model.forward(batch)
                    parts += list(self.model.logits(hidden, HEAD_ROWS))
                state.position += len(chunk)
        finally:
            state.release()
        return np.concatenate(parts)

    @property
    def live(self) -> set[int]:
        """Give the numbers of all that have neither ended nor been dropped."""
        return self._scheduler.numbers

    def is_live(self, number: int) -> bool:
        """Tell whether a sequence has neither ended nor been dropped."""
        return number in self._scheduler

    def check(self) -> None:
        """Test the invariants of everything the engine owns."""
        self._scheduler.check()

    def _holder(self) -> str:
        is_whole = self.context == self.model.shape.max_positions
        return "the model" if is_whole else "the memory plan (see --context)"

    def _check_length(self, ids: Seq[int]) -> None:
        if len(ids) > self.context:
            raise ContextTooLong(f"{len(ids)} tokens, but {self._holder()} holds {self.context}")

    def _check_ids(self, ids: Seq[int], where: str = "") -> None:
        if not ids:
            raise RequestError("the prompt is empty; at least one token is needed")
        size = self.model.shape.vocab_size
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise RequestError(f"{where}token ids are whole numbers, not {token_id!r}")
            if not 0 <= token_id < size:
                raise RequestError(f"{where}token id {token_id} is not in the vocabulary of {size}")

    def _run(self, batch: Batch) -> list[Delta]:
        """Compute a batch; give what its sequences gained, in their order."""
        # Damaged weights may overflow; what comes out of it is refused below.
        with np.errstate(all="ignore"):
            rows = self.model.forward(dataclasses.replace(batch.tokens, spill=self.spill))
            lengths = [len(sequence.tokens) for sequence in batch.sequences]
            for sequence, run in zip(batch.sequences, batch.tokens.runs, strict=True):
                sequence.state.position += run.stop - run.start
                sequence.held = 0 if sequence.drafts else run.held
            gained: dict[int, Delta] = {}
            with closing(self.model.logits(rows, HEAD_ROWS)) as blocks:
                each = itertools.chain.from_iterable(blocks)
                for wanted, logits in zip(batch.wanted, each, strict=True):
                    self._take(wanted, logits, gained)
        for sequence, length in zip(batch.sequences, lengths, strict=True):
            if sequence.drafts:
                self.spans.count("drafts_stood", sequence.settle_drafts(length))
            self._keep(sequence)
            is_live = sequence.number in self._scheduler
            if sequence.is_only_rated and is_live and not sequence.behind:
                self._scheduler.remove(sequence.number)
                sequence.finish_reason = "length"
                before = gained.get(sequence.number) or Delta(sequence.number)
                gained[sequence.number] = dataclasses.replace(before, finish_reason="length")
        return [gained[s.number] for s in batch.sequences if s.number in gained]

    def _take(self, wanted: Wanted, logits: Array, gained: dict[int, Delta]) -> None:
        """Use logits (V,): rate a token of the prompt, or pick the next one of the answer."""
        sequence, index = wanted.sequence, wanted.index
        before = gained.get(sequence.number) or Delta(sequence.number)
        if before.finish_reason is not None or wanted.is_in_vain:
            return
        try:
            refuse_no_numbers(logits, index)
            if index == len(sequence.tokens):
                gained[sequence.number] = self._extend(sequence, logits, before)
                return
            rated = rate(logits, sequence.tokens[index], sequence.sampling.prompt_logprobs or 0)
            gained[sequence.number] = dataclasses.replace(
                before, rated_prompt=[*before.rated_prompt, rated]
            )
        except FinbackError as error:
            failed = self._fail(sequence, error)
            gained[sequence.number] = dataclasses.replace(
                before, finish_reason=failed.finish_reason, error=error
            )

    def _extend(self, sequence: Sequence, logits: Array, before: Delta) -> Delta:
        """Append the next token to a sequence, and what must follow it; that may end it."""
        sampling, limit = sequence.sampling, sequence.constraint
        allowed = None if limit is None else limit.allowed()
        answer = sequence.answer
        adjusted = adjust(logits, sampling, sequence.tokens[: sequence.num_prompt], answer, allowed)
        token = pick(adjusted, sampling, sequence.seed, len(sequence.tokens))
        gained = [token]
        sequence.tokens.append(token)
        if token in sequence.stop_ids or limit is not None and limit.accept(token):
            sequence.finish_reason = "stop"
        elif limit is not None and sampling.logprobs is None:  # those need every token's logits
            gained += self._append_forced(sequence, limit)
        if sequence.finish_reason is None and len(sequence.tokens) >= sequence.max_length:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            self._scheduler.remove(sequence.number)
        rated = [] if sampling.logprobs is None else [rate(logits, token, sampling.logprobs)]
        return dataclasses.replace(
            before,
            token_ids=before.token_ids + gained,
            finish_reason=sequence.finish_reason,
            ends_with_stop_token=gained[-1] in sequence.stop_ids,
            rated=before.rated + rated,
        )

    def _restore(self, sequence: Sequence) -> None:
        """Begin with the longest state that is kept of the prompt, if there is a place for it."""
        if self.snapshots is None or not self._scheduler.has_place:
            return
        found = self.snapshots.find(sequence.tokens)
        if found is None or sequence.rated_from <= min(found.position, sequence.num_prompt - 1):
            return  # also where rows that a state would save are wanted
        tokens = sequence.tokens[: found.position]
        state = self.snapshots.load(found, tokens, self.model, self.memory)
        if state is not None:
            sequence.state, sequence.kept_at = state, found.position
            self.spans.count("tokens_restored", found.position)

    def _keep(self, sequence: Sequence) -> None:
        """Keep a state at the end of a prompt and of an answer, and every so many tokens."""
        if self.snapshots is None or sequence.is_only_rated or sequence.state.is_spilled:
            return
        if sequence.finish_reason in ("error", "abort"):
            return
        position = sequence.state.position
        is_boundary = (
            position in (sequence.num_prompt, sequence.cut_at) or sequence.finish_reason is not None
        )
        is_due = position - sequence.kept_at >= self.keep_every
        is_late = time.monotonic() - sequence.kept_when >= self.keep_every_s
        if position > sequence.kept_at and (is_boundary or is_due or is_late):
            self._save_state(sequence)

    def _save_state(self, sequence: Sequence) -> None:
        assert self.snapshots is not None
        # Of a prompt the state before its last token, with which the same prompt can begin: the
        # row of the last one gives the logits that the answer begins with.
        position = sequence.state.position - sequence.held
        if not sequence.held:
            self.model.settle(sequence.state)
        self.snapshots.save(sequence.tokens[:position], sequence.state)
        sequence.kept_at, sequence.kept_when = position, time.monotonic()

    def _free_ended(self) -> None:
        """Free what sequences that have ended hold in memory and in the spill file."""
        while self._ended:
            sequence = self._ended.pop()
            if self.spill is not None and sequence.state.is_spilled:
                self.spill.forget(sequence.state)
            sequence.state.release()
            if sequence.drafter is not None:
                sequence.drafter.release()

    def _propose(self, controller: DraftController) -> None:
        """Draft for every answer that goes on, as far as it pays."""
        answering = self._scheduler.answering
        for sequence in answering:
            if sequence.drafter is None:
                sequence.drafter = self.make_drafter(sequence)
            sequence.judge_guesses()
            room = sequence.max_length - len(sequence.tokens) - 1
            width = min(controller.width(len(answering), sequence.chance), room)
            asked = MOST_DRAFTS if sequence.drafter.is_free else width
            guesses = sequence.drafter.propose(sequence.tokens, asked)
            sequence.guessed, sequence.guessed_at = guesses, len(sequence.tokens)
            sequence.drafts = guesses[: max(0, width)]
            self.spans.count("drafts", len(sequence.drafts))

    def _learn(self, controller: DraftController, batch: Batch, seconds: float) -> None:
        """Keep how long a step took, if it had nothing but answers."""
        certain = len(batch.sequences)
        drafts = sum(batch.drafts)
        if len(batch.tokens.ids) == certain + drafts:
            pairs = zip(batch.sequences, batch.drafts, strict=True)
            stood = sum(sequence.stood for sequence, drafted in pairs if drafted)
            controller.note(certain, drafts, stood, seconds)

    def _append_forced(self, sequence: Sequence, limit: Constraint) -> list[int]:
        """Append tokens that leave no choice: they are computed, but nothing is sampled."""
        gained: list[int] = []
        for token in limit.forced()[: sequence.max_length - len(sequence.tokens)]:
            gained.append(token)
            sequence.tokens.append(token)
            if token in sequence.stop_ids or limit.accept(token):
                sequence.finish_reason = "stop"
                break
        self.spans.count("forced_tokens", len(gained))
        return gained

    def _fail(self, sequence: Sequence, error: FinbackError) -> Delta:
        self._scheduler.remove(sequence.number)
        sequence.finish_reason = "error"
        return Delta(sequence.number, finish_reason="error", error=error)
