"""Logits to tokens. A pick is a pure function of the logits, the seed and the position."""

import numpy as np

from finback.checkpoint.formats import Array
from finback.config import SamplingParams
from finback.errors import DamagedFile
from finback.kernels.ops import Ids
from finback.kernels.sampling import likeliest, shares

FIRST_SORTED = 64  # ids sorted at first; eight times more where the filters keep more


def pick(logits: Array, sampling: SamplingParams, seed: int, position: int) -> int:
    """Choose the token at `position` of a sequence from logits (V,).

    Filters apply in this order: temperature, top-k, top-p, min-p. Ties go to the lower id.

    Raises:
        DamagedFile: The logits hold something that is no number.
    """
    if not np.isfinite(logits).all():
        raise DamagedFile(
            f"the model gave logits that are no numbers at position {position}; "
            "its weights are damaged, download the model again"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    odds, total = shares(logits, sampling.temperature)
    order = _candidates(logits, odds, total, sampling)
    kept = odds[order].astype(np.float64)
    if sampling.top_k:
        total = float(kept.sum())
    count = len(kept)
    if sampling.top_p < 1:
        count = int(np.searchsorted(kept.cumsum(), sampling.top_p * total)) + 1
    if sampling.min_p > 0:
        count = min(count, int((kept >= sampling.min_p * kept[0]).sum()))
    sums = kept[: max(1, count)].cumsum()
    drawn = int(np.searchsorted(sums, _uniform(seed, position) * sums[-1], side="right"))
    return int(order[min(drawn, len(sums) - 1)])


def _candidates(logits: Array, odds: Array, total: float, sampling: SamplingParams) -> Ids:
    """Sort as many of the likeliest ids as the filters can keep, the lower of equals first.

    Without a filter every id is kept, and in no need of an order.
    """
    size = len(logits)
    if sampling.top_k:
        return likeliest(logits, sampling.top_k)
    if sampling.top_p == 1 and sampling.min_p == 0:
        return np.arange(size)
    count = FIRST_SORTED
    while True:
        ids = likeliest(logits, count)
        kept = odds[ids]
        is_past_top_p = kept.sum(dtype=np.float64) > sampling.top_p * total * (1 + 1e-9)
        if count >= size or is_past_top_p or kept[-1] < sampling.min_p * kept[0]:
            return ids
        count *= 8


def _uniform(seed: int, position: int) -> float:
    """Draw from [0, 1) by counter: a number for a seed and position, whatever came before."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
