"""`finback chat`: a conversation in the terminal."""

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from finback.cli import output
from finback.cli.run import (
    ActivationsOption,
    Answer,
    ContextOption,
    DraftsOption,
    MaxTokens,
    MemoryOption,
    MinP,
    ModelOption,
    Seed,
    SpineOption,
    SystemOption,
    Temperature,
    Thinking,
    Threads,
    TopK,
    TopP,
    sampling_of,
)
from finback.config import DEFAULT_ACTIVATIONS
from finback.errors import ContextTooLong, RequestError

if TYPE_CHECKING:
    from finback.llm import LLM

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
    threads: Threads = None,
    activations: ActivationsOption = DEFAULT_ACTIVATIONS,
    memory: MemoryOption = "auto",
    spine: SpineOption = "published",
    context: ContextOption = None,
    drafts: DraftsOption = "off",
) -> None:
    """Talk with a model. /help lists what can be typed besides messages."""
    sampling = sampling_of(locals())
    from finback.llm import LLM

    with LLM(
        model,
        threads=threads,
        activations=activations,
        memory=memory,
        spine=spine,
        context=context,
        drafts=drafts,
        max_sequences=1,
    ) as llm:
        if llm.chat_format is None:
            raise RequestError(f"{llm.folder.name} has no chat format; use `finback run --raw`")
        output.talk(output.dim(f"{llm.description}; /help for help"))
        messages = _opening(system)
        while (line := _read_line()) is not None:
            command, _, rest = line.partition(" ")
            if command in ("/exit", "/quit", "/bye"):
                return
            if command == "/help":
                output.talk(HELP)
            elif command in ("/reset", "/system"):
                system = rest.strip() or None if command == "/system" else system
                messages = _opening(system)
                output.talk(output.dim("(new conversation)"))
            elif line.startswith("/"):
                output.talk(f"unknown command {command}; /help lists them")
            elif line.strip():
                messages.append({"role": "user", "content": line})
                _answer(llm, messages, think, sampling)


def _opening(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []


def _read_line() -> str | None:
    """Ask for a line; None at the end of the input. Ctrl-C gives up what was typed."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history)
    try:
        return input("> ")
    except KeyboardInterrupt:
        output.talk("\n(Ctrl-D or /exit leaves)")
        return ""
    except EOFError:
        output.talk("")
        return None


def _answer(
    llm: "LLM", messages: list[dict[str, Any]], think: bool, sampling: dict[str, Any]
) -> None:
    """Stream an answer into the conversation; an error or Ctrl-C ends only this answer."""
    try:
        answer = Answer(llm, messages, think, sampling)
    except ContextTooLong as error:
        messages.pop()
        output.talk(f"finback: {error}; /reset starts a new conversation")
        return
    answer.run(show=True, quiet=False)
    answer.end(quiet=False)
    said = answer.out.message
    turn = {"role": "assistant", "content": said.content}
    if said.reasoning:
        turn["reasoning_content"] = said.reasoning
    messages.append(turn)
