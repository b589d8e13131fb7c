"""Reasoning, content and tool calls out of a model's answer, as its ids arrive.

Structure is recognised by token id, never by text: no text inside an element can end it.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from finback.text.stream import TextStream
from finback.text.tokenizer import Tokenizer
from finback.text.xtml import CLOSE, END, OPEN, SEP

Kind = Literal["reasoning", "content"]
MAX_TAG_TOKENS = 512  # a tag longer than this is none


@dataclass(slots=True)
class ToolCall:
    """One call of a function; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ParsedMessage:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer: text of a kind, or a finished tool call."""

    kind: Kind | Literal["tool_call"]
    text: str = ""
    call: ToolCall | None = None


class Parser(Protocol):
    """Takes an answer's ids one by one."""

    def push(self, token_id: int) -> list[Piece]:
        """Take one id and give what is now certain."""
        ...

    def finish(self) -> list[Piece]:
        """Give what is still held back; unfinished elements end here."""
        ...


class PlainParser:
    """For models without a dialect: everything is content."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start at the beginning of an answer."""
        self._stream = TextStream(tokenizer)

    def push(self, token_id: int) -> list[Piece]:
        """See `Parser.push`."""
        return _content(self._stream.push(token_id))

    def finish(self) -> list[Piece]:
        """See `Parser.finish`."""
        return _content(self._stream.finish())


def _content(text: str) -> list[Piece]:
    return [Piece("content", text)] if text else []


@dataclass(slots=True)
class _Element:
    tag: str
    attributes: Mapping[str, str]


class XtmlParser:
    """Kimi K3's dialect: `<|open|>tag key="value"<|sep|>` … `<|close|>tag<|sep|>`.

    Lenient: closers may be missing, and the answer may stop anywhere.
    """

    def __init__(self, tokenizer: Tokenizer, inside: str | None = None) -> None:
        """Start a message, or go on inside the element the prompt has opened (`think`)."""
        self._tokenizer = tokenizer
        self._open, self._close, self._sep, self._end = (
            tokenizer.specials[s] for s in (OPEN, CLOSE, SEP, END)
        )
        self._stack = [_Element(inside, {})] if inside else []
        self._tag: list[int] | None = None  # ids of the tag being read
        self._is_closing = False
        self._stream = TextStream(tokenizer)
        self._text = ""  # of the element being collected, for calls
        self._call: dict[str, str] | None = None
        self._arguments: dict[str, object] = {}
        self._raw_arguments: str | None = None

    def push(self, token_id: int) -> list[Piece]:
        """See `Parser.push`."""
        if token_id in (self._open, self._close, self._end):
            pieces = self._flush()
            if token_id == self._end:
                return pieces + self._leave_to(0)
            self._tag, self._is_closing = [], token_id == self._close
            return pieces
        if self._tag is None:
            return self._emit(self._stream.push(token_id))
        if token_id != self._sep and len(self._tag) < MAX_TAG_TOKENS:
            self._tag.append(token_id)
            return []
        tag, self._tag = self._tokenizer.decode(self._tag), None
        return self._closed(tag.strip()) if self._is_closing else self._opened(tag)

    def finish(self) -> list[Piece]:
        """See `Parser.finish`."""
        return self._flush() + self._leave_to(0)

    def _opened(self, tag: str) -> list[Piece]:
        element = _parse_tag(tag)
        # An element that cannot stand inside the open one ends it: its closer was left out.
        parents = {"argument": "call", "json": "call", "call": "tools"}
        parent = parents.get(element.tag)
        keep = max(
            (n for n, e in enumerate(self._stack, 1) if e.tag == parent or e.tag == "message"),
            default=0,
        )
        pieces = self._leave_to(keep)
        self._stack.append(element)
        self._text = ""
        if element.tag == "call":
            self._call, self._arguments, self._raw_arguments = dict(element.attributes), {}, None
        return pieces

    def _closed(self, tag: str) -> list[Piece]:
        depth = next(
            (n for n in range(len(self._stack) - 1, -1, -1) if self._stack[n].tag == tag), None
        )
        if depth is None:  # also the message itself, which the prompt has opened
            return self._leave_to(0) if tag == "message" else []
        return self._leave_to(depth)

    def _leave_to(self, depth: int) -> list[Piece]:
        pieces = []
        while len(self._stack) > depth:
            element = self._stack.pop()
            if element.tag == "argument":
                key = element.attributes.get("key", "")
                self._arguments[key] = _argument(self._text, element.attributes.get("type"))
            elif element.tag == "json":
                self._raw_arguments = self._text
            elif element.tag == "call" and self._call is not None:
                pieces.append(Piece("tool_call", call=self._finished_call(self._call)))
                self._call = None
            self._text = ""
        return pieces

    def _finished_call(self, attributes: Mapping[str, str]) -> ToolCall:
        raw = self._raw_arguments
        arguments = raw if raw is not None else json.dumps(self._arguments, ensure_ascii=False)
        return ToolCall(f"call_{secrets.token_hex(12)}", attributes.get("tool", ""), arguments)

    def _flush(self) -> list[Piece]:
        text, self._stream = self._stream.finish(), TextStream(self._tokenizer)
        return self._emit(text)

    def _emit(self, text: str) -> list[Piece]:
        if not text or not self._stack:
            return []
        tag = self._stack[-1].tag
        if tag in ("argument", "json"):
            self._text += text
        if tag not in ("think", "response"):
            return []
        return [Piece("reasoning" if tag == "think" else "content", text)]


ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')


def _parse_tag(text: str) -> _Element:
    attributes = {key: _unescape(value) for key, value in ATTRIBUTE.findall(text)}
    return _Element(text.split(" ", 1)[0].strip(), attributes)


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _argument(text: str, kind: str | None) -> object:
    """Read one argument's value: a string as it stands, anything else as JSON if it is any."""
    if kind == "string":
        return text
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def parse_answer(parser: Parser, token_ids: list[int]) -> ParsedMessage:
    """Parse a whole answer at once."""
    message = ParsedMessage()
    pieces = [piece for token_id in token_ids for piece in parser.push(token_id)]
    for piece in pieces + parser.finish():
        collect(message, piece)
    return message


def collect(message: ParsedMessage, piece: Piece) -> None:
    """Add a piece to a message."""
    if piece.call is not None:
        message.tool_calls.append(piece.call)
    elif piece.kind == "reasoning":
        message.reasoning += piece.text
    else:
        message.content += piece.text


PARSERS: Mapping[str, Callable[[Tokenizer, str | None], Parser]] = {
    "plain": lambda tokenizer, inside: PlainParser(tokenizer),
    "xtml": XtmlParser,
}
