"""Conversations and states kept on this machine: where they lie, and the file of a conversation."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path, user_data_path

from finback.checkpoint.files import exists, read_json, write_json
from finback.errors import CheckpointError, UsageError

STATES_VARIABLE, SESSIONS_VARIABLE = "FINBACK_STATES", "FINBACK_SESSIONS"
UNNAMED = "unnamed-"  # folders of states that are gone when their conversation ends
FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def states_folder() -> Path:
    """Name the folder for states: FINBACK_STATES, or a place for caches."""
    chosen = os.environ.get(STATES_VARIABLE)
    return Path(chosen) if chosen else user_cache_path("finback") / "states"


def sessions_folder() -> Path:
    """Name the folder for conversations: FINBACK_SESSIONS, or a place for application data."""
    chosen = os.environ.get(SESSIONS_VARIABLE)
    return Path(chosen) if chosen else user_data_path("finback") / "sessions"


@dataclass(slots=True)
class Session:
    """One conversation with a name: its messages, and the tokens computed for them so far."""

    name: str
    model: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # of prompt and answer after the last message

    def __post_init__(self) -> None:
        """Check the name.

        Raises:
            UsageError: It cannot be one of a file.
        """
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"a session's name has letters, digits, dots, dashes, at most 64, not {self.name!r}"
            )

    @property
    def path(self) -> Path:
        """Name the file that holds it."""
        return sessions_folder() / f"{self.name}.json"

    def save(self) -> None:
        """Write the conversation, whole or not at all.

        Raises:
            OSError: The folder cannot be written, or the disk is full.
        """
        value = {
            "format": FORMAT,
            "model": self.model,
            "messages": self.messages,
            "ids": self.ids,
        }
        write_json(self.path, value)


def open_session(name: str) -> Session:
    """Read a conversation; a new one if there is none of that name.

    Raises:
        UsageError: The name cannot be one.
        CheckpointError: The file is damaged, or of another version.
    """
    session = Session(name)
    if not exists(session.path):
        return session
    value = read_json(session.path)
    messages, ids, model = value.get("messages"), value.get("ids"), value.get("model")
    is_sound = (
        value.get("format") == FORMAT
        and isinstance(model, str)
        and isinstance(messages, list)
        and all(_is_message(message) for message in messages)
        and isinstance(ids, list)
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in ids)
    )
    if not is_sound:
        raise CheckpointError(
            f"{session.path}: is no session of this version of finback; choose another name, or "
            "move the file away"
        )
    assert isinstance(messages, list)
    assert isinstance(ids, list)
    return Session(name, str(model), messages, ids)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("role", "content")
    )


def list_sessions() -> list[str]:
    """Name the conversations that are kept."""
    names = (path.stem for path in sessions_folder().glob("*.json"))
    return sorted(name for name in names if NAME.fullmatch(name))
