"""`finback chat`: a conversation in the terminal."""

import sys
from typing import Any

from finback.cli import output
from finback.cli.run import (
    MaxTokens,
    MinP,
    ModelOption,
    Seed,
    SystemOption,
    Temperature,
    Thinking,
    TopK,
    TopP,
    chosen,
    figures,
)
from finback.config import SamplingParams
from finback.errors import RequestError

HELP = """/reset   start again
/system TEXT   start again with a system message
/help   this list
/exit   leave (also Ctrl-D)
Ctrl-C stops an answer."""


def chat(
    model: ModelOption = None,
    system: SystemOption = None,
    think: Thinking = True,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
) -> None:
    """Talk with a model. /help lists what can be typed besides messages."""
    sampling = chosen(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    SamplingParams(**sampling)
    from finback.llm import LLM

    with LLM(model) as llm:
        if llm.chat_format is None:
            raise RequestError(f"{llm.folder.name} has no chat format; use `finback run --raw`")
        output.talk(output.dim(f"{llm.folder.name}, /help for help"))
        messages = _opening(system)
        while (line := _read_line()) is not None:
            command, _, rest = line.partition(" ")
            if command == "/exit":
                return
            if command == "/help":
                output.talk(HELP)
            elif command in ("/reset", "/system"):
                messages = _opening(rest.strip() or None if command == "/system" else system)
            elif line.startswith("/"):
                output.talk(f"unknown command {command}; /help lists them")
            elif line.strip():
                messages.append({"role": "user", "content": line})
                _answer(llm, messages, think, sampling)


def _opening(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []


def _read_line() -> str | None:
    """Ask for a line; None at the end of the input."""
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401  (line editing and history)

            return input("> ")
        line = sys.stdin.readline()
    except EOFError:
        output.talk("")
        return None
    return line.rstrip("\n") if line else None


def _answer(
    llm: Any, messages: list[dict[str, Any]], think: bool, sampling: dict[str, Any]
) -> None:
    """Stream an answer into the conversation; an error or Ctrl-C ends only this answer."""
    from finback.llm import ChatCompletion
    from finback.text.chat import ChatOptions
    from finback.text.parse import collect

    out = ChatCompletion()
    try:
        for piece in llm.stream_chat(messages, ChatOptions(thinking=think), out, **sampling):
            collect(out.message, piece)
            if piece.kind == "content":
                output.data(piece.text, end="")
            elif piece.text:
                output.talk(output.dim(piece.text), end="")
    except KeyboardInterrupt:
        out.finish_reason = "abort"
    except RequestError as error:
        output.talk(f"finback: {error}")
        messages.pop()
        return
    output.data("")
    output.talk(output.dim(figures(out)))
    answer = {"role": "assistant", "content": out.message.content}
    if out.message.reasoning:
        answer["reasoning_content"] = out.message.reasoning
    messages.append(answer)
