"""A pick depends on logits, seed and position, and follows the distribution asked for."""

import numpy as np
import pytest

from finback.config import SamplingParams
from finback.engine.sampler import pick
from finback.errors import DamagedFile, RequestError

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
        pick(np.array([0, bad], np.float32), SamplingParams(), 1, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -1}, "temperature must be a number from 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens must be a whole number at least 1"),
        ({"stop": "x"}, "stop must be a list"),
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
