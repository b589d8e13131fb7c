"""An answer in the making: deltas of the engine become pieces of text, and figures."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from finback.config import SamplingParams
from finback.engine.engine import Engine
from finback.engine.sampler import TokenLogprob
from finback.engine.sequence import Constraint, Delta, FinishReason
from finback.errors import FinbackError
from finback.spans import Profile, Snapshot, Spans
from finback.text.parse import ParsedMessage, Parser, Piece
from finback.text.stream import StopStrings, TextStream

EVERY = 16  # tokens between two looks at the figures of an answer on its way


@dataclass(slots=True)
class RunStats:
    """What one answer cost. Seconds are those of the engine's steps, whoever waits between them.

    Steps are shared: what they cost is counted in full for each answer that was open.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    prompt: Profile = field(default_factory=Profile)  # up to the answer's first token
    whole: Profile = field(default_factory=Profile)  # prompt and answer
    decode: Profile = field(default_factory=Profile)  # the answer's tokens after the first
    disk_gbps: float | None = None  # the most that this disk gives; None where it was not asked

    @property
    def restored_tokens(self) -> int:
        """Tokens of the prompt whose state was kept from before."""
        return self.whole.counts.get("tokens_restored", 0)

    @property
    def prompt_s(self) -> float:
        """Seconds until the answer's first token."""
        return self.prompt.wall_s

    @property
    def decode_s(self) -> float:
        """Seconds for the answer's tokens after the first."""
        return self.decode.wall_s

    @property
    def compute_s(self) -> float:
        """Seconds of computing, prompt included."""
        return self.whole.compute_s

    @property
    def read_s(self) -> float:
        """Seconds with reads under way, beside computing or not."""
        return self.whole.read_s

    @property
    def wait_s(self) -> float:
        """Seconds in which nothing could be computed until bytes came."""
        return self.whole.wait_s

    @property
    def bytes_read(self) -> int:
        """Bytes read, prompt included."""
        return self.whole.bytes_read

    @property
    def tokens_per_s(self) -> float:
        """Rate of the answer's tokens after the first, which belongs to the prompt."""
        return (self.tokens - 1) / self.decode_s if self.decode_s > 0 and self.tokens > 1 else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes read for each token of the answer, the prompt's share included."""
        return self.bytes_read / max(1, self.tokens)


@dataclass(slots=True)
class Completion:
    """A finished answer. `token_ids` includes the stop token, `text` does not.

    `logprobs` and `prompt_logprobs` rate the tokens where that was asked for; the prompt's first
    token is not rated. `error` says why an answer of several ended with the reason error.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seed: int = 0
    stats: RunStats = field(default_factory=RunStats)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: FinbackError | None = None


@dataclass(slots=True)
class ChatCompletion(Completion):
    """A finished chat answer; `text` is everything the model wrote outside its structure."""

    message: ParsedMessage = field(default_factory=ParsedMessage)


class Reader(Protocol):
    """Turns tokens into pieces of text, up to a stop string."""

    @property
    def is_stopped(self) -> bool:
        """Tell whether a stop string was met."""
        ...

    def push(self, token: int) -> Iterable[Piece]:
        """Take a token in and give what is certain now."""
        ...

    def finish(self) -> Iterable[Piece]:
        """Give what is still held back."""
        ...


class PlainReader:
    """All text is content."""

    def __init__(self, stream: TextStream) -> None:
        """Read through a stream."""
        self._stream = stream

    @property
    def is_stopped(self) -> bool:
        """See `Reader.is_stopped`."""
        return self._stream.is_stopped

    def push(self, token: int) -> Iterable[Piece]:
        """See `Reader.push`."""
        text = self._stream.push(token)
        return (Piece("content", text),) if text else ()

    def finish(self) -> Iterable[Piece]:
        """See `Reader.finish`."""
        text = self._stream.finish()
        return (Piece("content", text),) if text else ()


class ChatReader:
    """Text has structure; stop strings end the content alone."""

    def __init__(self, parser: Parser, stop: Sequence[str]) -> None:
        """Read through the parser of a chat format."""
        self._parser, self._stops = parser, StopStrings(stop)

    @property
    def is_stopped(self) -> bool:
        """See `Reader.is_stopped`."""
        return self._stops.is_stopped

    def push(self, token: int) -> Iterable[Piece]:
        """See `Reader.push`."""
        for piece in self._parser.push(token):
            yield from self._until_stop(piece)

    def finish(self) -> Iterable[Piece]:
        """See `Reader.finish`."""
        for piece in self._parser.finish():
            yield from self._until_stop(piece)
        if rest := self._stops.finish():
            yield Piece("content", rest)

    def _until_stop(self, piece: Piece) -> Iterable[Piece]:
        """Let a piece through, content only up to a stop string and in its order."""
        is_content = piece.kind == "content"
        text = self._stops.push(piece.text) if is_content else self._stops.finish()
        if text:
            yield Piece("content", text)
        if not is_content and not self._stops.is_stopped:
            yield piece


class OpenAnswer:
    """One answer between its request and its end."""

    def __init__(
        self,
        ids: list[int],
        params: SamplingParams,
        out: Completion,
        reader: Reader,
        constraint: Constraint | None = None,
        written: Sequence[int] = (),
        shared: int = 0,
    ) -> None:
        """Take what was asked, and what of the answer is there; `begin` begins."""
        self.out, self.pieces = out, deque[Piece]()
        self._ids, self._params, self._constraint = ids, params, constraint
        self._reader, self._number, self._written = reader, 0, list(written)
        self._shared = shared
        self._engine: Engine | None = None

    @property
    def is_over(self) -> bool:
        """Tell whether nothing more will come."""
        return self.out.finish_reason is not None

    def begin(self, engine: Engine, spans: Spans, disk_gbps: float | None) -> int:
        """Hand the prompt to an engine; gives the number of its deltas."""
        self._totals, self._engine = Totals(spans), engine
        self.out.seed, self.out.prompt_ids = self._params.seed or 0, self._ids
        self.out.stats.prompt_tokens, self.out.stats.disk_gbps = len(self._ids), disk_gbps
        self._number = engine.add(
            self._ids,
            self._params,
            self._constraint,
            written=self._written,
            shared=self._shared,
        )
        self.out.token_ids += self._written
        for token in self._written:
            self.pieces += self._reader.push(token)
        return self._number

    def take(self, delta: Delta) -> None:
        """Take in what a step has brought; nothing any more once a stop string was met."""
        out = self.out
        if self.is_over:
            return
        out.prompt_logprobs += delta.rated_prompt
        out.error = delta.error
        taken = 0
        for token in delta.token_ids:
            taken += 1
            is_text = taken < len(delta.token_ids) or not delta.ends_with_stop_token
            self.pieces += self._reader.push(token) if is_text else ()
            if self._reader.is_stopped:
                break
        out.token_ids += delta.token_ids[:taken]
        out.logprobs += delta.rated[:taken]
        if self._reader.is_stopped:
            self._end("stop")
            assert self._engine is not None
            self._engine.abort(self._number)
        elif delta.finish_reason is not None:
            self._end(delta.finish_reason)
        self._totals.settle(out)

    def settle(self) -> None:
        """Write into the figures what was spent so far, though nothing came of it yet."""
        self._totals.settle(self.out)

    def close(self) -> None:
        """Drop what is not finished."""
        if self._engine is not None and self._engine.abort(self._number) and not self.is_over:
            self.out.finish_reason = "abort"

    def _end(self, reason: FinishReason) -> None:
        self.out.finish_reason = reason
        if not self._reader.is_stopped and reason != "error":
            self.pieces += self._reader.finish()


class Totals:
    """The engine's totals before an answer, to be subtracted as it grows."""

    def __init__(self, spans: Spans) -> None:
        """Remember the totals."""
        self._spans, self._start = spans, spans.snapshot()
        self._first: Snapshot | None = None  # after the prompt

    def settle(self, out: Completion) -> None:
        """Write what was spent since into the answer's figures."""
        stats = out.stats
        if self._first is None:
            stats.prompt = stats.whole = self._spans.since(self._start)
            if out.token_ids:
                self._first = self._spans.snapshot()
        stats.tokens = len(out.token_ids)
        if self._first is not None and (out.finish_reason or stats.tokens % EVERY == 0):
            stats.whole = self._spans.since(self._start)
            stats.decode = self._spans.since(self._first)
