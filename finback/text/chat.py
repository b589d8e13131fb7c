"""Conversations to token ids: K3's own encoding, or the jinja template a checkpoint ships."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from finback.checkpoint.files import exists, read_file
from finback.errors import RequestError
from finback.text.parse import PARSERS, Parser
from finback.text.template import MAX_TEMPLATE_BYTES, Template
from finback.text.tokenizer import Tokenizer, read_tokenizer_config, token_text
from finback.text.xtml import CLOSE, END, OPEN, SEP, Message, render


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a request asks besides its messages; checked when it is rendered."""

    tools: Sequence[Mapping[str, object]] = ()
    thinking: bool = True
    thinking_effort: str | None = None
    tool_choice: str | None = None
    response_format: Mapping[str, object] | None = None


class ChatFormat(Protocol):
    """How a model wants conversations written, and how its answers are read."""

    content_ends: frozenset[int]  # tokens that end an answer's content, besides stop tokens

    def encode(
        self, messages: Sequence[Message], options: ChatOptions, opens_answer: bool = True
    ) -> list[int]:
        """Give the ids of a conversation up to where the model's answer begins.

        Args:
            messages: In OpenAI's shape.
            options: What the request asks besides.
            opens_answer: Whether the beginning of an answer is written too.

        Raises:
            RequestError: Naming what cannot be rendered.
        """
        ...

    def parser(self, options: ChatOptions) -> Parser:
        """Make the reader of an answer to such a prompt."""
        ...


class XtmlChat:
    """Kimi K3's encoding: segments, each tokenised on its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Write with a vocabulary that has the four structure tokens."""
        self._tokenizer = tokenizer
        self.content_ends = frozenset({tokenizer.specials[CLOSE]})

    def encode(
        self, messages: Sequence[Message], options: ChatOptions, opens_answer: bool = True
    ) -> list[int]:
        """See `ChatFormat.encode`."""
        segments = render(
            messages,
            tools=options.tools,
            thinking=options.thinking,
            thinking_effort=options.thinking_effort,
            tool_choice=options.tool_choice,
            response_format=options.response_format,
            add_generation_prompt=opens_answer,
        )
        ids: list[int] = []
        for text, is_special in segments:
            ids += self._tokenizer.encode(text, allow_special=is_special)
        return ids

    def parser(self, options: ChatOptions) -> Parser:
        """See `ChatFormat.parser`."""
        return PARSERS["xtml"](self._tokenizer, "think" if options.thinking else "response")


class TemplateChat:
    """The jinja template of a checkpoint."""

    content_ends: frozenset[int] = frozenset()

    def __init__(
        self, tokenizer: Tokenizer, source: str, special_strings: Mapping[str, str]
    ) -> None:
        """Keep the template; it is compiled when a conversation needs it."""
        self._template = Template(source, tokenizer)
        self._special_strings = special_strings
        self._tokenizer = tokenizer

    def encode(
        self, messages: Sequence[Message], options: ChatOptions, opens_answer: bool = True
    ) -> list[int]:
        """See `ChatFormat.encode`. Special strings in the messages stay ordinary text."""
        return self._template.encode(
            {"messages": list(messages), "tools": list(options.tools) or None},
            {
                "add_generation_prompt": opens_answer,
                "enable_thinking": options.thinking,
                "thinking": options.thinking,
                **self._special_strings,
            },
        )

    def parser(self, options: ChatOptions) -> Parser:
        """See `ChatFormat.parser`."""
        return PARSERS["plain"](self._tokenizer, None)


def continue_ids(
    chat: ChatFormat,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    options: ChatOptions,
    ids: Sequence[int],
) -> list[int]:
    """Give the ids of a conversation so that they go on from ids that were computed already.

    A text can be cut into tokens in several ways, and a model writes its own. Where the ids so far
    stand for the same text as the messages but the last, what is new is appended to them; otherwise
    all is written anew.

    Args:
        chat: The format.
        tokenizer: Of the same model.
        messages: The last one is new.
        options: As for `encode`.
        ids: Prompt and answer of the turns before.

    Raises:
        RequestError: As `ChatFormat.encode`.
    """
    whole = chat.encode(messages, options)
    if not ids:
        return whole
    before = chat.encode(messages[:-1], options, opens_answer=False)
    if whole[: len(before)] != before:
        return whole
    # A model stops at the first token after its answer; the format may go on.
    text, wanted = _text_of(tokenizer, ids), _text_of(tokenizer, before)
    at = len(before)
    while at and len(wanted) > len(text):
        at -= 1
        wanted = wanted[: len(wanted) - len(tokenizer.token_bytes(before[at]))]
    return list(ids) + whole[at:] if wanted == text else whole


def shared_opening(
    chat: ChatFormat, messages: Sequence[Message], options: ChatOptions, ids: Sequence[int]
) -> int:
    """Count the tokens at the beginning of `ids` that the first message alone gives."""
    try:
        opening = chat.encode(messages[:1], options, opens_answer=False)
    except RequestError:  # a template that wants a question too
        return 0
    return len(opening) if list(ids[: len(opening)]) == opening else 0


def _text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(number) for number in ids)


def load_chat(folder: Path, tokenizer: Tokenizer) -> ChatFormat | None:
    """Find how a checkpoint wants conversations written; None if it does not say.

    Raises:
        CheckpointError: Its template cannot be read.
    """
    if all(name in tokenizer.specials for name in (OPEN, CLOSE, SEP, END)):
        return XtmlChat(tokenizer)
    config = read_tokenizer_config(folder)
    source = _template_source(folder, config)
    if source is None:
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    strings = {name: text for name in names if (text := token_text(config.get(name))) is not None}
    return TemplateChat(tokenizer, source, strings)


def _template_source(folder: Path, config: Mapping[str, object]) -> str | None:
    path = folder / "chat_template.jinja"
    if exists(path):
        return read_file(path, MAX_TEMPLATE_BYTES).decode("utf-8", errors="replace")
    source = config.get("chat_template")
    for entry in source if isinstance(source, list) else []:  # several, by name
        if isinstance(entry, dict) and entry.get("name") == "default":
            source = entry.get("template")
    return source if isinstance(source, str) else None
