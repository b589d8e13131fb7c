"""Several prompts of one command, answered together."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finback.cli import output
from finback.cli.texts import read_lines
from finback.errors import UsageError
from finback.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from finback.llm import LLM, Completion, Request


def read_prompts(file: str) -> list[str]:
    """Read one prompt a line; empty lines are passed over.

    Raises:
        UsageError: The file cannot be read, or holds no prompt.
    """
    prompts = [line for line in read_lines(file) if line.strip()]
    if not prompts:
        raise UsageError(f"{file}: holds no prompts, which are lines of text")
    return prompts


def answer_all(
    llm: "LLM",
    prompts: Sequence[str],
    requests: "Sequence[Request]",
    report: Any,
    as_json: bool,
    quiet: bool,
) -> bool:
    """Answer prompts together and print the answers in their order; false if Ctrl-C ended it.

    Args:
        llm: The model.
        prompts: As they were given, for headings.
        requests: One for each.
        report: Turns a finished answer into JSON.
        as_json: One object a line, as answers end, instead of text.
        quiet: Without headings and figures.
    """
    done: dict[int, Completion] = {}
    start, printed = llm.spans.snapshot(), 0
    is_whole = True
    try:
        for place, out in llm.batch(requests):
            done[place] = out
            if as_json:
                output.json_line({"index": place, **report(out)})
            while not as_json and printed in done:
                _print(printed, prompts[printed], done[printed], quiet)
                printed += 1
            if not quiet:
                _say(f"{len(done)} of {len(prompts)} answered")
    except KeyboardInterrupt:
        is_whole = False
    for place in sorted(done) if not as_json else []:
        if place >= printed:  # answers that waited for an earlier one
            _print(place, prompts[place], done[place], quiet)
    if not quiet:
        spent = llm.spans.since(start)
        tokens = sum(len(out.token_ids) for out in done.values())
        inputs = sum(out.stats.prompt_tokens for out in done.values())
        steps = max(1, spent.counts.get("steps", 0))
        rate = tokens / spent.wall_s if spent.wall_s else 0.0
        written = spent.counts.get("bytes_spilled", 0)
        spilled = f"{human_bytes(written)} of states written to disk, " if written else ""
        output.talk(
            output.dim(
                f"{len(done)} answers: {inputs} tokens in, {tokens} out, {rate:.3g} tokens/s; "
                f"{spent.counts.get('rows', 0) / steps:.1f} rows in each of {steps} passes, "
                f"{human_bytes(spent.bytes_read / max(1, tokens))} read per token, {spilled}"
                f"{human_seconds(spent.compute_s)} computing, {human_seconds(spent.read_s)} reading"
            )
        )
    return is_whole


def _print(place: int, prompt: str, out: "Completion", quiet: bool) -> None:
    if not quiet:
        shown = output.printable(prompt)
        shown = shown if len(shown) <= 60 else shown[:59] + "…"
        output.data(f"{'' if place == 0 else chr(10)}==> {place + 1}: {shown} <==")
    elif place:
        output.data("")
    if out.error is not None:
        output.talk(f"finback: prompt {place + 1}: {output.printable(str(out.error))}")
    output.data(out.text)


def _say(text: str) -> None:
    """Show progress where somebody watches."""
    if sys.stderr.isatty():
        output.talk(f"\r\x1b[K{text}", end="")


def requests_of(
    prompts: Sequence[str],
    system: str | None,
    as_chat: bool,
    think: bool,
    sampling: Mapping[str, Any],
) -> "list[Request]":
    """Ask each prompt in its own conversation, or let each be continued."""
    from finback.llm import Request
    from finback.text.chat import ChatOptions

    if not as_chat:
        return [Request(prompt=prompt, sampling=sampling) for prompt in prompts]
    opening = [{"role": "system", "content": system}] if system else []
    return [
        Request(
            messages=[*opening, {"role": "user", "content": prompt}],
            options=ChatOptions(thinking=think),
            sampling=sampling,
        )
        for prompt in prompts
    ]
