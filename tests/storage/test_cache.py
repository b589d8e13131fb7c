"""The expert cache on a file of small experts: what is read, what stays, what errors leave."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.errors import DamagedFile, ReadError
from finback.spans import Spans
from finback.storage import cache as cache_module
from finback.storage import files
from finback.storage.arena import Arena
from finback.storage.cache import ExpertCache
from finback.storage.extents import ExpertLayout, Extent, Part, place
from finback.storage.policies import POLICIES
from finback.storage.prefetch import Guesses
from finback.storage.reader import Reader, Ticket

LAYERS, EXPERTS, BYTES = 4, 6, 5000


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each expert's bytes are its own number."""
    path = tmp_path_factory.mktemp("experts") / "experts.bin"
    numbers = np.repeat(np.arange(LAYERS * EXPERTS, dtype=np.uint8), BYTES)
    path.write_bytes(numbers.tobytes())
    return path


def layout_in(path: Path) -> Callable[[int, int], ExpertLayout]:
    def layout(layer: int, expert: int) -> ExpertLayout:
        extent = Extent(path, (layer * EXPERTS + expert) * BYTES, BYTES)
        half = BYTES // 2
        parts = ((0, half), (half, BYTES))
        return ExpertLayout((extent,), {"w": Part("mxfp4", (1, 32), parts)})

    return layout


def make(path: Path, slots: int, policy: str = "distance", guesses: bool = True) -> ExpertCache:
    layout, spans = layout_in(path), Spans()
    sizes = [place(layout(n, e).extents)[1] for n in range(LAYERS) for e in range(EXPERTS)]
    return ExpertCache(
        layout,
        Reader(spans, threads=2),
        spans,
        Arena(max(sizes), slots),
        POLICIES[policy](LAYERS, EXPERTS),
        EXPERTS,
        Guesses(3) if guesses else None,
    )


def visit(experts: ExpertCache, layer: int, wanted: list[int], in_order: bool = False) -> list[int]:
    """Lease, check every byte, and give the experts in the order in which they came."""
    came: list[int] = []
    with experts.lease(layer, wanted, in_order) as batches:
        for ready in batches:
            for expert, matrices in ready.items():
                assert not matrices["w"].parts[0].flags.writeable
                for part in matrices["w"].parts:
                    assert (part == layer * EXPERTS + expert).all()
                came.append(expert)
    return came


@pytest.fixture
def open_cache(file: Path) -> Iterator[Callable[..., ExpertCache]]:
    opened: list[ExpertCache] = []

    def open_one(slots: int, policy: str = "distance", guesses: bool = True) -> ExpertCache:
        opened.append(make(file, slots, policy, guesses))
        return opened[-1]

    yield open_one
    for one in opened:
        one.check()
        one._reader.close()
        one._reader.check()


@settings(max_examples=40)
@given(
    slots=st.integers(1, 26),
    policy=st.sampled_from(sorted(POLICIES)),
    steps=st.lists(
        st.tuples(
            st.integers(0, LAYERS - 1),
            st.sets(st.integers(0, EXPERTS - 1), min_size=1),
            st.sets(st.integers(0, EXPERTS - 1)),
            st.booleans(),
        ),
        max_size=25,
    ),
)
def test_every_expert_comes_once_with_its_own_bytes(
    file: Path, slots: int, policy: str, steps: list[tuple[int, set[int], set[int], bool]]
) -> None:
    experts = make(file, slots, policy)
    for layer, wanted, guessed, in_order in steps:
        came = visit(experts, layer, sorted(wanted), in_order)
        assert (came if in_order else sorted(came)) == sorted(wanted)
        experts.check()
        experts.guess((layer + 1) % LAYERS, {"router": sorted(guessed)})
    experts._reader.close()


def test_hits_come_first_and_are_counted(open_cache: Callable[..., ExpertCache]) -> None:
    experts = open_cache(8)
    visit(experts, 0, [1, 4])
    assert visit(experts, 0, [0, 1, 2, 4])[:2] == [1, 4]
    counts = experts._spans.counts
    assert (counts["expert_hits"], counts["expert_misses"]) == (2, 4)
    assert counts["bytes_read_expert"] == 4 * BYTES


def test_a_guess_is_joined_and_a_wrong_one_is_forgotten(
    open_cache: Callable[..., ExpertCache],
) -> None:
    experts = open_cache(6)
    visit(experts, 0, [0])
    experts.guess(1, {"router": [2, 3]})
    visit(experts, 1, [2, 5])
    counts = experts._spans.counts
    assert counts["guesses"] == 2
    assert counts["guesses_used"] == 1
    assert counts["expert_misses"] == 2
    for layer in range(LAYERS):
        visit(experts, layer, list(range(EXPERTS)))
    assert counts["guesses_wasted"] == 1


def test_sweeps_keep_what_fits(open_cache: Callable[..., ExpertCache]) -> None:
    """Layer after layer, all experts, read ahead: recency would find nothing again."""
    slots, sweeps, everything = 10, 30, list(range(EXPERTS))
    experts = open_cache(slots)
    for _ in range(sweeps):
        for layer in range(LAYERS):
            assert visit(experts, layer, everything, in_order=True) == everything
            experts.guess((layer + 1) % LAYERS, {"sweep": everything}, experts.read_ahead)
            experts._reader.wait_until_idle()
    read = experts._spans.counts["bytes_read_expert"] / BYTES / sweeps
    # A sweep wants 24; the slots keep what is not needed to read the rest through.
    assert read <= LAYERS * EXPERTS - (slots - experts.read_ahead - 2)


def test_an_error_leaves_nothing_behind(
    open_cache: Callable[..., ExpertCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, real = open_cache(4), os.preadv

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    visit(experts, 0, [1])
    for _ in range(3):
        monkeypatch.setattr(files.os, "preadv", fail)
        with pytest.raises(ReadError, match=r"experts.bin: .*Input/output error"):
            visit(experts, 0, [1, 2, 3])
        monkeypatch.setattr(files.os, "preadv", real)
        experts.check()
        assert sorted(visit(experts, 0, [1, 2, 3])) == [1, 2, 3]
        visit(experts, 1, [0, 1, 2, 3, 4])


def test_a_caller_that_gives_up_leaves_nothing_behind(
    open_cache: Callable[..., ExpertCache],
) -> None:
    experts = open_cache(3)

    def give_up() -> None:
        with experts.lease(0, [0, 1, 2, 3, 4]) as batches:
            next(batches)
            raise KeyError

    for _ in range(20):
        with pytest.raises(KeyError):
            give_up()
        experts.check()
    assert sorted(visit(experts, 0, [0, 4])) == [0, 4]


def test_an_interrupted_cleanup_is_made_good(
    open_cache: Callable[..., ExpertCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while reads are under way, and again while the lease lets go of its slots."""
    experts, real = open_cache(6), os.preadv
    cancel = experts._reader.cancel

    def slow(descriptor: int, views: list[memoryview], offset: int) -> int:
        time.sleep(0.01)
        return real(descriptor, views, offset)

    def interrupt(ticket: Ticket) -> None:
        cancel(ticket)
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "preadv", slow)
    for _ in range(4):
        monkeypatch.setattr(experts._reader, "cancel", interrupt)
        with pytest.raises(KeyboardInterrupt):
            visit_and_stop(experts)
        monkeypatch.setattr(experts._reader, "cancel", cancel)
        assert sorted(visit(experts, 1, [0, 1, 2, 3, 4])) == [0, 1, 2, 3, 4]
        assert sorted(visit(experts, 0, [0, 1, 2, 3, 4, 5])) == [0, 1, 2, 3, 4, 5]


def visit_and_stop(experts: ExpertCache) -> None:
    with experts.lease(2, [0, 1, 2, 3, 4, 5]):
        raise KeyboardInterrupt


def test_a_bad_scale_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(b"\xff" * (LAYERS * EXPERTS * BYTES))
    experts = make(path, 3)
    with pytest.raises(DamagedFile, match=r"bad.bin: expert 2 of layer 1, w.weight_scale holds"):
        visit(experts, 1, [2])
    experts.check()
    experts._reader.close()


def test_under_memory_pressure_slots_go_back(
    open_cache: Callable[..., ExpertCache],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    experts = open_cache(20)
    for layer in range(LAYERS):
        visit(experts, layer, list(range(EXPERTS)))
    monkeypatch.setattr(cache_module, "pressure", lambda: 0.4)
    monkeypatch.setattr(cache_module, "SECONDS_BETWEEN_LOOKS", 0.0)
    for _ in range(30):
        for layer in range(LAYERS):
            assert sorted(visit(experts, layer, [0, 3, 5])) == [0, 3, 5]
    assert 1 <= experts.num_slots < 20
    assert "memory is short on this machine (40 %" in caplog.text
