"""When bytes are read never changes what comes out: the same bits under every way of reading."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from finback.hub.local import STORYTELLER
from finback.kernels.cpu import Cpu
from finback.kernels.library import instruction_sets
from finback.models.state import SequenceState
from finback.spans import Spans
from finback.storage import reader
from tests.helpers import extend, in_chunks, load_all

pytestmark = pytest.mark.skipif(
    not instruction_sets(), reason="needs the native library: install a C compiler and reinstall"
)

WAYS: dict[str, dict[str, Any]] = {
    "fewest slots": {"expert_slots": 1},
    "few slots": {"expert_slots": 3},
    "no guesses": {"expert_slots": 5, "guesses": False},
    "by recency": {"expert_slots": 9, "policy": "recency"},
    "by frequency": {"expert_slots": 9, "policy": "frequency"},
    "spine streamed": {"stream_spine": True},
    "everything streamed": {"stream_spine": True, "expert_slots": 1, "read_threads": 1},
    "buffered": {"expert_slots": 2, "direct_reads": False, "stream_spine": True},
    "eight reader threads": {"expert_slots": 2, "read_threads": 8, "stream_spine": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(tiny: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "DIRECT_FROM", 0)
    ids = load_file(tiny / "reference.safetensors")["input_ids"]
    whole = in_chunks(load_all(tiny, Cpu(2)).model, ids, len(ids))
    loaded = load_all(tiny, Cpu(2), **WAYS[way])
    for size in (1, 7):
        np.testing.assert_array_equal(in_chunks(loaded.model, ids, size), whole)
    loaded.experts.check()
    loaded.spine.check()
    loaded.reader.close()
    loaded.reader.check()


def test_a_streamed_spine_is_read_once_for_each_step() -> None:
    spans = Spans()
    loaded = load_all(STORYTELLER, Cpu(1), spans, stream_spine=True)
    state = SequenceState()
    extend(loaded.model, state, [5])
    before = spans.snapshot()
    for _ in range(4):
        extend(loaded.model, state, [7])
    loaded.reader.close()
    spine = sum(group.num_bytes for group in loaded.spine.groups)
    read = spans.since(before).counts["bytes_read_spine"]
    assert read == pytest.approx(4 * spine, rel=0.3)  # and what was read ahead at the borders


def test_a_step_is_computing_waiting_and_the_rest() -> None:
    spans = Spans()
    loaded = load_all(STORYTELLER, Cpu(1), spans, stream_spine=True, expert_slots=4)
    state, before = SequenceState(), spans.snapshot()
    for token in range(5):
        with spans.span("step"):
            extend(loaded.model, state, [token])
    loaded.reader.close()
    profile = spans.since(before)
    parts = profile.compute_s + profile.wait_s + profile.other_s
    assert parts == pytest.approx(profile.wall_s, rel=0.02)
    assert profile.wait_s > 0
    assert 0 < profile.read_s <= profile.wall_s * 1.02
    assert profile.bytes_read > 0


def test_a_layer_whose_read_was_given_up_is_read_again(tiny: Path) -> None:
    ids = load_file(tiny / "reference.safetensors")["input_ids"]
    whole = in_chunks(load_all(tiny, Cpu(2)).model, ids, len(ids))
    loaded = load_all(tiny, Cpu(2), stream_spine=True)
    for held in loaded.spine._held.values():
        if held.ticket is not None:
            loaded.reader.cancel(held.ticket)
            held.memory[:] = 0
    np.testing.assert_array_equal(in_chunks(loaded.model, ids, 7), whole)
    loaded.reader.close()


def test_groups_and_experts_share_no_memory() -> None:
    loaded = load_all(STORYTELLER, Cpu(1), stream_spine=True, expert_slots=2)
    memories = [loaded.spine.memory(group.name) for group in loaded.spine.groups]
    for (a, one), (b, other) in itertools.combinations(enumerate(memories), 2):
        assert np.shares_memory(one, other) == ((a - b) % 2 == 0)
    loaded.reader.close()
