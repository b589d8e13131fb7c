"""States that are not in memory: the same bits, every byte counted, nothing left behind."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback import LLM, Request
from finback.errors import CapacityError
from finback.kernels.library import instruction_sets
from finback.spans import Spans
from finback.storage import spill
from finback.storage.arena import MemoryPool, reserve
from finback.storage.reader import Reader
from finback.storage.spill import SpillFile
from tests.conftest import DATA, EXAMPLES, TINY

needs_native = pytest.mark.skipif(
    not instruction_sets(), reason="needs the native library: install a C compiler and reinstall"
)
PROMPTS = ("The whale", "A ship on the sea and the wind", "x", "Call me", "There once was a man")


@pytest.fixture
def file(tmp_path: Path) -> Any:
    reader = Reader(Spans(), threads=2)
    one = SpillFile(tmp_path / "spill", reader, reader._spans, MemoryPool())
    yield one
    one.close()
    reader.close()
    assert list((tmp_path / "spill").iterdir()) == []


def test_parts_come_back_as_they_were(file: SpillFile) -> None:
    rng, kept = np.random.default_rng(1), []
    for size in (4096, 40960, 5000, 17, 3_000_000):
        place = file.place(size)
        memory = reserve(size)
        memory[:] = rng.integers(0, 256, size, np.uint8)
        file.write(place, memory, 0, size)
        kept.append((place, memory))
    for _ in range(2):
        for place, _ in kept:
            file.begin_read(place)
        for place, memory in kept:
            np.testing.assert_array_equal(file.take(place), memory)
    place, memory = kept[2]
    file.write(place, memory[4000:].copy(), 4000, 5000)  # a part of it
    np.testing.assert_array_equal(file.take(place), memory)
    offsets = [place.offset for place, _ in kept]
    for place, _ in kept:
        file.begin_read(place)
        file.give_up(place)
    assert sorted(file.place(room).offset for room in (4096, 40960, 8000, 9, 2_999_999)) == offsets


def test_a_full_disk_is_named(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spill.os, "pwrite", full)
    place = file.place(4096)
    file.write(place, reserve(4096), 0, 4096)
    with pytest.raises(CapacityError, match="states cannot be written .No space left"):
        file.settle(place)


@pytest.fixture(scope="module", params=TINY)
def alone(request: pytest.FixtureRequest) -> dict[str, Any]:
    folder = DATA / str(request.param)
    with LLM(folder) as llm:
        found = [llm.generate(p, max_tokens=6, seed=n) for n, p in enumerate(PROMPTS)]
    return {"folder": folder, "ids": [one.token_ids for one in found]}


def requests() -> list[Request]:
    return [
        Request(prompt=prompt, sampling={"max_tokens": 6, "seed": n})
        for n, prompt in enumerate(PROMPTS)
    ]


@needs_native
@settings(max_examples=EXAMPLES)
@given(
    resident=st.integers(1, 5),
    places=st.integers(2, 6),
    rows=st.sampled_from([2, 9, 30]),
    slots=st.sampled_from([1, None]),
    streamed=st.booleans(),
)
def test_the_same_text_with_states_on_disk(
    alone: dict[str, Any], resident: int, places: int, rows: int, slots: int | None, streamed: bool
) -> None:
    with LLM(
        alone["folder"],
        resident_sequences=resident,
        max_sequences=places,
        max_rows=rows,
        expert_slots=slots,
        stream_spine=streamed,
        drafts="lookup",
    ) as llm:
        assert llm.plan.max_resident == min(resident, places)
        done = dict(llm.batch(requests()))
        assert [done[n].token_ids for n in range(len(PROMPTS))] == alone["ids"]
        llm.engine.check()
        if llm.plan.max_resident < min(places, len(PROMPTS)) and rows > 20:
            counts = llm.spans.counts
            assert counts["bytes_spilled"] > 0
            assert llm.engine.spill is not None
            assert llm.engine.spill._parts == {}
    states = Path(os.environ["FINBACK_STATES"])
    assert not list(states.glob("spill-*"))


def test_after_so_many_bytes_nothing_more_is_spilled(alone: dict[str, Any]) -> None:
    options: dict[str, Any] = {"resident_sequences": 1, "max_sequences": 4}
    with LLM(alone["folder"], max_spill_writes="1", **options) as llm:
        done = dict(llm.batch([*requests(), *requests()]))
        assert [done[n % 5].token_ids for n in range(10)] == alone["ids"] * 2
        first = llm.spans.counts["bytes_spilled"]
    with LLM(alone["folder"], **options) as llm:
        dict(llm.batch([*requests(), *requests()]))
        assert llm.spans.counts["bytes_spilled"] > first > 0
    with LLM(alone["folder"], spill=False, **options) as llm:
        assert llm.plan.max_sequences == 1
        done = dict(llm.batch(requests()))
        assert [done[n].token_ids for n in range(5)] == alone["ids"]
        assert llm.spans.counts["bytes_spilled"] == 0


def test_a_disk_that_fills_ends_those_answers_and_no_others(
    alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with LLM(alone["folder"], resident_sequences=1, max_sequences=4) as llm:
        real = spill.os.pwrite
        monkeypatch.setattr(spill.os, "pwrite", full)
        done = dict(llm.batch(requests()))
        errors = [done[n].error for n in range(5)]
        assert any(isinstance(error, CapacityError) for error in errors)
        monkeypatch.setattr(spill.os, "pwrite", real)
        done = dict(llm.batch(requests()))
        assert [done[n].token_ids for n in range(5)] == alone["ids"]
        llm.engine.check()
