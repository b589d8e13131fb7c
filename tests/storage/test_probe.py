"""The measurement of a disk, where files or memory are small."""

from pathlib import Path

import pytest

from finback import LLM
from finback.bench import stream
from finback.bench.stream import last_of, measure_stream
from finback.errors import ReadError, UsageError
from finback.planner.synth import cut_down, find_config, synthesise
from finback.storage.arena import reserve
from finback.storage.extents import Extent
from finback.storage.probe import measure_again, measure_ceiling
from tests.conftest import DATA


def test_memory_too_small_for_a_piece_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 21))
    for memory in (None, reserve(4096)):
        rate = measure_ceiling([path], seconds=0.05, piece=1 << 16, memory=memory)
        assert rate is not None
        assert rate.gbps > 0


def test_requests_are_made_once_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * ((1 << 20) + 5))
    requests = [Extent(path, 0, 4096), Extent(path, 8192, 1 << 16), Extent(path, 1 << 20, 4096)]
    assert measure_again(requests, threads=4) is None
    rate = measure_again(requests, threads=2)
    assert rate is not None
    assert rate.gbps > 0
    path.unlink()
    with pytest.raises(ReadError, match="cannot be read .No such file"):
        measure_again(requests, threads=2)


def test_what_decoding_reads_is_noted(tmp_path: Path) -> None:
    with LLM(DATA / "tiny-k3", expert_slots=1) as llm:
        with llm.record_reads() as requests:
            stats = llm.generate("x", max_tokens=3, ignore_eos=True).stats
        assert sum(one.num_bytes for one in requests) >= stats.bytes_read > 0
        assert all(one.offset % 4096 == one.num_bytes % 4096 == 0 for one in requests)
        few = last_of(requests, 5000)
        assert few == requests[-len(few) :]
        assert len(few) < len(requests)
        assert last_of(requests, 1 << 60) == requests


def test_files_too_small_to_measure_with(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    assert measure_ceiling([path], seconds=0.05) is None


def test_a_model_without_experts_has_nothing_to_stream(tmp_path: Path) -> None:
    config = find_config(str(DATA / "tiny-k3"))
    synthesise(tmp_path / "m", cut_down(config, layers=3, changes={"first_k_dense_replace": 99}))
    with pytest.raises(UsageError, match="has no experts to read"):
        measure_stream(tmp_path / "m", rounds=1)


def test_a_measurement_that_fails_closes_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Reads(stream.ExpertReads):
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(stream, "ExpertReads", Reads)
    with pytest.raises(UsageError, match="too small to measure a disk with"):
        measure_stream(DATA / "tiny-k3", rounds=1)
    assert len(closed) == 1
