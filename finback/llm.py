"""The Python face: load a model, then generate, stream, chat, tokenize, or get logits."""

import dataclasses
import logging
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from finback.answer import ChatCompletion, ChatReader, Completion, OpenAnswer, PlainReader, RunStats
from finback.assembly import assemble, make_controller
from finback.checkpoint.formats import Array
from finback.checkpoint.hf import SAMPLING_KEYS
from finback.config import EngineConfig, SamplingParams, with_known_options
from finback.engine.sampler import TokenLogprob
from finback.engine.sequence import Delta
from finback.errors import FinbackError, RequestError, UsageError
from finback.hub.local import STORYTELLER, find_model
from finback.spans import Spans
from finback.storage.extents import Extent
from finback.storage.trace import Recorder
from finback.text.chat import ChatOptions, continue_ids, shared_opening
from finback.text.grammar import Grammars
from finback.text.parse import Piece, collect
from finback.text.stream import TextStream
from finback.text.xtml import Message

__all__ = [
    "LLM",
    "ChatCompletion",
    "ChatOptions",
    "Completion",
    "Request",
    "RunStats",
    "Score",
    "TokenLogprob",
]
RAW_MAX_TOKENS = 256  # a bare text has no end of its own
logger = logging.getLogger(__name__)
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One of several answers that are written together: a text to continue, or a conversation."""

    prompt: Prompt | None = None
    messages: Sequence[Message] | None = None
    options: ChatOptions | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Score:
    """How likely a model finds a text: the sum over its rated tokens, in nats."""

    tokens: list[TokenLogprob] = field(default_factory=list)

    @property
    def logprob(self) -> float:
        """Sum the tokens up."""
        return sum(token.logprob for token in self.tokens)

    @property
    def is_greedy(self) -> bool:
        """Tell whether each token was the likeliest."""
        return all(token.rank == 1 for token in self.tokens)


class LLM:
    """A model folder, loaded. Use it as a context manager, or close it."""

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        """Check the folder and load what stays in memory.

        Args:
            path: A model folder, a name from `finback list`, or None for the storyteller.
            options: Fields of `EngineConfig`; only `activations` and `spine` change a result.

        Raises:
            CheckpointError: The folder is missing, damaged or of an unsupported kind.
            UsageError: An option is unknown or out of range.
        """
        config = with_known_options(EngineConfig, options, UsageError)
        self.folder = STORYTELLER if path is None else find_model(path)
        self.spans = Spans()
        self._open: dict[int, OpenAnswer] = {}
        self._rating: dict[int, Rating] = {}
        self._is_closed, self._heat = False, config.heat
        self._is_asked_to_stop = False
        parts = assemble(self.folder, config, self.spans)
        self._parts, self._loaded, self.engine = parts, parts.loaded, parts.engine
        self.plan, self.disk, self.ops = parts.plan, parts.disk, parts.ops
        self.activations, self.sampling = parts.ops.activations, parts.sampling
        self.tokenizer, self.chat_format = parts.tokenizer, parts.chat_format
        self._grammars = Grammars(self.tokenizer, self.engine.model.shape.vocab_size)
        spine = "" if config.spine == "published" else f", {config.spine} spine"
        self._description = (
            f"{self.folder.name}: {self.activations} activations{spine}, {self.ops.description}"
        )
        logger.info("loaded %s in %.2f s", self.folder, self.spans.seconds["load"])

    @property
    def description(self) -> str:
        """Say for people what runs, on what, and what its disk gives."""
        if self.disk is None:
            return self._description
        share = self.disk.huge_page_share
        pages = "no huge pages, which makes reading slow" if share == 0 else "huge pages"
        return f"{self._description}; disk {self.disk.gbps:.2f} GB/s at most, {pages}"

    def use_drafts(self, is_on: bool) -> None:
        """Turn drafts on or off, with nothing learnt so far whether they pay."""
        self.engine.drafts = make_controller(self.engine.model) if is_on else None

    def stop(self) -> None:
        """Let answers end after the step that is computed now; their states are kept, if any are.

        May be called from a signal's handler.
        """
        self._is_asked_to_stop = True

    def wait_for_reads(self) -> None:
        """Let what is being read ahead come in, so that nothing disturbs a measurement."""
        self._loaded.reader.wait_until_idle()

    @contextmanager
    def record_reads(self) -> Iterator[list[Extent]]:
        """Note every request to a disk inside the block, in the order they end."""
        requests: list[Extent] = []
        self._loaded.reader.on_read = requests.append
        try:
            yield requests
        finally:
            self._loaded.reader.on_read = None

    def record_routes(self) -> Recorder:
        """Note from now on which experts are used; the recorder gives the trace."""
        self._refuse_closed()
        shape = self._loaded.model.shape
        recorder = Recorder(shape.num_layers, shape.num_experts, self._loaded.experts.slot_bytes)
        self._loaded.experts.on_lease = recorder.note
        return recorder

    @overload
    def generate(self, prompt: Prompt, **sampling: Any) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], **sampling: Any
    ) -> list[Completion]: ...

    def generate(self, prompt: Any, **sampling: Any) -> Completion | list[Completion]:
        """Continue a text, or token ids; or several of them, computed together.

        Args:
            prompt: One prompt, or a list of prompts, whose answers come in the same order. Of
                several, one that fails has an `error`, and the others go on.
            sampling: Fields of `SamplingParams`; what is not given comes from the model's
                `generation_config.json`, and `max_tokens` is 256.

        Raises:
            RequestError: A prompt or an option cannot be used.
        """
        if isinstance(prompt, list | tuple) and any(
            isinstance(p, str | list | tuple) for p in prompt
        ):
            done = dict(self.batch([Request(prompt=one, sampling=sampling) for one in prompt]))
            return [done[number] for number in range(len(prompt))]
        out = Completion()
        for text in self.stream(prompt, out, **sampling):
            out.text += text
        return out

    def batch(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Write several answers together: every byte read from the disk serves all of them.

        Gives the place of a request and its answer as they end, a `ChatCompletion` where messages
        were given.
        All requests are checked at once; an answer that fails has an `error`, the others go on.

        Raises:
            RequestError: A request cannot be used; it is named by its place.
        """
        _check_list(requests, "requests")
        answers = []
        for number, request in enumerate(requests):
            if not isinstance(request, Request) or not isinstance(request.sampling, Mapping):
                raise RequestError(
                    f"request {number + 1}: give a Request, whose sampling is a table of options"
                )
            try:
                answers.append(self._open_request(request))
            except RequestError as error:
                raise type(error)(f"request {number + 1}: {error}") from error
        return self._all(answers)

    def stream(
        self,
        prompt: Prompt,
        into: Completion | None = None,
        written: Sequence[int] = (),
        **sampling: Any,
    ) -> Iterator[str]:
        """Continue a text and give it piece by piece; ids, end and figures are kept in `into`.

        See `generate`. An unusable prompt or option is refused at once, not at the first piece.
        `written` are the answer's tokens so far, where an earlier run is gone on with: with the
        same seed and options the text is the one that it would have been.
        """
        answer = self._open_text(prompt, sampling, _fresh(into or Completion()), written)
        return self._texts(answer)

    def chat(
        self, messages: Sequence[Message], options: ChatOptions | None = None, **sampling: Any
    ) -> ChatCompletion:
        """Answer a conversation in OpenAI's message shape.

        Raises:
            RequestError: The model has no chat format, or a message or option cannot be used.
        """
        out = ChatCompletion()
        for piece in self.stream_chat(messages, options, out, **sampling):
            collect(out.message, piece)
        out.text = out.message.content
        return out

    def stream_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions | None = None,
        into: Completion | None = None,
        after: Sequence[int] = (),
        written: Sequence[int] = (),
        **sampling: Any,
    ) -> Iterator[Piece]:
        """Answer a conversation piece by piece; ids, end and figures are kept in `into`.

        `after` are the ids of all turns before, from `Completion.prompt_ids` and `token_ids`: then
        only what is new is computed where a state of them is kept. `written` is as for `stream`.

        Stop strings and constraints apply to the content, not to reasoning or calls; with a
        constraint the model does not reason first.
        """
        out = _fresh(into or Completion())
        return self._pieces(self._open_chat(messages, options, sampling, out, after, written))

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Prompt],
        top: int = 0,
    ) -> list[Score]:
        """Rate continuations, each after its prompt, many in one pass over the layers.

        Args:
            prompts: Texts or token ids.
            continuations: One for each prompt; both are turned into tokens on their own.
            top: How many of the likeliest tokens are wanted with each.

        Raises:
            RequestError: A text is empty, too long, or not one of each pair is there.
        """
        _check_list(prompts, "prompts")
        _check_list(continuations, "continuations")
        if len(prompts) != len(continuations):
            raise RequestError(
                f"{len(prompts)} prompts and {len(continuations)} continuations; give pairs"
            )
        return self._rate(self._pairs(prompts, continuations), top)

    def score_each(
        self, prompts: Sequence[Prompt | None], continuations: Sequence[Prompt], top: int = 0
    ) -> Iterator[tuple[int, Score]]:
        """Give scores with the places of their texts as they come; all texts are checked at once.

        Args:
            prompts: None where the whole text is to be rated, from its second token on.
            continuations: One for each prompt.
            top: As for `score`.

        Raises:
            RequestError: As `score`.
        """
        _check_list(prompts, "prompts")
        _check_list(continuations, "continuations")
        return self._rated(self._pairs(prompts, continuations), top)

    def logprobs(self, texts: Sequence[Prompt], top: int = 0) -> list[Score]:
        """Rate texts as a whole, each from its second token on. See `score`."""
        _check_list(texts, "texts")
        return self._rate([(self._ids(text), 1) for text in texts], top)

    def tokenize(self, text: str) -> list[int]:
        """Turn text into ids; special strings count as ordinary text."""
        if not isinstance(text, str):
            raise RequestError(f"only text has tokens, not {type(text).__name__}")
        return self.tokenizer.encode(text)

    def logits(self, token_ids: Sequence[int]) -> Array:
        """Give the logits after every token: (T,) -> (T, V) float32."""
        self._refuse_closed()
        _check_list(token_ids, "token_ids")
        return self.engine.logits(token_ids)

    def close(self) -> None:
        """Close the model's files; it cannot be used any more."""
        self._is_closed = True
        if self._heat is not None:
            try:
                self._loaded.experts.save_heat(Path(self._heat))
            except OSError as error:
                logger.warning("%s: the heat could not be kept (%s)", self._heat, error.strerror)
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self.folder.name} has been closed; load it again")

    def _params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        self._refuse_closed()
        defaults = {key: getattr(self.sampling, key) for key in SAMPLING_KEYS}
        params = with_known_options(SamplingParams, defaults | dict(sampling), RequestError)
        return params if params.seed is not None else params.replaced(seed=secrets.randbits(32))

    def _pairs(
        self, prompts: Sequence[Prompt | None], continuations: Sequence[Prompt]
    ) -> list[tuple[list[int], int]]:
        """Give each text as ids, and the first token to be rated."""
        out = []
        for number, (prompt, continuation) in enumerate(
            zip(prompts, continuations, strict=True), 1
        ):
            before = None if prompt is None else self._ids(prompt)
            after = self._ids(continuation)
            if not after or before == []:
                raise RequestError(f"text {number}: neither prompt nor continuation may be empty")
            out.append((after, 1) if before is None else (before + after, len(before)))
        return out

    def _ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str | list | tuple):
            raise RequestError("a prompt is text or a list of token ids")
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _open_request(self, request: Request) -> OpenAnswer:
        if request.messages is not None:
            return self._open_chat(
                request.messages, request.options, request.sampling, ChatCompletion()
            )
        if request.prompt is None:
            raise RequestError("a request needs a prompt or messages")
        return self._open_text(request.prompt, request.sampling, Completion())

    def _open_text(
        self,
        prompt: Prompt,
        sampling: Mapping[str, Any],
        out: Completion,
        written: Sequence[int] = (),
    ) -> OpenAnswer:
        params = self._params({"max_tokens": RAW_MAX_TOKENS} | dict(sampling))
        ids = self._ids(prompt)
        self.engine.check_prompt(ids, params)
        guide = self._grammars.guide(params, self.engine.stop_ids)
        reader = PlainReader(TextStream(self.tokenizer, params.stop))
        return OpenAnswer(ids, params, out, reader, guide, written)

    def _open_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions | None,
        sampling: Mapping[str, Any],
        out: Completion,
        after: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> OpenAnswer:
        if not isinstance(messages, list | tuple) or not messages:
            raise RequestError("messages must be a list with at least one message")
        if options is not None and not isinstance(options, ChatOptions):
            raise RequestError("options must be ChatOptions, as ChatOptions(thinking=False)")
        if self.chat_format is None:
            raise RequestError(
                f"{self.folder.name} has no chat format; give it plain text to continue (--raw)"
            )
        options, params = options or ChatOptions(), self._params(sampling)
        ends = self.engine.stop_ids | self.chat_format.content_ends
        guide = self._grammars.guide(params, ends)
        if guide is not None:  # the format is that of the content, which comes first then
            options = dataclasses.replace(options, thinking=False)
        ids = continue_ids(self.chat_format, self.tokenizer, messages, options, after)
        self.engine.check_prompt(ids, params)
        reader = ChatReader(self.chat_format.parser(options), params.stop)
        shared = 0
        if self.engine.snapshots is not None and messages[0].get("role") == "system":
            shared = shared_opening(self.chat_format, messages, options, ids)
        return OpenAnswer(ids, params, out, reader, guide, written, shared)

    def _texts(self, answer: OpenAnswer) -> Iterator[str]:
        with closing(self._pieces(answer)) as pieces:
            for piece in pieces:
                yield piece.text

    def _pieces(self, answer: OpenAnswer) -> Generator[Piece]:
        """Run one answer, and give its pieces as they come."""
        number = self._begin(answer)
        try:
            while True:
                while answer.pieces:
                    yield answer.pieces.popleft()
                if answer.is_over or self._is_asked_to_stop:
                    break
                self._step(number)
                answer.settle()
            if self._is_asked_to_stop and not answer.is_over:
                self.engine.keep(number)
            if answer.out.error is not None:
                raise answer.out.error
        finally:
            self._open.pop(number).close()

    def _all(self, answers: list[OpenAnswer]) -> Iterator[tuple[int, Completion]]:
        """Run answers together, and give each with its place when it ends."""
        running: dict[int, int] = {}
        try:
            for place, answer in enumerate(answers):
                running[self._begin(answer)] = place
            while running:
                ended = [number for number in running if self._open[number].is_over]
                for number in ended:
                    answer = self._open.pop(number)
                    answer.close()
                    yield running.pop(number), _collected(answer)
                if self._is_asked_to_stop:
                    return
                if not ended:
                    self._step(next(iter(running)))
        finally:
            for number in running:
                if (left := self._open.pop(number, None)) is not None:
                    left.close()

    def _rate(self, texts: Sequence[tuple[list[int], int]], top: int) -> list[Score]:
        """Rate the tokens of texts from a place on, in their order."""
        scores = dict(self._rated(texts, top))
        return [scores[number] for number in range(len(texts))]

    def _rated(
        self, texts: Sequence[tuple[list[int], int]], top: int
    ) -> Iterator[tuple[int, Score]]:
        """Rate texts, and give each with its place when it is done."""
        self._refuse_closed()
        running: dict[int, int] = {}
        try:
            for place, (ids, rated_from) in enumerate(texts):
                try:
                    number = self.engine.add_text(ids, rated_from, top)
                except RequestError as error:
                    raise type(error)(f"text {place + 1}: {error}") from error
                running[number], self._rating[number] = place, Rating()
            while running:
                ended = [number for number in running if self._rating[number].is_over]
                for number in ended:
                    rating = self._rating.pop(number)
                    if rating.error is not None:
                        raise rating.error
                    yield running.pop(number), rating.score
                if not ended:
                    self._step(next(iter(running)))
        finally:
            for number in running:
                self._rating.pop(number, None)
                self.engine.abort(number)

    def _begin(self, answer: OpenAnswer) -> int:
        self._refuse_closed()
        self._drop_orphans()
        self._is_asked_to_stop &= bool(self._open)  # it was meant for those that are over
        disk_gbps = None if self.disk is None else self.disk.gbps
        number = answer.begin(self.engine, self.spans, disk_gbps)
        self._open[number] = answer
        return number

    def _step(self, number: int) -> None:
        """Advance every open answer by one step, and keep what others gained for them."""
        if not self.engine.is_live(number):
            raise FinbackError("the answer was dropped: a step for several answers was interrupted")
        self._drop_orphans()
        for delta in self.engine.step():
            if delta.number in self._open:
                self._open[delta.number].take(delta)
            elif delta.number in self._rating:
                self._rating[delta.number].take(delta)

    def _drop_orphans(self) -> None:
        """Drop what the engine was given when Ctrl-C came before anybody held its number."""
        for number in self.engine.live - self._open.keys() - self._rating.keys():
            self.engine.abort(number)


@dataclass(slots=True)
class Rating:
    """One text that is being rated."""

    score: Score = field(default_factory=Score)
    is_over: bool = False
    error: FinbackError | None = None

    def take(self, delta: Delta) -> None:
        """Take in what a step has brought."""
        self.score.tokens += delta.rated_prompt
        self.is_over, self.error = delta.finish_reason is not None, delta.error


def _collected(answer: OpenAnswer) -> Completion:
    """Put the pieces of a finished answer together."""
    out = answer.out
    for piece in answer.pieces:
        if isinstance(out, ChatCompletion):
            collect(out.message, piece)
        else:
            out.text += piece.text
    if isinstance(out, ChatCompletion):
        out.text = out.message.content
    return out


def _check_list(value: object, name: str) -> None:
    if not isinstance(value, list | tuple | range):
        raise RequestError(f"{name} must be a list, not {type(value).__name__}")


def _fresh(into: Completion) -> Completion:
    """Refuse to mix two answers in one record."""
    if into.finish_reason is not None or into.token_ids:
        raise RequestError("`into` holds another answer; give a new one")
    return into
