"""Whole models on the native library, with every instruction set this machine has."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from finback.kernels.cpu import Cpu
from finback.kernels.library import instruction_sets
from finback.models.base import Run, TokenBatch
from finback.models.state import SequenceState
from tests.conftest import DATA
from tests.helpers import Recorder, extend, in_chunks, load, logits_of

pytestmark = pytest.mark.skipif(
    not instruction_sets(), reason="needs the native library: install a C compiler and reinstall"
)


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set in turn."""
    return str(request.param)


def test_logits_and_routes_agree_with_float64(tiny: Path, isa: str) -> None:
    reference = load_file(tiny / "reference.safetensors")
    model, seen = load(tiny, ops=Cpu(isa=isa)), Recorder()
    logits = extend(model, SequenceState(), reference["input_ids"], seen)
    assert np.abs(logits - reference["logits_f64"]).max() < 1e-3
    assert (logits.argmax(-1) == reference["logits_f64"].argmax(-1)).all()
    np.testing.assert_array_equal(
        np.stack(list(seen.routes.values())), reference["routed_expert_ids"]
    )


def test_the_same_bits_whatever_the_chunks_threads_and_cache(tiny: Path, isa: str) -> None:
    ids = load_file(tiny / "reference.safetensors")["input_ids"]
    whole = in_chunks(load(tiny, ops=Cpu(threads=1, isa=isa)), ids, len(ids))
    for size, threads, slots in ((1, 1, 1), (3, 2, None), (7, 3, 2), (16, 2, None)):
        model = load(tiny, Cpu(threads=threads, isa=isa), expert_slots=slots)
        np.testing.assert_array_equal(in_chunks(model, ids, size), whole)


def test_the_same_bits_beside_other_sequences(tiny: Path, isa: str) -> None:
    ids = load_file(tiny / "reference.safetensors")["input_ids"].astype(np.int64)
    model = load(tiny, ops=Cpu(threads=2, isa=isa))
    alone = [in_chunks(model, part, len(part)) for part in (ids[:9], ids[9:12], ids[12:])]
    states = [SequenceState() for _ in range(3)]
    runs = tuple(Run(s, a, b) for s, a, b in zip(states, (0, 9, 12), (9, 12, 40), strict=True))
    together = logits_of(model, TokenBatch(ids, runs, np.arange(40)))
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_int16_activations_change_no_choice(tiny: Path, isa: str) -> None:
    reference = load_file(tiny / "reference.safetensors")
    logits = in_chunks(load(tiny, ops=Cpu(isa=isa, activations="int16")), reference["input_ids"], 7)
    assert np.abs(logits - reference["logits_f64"]).max() < 5e-3
    assert (logits.argmax(-1) == reference["logits_f64"].argmax(-1)).all()


def test_rounded_activations_keep_the_bits_too(isa: str) -> None:
    ids = load_file(DATA / "tiny-k3" / "reference.safetensors")["input_ids"]
    for activations in ("int16", "int8"):
        model = load(DATA / "tiny-k3", ops=Cpu(1, isa, activations))
        whole = in_chunks(model, ids, len(ids))
        for size in (1, 7):
            model = load(DATA / "tiny-k3", Cpu(3, isa, activations), expert_slots=1)
            np.testing.assert_array_equal(in_chunks(model, ids, size), whole)
