"""Texts that commands read, and rated tokens that they print."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finback.errors import UsageError

if TYPE_CHECKING:
    from finback.llm import LLM, TokenLogprob


def read_lines(file: str) -> list[str]:
    """Read the lines of a text file, or of standard input for `-`.

    Raises:
        UsageError: There is no such file, or it is no UTF-8.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: is no UTF-8 text ({error})") from error
    return text.removesuffix("\n").split("\n") if text else []


def logprob_json(llm: "LLM", token: "TokenLogprob") -> dict[str, Any]:
    """Describe a rated token, with the text it stands for."""
    value = {
        "id": token.token_id,
        "text": llm.tokenizer.decode([token.token_id]),
        "logprob": token.logprob,
        "rank": token.rank,
    }
    if token.top:
        value["top"] = [
            {"id": number, "text": llm.tokenizer.decode([number]), "logprob": logprob}
            for number, logprob in token.top
        ]
    return value
