"""`config.json` and `generation_config.json` as checked plain values."""

import reprlib
from collections.abc import Mapping
from typing import Any

from finback.config import SamplingParams
from finback.errors import CheckpointError, RequestError

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")


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
            raise self.error(
                key, f"must be a whole number from {low} to {high}, not {reprlib.repr(value)}"
            )
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
            raise self.error(
                key, f"must be a number from {low:g} to {high:g}, not {reprlib.repr(value)}"
            )
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Read true or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {reprlib.repr(value)}")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """Read one of a few words."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, f"must be {' or '.join(allowed)}, not {reprlib.repr(value)}")
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


def read_stop_ids(configs: Mapping[str, Mapping[str, object]], vocab_size: int) -> list[int]:
    """Collect `eos_token_id`, a number or a list, from several configs by name.

    Raises:
        CheckpointError: A value is of another type or outside the vocabulary.
    """
    ids: list[int] = []
    for name, config in configs.items():
        value = config.get("eos_token_id")
        given: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in given:
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= int(token_id) < vocab_size:
                raise CheckpointError(
                    f"{name}: eos_token_id must be ids below {vocab_size}, "
                    f"not {reprlib.repr(value)}"
                )
            if token_id not in ids:
                ids.append(token_id)
    return ids


def read_sampling(generation: Mapping[str, Any]) -> SamplingParams:
    """Take a model's recommended sampling, as far as its `generation_config.json` gives any.

    Raises:
        CheckpointError: A value is impossible.
    """
    given = {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise CheckpointError(f"generation_config.json: {error}") from error
