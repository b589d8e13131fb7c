"""The Python face: load a model, then generate, stream, chat, tokenize, or get logits."""

import dataclasses
import logging
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from finback.checkpoint.files import read_json_if_there
from finback.checkpoint.formats import Array
from finback.checkpoint.hf import SAMPLING_KEYS, read_sampling, read_stop_ids
from finback.checkpoint.index import Checkpoint, open_checkpoint
from finback.config import EngineConfig, SamplingParams, with_known_options
from finback.engine.engine import Engine
from finback.engine.sequence import Delta, FinishReason
from finback.errors import CheckpointError, FinbackError, RequestError, UsageError
from finback.hub.local import STORYTELLER, find_model
from finback.kernels.backends import best_backend
from finback.models.convert import with_spine
from finback.models.loading import MemoryPlan, load_model, read_needs
from finback.planner.memory import plan_memory
from finback.spans import Profile, Snapshot, Spans
from finback.storage.arena import reserve
from finback.storage.extents import Extent
from finback.storage.probe import LEAST_MEMORY, MEMORY_BYTES, DiskRate, measure_ceiling
from finback.storage.trace import Recorder
from finback.text.chat import ChatFormat, ChatOptions, load_chat
from finback.text.parse import ParsedMessage, Piece, collect
from finback.text.stream import StopStrings, TextStream
from finback.text.tokenizer import load_tokenizer, read_tokenizer_config, token_text
from finback.text.xtml import Message

EVERY = 16  # tokens between two looks at the figures of an answer on its way
RAW_MAX_TOKENS = 256  # a bare text has no end of its own
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunStats:
    """What one answer cost. Seconds are those of the engine's steps, whoever waits between them."""

    prompt_tokens: int = 0
    tokens: int = 0
    prompt: Profile = field(default_factory=Profile)  # up to the answer's first token
    whole: Profile = field(default_factory=Profile)  # prompt and answer
    decode: Profile = field(default_factory=Profile)  # the answer's tokens after the first
    disk_gbps: float | None = None  # the most that this disk gives; None where it was not asked

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
    """A finished answer. `token_ids` includes the stop token, `text` does not."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seed: int = 0
    stats: RunStats = field(default_factory=RunStats)


@dataclass(slots=True)
class ChatCompletion(Completion):
    """A finished chat answer; `text` is everything the model wrote outside its structure."""

    message: ParsedMessage = field(default_factory=ParsedMessage)


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
        self._inbox: dict[int, list[Delta]] = {}
        self._is_closed, self._heat = False, config.heat
        checkpoint = open_checkpoint(self.folder)
        generation = read_json_if_there(self.folder / "generation_config.json")
        self.sampling = read_sampling(generation)
        self.tokenizer = load_tokenizer(self.folder)
        self.chat_format: ChatFormat | None = load_chat(self.folder, self.tokenizer)
        ops = best_backend(config.threads, config.activations)
        self.activations = ops.activations
        spine = "" if config.spine == "published" else f", {config.spine} spine"
        self._description = (
            f"{self.folder.name}: {ops.activations} activations{spine}, {ops.description}"
        )
        with self.spans.span("load"):
            needs = read_needs(with_spine(checkpoint, config.spine))
            self.plan = plan_memory(needs, config, ops)
            config = dataclasses.replace(
                config,
                max_rows=self.plan.max_rows,
                max_sequences=self.plan.max_sequences,
                context=self.plan.context,
            )
            self.disk = _measure_disk(checkpoint, self.plan) if self.plan.reads_from_disk else None
            self._loaded = load_model(needs, self.plan, ops, self.spans, config)
        try:
            ends = self._stop_ids(checkpoint.config, generation)
            self.engine = Engine(self._loaded.model, config, self.spans, ends)
        except BaseException:
            self.close()
            raise
        logger.info("loaded %s in %.2f s", self.folder, self.spans.seconds["load"])

    @property
    def description(self) -> str:
        """Say for people what runs, on what, and what its disk gives."""
        if self.disk is None:
            return self._description
        share = self.disk.huge_page_share
        pages = "no huge pages, which makes reading slow" if share == 0 else "huge pages"
        return f"{self._description}; disk {self.disk.gbps:.2f} GB/s at most, {pages}"

    @property
    def streamed_extents(self) -> list[Extent]:
        """List where in the files lies what is read again for every step, experts apart."""
        spine = self._loaded.spine
        return [e for group in spine.groups if not spine.stays(group.name) for e in group.extents]

    def record_routes(self) -> Recorder:
        """Note from now on which experts are used; the recorder gives the trace."""
        self._refuse_closed()
        shape = self._loaded.model.shape
        recorder = Recorder(shape.num_layers, shape.num_experts, self._loaded.experts.slot_bytes)
        self._loaded.experts.on_lease = recorder.note
        return recorder

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Completion:
        """Continue a text, or token ids.

        Args:
            sampling: Fields of `SamplingParams`; what is not given comes from the model's
                `generation_config.json`, and `max_tokens` is 256.

        Raises:
            RequestError: The prompt or an option cannot be used.
        """
        out = Completion()
        for text in self.stream(prompt, out, **sampling):
            out.text += text
        return out

    def stream(
        self, prompt: str | Sequence[int], into: Completion | None = None, **sampling: Any
    ) -> Iterator[str]:
        """Continue a text and give it piece by piece; ids, end and figures are kept in `into`.

        See `generate`. An unusable prompt or option is refused at once, not at the first piece.
        """
        params = self._params({"max_tokens": RAW_MAX_TOKENS} | sampling)
        if not isinstance(prompt, str | list | tuple):
            raise RequestError("a prompt is text or a list of token ids")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.engine.check_prompt(ids)
        return self._text_pieces(ids, params, _fresh(into or Completion()))

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
        **sampling: Any,
    ) -> Iterator[Piece]:
        """Answer a conversation piece by piece; ids, end and figures are kept in `into`.

        Stop strings apply to the content, not to reasoning or calls.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise RequestError("messages must be a list with at least one message")
        if options is not None and not isinstance(options, ChatOptions):
            raise RequestError("options must be ChatOptions, as ChatOptions(thinking=False)")
        if self.chat_format is None:
            raise RequestError(
                f"{self.folder.name} has no chat format; give it plain text to continue (--raw)"
            )
        options = options or ChatOptions()
        out = _fresh(into or Completion())
        params = self._params(sampling)
        prompt = self.chat_format.encode(messages, options)
        self.engine.check_prompt(prompt)
        return self._chat_pieces(prompt, params, self.chat_format, options, out)

    def tokenize(self, text: str) -> list[int]:
        """Turn text into ids; special strings count as ordinary text."""
        return self.tokenizer.encode(text)

    def logits(self, token_ids: Sequence[int]) -> Array:
        """Give the logits after every token: (T,) -> (T, V) float32."""
        self._refuse_closed()
        return self.engine.logits(token_ids)

    def close(self) -> None:
        """Close the model's files; it cannot be used any more."""
        self._is_closed = True
        if self._heat is not None:
            try:
                self._loaded.experts.save_heat(Path(self._heat))
            except OSError as error:
                logger.warning("%s: the heat could not be kept (%s)", self._heat, error.strerror)
        self._loaded.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stop_ids(
        self, config: Mapping[str, object], generation: Mapping[str, object]
    ) -> list[int]:
        """Collect the ids that end an answer, and check the vocabulary against the model."""
        size = self._loaded.model.shape.vocab_size
        if self.tokenizer.num_tokens > size:
            raise CheckpointError(
                f"{self.folder}: the tokenizer gives ids up to {self.tokenizer.num_tokens - 1}, "
                f"the model embeds {size}; the files belong to different models"
            )
        text = config.get("text_config")
        configs = {"generation_config.json": generation, "config.json": config}
        if isinstance(text, dict):
            configs["config.json: text_config"] = text
        ends = read_stop_ids(configs, size)
        named = token_text(read_tokenizer_config(self.folder).get("eos_token"))
        if named is not None and named in self.tokenizer.specials:
            ends.append(self.tokenizer.specials[named])
        return ends

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self.folder.name} has been closed; load it again")

    def _params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        self._refuse_closed()
        defaults = {key: getattr(self.sampling, key) for key in SAMPLING_KEYS}
        params = with_known_options(SamplingParams, defaults | dict(sampling), RequestError)
        return params if params.seed is not None else params.replaced(seed=secrets.randbits(32))

    def _text_pieces(
        self, ids: list[int], params: SamplingParams, out: Completion
    ) -> Iterator[str]:
        text = TextStream(self.tokenizer, params.stop)
        with closing(self._tokens(ids, params, out)) as tokens:
            for token in tokens:
                if piece := text.push(token):
                    yield piece
                if text.is_stopped:
                    out.finish_reason = "stop"
                    return
        if piece := text.finish():
            yield piece

    def _chat_pieces(
        self,
        prompt: list[int],
        params: SamplingParams,
        chat: ChatFormat,
        options: ChatOptions,
        out: Completion,
    ) -> Iterator[Piece]:
        parser, stops = chat.parser(options), StopStrings(params.stop)
        with closing(self._tokens(prompt, params, out)) as tokens:
            for token in tokens:
                for piece in parser.push(token):
                    yield from _until_stop(piece, stops)
                if stops.is_stopped:
                    out.finish_reason = "stop"
                    return
        for piece in parser.finish():
            yield from _until_stop(piece, stops)
        if rest := stops.finish():
            yield Piece("content", rest)

    def _tokens(self, ids: list[int], params: SamplingParams, out: Completion) -> Generator[int]:
        """Run one sequence and give its tokens but the stop token; the rest goes into `out`."""
        assert params.seed is not None
        number = self.engine.add(ids, params)
        inbox = self._inbox[number] = []
        out.seed, out.stats.prompt_tokens = params.seed, len(ids)
        out.stats.disk_gbps = None if self.disk is None else self.disk.gbps
        totals = Totals(self.spans)
        try:
            while out.finish_reason is None:
                if not inbox:
                    self._step(number)
                    totals.settle(out)
                while inbox:
                    delta = inbox.pop(0)
                    if delta.error is not None:
                        raise delta.error
                    out.token_ids += delta.token_ids
                    out.finish_reason = delta.finish_reason
                    totals.settle(out)
                    is_stop_token = delta.finish_reason == "stop"
                    yield from delta.token_ids[: -1 if is_stop_token else None]
        finally:
            del self._inbox[number]
            if self.engine.abort(number) is not None and out.finish_reason is None:
                out.finish_reason = "abort"

    def _step(self, number: int) -> None:
        """Advance every open answer by one step, and keep what others gained for them."""
        if not self.engine.is_live(number):
            raise FinbackError("the answer was dropped: a step for several answers was interrupted")
        for delta in self.engine.step():
            if delta.number in self._inbox:
                self._inbox[delta.number].append(delta)


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


def _measure_disk(checkpoint: Checkpoint, plan: MemoryPlan) -> DiskRate | None:
    """Measure the disk, within the plan's memory; None if there is too little of either."""
    size = min(MEMORY_BYTES, plan.budget - plan.parts["interpreter"])
    if size < LEAST_MEMORY:
        return None
    paths = [checkpoint.folder / name for name in checkpoint.files]
    return measure_ceiling(paths, memory=reserve(size))


def _fresh(into: Completion) -> Completion:
    """Refuse to mix two answers in one record."""
    if into.finish_reason is not None or into.token_ids:
        raise RequestError("`into` holds another answer; give a new one")
    return into


def _until_stop(piece: Piece, stops: StopStrings) -> Iterator[Piece]:
    """Let a piece through, content only up to a stop string and in its order."""
    text = stops.push(piece.text) if piece.kind == "content" else stops.finish()
    if text:
        yield Piece("content", text)
    if piece.kind != "content" and not stops.is_stopped:
        yield piece
