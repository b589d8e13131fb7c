"""Printing quantities: bytes in powers of ten (as disks are sold), seconds, counts."""


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
