"""Runs that can be gone on with: what was asked and what of the answer is there."""

import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finback.checkpoint.files import exists, read_json, write_json
from finback.config import SamplingParams
from finback.errors import CheckpointError, RequestError, UsageError
from finback.hub.sessions import NAME, sessions_folder

FORMAT = 1
OPTIONS = {"spine", "activations", "context"}  # of the engine, that a run is kept with


@dataclass(slots=True)
class RunRecord:
    """One run on its way. Kept until it ends."""

    model: str | None
    text: str
    system: str | None
    as_chat: bool
    think: bool
    sampling: dict[str, Any]  # with the seed
    options: dict[str, Any]  # of the engine, as far as they change a result
    token_ids: list[int] = field(default_factory=list)
    fingerprint: str = ""  # of the model and everything that changes its results
    id: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def path(self) -> Path:
        """Name the file that holds it."""
        return _folder() / f"{self.id}.json"

    def save(self) -> None:
        """Write it, whole or not at all.

        Raises:
            OSError: The folder cannot be written, or the disk is full.
        """
        write_json(self.path, {"format": FORMAT, **asdict(self)})

    def delete(self) -> None:
        """Forget the run, which has ended."""
        self.path.unlink(missing_ok=True)


def open_run(name: str) -> RunRecord:
    """Read a run that was interrupted.

    Raises:
        UsageError: There is none of that name; those there are are named.
        CheckpointError: Its file is damaged, or of another version.
    """
    path = _folder() / f"{name}.json"
    if not NAME.fullmatch(name) or not exists(path):
        there = ", ".join(sorted(p.stem for p in _folder().glob("*.json"))) or "none"
        raise UsageError(f"no run {name!r} to go on with; there are: {there}")
    value = read_json(path)
    kinds = {
        "model": str | None,
        "text": str,
        "system": str | None,
        "as_chat": bool,
        "think": bool,
        "sampling": dict,
        "options": dict,
        "token_ids": list,
        "fingerprint": str,
    }
    if value.get("format") != FORMAT or not all(
        isinstance(value.get(key), kind) for key, kind in kinds.items()
    ):
        raise CheckpointError(f"{path}: is no run of this version of finback, or damaged")
    fields: dict[str, Any] = {key: value[key] for key in kinds}
    bias = fields["sampling"].get("logit_bias")
    if isinstance(bias, dict):  # JSON has no whole numbers as keys
        try:
            fields["sampling"]["logit_bias"] = {int(token): bias[token] for token in bias}
        except ValueError as error:
            raise CheckpointError(f"{path}: logit_bias is damaged") from error
    if not set(fields["options"]) <= OPTIONS:
        raise CheckpointError(f"{path}: has options that do not belong to a run that is kept")
    try:
        SamplingParams(**fields["sampling"])
        fields["text"].encode()
    except (TypeError, RequestError, UnicodeEncodeError) as error:
        raise CheckpointError(f"{path}: what was asked for cannot be ({error})") from error
    return RunRecord(**fields, id=name)


def _folder() -> Path:
    return sessions_folder().parent / f"{sessions_folder().name}-runs"
