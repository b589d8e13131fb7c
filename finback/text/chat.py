"""Conversations to token ids: K3's own encoding, or the jinja template a checkpoint ships."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from finback.errors import RequestError, TokenizerError
from finback.text.parse import PARSERS, Parser
from finback.text.tokenizer import Tokenizer, read_tokenizer_config
from finback.text.xtml import CLOSE, END, OPEN, SEP, Message, render

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a request asks besides its messages."""

    tools: Sequence[object] = ()
    thinking: bool = True
    thinking_effort: str | None = None
    tool_choice: str | None = None
    response_format: Mapping[str, object] | None = None


class ChatFormat(Protocol):
    """How a model wants conversations written, and how its answers are read."""

    def encode(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """Give the ids of a conversation up to where the model's answer begins.

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

    def encode(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """See `ChatFormat.encode`."""
        segments = render(
            messages,
            tools=options.tools,
            thinking=options.thinking,
            thinking_effort=options.thinking_effort,
            tool_choice=options.tool_choice,
            response_format=options.response_format,
        )
        ids: list[int] = []
        for text, is_special in segments:
            ids += self._tokenizer.encode(text, allow_special=is_special)
        return ids

    def parser(self, options: ChatOptions) -> Parser:
        """See `ChatFormat.parser`."""
        return PARSERS["xtml"](self._tokenizer, "think" if options.thinking else "response")


class TemplateChat:
    """A checkpoint's jinja template, run in a sandbox without access to anything but its inputs."""

    def __init__(
        self, tokenizer: Tokenizer, source: str, special_strings: Mapping[str, str]
    ) -> None:
        """Compile the template.

        Raises:
            TokenizerError: It is no valid template.
        """
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TokenizerError(
                f"the chat template of this checkpoint is not valid jinja: {error}"
            ) from error
        self._tokenizer, self._special_strings = tokenizer, special_strings

    def encode(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """See `ChatFormat.encode`. Special strings in the messages stay ordinary text."""
        guard = _Guard(self._tokenizer.specials)
        values = guard.hide([dict(message) for message in messages])
        try:
            text = self._template.render(
                messages=values,
                tools=guard.hide(list(options.tools)) or None,
                add_generation_prompt=True,
                enable_thinking=options.thinking,
                thinking=options.thinking,
                **self._special_strings,
            )
        except RequestError:
            raise
        except Exception as error:  # whatever a stranger's template does wrong
            raise RequestError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return guard.encode(text, self._tokenizer)

    def parser(self, options: ChatOptions) -> Parser:
        """See `ChatFormat.parser`."""
        return PARSERS["plain"](self._tokenizer, None)


class _Guard:
    """Hides special strings in what users write, so that no template makes structure of them."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self._strings = sorted((s for s in specials if s), key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, self._strings)) or r"(?!)")
        nonce = secrets.token_hex(8)
        self._mark = f"\ue000{nonce}:{{}}\ue001"
        self._marks = re.compile(f"\ue000{nonce}:(\\d+)\ue001")

    def hide(self, value: Any) -> Any:
        """Replace special strings by marks, in all strings of a nested value."""
        if isinstance(value, str):
            return self._find.sub(lambda m: self._mark.format(self._strings.index(m[0])), value)
        if isinstance(value, Mapping):
            return {key: self.hide(inner) for key, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Tokenise rendered text with its special strings, and marked ones as ordinary text."""
        ids: list[int] = []
        for number, part in enumerate(self._marks.split(text)):
            if number % 2:
                ids += tokenizer.encode(self._strings[int(part)])
            elif part:
                ids += tokenizer.encode(part, allow_special=True)
        return ids


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"the model's chat template refuses these messages: {message}")


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def load_chat(folder: Path, tokenizer: Tokenizer) -> ChatFormat | None:
    """Find how a checkpoint wants conversations written; None if it does not say.

    Raises:
        TokenizerError: Its template is damaged.
    """
    if all(name in tokenizer.specials for name in (OPEN, CLOSE, SEP, END)):
        return XtmlChat(tokenizer)
    config = read_tokenizer_config(folder)
    source = _template_source(folder, config)
    if source is None:
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    strings = {name: text for name in names if (text := _token_text(config.get(name))) is not None}
    return TemplateChat(tokenizer, source, strings)


def _template_source(folder: Path, config: Mapping[str, object]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise TokenizerError(f"{path}: larger than any chat template")
        return path.read_text(encoding="utf-8", errors="replace")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
