"""`finback synth`: a checkpoint of random weights, to try a machine without a download."""

import json
from pathlib import Path
from typing import Annotated

import typer

from finback.cli import output
from finback.errors import UsageError
from finback.units import human_bytes


def synth(
    folder: Annotated[Path, typer.Argument(help="Where to write it.", metavar="DIR")],
    like: Annotated[
        str, typer.Option(help="A known model (kimi-k3), a config.json, or a folder with one.")
    ] = "kimi-k3",
    layers: Annotated[int | None, typer.Option(help="Keep the first layers.", min=1)] = None,
    hidden: Annotated[
        int | None,
        typer.Option(help="Width; heads and dense layers shrink in proportion.", min=32),
    ] = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts a layer.", min=1)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other key of the config, as KEY=VALUE; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Other seeds give other weights.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a checkpoint of random weights in the published layout, for measurements.

    Interrupted, it goes on where it stopped when it is called again.
    """
    from finback.planner.synth import cut_down, find_config, synthesise

    config = cut_down(find_config(like), layers, hidden, experts, dict(map(_pair, set_ or [])))
    with output.Progress("writing") as progress:
        size = synthesise(folder, config, seed, progress.bytes)
    if as_json:
        output.json_data({"folder": str(folder), "bytes": size})
    else:
        output.data(f"{output.printable(str(folder))}: {human_bytes(size)} of random weights")


def _pair(text: str) -> tuple[str, object]:
    """Read KEY=VALUE, the value as JSON where it is some."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
