"""Logits to tokens. A pick is a pure function of the logits, the seed and the position."""

import numpy as np

from finback.checkpoint.formats import Array
from finback.config import SamplingParams
from finback.errors import DamagedFile

FIRST_SORTED = 256  # ids sorted at first; eight times more where the filters keep more


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
    with np.errstate(over="ignore"):  # a tiny temperature makes the others infinitely unlikely
        shares = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    total = float(shares.sum())
    order = _likeliest(logits, shares, total, sampling)
    kept = shares[order]
    if sampling.top_k:
        total = float(kept[: sampling.top_k].sum())
        order, kept = order[: sampling.top_k], kept[: sampling.top_k]
    count = len(kept)
    if sampling.top_p < 1:
        count = int(np.searchsorted(kept.cumsum(), sampling.top_p * total)) + 1
    if sampling.min_p > 0:
        count = min(count, int((kept >= sampling.min_p * kept[0]).sum()))
    sums = kept[: max(1, count)].cumsum()
    drawn = int(np.searchsorted(sums, _uniform(seed, position) * sums[-1], side="right"))
    return int(order[min(drawn, len(sums) - 1)])


def _likeliest(
    logits: Array, shares: np.ndarray, total: float, sampling: SamplingParams
) -> np.ndarray:
    """Sort as many of the likeliest ids as the filters can keep, the lower of equals first.

    A whole vocabulary is rarely needed, and sorting it costs more than everything else here.
    """
    size = len(logits)
    has_tail = sampling.top_p == 1 and sampling.min_p == 0
    count = sampling.top_k or (size if has_tail else FIRST_SORTED)
    while count < size:
        least = np.partition(logits, size - count)[size - count]
        ids = np.flatnonzero(logits >= least)  # all of equals, so that the lower ones are there
        kept = shares[ids]
        is_past_top_p = sampling.top_p < 1 and kept.sum() > sampling.top_p * total * (1 + 1e-9)
        if sampling.top_k or is_past_top_p or kept.min() < sampling.min_p:
            return ids[np.argsort(-logits[ids], kind="stable")]
        count *= 8
    return np.argsort(-logits, kind="stable")


def _uniform(seed: int, position: int) -> float:
    """Draw from [0, 1) by counter: a number for a seed and position, whatever came before."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
