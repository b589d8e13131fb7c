"""`finback list`: the models on this machine."""

import dataclasses
from typing import Annotated

import typer

from finback.cli import output
from finback.units import human_bytes


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models here: the embedded one, $FINBACK_MODELS, the Hugging Face cache."""
    from finback.hub import local

    models = local.list_models()
    if as_json:
        output.json_data([{**dataclasses.asdict(m), "folder": str(m.folder)} for m in models])
        return
    rows = [
        tuple(
            map(output.printable, (m.name, m.model_type, human_bytes(m.num_bytes), str(m.folder)))
        )
        for m in models
    ]
    output.data(output.table(("name", "family", "size", "folder"), rows, left=(0, 1, 3)))
