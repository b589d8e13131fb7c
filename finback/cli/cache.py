"""`finback cache`: states of prefixes that are kept on disk."""

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from finback.cli import output
from finback.errors import UsageError
from finback.units import human_bytes, parse_bytes

app = typer.Typer(
    no_args_is_help=True, help="States that are kept, so that nothing is computed twice."
)
HOUR, DAY = 3600, 86_400


@app.command("list")
def list_states(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the states that are kept, the last used first."""
    from finback.engine.snapshots import list_snapshots
    from finback.hub.sessions import states_folder

    folder = states_folder()
    found = sorted(list_snapshots(folder), key=lambda one: -one.used_at)
    if as_json:
        output.json_data(
            {
                "folder": str(folder),
                "states": [
                    {
                        "id": one.key,
                        "model": one.model,
                        "tokens": one.position,
                        "bytes": one.num_bytes,
                        "used_at": one.used_at,
                    }
                    for one in found
                ],
            }
        )
        return
    if not found:
        output.data(f"no states in {folder}")
        return
    rows = [
        (
            one.key[:12],
            str(one.position),
            human_bytes(one.num_bytes),
            f"{(time.time() - one.used_at) / DAY:.1f} days",
            one.model[:12],
        )
        for one in found
    ]
    total = human_bytes(sum(one.num_bytes for one in found))
    table = output.table(("id", "tokens", "size", "unused for", "model"), rows, left=(0, 4))
    output.data(f"{table}\n\n{len(found)} states, {total}, in {folder}")


@app.command("rm")
def remove(
    states: Annotated[list[str], typer.Argument(help="Ids from `finback cache list`, or `all`.")],
) -> None:
    """Delete states."""
    from finback.engine.snapshots import list_snapshots
    from finback.hub.sessions import states_folder

    found = list_snapshots(states_folder())
    for name in states:
        chosen = found if name == "all" else [one for one in found if one.key.startswith(name)]
        if name != "all" and (not name or len(chosen) != 1):
            what = "no state" if not chosen else f"{len(chosen)} states"
            raise UsageError(f"{name!r} names {what}; see `finback cache list`")
        for one in chosen:
            one.path.unlink(missing_ok=True)
    output.talk("deleted")


@app.command("prune")
def prune(
    memory: Annotated[
        str, typer.Option("--to", help="Keep at most so much: 10GiB; 0 keeps nothing.")
    ] = "8GiB",
    days: Annotated[
        float | None, typer.Option(help="Delete what was not used for so many days.", min=0.0)
    ] = None,
) -> None:
    """Delete the states that are worth least, and files that were set aside."""
    from finback.engine.snapshots import ASIDE, evicted, list_snapshots
    from finback.hub.sessions import UNNAMED, states_folder

    folder = states_folder()
    found = list_snapshots(folder)
    most = 0 if memory.strip() == "0" else parse_bytes(memory)
    gone = {one.path: one.num_bytes for one in evicted(found, most)}
    if days is not None:
        limit = time.time() - days * DAY
        gone |= {one.path: one.num_bytes for one in found if one.used_at < limit}
    hex40 = "[0-9a-f]" * 40
    old = [p for p in folder.glob(f"{hex40}.state.*.part") if _age(p) > HOUR]
    for path in [*folder.glob(f"{hex40}{ASIDE}"), *old]:
        with contextlib.suppress(FileNotFoundError):
            gone[path] = path.stat().st_size
    for left in folder.glob(f"{UNNAMED}*"):  # of conversations that were killed
        if _age(left) > 7 * DAY:
            gone |= {path: path.stat().st_size for path in left.iterdir()}
    for path in gone:
        path.unlink(missing_ok=True)
    for left in folder.glob(f"{UNNAMED}*"):
        with contextlib.suppress(OSError):  # in use
            left.rmdir()
    output.talk(f"deleted {len(gone)} files, {human_bytes(sum(gone.values()))}")


def _age(path: Path) -> float:
    """Give the seconds since a file or folder was changed; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
