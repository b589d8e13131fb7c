"""All printing: data to stdout, talk to stderr. Nothing printed can drive the terminal."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from finback.units import human_bytes


def prepare() -> None:
    """Make the standard streams usable whatever they were started with.

    A closed one becomes the null device; text they cannot carry is escaped instead of refused.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  (lives as long as the process)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def data(text: str, end: str = "\n") -> None:
    """Print data at once, for the next program in the pipe; for a terminal, without its codes."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def json_data(value: object) -> None:
    """Print one JSON value."""
    data(json.dumps(value, indent=2, ensure_ascii=False))


def json_line(value: object) -> None:
    """Print one JSON value on a line of its own."""
    data(json.dumps(value, ensure_ascii=False))


def talk(text: str, end: str = "\n") -> None:
    """Print words for the person at the terminal; if nobody can be told, go on."""
    with contextlib.suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def echo(prompt: str) -> None:
    """Show a prompt in front of what continues it, where both go to a terminal."""
    if sys.stderr.isatty() and sys.stdout.isatty():
        talk(dim(printable(prompt)), end="")


def printable(text: str) -> str:
    """Escape control characters other than newline and tab, and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    return c if c.isspace() and ord(c) > 160 else c.encode("unicode_escape").decode()


def dim(text: str) -> str:
    """Grey a text, where stderr is a terminal that wants colour."""
    wants = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[2m{text}\x1b[0m" if wants else text


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Lay out columns: those numbered in `left` to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n in left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Progress:
    """A line on stderr that is written over, where somebody is there to watch it."""

    def __init__(self, verb: str) -> None:
        """Say what is being done."""
        self._verb, self._last = verb, 0.0
        self._is_watched = sys.stderr.isatty()
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_watched:
            talk("\r\x1b[K", end="")

    def bytes(self, done: int, total: int) -> None:
        """Show how far it has come and how long the rest will take."""
        now = time.monotonic()
        if not self._is_watched or (now - self._last < 0.2 and done < total):
            return
        self._last = now
        rate = done / max(now - self._start, 1e-3)
        left = f", {(total - done) / rate:.0f} s left" if rate > 0 else ""
        talk(
            f"\r\x1b[K{self._verb} {human_bytes(done)} of {human_bytes(total)} "
            f"({human_bytes(rate)}/s{left})",
            end="",
        )


def close_quietly() -> None:
    """After a reader of the pipe has left, keep the interpreter from complaining at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
