"""The helpers for picking tokens, native with every instruction set and in NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.kernels import sampling
from finback.kernels.cpu import Cpu
from finback.kernels.library import instruction_sets

BACKENDS = ("numpy", *instruction_sets())


def use(backend: str, patch: pytest.MonkeyPatch) -> None:
    if backend == "numpy":
        patch.setattr(sampling, "library", lambda: None)
    else:
        Cpu(isa=backend)


@given(
    values=st.lists(st.integers(-40, 40), min_size=1, max_size=90),
    count=st.integers(1, 100),
)
def test_the_likeliest_come_first_and_of_equals_the_lower(values: list[int], count: int) -> None:
    array = np.array(values, np.float32) / 4
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    for backend in BACKENDS:
        with pytest.MonkeyPatch.context() as patch:
            use(backend, patch)
            assert sampling.likeliest(array, count).tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.01, 7.5])
def test_shares_are_exponentials(
    backend: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(backend, monkeypatch)
    logits = np.random.default_rng(1).standard_normal(1003).astype(np.float32) * 5
    shares, total = sampling.shares(logits, temperature)
    exact = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    np.testing.assert_allclose(shares, exact, rtol=2e-4 if temperature < 1 else 3e-6, atol=1e-37)
    assert total == pytest.approx(float(shares.sum(dtype=np.float64)), rel=1e-12)
    assert shares[logits.argmax()] == 1
