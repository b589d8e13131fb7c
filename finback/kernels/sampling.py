"""What picking a token needs over a large vocabulary: native where it was built, else NumPy."""

from ctypes import byref, c_double

import numpy as np
import numpy.typing as npt

from finback.checkpoint.formats import Array
from finback.kernels.library import library
from finback.kernels.ops import Ids

LEAST_TEMPERATURE = 1e-30  # below, differences leave float32's range


def shares(logits: Array, temperature: float) -> tuple[Array, float]:
    """Give e^((logits − largest) / temperature) of finite logits (V,), and the sum.

    Both are the same bits on every call; the sum is of float64.
    """
    largest, loaded = float(logits.max()), library()
    temperature = max(temperature, LEAST_TEMPERATURE)
    logits = np.ascontiguousarray(logits, np.float32)
    if loaded is None:
        with np.errstate(under="ignore", over="ignore"):
            out: Array = np.exp((logits - np.float32(largest)) / np.float32(temperature))
        return out, float(out.sum(dtype=np.float64))
    out, total = np.empty_like(logits), c_double()
    loaded.finback_shares(
        logits.ctypes.data, len(logits), largest, temperature, out.ctypes.data, byref(total)
    )
    return out, total.value


def likeliest(values: Array, count: int) -> Ids:
    """Give the numbers of the `count` largest of finite values (V,), best first.

    Of equals the lower number comes first.
    """
    count, loaded = min(count, len(values)), library()
    if loaded is None:
        return _sorted(values, count)
    values = np.ascontiguousarray(values, np.float32)
    ids = np.empty(count, np.int64)
    loaded.finback_likeliest(values.ctypes.data, len(values), count, ids.ctypes.data)
    return ids


def _sorted(values: Array, count: int) -> Ids:
    """Sort no more than is asked for: a whole vocabulary costs more than everything else here."""
    ids: npt.NDArray[np.int64] = np.arange(len(values))
    if 0 < count < len(values):
        least = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= least)  # all of equals, so that the lower ones are there
    return ids[np.argsort(-values[ids], kind="stable")][:count]
