"""Each family against an independent float64 implementation, in every way of cutting the prompt."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from finback.models.base import Run, TokenBatch
from finback.models.state import SequenceState
from tests.conftest import DATA
from tests.helpers import Recorder, extend, in_chunks, load, logits_of


@pytest.mark.parametrize("size", [1, 3, 7, 16, 40])
def test_logits_agree_with_float64_whatever_the_chunks(tiny: Path, size: int) -> None:
    reference = load_file(tiny / "reference.safetensors")
    logits = in_chunks(load(tiny), reference["input_ids"], size)
    expected = reference["logits_f64"]
    assert np.abs(logits - expected).max() < 1e-3
    assert (logits.argmax(-1) == expected.argmax(-1)).all()


def test_hidden_states_and_routes_agree_layer_by_layer(tiny: Path) -> None:
    reference = load_file(tiny / "reference.safetensors")
    model, seen = load(tiny), Recorder()
    extend(model, SequenceState(), reference["input_ids"], seen)
    hidden = reference["hidden_after_layer_f32"]
    assert len(seen.layers) == len(hidden)
    for layer, x in enumerate(seen.layers):
        assert np.abs(x - hidden[layer]).max() < 1e-3 * np.abs(hidden[layer]).max()
    assert list(seen.routes) == list(model.shape.routed_layers)
    np.testing.assert_array_equal(
        np.stack(list(seen.routes.values())), reference["routed_expert_ids"]
    )


def test_the_same_bits_whatever_the_chunks_and_the_cache(tiny: Path) -> None:
    ids = load_file(tiny / "reference.safetensors")["input_ids"]
    whole = in_chunks(load(tiny), ids, len(ids))
    for size in (1, 2, 5, 11):
        np.testing.assert_array_equal(in_chunks(load(tiny, expert_slots=1), ids, size), whole)


def test_the_same_bits_beside_other_sequences(tiny: Path) -> None:
    ids = load_file(tiny / "reference.safetensors")["input_ids"]
    model = load(tiny)
    alone = [in_chunks(model, part, len(part)) for part in (ids[:9], ids[9:12], ids[12:])]
    states = [SequenceState() for _ in range(3)]
    runs = tuple(Run(s, a, b) for s, a, b in zip(states, (0, 9, 12), (9, 12, 40), strict=True))
    together = logits_of(model, TokenBatch(ids.astype(np.int64), runs, np.arange(40)))
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_only_wanted_rows_are_given(tiny: Path) -> None:
    ids = load_file(tiny / "reference.safetensors")["input_ids"].astype(np.int64)
    model = load(tiny)
    every = in_chunks(model, ids, 40)
    state = SequenceState()
    some = logits_of(model, TokenBatch(ids, (Run(state, 0, 40),), np.array([3, 39])))
    np.testing.assert_array_equal(some, every[[3, 39]])


@pytest.mark.parametrize(
    ("name", "key", "limit"),
    [
        ("tiny-k3", "llama_cpp_f32_whole", 1e-3),
        ("tiny-k3", "nemo_fla_f32_whole", 1e-3),
        ("tiny-kimi-linear", "transformers_f32_whole", 1e-3),
    ],
)
def test_other_peoples_implementations_agree(name: str, key: str, limit: float) -> None:
    expected = load_file(DATA / name / "independent.safetensors")[key]
    ids = load_file(DATA / name / "reference.safetensors")["input_ids"]
    assert np.abs(in_chunks(load(DATA / name), ids, 40) - expected).max() < limit


def test_state_bytes_are_what_the_shape_says(tiny: Path) -> None:
    model = load(tiny)
    state = SequenceState()
    assert state.num_bytes == 0  # made when a layer first needs it
    extend(model, state, range(64))
    assert state.num_bytes == model.shape.state_bytes + 64 * model.shape.state_bytes_per_token
