"""Quantities: bytes in powers of ten (as disks are sold), seconds, counts; reading sizes."""

import re

from finback.errors import UsageError

BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BYTE_UNITS |= {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
BYTE_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(text: str, whole: int | None = None) -> int:
    """Read `4GiB`, `4 GB`, `512M` (powers of two), `1000000`, or `50%` of `whole`.

    Raises:
        UsageError: It is none of these.
    """
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]{0,3}|%)", text.strip())
    if found is not None:
        number, unit = float(found[1]), found[2].lower()
        if unit == "%" and whole is not None and 0 < number <= 100:
            return int(whole * number / 100)
        if unit in BYTE_UNITS and number > 0:
            return int(number * BYTE_UNITS[unit])
    raise UsageError(f"{text!r} is no size; write it as 4GiB, 8 GB or 50%")


def human_bytes(count: float) -> str:
    """Print bytes with three digits, as `17.5 MB`."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{int(value)} B" if unit == "B" else f"{value:.3g} {unit}"


def human_count(count: float) -> str:
    """Print a large count with three digits, as `2.78 T`."""
    value, unit = float(count), ""
    for larger in ("k", "M", "G", "T"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}".strip()


def human_seconds(seconds: float) -> str:
    """Print a duration as `1.25 s`, `3.1 min` or `2.4 h`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
