"""`config.json` and its neighbours as checked plain values."""

import json
from collections.abc import Mapping
from pathlib import Path

from finback.errors import CheckpointError, DamagedFile

MAX_JSON_BYTES = 1 << 30  # the index of Kimi K3 has 60 MB


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        DamagedFile: It is missing, unreadable or something else.
    """
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise DamagedFile(f"{path}: {size} bytes, more than any file of this kind has")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        link = " (a link to a file that is not there)" if path.is_symlink() else ""
        raise DamagedFile(f"{path}: missing{link}; is this a model folder?") from error
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path}: must hold a JSON object")
    return value


class Fields:
    """One object of a config, read key by key with its type and limits checked."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        """Wrap an object; `where` begins every error message, as `…/config.json: text_config.`."""
        self.values, self.where = values, where

    def error(self, key: str, problem: str) -> CheckpointError:
        """Make the error for one key, to be raised by the caller."""
        return CheckpointError(f"{self.where}{key} {problem}")

    def has(self, key: str) -> bool:
        """Tell whether a key is there and not null."""
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24
    ) -> int:
        """Read a whole number within limits."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"must be a whole number from {low} to {high}, not {value!r}")
        return value

    def number(
        self, key: str, default: float | None = None, *, low: float = -1e6, high: float = 1e6
    ) -> float:
        """Read a number within limits."""
        value = self.values.get(key)
        value = default if value is None else value
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not low <= value <= high
        ):
            raise self.error(key, f"must be a number from {low:g} to {high:g}, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Read true or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """Read one of a few words."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, f"must be {' or '.join(allowed)}, not {value!r}")
        return value

    def integers(self, key: str) -> list[int]:
        """Read a list of whole numbers."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(
            isinstance(n, int) and not isinstance(n, bool) for n in value
        ):
            raise self.error(key, "must be a list of whole numbers")
        return value

    def section(self, key: str) -> "Fields":
        """Step into an object inside this one."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return Fields(value, f"{self.where}{key}.")


def stop_ids(*configs: Mapping[str, object]) -> list[int]:
    """Collect `eos_token_id` of several configs: a number or a list in each."""
    ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id not in ids:
                ids.append(token_id)
    return ids
