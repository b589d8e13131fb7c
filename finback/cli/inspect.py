"""`finback inspect`: what is in a checkpoint, without loading it."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finback.cli import output
from finback.units import human_bytes, human_count

if TYPE_CHECKING:
    from finback.planner.footprint import Footprint

MAX_SHOWN = 20


def inspect(
    model: Annotated[
        str, typer.Argument(help="A model folder or a name from `finback list`.", metavar="DIR")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print exact numbers as JSON.")] = False,
) -> None:
    """Show what is in a checkpoint: tensors by role, bytes per token, what is missing or odd.

    Works on config.json and the index alone, before the shards are downloaded. Exits with 3 if
    tensors are missing or contradict the config.
    """
    from finback.checkpoint.index import open_checkpoint
    from finback.errors import CheckpointError
    from finback.hub.local import STORYTELLER, find_model
    from finback.planner.footprint import measure_footprint

    folder = find_model(model) if model else STORYTELLER
    footprint = measure_footprint(open_checkpoint(folder))
    if as_json:
        output.json_data(_as_json(footprint))
    else:
        output.data(f"model       {output.printable(str(folder))}\n{_as_text(footprint)}")
    if footprint.missing or footprint.wrong:
        output.talk(f"finback: {folder}: tensors are missing or contradict config.json, see above")
        raise typer.Exit(CheckpointError.exit_code)


def _as_json(f: "Footprint") -> dict[str, Any]:
    return {
        **dataclasses.asdict(f),
        "expert_bytes": f.expert_bytes,
        "spine_bytes": f.spine_bytes,
        "is_complete": f.is_complete,
    }


def _as_text(f: "Footprint") -> str:
    shape = f.shape
    routed = (
        f"{len(shape.routed_layers)} routed with {shape.num_experts} experts, {shape.top_k} used"
    )
    lines = [
        f"family      {f.model_type}, {human_count(f.num_parameters)} parameters",
        f"layers      {shape.num_layers}, {routed}; width {shape.width}",
        f"vocabulary  {shape.vocab_size}, context {shape.max_positions} tokens",
        "",
        _roles(f),
        "",
        f"per token   {_exact(f.expert_bytes_per_token)} of experts, when none is in memory",
        f"sequence    {_exact(shape.state_bytes)} of state, "
        f"and {_exact(shape.state_bytes_per_token)} for each of its tokens",
    ]
    if f.skipped_tensors:
        size = "" if f.skipped_bytes is None else f", {_exact(f.skipped_bytes)}"
        lines.append(f"not used    {f.skipped_tensors} tensors of other parts{size}")
    if f.missing_files:
        lines.append(
            f"not here    {len(f.missing_files)} files, so sizes follow config and index: "
            f"{_some(f.missing_files)}"
        )
    for title, names in (("missing", f.missing), ("wrong", f.wrong), ("odd", f.odd)):
        if names:
            lines.append(f"{title:<11} {len(names)}: {_some(names)}")
    if f.is_complete:
        lines.append("complete    every tensor is there and fits the config")
    return "\n".join(lines)


def _roles(f: "Footprint") -> str:
    rows = [
        (role, f.formats[role], str(f.tensors_by_role[role]), f"{size:,}", human_bytes(size))
        for role, size in sorted(f.bytes_by_role.items(), key=lambda pair: -pair[1])
    ]
    total = f.expert_bytes + f.spine_bytes
    spine_count = sum(f.tensors_by_role.values()) - f.tensors_by_role.get("expert", 0)
    rows.append(
        (
            "spine (all but experts)",
            "",
            str(spine_count),
            f"{f.spine_bytes:,}",
            human_bytes(f.spine_bytes),
        )
    )
    rows.append(("all", "", str(sum(f.tensors_by_role.values())), f"{total:,}", human_bytes(total)))
    return output.table(("role", "format", "tensors", "bytes", ""), rows)


def _exact(size: int) -> str:
    return f"{size:,} B ({human_bytes(size)})" if size >= 1000 else f"{size} B"


def _some(names: list[str]) -> str:
    more = f" … and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return output.printable(", ".join(names[:MAX_SHOWN]) + more)
