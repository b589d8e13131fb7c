"""Runs that are kept while they go on: `finback run --checkpoint` and `--resume`."""

import re
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from finback.cli import output
from finback.errors import UsageError
from finback.hub.runs import RunRecord, open_run
from finback.hub.sessions import states_folder

if TYPE_CHECKING:
    from finback.llm import LLM

Every = tuple[int | None, float | None]  # tokens, seconds


def parse_every(text: str) -> Every:
    """Read how often a run is kept: `256` tokens, `10min`, `30s`.

    Raises:
        UsageError: It is none of these.
    """
    found = re.fullmatch(r"([0-9]{1,9})\s*(s|min|h)?", text.strip())
    if found is None or int(found[1]) < 1:
        raise UsageError(f"--checkpoint {text!r}: write 256 (tokens), 10min or 30s")
    number, unit = int(found[1]), found[2]
    return (number, None) if unit is None else (None, number * {"s": 1, "min": 60, "h": 3600}[unit])


def kept_options(every: Every | None) -> dict[str, Any]:
    """Give the engine's options for a run that is kept."""
    if every is None:
        return {}
    return {"states": str(states_folder()), "keep_every": every[0], "keep_every_s": every[1]}


def resume_run(
    name: str, checkpoint: str | None, memory: str, threads: int | None, as_json: bool, quiet: bool
) -> None:
    """Go on with a run: the text is the one that it would have been.

    Raises:
        UsageError: There is no such run.
    """
    record = open_run(name)
    every = parse_every(checkpoint or "256")
    from finback.llm import LLM

    with LLM(
        record.model,
        memory=memory,
        threads=threads,
        max_sequences=1,
        **record.options,
        **kept_options(every),
    ) as llm:
        if not quiet and not as_json:
            output.talk(output.dim(llm.description))
        if not keep_running(llm, record, every, as_json, quiet):
            raise typer.Exit(130)


def keep_running(llm: "LLM", record: RunRecord, every: Every, as_json: bool, quiet: bool) -> bool:
    """Write an answer, keeping it every so often; false if Ctrl-C ended it, and then it is kept."""
    from finback.cli.run import Answer, messages_of, report

    if record.sampling.get("seed") is None:
        record.sampling["seed"] = secrets.randbits(32)
    prompt = messages_of(record.text, record.system) if record.as_chat else record.text
    written = list(record.token_ids)
    answer = Answer(llm, prompt, record.think, record.sampling, written=written)
    snapshots = llm.engine.snapshots
    made_by = "" if snapshots is None else snapshots.fingerprint
    if record.fingerprint and record.fingerprint != made_by:
        raise UsageError(
            f"run {record.id} was with another model, or on another instruction set; "
            "its text would not be the same"
        )
    record.fingerprint = made_by
    record.save()
    last = [len(written), time.monotonic()]

    def keep() -> None:
        """Write the record when it is due; what it is ahead of the state is computed again."""
        if answer.out.finish_reason is not None:  # nothing follows a stop token
            return
        tokens, seconds = every
        count = len(answer.out.token_ids)
        is_due = tokens is not None and count - last[0] >= tokens
        is_late = seconds is not None and time.monotonic() - last[1] >= seconds
        if is_due or is_late:
            _save(record, answer.out.token_ids)
            last[:] = [count, time.monotonic()]

    if not quiet and not as_json:
        output.talk(output.dim(f"kept as run {record.id}; Ctrl-C stops and keeps it"))
        if not record.as_chat:
            output.echo(record.text)
    with _gentle_interrupt(llm):
        is_whole = answer.run(show=not as_json, quiet=quiet, on_piece=keep)
    if is_whole:
        record.delete()
    else:
        _save(record, answer.out.token_ids)
    if as_json:
        value = report(llm, answer.out, record.as_chat)
        output.json_data(value if is_whole else value | {"resume": record.id})
    else:
        answer.end(quiet)
    if not is_whole:
        output.talk(f"finback: stopped; go on with: finback run --resume {record.id}")
    return is_whole


def _save(record: RunRecord, token_ids: list[int]) -> None:
    """Write the record; where that fails the run goes on."""
    record.token_ids = list(token_ids)
    try:
        record.save()
    except OSError as error:
        output.talk(f"finback: {record.path}: cannot be kept ({error.strerror}); going on")


@contextmanager
def _gentle_interrupt(llm: "LLM") -> Iterator[None]:
    """Let the first Ctrl-C end the answer after the step that is computed, the second at once."""
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        llm.stop()
        output.talk("\nstopping after this pass; Ctrl-C again leaves at once")

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
