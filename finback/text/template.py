"""A stranger's jinja template, run in a sandbox: it sees its inputs and nothing else.

Held to limits as well: of source and output size, of time, and of the operators that make much
out of little. What users write in their messages cannot become special tokens.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

from finback.errors import RequestError, TokenizerError
from finback.text.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20
MAX_OUTPUT_CHARS = 64 << 20
MAX_PRODUCT = 1 << 20  # elements of a repeated string or list; the size of a power's exponent
MAX_SECONDS = 10.0
UNBOUNDED_METHODS = ("center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill")
# Private characters stand for special strings while a template runs: one character for one string,
# so that no filter takes them apart.
PRIVATE_PLANES = range(0xF0000, 0x10FFFE)


class Template:
    """One template and the vocabulary it is written for."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Keep the source; nothing runs before `encode`."""
        self._source, self._tokenizer = source, tokenizer
        self._compiled: Any = None

    def encode(self, written: Mapping[str, Any], options: Mapping[str, Any]) -> list[int]:
        """Render and tokenise.

        Args:
            written: What users wrote; special strings in it stay ordinary text.
            options: The rest of the template's inputs.

        Raises:
            RequestError: The template refuses these inputs, or fails on them.
            TokenizerError: It is no valid template.
        """
        if self._compiled is None:
            self._compiled = _compile(self._source)
        marks = _Marks(self._tokenizer.specials, written)
        with _limited_time():
            try:
                text = ""
                for piece in self._compiled.generate(**marks.hide(dict(written)), **options):
                    text += piece
                    if len(text) > MAX_OUTPUT_CHARS:
                        _refuse("its output has no end")
            except RequestError:
                raise
            except Exception as error:  # whatever a stranger's template does wrong
                _refuse(f"{error}")
        return marks.encode(text, self._tokenizer)


class _Marks:
    """Replaces special strings in what users wrote by private characters that it does not hold."""

    def __init__(self, specials: Mapping[str, int], written: Mapping[str, Any]) -> None:
        self._strings = sorted((s for s in specials if s), key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, self._strings)) or r"(?!)")
        used = set(json.dumps(written, ensure_ascii=False, default=str))
        self._first = next(
            start
            for start in PRIVATE_PLANES
            if not any(chr(start + n) in used for n in range(len(self._strings)))
        )
        last = self._first + max(0, len(self._strings) - 1)
        self._marks = re.compile(f"([{chr(self._first)}-{chr(last)}])")
        self._number = {text: n for n, text in enumerate(self._strings)}

    def hide(self, value: Any) -> Any:
        """Replace special strings in all strings of a nested value, keys included."""
        if isinstance(value, str):
            return self._find.sub(lambda m: chr(self._first + self._number[m[0]]), value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(inner) for key, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Tokenise rendered text with its special strings, and marked ones as ordinary text."""
        ids: list[int] = []
        for number, part in enumerate(self._marks.split(text)):
            if number % 2:
                ids += tokenizer.encode(self._strings[ord(part) - self._first])
            elif part:
                ids += tokenizer.encode(part, allow_special=True)
        return ids


def _compile(source: str) -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses the operators that make much out of little."""

        intercepted_binops = frozenset(["*", "**", "%"])

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if isinstance(obj, str) and attr in UNBOUNDED_METHODS:
                return False
            return bool(super().is_safe_attribute(obj, attr, value))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for one, other in ((left, right), (right, left)):
                size = len(one) if isinstance(one, str | list | tuple) else 1
                if operator == "*" and isinstance(other, int) and size * abs(other) > MAX_PRODUCT:
                    _refuse("it repeats too much")
            if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
                _refuse("it raises to too high a power")
            if operator == "%" and isinstance(left, str):
                _refuse("it formats with %")
            return super().call_binop(context, operator, left, right)

    if len(source) > MAX_TEMPLATE_BYTES:
        raise TokenizerError("the chat template of this checkpoint is larger than any")
    sandbox = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False
    )
    for unbounded in ("center", "format", "indent", "wordwrap"):
        sandbox.filters[unbounded] = _too_free
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return sandbox.from_string(source)
    except Exception as error:  # a stranger's text may break the compiler in many ways
        raise TokenizerError(
            f"the chat template of this checkpoint is not valid jinja: {error}"
        ) from error


@contextmanager
def _limited_time() -> Iterator[None]:
    """End Python code that runs for too long, by looking at the clock at each of its lines."""
    end = time.monotonic() + MAX_SECONDS

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            _refuse(f"it runs for more than {MAX_SECONDS:g} seconds")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _too_free(*_: object, **__: object) -> NoReturn:
    _refuse("it uses a filter that is not allowed")


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"the model's chat template refuses these messages: {message}")


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
