"""The engine: add sequences, step them, abort them. It speaks token ids and never text."""

import itertools
import secrets
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from finback.checkpoint.formats import Array
from finback.config import EngineConfig, SamplingParams
from finback.engine.sampler import pick
from finback.engine.scheduler import Batch, Scheduler
from finback.engine.sequence import Delta, Sequence
from finback.errors import ContextTooLong, RequestError
from finback.models.base import Model, Run, TokenBatch
from finback.spans import Spans


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
        room = self.model.shape.max_positions - len(ids)
        sequence = Sequence(
            number=next(self._numbers),
            prompt_length=len(ids),
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
        size = self.model.shape.max_positions
        if len(token_ids) >= size:
            raise ContextTooLong(
                f"the prompt has {len(token_ids)} tokens and the model holds {size}, "
                "answer included; shorten the prompt"
            )

    def step(self) -> list[Delta]:
        """Run one forward pass and give what each sequence gained by it.

        Sequences that are still reading their prompt gain nothing yet and give no delta.
        """
        batch = self._scheduler.next_batch()
        if batch is None:
            return []
        with self.spans.span("step"):
            logits = self.model.forward(batch.tokens)
            for sequence, run in zip(batch.sequences, batch.tokens.runs, strict=True):
                sequence.state.position += run.stop - run.start
            deltas = self._settle(batch, logits)
        self.spans.count("steps", 1)
        self.spans.count("rows", len(batch.tokens.ids))
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
        if len(ids) > self.model.shape.max_positions:
            raise ContextTooLong(
                f"{len(ids)} tokens, but the model holds {self.model.shape.max_positions}"
            )
        state = self.model.new_state()
        parts = []
        for start in range(0, len(ids), self._config.max_rows):
            chunk = np.array(ids[start : start + self._config.max_rows], np.int64)
            rows = np.arange(len(chunk))
            parts.append(self.model.forward(TokenBatch(chunk, (Run(state, 0, len(chunk)),), rows)))
            state.position += len(chunk)
        return np.concatenate(parts)

    def check(self) -> None:
        """Test the invariants of everything the engine owns."""
        self._scheduler.check()

    def _check_ids(self, ids: Seq[int]) -> None:
        if not ids:
            raise RequestError("the prompt is empty; at least one token is needed")
        size = self.model.shape.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise RequestError(f"token id {token_id} is outside the vocabulary of {size}")

    def _settle(self, batch: Batch, logits: Array) -> list[Delta]:
        deltas = []
        for sequence, row in zip(batch.picking, logits, strict=True):
            token = pick(row, sequence.sampling, sequence.seed, len(sequence.tokens))
            if token in sequence.stop_ids:
                sequence.finish_reason = "stop"
            sequence.tokens.append(token)
            if sequence.finish_reason is None and len(sequence.tokens) >= sequence.max_length:
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                self._scheduler.remove(sequence.number)
            deltas.append(Delta(sequence.number, [token], sequence.finish_reason))
        return deltas
