"""The engine: add sequences, step them, abort them. It speaks token ids and never text."""

import itertools
import logging
import secrets
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from finback.checkpoint.formats import Array
from finback.config import EngineConfig, SamplingParams
from finback.engine.sampler import pick
from finback.engine.scheduler import Scheduler
from finback.engine.sequence import Delta, Sequence
from finback.errors import ContextTooLong, FinbackError, RequestError
from finback.models.base import Model, Run, TokenBatch
from finback.spans import Spans

logger = logging.getLogger(__name__)


class Engine:
    """Pushes sequences through a model, all of them together. For use by one thread."""

    def __init__(
        self, model: Model, config: EngineConfig, spans: Spans, stop_ids: Iterable[int] = ()
    ) -> None:
        """Take a loaded model.

        Args:
            stop_ids: Tokens that end an answer unless a request ignores them.
        """
        self.model, self.spans, self._config = model, spans, config
        self._stop_ids = frozenset(stop_ids)
        most = model.shape.max_positions
        self.context = min(config.context or most, most)  # tokens of a sequence
        self._scheduler = Scheduler(config)
        self._numbers = itertools.count(1)

    @property
    def is_idle(self) -> bool:
        """Tell whether no sequence is left."""
        return len(self._scheduler) == 0

    def add(self, token_ids: Seq[int], sampling: SamplingParams) -> int:
        """Take in a prompt and give the number its deltas will carry.

        Raises:
            RequestError: The prompt is empty or holds an id outside the vocabulary.
            ContextTooLong: The prompt leaves no room for one token.
        """
        ids = list(token_ids)
        self.check_prompt(ids)
        room = self.context - len(ids)
        sequence = Sequence(
            number=next(self._numbers),
            tokens=ids,
            sampling=sampling,
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(64),
            state=self.model.new_state(),
            max_length=len(ids) + min(room, sampling.max_tokens or room),
            stop_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else self._stop_ids),
        )
        self._scheduler.add(sequence)
        return sequence.number

    def check_prompt(self, token_ids: Seq[int]) -> None:
        """Refuse what `add` would refuse, without adding anything."""
        self._check_ids(token_ids)
        if len(token_ids) >= self.context:
            raise ContextTooLong(
                f"the prompt has {len(token_ids)} tokens and {self._holder()} holds "
                f"{self.context}, answer included; shorten the prompt"
            )

    def step(self) -> list[Delta]:
        """Run one forward pass and give what each sequence gained by it.

        Sequences that are still reading their prompt gain nothing yet and give no delta. A pass
        that fails leaves the states of its sequences half advanced: they all end with that error.
        """
        batch = self._scheduler.next_batch()
        if batch is None:
            return []
        with self.spans.span("step"):
            try:
                # Damaged weights may overflow; the sampler refuses what comes out of it.
                with np.errstate(all="ignore"):
                    logits = self.model.forward(batch.tokens)
            except FinbackError as error:
                return [self._fail(sequence, error) for sequence in batch.sequences]
            except BaseException:
                for sequence in batch.sequences:
                    self._scheduler.remove(sequence.number)
                raise
            for sequence, run in zip(batch.sequences, batch.tokens.runs, strict=True):
                sequence.state.position += run.stop - run.start
            deltas = [self._extend(s, row) for s, row in zip(batch.picking, logits, strict=True)]
        self.spans.count("steps", 1)
        self.spans.count("rows", len(batch.tokens.ids))
        logger.debug(
            "step of %d rows for %d sequences", len(batch.tokens.ids), len(batch.sequences)
        )
        return deltas

    def abort(self, number: int) -> Delta | None:
        """Drop a sequence between two steps; unknown or finished numbers are no error."""
        sequence = self._scheduler.remove(number)
        if sequence is None:
            return None
        sequence.finish_reason = "abort"
        return Delta(number, finish_reason="abort")

    def logits(self, token_ids: Seq[int]) -> Array:
        """Give the logits after every token: (T,) -> (T, V) float32. Adds no sequence.

        Raises:
            RequestError: An id lies outside the vocabulary.
            ContextTooLong: There are more tokens than the model holds.
        """
        ids = list(token_ids)
        self._check_ids(ids)
        if len(ids) > self.context:
            raise ContextTooLong(f"{len(ids)} tokens, but {self._holder()} holds {self.context}")
        state = self.model.new_state()
        parts = []
        for start in range(0, len(ids), self._config.max_rows):
            chunk = np.array(ids[start : start + self._config.max_rows], np.int64)
            rows = np.arange(len(chunk))
            with np.errstate(all="ignore"):
                batch = TokenBatch(chunk, (Run(state, 0, len(chunk)),), rows)
                parts.append(self.model.forward(batch))
            state.position += len(chunk)
        return np.concatenate(parts)

    def is_live(self, number: int) -> bool:
        """Tell whether a sequence has neither ended nor been dropped."""
        return number in self._scheduler

    def check(self) -> None:
        """Test the invariants of everything the engine owns."""
        self._scheduler.check()

    def _holder(self) -> str:
        is_whole = self.context == self.model.shape.max_positions
        return "the model" if is_whole else "the memory plan (see --context)"

    def _check_ids(self, ids: Seq[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty; at least one token is needed")
        size = self.model.shape.vocab_size
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise RequestError(f"a prompt is text or whole numbers, not {token_id!r}")
            if not 0 <= token_id < size:
                raise RequestError(f"token id {token_id} is outside the vocabulary of {size}")

    def _extend(self, sequence: Sequence, logits: Array) -> Delta:
        """Append the next token to a sequence, which may end it."""
        try:
            token = pick(logits, sequence.sampling, sequence.seed, len(sequence.tokens))
        except FinbackError as error:
            return self._fail(sequence, error)
        sequence.tokens.append(token)
        if token in sequence.stop_ids:
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.max_length:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            self._scheduler.remove(sequence.number)
        return Delta(sequence.number, [token], sequence.finish_reason)

    def _fail(self, sequence: Sequence, error: FinbackError) -> Delta:
        self._scheduler.remove(sequence.number)
        sequence.finish_reason = "error"
        return Delta(sequence.number, finish_reason="error", error=error)
