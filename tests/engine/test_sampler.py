"""A pick depends on logits, seed and position, and follows the distribution asked for."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback import LLM, Request
from finback.config import SamplingParams
from finback.engine.sampler import _uniform, adjust, pick, rate, refuse_no_numbers
from finback.errors import DamagedFile, RequestError
from tests.conftest import DATA

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03], np.float32))


def frequencies(logits: np.ndarray, draws: int = 4000, **options: float) -> np.ndarray:
    sampling = SamplingParams(**options)  # type: ignore[arg-type]
    picks = [pick(logits, sampling, seed=7, position=n) for n in range(draws)]
    return np.bincount(picks, minlength=len(logits)) / draws


def test_temperature_zero_takes_the_likeliest_and_the_lower_of_two() -> None:
    assert pick(np.array([1, 3, 3, 0], np.float32), SamplingParams(temperature=0), 1, 1) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.07, 0.03]),
        ({"temperature": 0.5}, [0.7243, 0.1811, 0.0652, 0.0142, 0.0026]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_p": 0.7}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_p": 0.8}, [0.5556, 0.2778, 0.1667, 0, 0]),
        ({"min_p": 0.2}, [0.5556, 0.2778, 0.1667, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0]),
    ],
)
def test_the_shares_are_those_asked_for(options: dict[str, float], expected: list[float]) -> None:
    np.testing.assert_allclose(frequencies(LOGITS, **options), expected, atol=0.025)


def plainly(logits: np.ndarray, sampling: SamplingParams, drawn: float) -> int:
    """Pick with the whole vocabulary sorted, filter after filter; without one, in its own order."""
    ids = list(range(len(logits)))
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        ids.sort(key=lambda i: (-logits[i], i))
    top = float(logits.max())
    shares = [math.exp((float(logits[i]) - top) / sampling.temperature) for i in ids]
    if sampling.top_k:
        shares = shares[: sampling.top_k]
    total, kept = sum(shares), []
    for share in shares:
        if (sum(kept) >= sampling.top_p * total and sampling.top_p < 1) or share < sampling.min_p:
            break
        kept.append(share)
    drawn *= sum(kept)
    for i, share in zip(ids, kept, strict=False):
        drawn -= share
        if drawn < 0:
            return i
    return ids[len(kept) - 1]


@given(
    size=st.integers(1, 3000),
    spread=st.floats(0.01, 8),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 700),
    top_p=st.floats(0.05, 0.999) | st.just(1.0),
    min_p=st.floats(0, 0.2) | st.just(0.0),
)
def test_a_part_sorted_vocabulary_gives_the_same_pick(
    size: int, spread: float, seed: int, **options: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(size) * spread).astype(np.float16).astype(np.float32)  # with ties
    sampling = SamplingParams(**options)  # type: ignore[arg-type]
    for position in range(3):
        drawn = _uniform(seed, position)
        # Odds are float32: on the border between two tokens either may be taken.
        near = {plainly(logits, sampling, drawn + off) for off in (-1e-5, 0, 1e-5)}
        assert pick(logits, sampling, seed, position) in near


def test_a_pick_is_a_function_of_seed_and_position() -> None:
    flat = np.zeros(1000, np.float32)
    a = [pick(flat, SamplingParams(), 5, n) for n in range(20)]
    assert a == [pick(flat, SamplingParams(), 5, n) for n in range(20)]
    assert a != [pick(flat, SamplingParams(), 6, n) for n in range(20)]
    assert len(set(a)) > 15


def test_very_low_temperatures_do_not_overflow() -> None:
    for temperature in (1e-6, 1e-320):
        assert pick(LOGITS * 1000, SamplingParams(temperature=temperature), 1, 1) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_an_error(bad: float) -> None:
    with pytest.raises(DamagedFile, match="no numbers at position 3"):
        refuse_no_numbers(np.array([0, bad], np.float32), 3)


def adjusted(
    options: dict[str, Any], prompt: list[int], answer: list[int], allowed: Any = None
) -> np.ndarray:
    logits = np.array([2, -1, 0.5, 3, -4], np.float32)
    before = logits.copy()
    out = adjust(logits, SamplingParams(**options), prompt, answer, allowed)
    np.testing.assert_array_equal(logits, before)
    return out


def test_penalties_and_biases_are_those_of_the_papers() -> None:
    options: dict[str, Any] = {"repetition_penalty": 2.0}
    np.testing.assert_allclose(adjusted(options, [0, 1], [3]), [1, -2, 0.5, 1.5, -4])
    options = {"frequency_penalty": 0.5, "presence_penalty": 1.0}  # of the answer alone
    np.testing.assert_allclose(adjusted(options, [0, 0], [3, 3, 1]), [2, -2.5, 0.5, 1, -4])
    np.testing.assert_allclose(adjusted(options, [0], []), [2, -1, 0.5, 3, -4])
    options = {"logit_bias": {4: 10.0, 0: -1}}
    np.testing.assert_allclose(adjusted(options, [], []), [1, -1, 0.5, 3, 6])
    assert adjusted({}, [0], [1]).tolist() == [2, -1, 0.5, 3, -4]


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 2}])
def test_what_is_not_allowed_never_comes(options: dict[str, Any]) -> None:
    allowed = np.array([False, True, False, False, True])
    logits = adjusted(options, [], [], allowed)
    picks = {pick(logits, SamplingParams(**options), 3, n) for n in range(300)}
    assert picks <= {1, 4}
    alone = adjusted(options, [], [], np.array([False] * 4 + [True]))
    assert {pick(alone, SamplingParams(**options), 3, n) for n in range(50)} == {4}


def test_likelihoods_are_those_of_the_softmax() -> None:
    logits = np.random.default_rng(1).standard_normal(3000).astype(np.float32) * 5
    logits[7] = logits[900]
    expected = logits.astype(float) - np.log(np.exp(logits.astype(float)).sum())
    order = np.argsort(-logits, kind="stable")
    for token in (0, 7, 900, int(order[0]), int(order[-1])):
        rated = rate(logits, token, 4)
        assert rated.logprob == pytest.approx(expected[token], abs=2e-5)
        assert order[rated.rank - 1] == token
        assert [n for n, _ in rated.top] == order[:4].tolist()
    assert rate(logits, 5, 0).top == ()


def test_samples_follow_the_distribution_of_a_model() -> None:
    """Pearson's chi-square over many seeds, on a tiny model's own logits."""
    with LLM(DATA / "tiny-k3") as llm:
        ids = llm.tokenize("The whale")
        logits = llm.logits(ids)[-1].astype(float)
        seeds = range(1500)
        sampling: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True}
        requests = [Request(prompt=ids, sampling=sampling | {"seed": n}) for n in seeds]
        drawn = np.zeros(len(logits))
        for _, out in llm.batch(requests):
            drawn[out.token_ids[0]] += 1
    shares = np.exp(logits - logits.max())
    expected = shares / shares.sum() * len(seeds)
    order = np.argsort(-expected)
    often = order[expected[order] >= 5]
    rest = order[len(often) :]
    observed = np.append(drawn[often], drawn[rest].sum())
    wanted = np.append(expected[often], expected[rest].sum())
    chi = ((observed - wanted) ** 2 / wanted).sum()
    degrees = len(observed) - 1
    assert chi < degrees + 5 * math.sqrt(2 * degrees)  # five standard deviations


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.01"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must map"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"logprobs": -1}, "logprobs must be a whole number from 0"),
        ({"temperature": -1}, "temperature must be a number from 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens must be a whole number at least 1"),
        ({"stop": ("",)}, "stop must be a list"),
        ({"stop": 5}, "stop must be a list"),
        ({"stop_token_ids": "abc"}, "stop_token_ids must be a list"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids must be a list"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false"),
        ({"temperature": 10**400}, "temperature must be a number from 0 to 100"),
    ],
)
def test_options_are_checked_when_they_are_made(options: dict, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**options)
