"""Logits to tokens. A pick is a pure function of the logits, the seed and the position."""

import numpy as np

from finback.checkpoint.formats import Array
from finback.config import SamplingParams
from finback.errors import DamagedFile


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
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    wide = logits[order].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature makes the others infinitely unlikely
        shares = np.exp((wide - wide[0]) / sampling.temperature)
    shares /= shares.sum()
    kept = len(shares)
    if sampling.top_p < 1:
        kept = int(np.searchsorted(shares.cumsum(), sampling.top_p)) + 1
    if sampling.min_p > 0:
        kept = min(kept, int((shares >= sampling.min_p * shares[0]).sum()))
    total = shares[: max(1, kept)].cumsum()
    drawn = int(np.searchsorted(total, _uniform(seed, position) * total[-1], side="right"))
    return int(order[min(drawn, len(total) - 1)])


def _uniform(seed: int, position: int) -> float:
    """Draw from [0, 1) by counter: a number for a seed and position, whatever came before."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
