"""Logits to tokens. A pick is a pure function of the logits, the seed and the position."""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from finback.checkpoint.formats import Array, Mask
from finback.config import SamplingParams
from finback.errors import DamagedFile
from finback.kernels.ops import Ids
from finback.kernels.sampling import likeliest, shares

FIRST_SORTED = 64  # ids sorted at first; eight times more where the filters keep more
FORBIDDEN = np.float32(-1e30)  # the logit of a token that may not come


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token: natural logarithms of raw probabilities."""

    token_id: int
    logprob: float
    rank: int  # 1 for the likeliest token
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with theirs


def refuse_no_numbers(logits: Array, position: int) -> None:
    """Refuse logits (V,) for the token at `position` that cannot be used.

    Raises:
        DamagedFile: They hold something that is no number.
    """
    if not np.isfinite(logits).all():
        raise DamagedFile(
            f"the model gave logits that are no numbers at position {position}; "
            "its weights are damaged, download the model again"
        )


def adjust(
    logits: Array,
    sampling: SamplingParams,
    prompt: Seq[int],
    answer: Seq[int],
    allowed: Mask | None,
) -> Array:
    """Apply penalties, biases and a constraint to logits (V,), which stay as they are.

    Repetition: tokens of prompt and answer are divided by the penalty where positive, multiplied
    where negative. Source: Keskar et al. 2019, "CTRL", section 4.1. Frequency and presence count
    the answer alone, as OpenAI's interface has it. Then biases are added.
    """
    out = logits
    if sampling.repetition_penalty != 1:
        out = logits.copy()
        seen = np.unique(np.array([*prompt, *answer], np.int64))
        penalty = np.float32(sampling.repetition_penalty)
        out[seen] = np.where(out[seen] > 0, out[seen] / penalty, out[seen] * penalty)
    if answer and (sampling.frequency_penalty or sampling.presence_penalty):
        out = out.copy() if out is logits else out
        counts = Counter(answer)
        ids = np.fromiter(counts, np.int64)
        times = np.fromiter(counts.values(), np.float32)
        out[ids] -= np.float32(sampling.frequency_penalty) * times
        out[ids] -= np.float32(sampling.presence_penalty)
    if sampling.logit_bias:
        out = out.copy() if out is logits else out
        for token, bias in sampling.logit_bias.items():
            out[token] += np.float32(bias)
    if allowed is not None:
        out = np.where(allowed, out, FORBIDDEN)
    return out


def rate(logits: Array, token: int, count: int) -> TokenLogprob:
    """Say how likely a token was by raw logits (V,), and give the `count` likeliest ones."""
    _, total = shares(logits, 1.0)
    log_total = float(logits.max()) + float(np.log(total))
    top = (
        [(int(n), float(logits[n]) - log_total) for n in likeliest(logits, count)] if count else []
    )
    value = logits[token]
    ahead = int((logits > value).sum()) + int((logits[:token] == value).sum())
    return TokenLogprob(token, float(value) - log_total, 1 + ahead, tuple(top))


def pick(logits: Array, sampling: SamplingParams, seed: int, position: int) -> int:
    """Choose the token at `position` of a sequence from finite logits (V,).

    Filters apply in this order: temperature, top-k, top-p, min-p. Ties go to the lower id.
    """
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
    # Rounding may draw the whole sum: that is the last token with a share of its own.
    return int(order[min(drawn, int(np.searchsorted(sums, sums[-1])))])


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
