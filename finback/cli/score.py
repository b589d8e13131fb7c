"""`finback score`: how likely a model finds texts, many in one pass over the layers."""

import json
from math import exp
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finback.cli import output
from finback.cli.run import (
    ActivationsOption,
    ContextOption,
    MemoryOption,
    ModelOption,
    SpineOption,
    Threads,
)
from finback.cli.texts import logprob_json, read_lines
from finback.config import DEFAULT_ACTIVATIONS, MAX_LOGPROBS
from finback.errors import UsageError
from finback.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from finback.llm import LLM, Score

ROWS = 16_384  # in one pass, where memory allows: all of them share every expert that is read


def score(
    file: Annotated[
        str,
        typer.Argument(
            help="JSON lines: a text, or an object with `text`, or one with `prompt` and "
            "`continuation`; - for standard input.",
            metavar="FILE.jsonl",
        ),
    ],
    model: ModelOption = None,
    memory: MemoryOption = "auto",
    spine: SpineOption = "published",
    context: ContextOption = None,
    rows: Annotated[
        int,
        typer.Option(help="Tokens in one pass over the layers, as far as memory allows.", min=1),
    ] = ROWS,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Add each token with its own figures.")
    ] = False,
    top: Annotated[
        int, typer.Option(help="With --tokens: so many likeliest tokens.", min=0, max=MAX_LOGPROBS)
    ] = 0,
    threads: Threads = None,
    activations: ActivationsOption = DEFAULT_ACTIVATIONS,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the scores alone.")] = False,
) -> None:
    """Rate texts: one JSON object a line, as they are done; `index` is the line, from 0.

    `logprob` is the sum over the rated tokens in nats: those of the continuation, or of a text
    from its second token on.
    """
    from finback.llm import LLM

    prompts, texts = _read(file)
    with LLM(
        model,
        memory=memory,
        spine=spine,
        context=context,
        max_rows=rows,
        max_sequences=1,
        threads=threads,
        activations=activations,
    ) as llm:
        if not quiet:
            output.talk(output.dim(llm.description))
        start, rated, total = llm.spans.snapshot(), 0, 0.0
        for index, one in llm.score_each(prompts, texts, top if tokens else 0):
            rated += len(one.tokens)
            total += one.logprob
            output.json_line(_as_json(llm, index, one, tokens))
        spent = llm.spans.since(start)
        if quiet or not rated:
            return
        steps = spent.counts.get("steps", 0)
        output.talk(
            output.dim(
                f"{len(texts)} texts, {rated} tokens rated in {human_seconds(spent.wall_s)} and "
                f"{steps} passes, {rated / spent.wall_s:.3g} tokens/s, "
                f"{human_bytes(spent.bytes_read / rated)} read per token; "
                f"{-total / rated:.4f} nats a token, perplexity {exp(-total / rated):.4g}"
            )
        )


def _as_json(llm: "LLM", index: int, one: "Score", with_tokens: bool) -> dict[str, Any]:
    value: dict[str, Any] = {
        "index": index,
        "logprob": one.logprob,
        "num_tokens": len(one.tokens),
        "is_greedy": one.is_greedy,
    }
    if with_tokens:
        value["tokens"] = [logprob_json(llm, token) for token in one.tokens]
    return value


def _read(file: str) -> tuple[list[str | None], list[str]]:
    """Read the texts; None stands for a prompt that is not there."""
    prompts: list[str | None] = []
    texts: list[str] = []
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            raise UsageError(f"{file}, line {number}: is empty; give one JSON value a line")
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{file}, line {number}: is no JSON ({error})") from error
        except RecursionError as error:
            raise UsageError(f"{file}, line {number}: is nested too deeply") from error
        value = {"text": value} if isinstance(value, str) else value
        names = sorted(value) if isinstance(value, dict) else []
        if names not in (["text"], ["continuation", "prompt"]) or not all(
            isinstance(text, str) for text in value.values()
        ):
            raise UsageError(
                f"{file}, line {number}: give a text, an object with a text under `text`, or one "
                "with texts under `prompt` and `continuation`"
            )
        prompts.append(value.get("prompt"))
        texts.append(value["text"] if "text" in value else value["continuation"])
    if not texts:
        raise UsageError(f"{file}: holds no texts")
    return prompts, texts
