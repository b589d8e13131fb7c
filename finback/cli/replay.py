"""`finback replay`: what a cache of some memory would have made of recorded routes."""

from pathlib import Path
from typing import Annotated

import typer

from finback.cli import output
from finback.errors import UsageError
from finback.units import human_bytes, parse_bytes

BAR = 40


def replay(
    trace: Annotated[Path, typer.Argument(help="Written by `finback run --trace`.")],
    memory: Annotated[
        list[str] | None,
        typer.Option(
            help="Memory for experts: 4GiB, or 10% of all experts; repeatable.",
            show_default="5%, 10%, 25%, 50%",
        ),
    ] = None,
    heat: Annotated[
        Path | None,
        typer.Option(help="Begin with what a run with --heat has kept; adds the policy pinned."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how many experts each policy would have found in memory, beside the best possible.

    Works on a recorded trace alone, without the model. "belady" gives up what is wanted last,
    which nobody can know in advance: the bound.
    """
    from finback.storage.trace import load_trace
    from finback.storage.trace import replay as run

    recorded = load_trace(trace)
    if len(recorded) == 0:
        raise UsageError(f"{trace}: the trace is empty")
    whole = recorded.num_layers * recorded.num_experts * recorded.expert_bytes
    rows = []
    for text in memory or ("5%", "10%", "25%", "50%"):
        size = parse_bytes(text, whole)
        slots = size // recorded.expert_bytes
        if slots < 1:
            raise UsageError(f"--memory {text}: less than one expert of {recorded.expert_bytes} B")
        rows.append(
            (text, size, run(recorded, min(slots, whole // recorded.expert_bytes), heat=heat))
        )
    if as_json:
        output.json_data(
            {
                "steps": recorded.num_steps,
                "wants": len(recorded.experts),
                "expert_bytes": recorded.expert_bytes,
                "rows": [
                    {"memory": text, "bytes": size, "slots": r.slots, "hits": r.hits}
                    for text, size, r in rows
                ],
            }
        )
        return
    names = list(rows[0][2].hits)
    table = output.table(
        ("memory", "", "slots", *names),
        [
            (text, human_bytes(size), str(r.slots), *(f"{r.hits[n]:.1%}" for n in names))
            for text, size, r in rows
        ],
        left=(0, 1),
    )
    bars = "\n".join(
        f"{text:>8} {name:<9} {_bar(r.hits[name])}" for text, _, r in rows for name in names
    )
    output.data(
        f"{recorded.num_steps} steps, {len(recorded.experts)} experts wanted; "
        f"share found in memory:\n\n{table}\n\n{bars}"
    )


def _bar(share: float) -> str:
    filled = round(BAR * share)
    return "█" * filled + "·" * (BAR - filled)
