"""All printing: data to stdout, talk to stderr."""

import json
import os
import sys
from collections.abc import Iterable, Sequence


def data(text: str, end: str = "\n") -> None:
    """Print data at once, for the next program in the pipe."""
    print(text, end=end, flush=True)


def json_data(value: object) -> None:
    """Print one JSON value."""
    data(json.dumps(value, indent=2, ensure_ascii=False))


def talk(text: str, end: str = "\n") -> None:
    """Print words for the person at the terminal."""
    print(text, end=end, file=sys.stderr, flush=True)


def dim(text: str) -> str:
    """Grey a text, where stderr is a terminal that wants colour."""
    wants = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[2m{text}\x1b[0m" if wants else text


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out columns: the first to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def close_quietly() -> None:
    """After a reader of the pipe has left, keep the interpreter from complaining at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
