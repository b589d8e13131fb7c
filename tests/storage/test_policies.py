"""Policies on sequences whose best victim is plain to see."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from finback.errors import DamagedFile
from finback.storage.policies import POLICIES, Distance, Frequency, Pinned, Recency
from finback.storage.trace import Trace, load_trace, make_trace, replay

KEYS = np.arange(6)


def test_recency_gives_up_the_oldest() -> None:
    policy = Recency(1, 6)
    for key in (3, 1, 5, 0, 2, 4, 1):
        policy.used(np.array([key]), 0)
    assert policy.scores(KEYS, 0, 0).argmax() == 3


def test_frequency_forgets() -> None:
    policy = Frequency(1, 6, half_life=10)
    for step in range(50):
        policy.used(KEYS[1:], step)
    assert policy.scores(KEYS, 0, 50).argmax() == 0
    policy.used(KEYS[:1], 100)
    assert policy.scores(KEYS, 0, 100).argmax() != 0


def test_distance_prefers_what_is_used_often_and_of_those_the_near_layer() -> None:
    policy = Distance(3, 2)
    for step in range(40):
        for layer in range(3):
            policy.used(np.array([2 * layer]), step)  # the even ones in every step
    scores = policy.scores(KEYS, 0, 40)
    assert set(np.argsort(-scores)[:3]) == {1, 3, 5}  # never used
    assert scores[0] > scores[4] > scores[2]  # layer 0 was just computed, layer 1 comes next


def zipf_trace(steps: int, drift: int = 0) -> Trace:
    """Routes by chance, some experts much likelier; which ones changes every `drift` steps."""
    rng = np.random.default_rng(5)
    chances = np.log(np.arange(1, 33) ** -1.0)
    layers, experts = [], []
    order = [rng.permutation(32) for _ in range(4)]
    for step in range(steps):
        if drift and step % drift == 0:
            order = [rng.permutation(32) for _ in range(4)]
        for layer in range(4):
            drawn = np.argsort(-(chances + rng.gumbel(size=32)))[:4]
            layers.append(layer)
            experts.append(order[layer][drawn])
    return make_trace(4, 32, 1000, layers, experts)


@pytest.mark.parametrize("drift", [0, 60])
@pytest.mark.parametrize("slots", [8, 16, 40])
def test_distance_beats_both_of_what_it_combines(drift: int, slots: int) -> None:
    hits = replay(zipf_trace(400, drift), slots).hits
    assert hits["belady"] >= hits["distance"] >= max(hits["recency"], hits["frequency"])


def test_belady_knows_the_future() -> None:
    trace = make_trace(1, 4, 1, [0] * 6, [[0], [1], [2], [0], [1], [3]])
    assert replay(trace, 1, ("recency",)).hits == {"recency": 0.0, "belady": 1 / 6}
    assert replay(trace, 2, ("recency",)).hits == {"recency": 0.0, "belady": 2 / 6}
    assert replay(trace, 4, ("recency",)).hits == {"recency": 2 / 6, "belady": 2 / 6}


def test_a_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    trace = zipf_trace(5)
    trace.save(tmp_path / "t.npz")
    again = load_trace(tmp_path / "t.npz")
    assert again.num_steps == trace.num_steps == 5
    for name in ("layers", "starts", "experts"):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name))
    assert list(tmp_path.iterdir()) == [tmp_path / "t.npz"]


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    for content in (b"", b"PK nonsense", b"x" * 100):
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match="t.npz"):
            load_trace(path)
    good = zipf_trace(3)
    for name, value in (
        ("experts", np.full(len(good.experts), 99)),
        ("starts", good.starts[::-1]),
        ("layers", good.layers[:-1]),
        ("starts", np.array([0, -(2**62), 2**62, *good.starts[3:]])),
        ("experts", np.zeros_like(good.experts)),  # one expert twice in a lease
        ("num_layers", 2**40),
        ("experts", good.experts.astype(float)),
    ):
        dataclasses.replace(good, **{name: value}).save(path)
        with pytest.raises(DamagedFile, match="contradicts itself"):
            load_trace(path)
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DamagedFile, match="is no regular file"):
        load_trace(tmp_path / "pipe.npz")
    good.save(path)
    raw = bytearray(path.read_bytes())
    middle = slice(len(raw) // 3, len(raw) // 3 + 60)
    raw[middle] = bytes(byte ^ 0xFF for byte in raw[middle])
    path.write_bytes(bytes(raw))
    with pytest.raises(DamagedFile, match="t.npz"):
        load_trace(path)
    with pytest.raises(DamagedFile, match="missing.npz"):
        load_trace(tmp_path / "missing.npz")


def test_heat_is_kept_across_runs(tmp_path: Path) -> None:
    first, again = Distance(4, 32), Distance(4, 32)
    trace = zipf_trace(100)
    keys = np.arange(4 * 32)
    for at, layer in enumerate(trace.layers.tolist()):
        wanted = trace.experts[trace.starts[at] : trace.starts[at + 1]]
        first.used(wanted + 32 * layer, at // 4)
    first.save(tmp_path / "heat.npz")
    again.restore(tmp_path / "heat.npz")
    np.testing.assert_allclose(again.scores(keys, 2, 0), first.scores(keys, 2, 99), rtol=0.2)
    with pytest.raises(DamagedFile, match="of another model"):
        Distance(4, 31).restore(tmp_path / "heat.npz")
    (tmp_path / "heat.npz").write_bytes(b"junk")
    with pytest.raises(DamagedFile, match="heat.npz"):
        again.restore(tmp_path / "heat.npz")


def test_what_earlier_runs_used_most_stays(tmp_path: Path) -> None:
    first = Distance(1, 6)
    for step in range(50):
        first.used(np.array([3, 4]), step)
    first.save(tmp_path / "heat.npz")
    policy = Pinned(1, 6, num_slots=4)
    policy.restore(tmp_path / "heat.npz")
    for step in range(200):
        policy.used(np.array([0, 1]), step)
    assert set(np.argsort(-policy.scores(KEYS, 0, 200))[-2:]) == {3, 4}
    assert policy.scores(np.array([3, 4]), 0, 200).argmax() in (0, 1)  # there is no other


def test_a_replay_with_heat_has_the_pinned_policy(tmp_path: Path) -> None:
    trace = zipf_trace(200)
    assert "pinned" not in replay(trace, 16).hits
    learnt = Distance(4, 32)
    for at, layer in enumerate(trace.layers.tolist()):
        wanted = trace.experts[trace.starts[at] : trace.starts[at + 1]]
        learnt.used(wanted + 32 * layer, at // 4)
    learnt.save(tmp_path / "heat.npz")
    hits = replay(trace, 16, heat=tmp_path / "heat.npz").hits
    assert hits["pinned"] > hits["recency"]


def test_all_have_a_name() -> None:
    assert sorted(POLICIES) == ["distance", "frequency", "pinned", "recency"]
