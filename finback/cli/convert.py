"""`finback convert`: a smaller form of what every token uses."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from finback.cli import output
from finback.units import human_bytes


def convert(
    model: Annotated[
        str, typer.Argument(help="A model folder or a name from `finback list`.", metavar="DIR")
    ],
    spine: Annotated[
        Literal["int8", "int4"],
        typer.Option(help="Half of the published bytes (int8), or a little over a quarter (int4)."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write it.", show_default="finback-spine-FORM inside DIR"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a smaller form of what every token uses, so that more of it fits into memory.

    It is not exact; use it by name, with --spine. Experts stay as published. Interrupted, it goes
    on where it stopped when it is called again.
    """
    from finback.checkpoint.index import open_checkpoint
    from finback.hub.local import find_model
    from finback.models.convert import convert_spine

    folder = find_model(model)
    with output.Progress("converting") as progress:
        done = convert_spine(open_checkpoint(folder), spine, out, progress.bytes)
    if as_json:
        output.json_data({**dataclasses.asdict(done), "folder": str(done.folder)})
        return
    use = spine if out is None else output.printable(str(out))
    output.data(
        f"{output.printable(str(done.folder))}: {done.num_tensors} matrices, "
        f"{human_bytes(done.before_bytes)} to {human_bytes(done.after_bytes)}; "
        f"use them with --spine {use}"
    )
