"""`finback run`: one prompt, one answer."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finback.cli import output
from finback.config import MAX_SEED, SamplingParams
from finback.errors import UsageError
from finback.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from finback.llm import LLM, Completion


def _help(name: str) -> str:
    """Take an option's help from the dataclass it fills."""
    fields = {f.name: f for f in dataclasses.fields(SamplingParams)}
    return str(fields[name].metadata["help"])


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A model folder or a name from `finback list`.",
        show_default="storyteller",
    ),
]
SystemOption = Annotated[str | None, typer.Option("--system", "-s", help="A system message.")]
MaxTokens = Annotated[int | None, typer.Option(help=_help("max_tokens"), min=1)]
Temperature = Annotated[float | None, typer.Option(help=_help("temperature"), min=0.0, max=100.0)]
TopP = Annotated[float | None, typer.Option(help=_help("top_p"), max=1.0)]
TopK = Annotated[int | None, typer.Option(help=_help("top_k"), min=0)]
MinP = Annotated[float | None, typer.Option(help=_help("min_p"), min=0.0, max=1.0)]
Seed = Annotated[int | None, typer.Option(help=_help("seed"), min=0, max=MAX_SEED)]
Thinking = Annotated[
    bool, typer.Option("--think/--no-think", help="Let the model reason before it answers.")
]


def run(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="The prompt; standard input joins it.")
    ] = None,
    model: ModelOption = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Ask the model, or let it continue a text.",
            show_default="chat if it can",
        ),
    ] = None,
    system: SystemOption = None,
    think: Thinking = True,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with all figures.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer alone.")] = False,
) -> None:
    """Answer one prompt. Text goes to stdout, everything else to stderr.

    Without --max-tokens a continued text (--raw) ends after 256 tokens, an answer where the
    model ends it.
    """
    text = _prompt(prompt or [])
    sampling = chosen(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop) if stop else None,
    )
    SamplingParams(**sampling)  # refuse before a model is loaded
    if chat is False and system is not None:
        raise UsageError("--system belongs to a conversation; leave out --raw")
    from finback.llm import LLM, ChatCompletion

    with LLM(model) as llm:
        as_chat = chat if chat is not None else llm.chat_format is not None
        out = ChatCompletion()
        shown = (
            chat_text(llm, text, system, think, sampling, out)
            if as_chat
            else raw_text(llm, text, sampling, out)
        )
        for kind, piece in shown:
            out.text += piece if kind == "content" else ""
            if as_json:
                continue
            if kind == "content":
                output.data(piece, end="")
            elif not quiet:
                output.talk(output.dim(piece), end="")
        if as_json:
            output.json_data(report(llm, out, as_chat))
            return
        output.data("")
        if not quiet:
            output.talk(output.dim(figures(out)))


def chosen(**options: Any) -> dict[str, Any]:
    """Keep the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def raw_text(
    llm: "LLM", text: str, sampling: dict[str, Any], out: "Completion"
) -> Iterator[tuple[str, str]]:
    """Continue a text, as pairs of kind and piece."""
    for piece in llm.stream(text, out, **sampling):
        yield "content", piece


def chat_text(
    llm: "LLM", text: str, system: str | None, think: bool, sampling: dict[str, Any], out: Any
) -> Iterator[tuple[str, str]]:
    """Answer a question, as pairs of kind and piece."""
    from finback.text.chat import ChatOptions
    from finback.text.parse import collect

    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    for piece in llm.stream_chat(messages, ChatOptions(thinking=think), out, **sampling):
        collect(out.message, piece)
        yield piece.kind, piece.text


def figures(out: "Completion") -> str:
    """Put a run's figures on one line."""
    s = out.stats
    rate = f"{s.tokens_per_s:.3g} tokens/s" if s.tokens_per_s else "one token"
    end = {"stop": "", "length": " (cut at the limit)", "abort": " (stopped)"}.get(
        out.finish_reason or "abort", ""
    )
    return (
        f"{s.prompt_tokens} + {s.tokens} tokens{end}, {rate}, "
        f"{human_bytes(s.bytes_per_token)} read per token, {human_seconds(s.compute_s)} computing, "
        f"{human_seconds(s.read_s)} reading, seed {out.seed}"
    )


def report(llm: "LLM", out: Any, as_chat: bool) -> dict[str, Any]:
    """Gather everything about a run for `--json`."""
    s = out.stats
    value: dict[str, Any] = {
        "model": llm.folder.name,
        "text": out.text,
        "finish_reason": out.finish_reason,
        "token_ids": out.token_ids,
        "seed": out.seed,
        "stats": {
            **dataclasses.asdict(s),
            "tokens_per_s": s.tokens_per_s,
            "bytes_per_token": s.bytes_per_token,
        },
    }
    if as_chat:
        value["message"] = dataclasses.asdict(out.message)
    return value


def _prompt(words: list[str]) -> str:
    """Join the arguments, and standard input where it is piped."""
    parts = [" ".join(words)] if words else []
    if not sys.stdin.isatty():
        piped = sys.stdin.read().strip("\n")
        parts += [piped] if piped else []
    if not parts:
        raise UsageError("no prompt: give one as an argument or through a pipe")
    return "\n\n".join(parts)
