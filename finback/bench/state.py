"""Keeping, restoring and going back: states of Kimi K3's true size, and a prefix of a model."""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finback.bench.stream import drop_cached
from finback.engine.statefile import read_state, write_state
from finback.errors import UsageError
from finback.llm import LLM
from finback.models.base import read_layout_of
from finback.models.state import LatentState, RecurrentState, SequenceState
from finback.planner.synth import find_config
from finback.spans import Spans
from finback.storage.arena import MemoryPool
from finback.storage.probe import measure_ceiling
from finback.storage.reader import Reader

TOKENS = 512


@dataclass(slots=True)
class StateReport:
    """Medians over the rounds; seconds, bytes and GB/s."""

    k3_state_bytes: int = 0
    k3_save_s: float = 0.0
    k3_restore_s: float = 0.0  # into memory of a state that has ended
    k3_restore_gbps: float = 0.0
    k3_first_restore_gbps: float = 0.0  # into new memory
    ceiling_gbps: float = 0.0
    of_ceiling: float = 0.0
    go_back_s: float = 0.0  # K3's size, by four drafts
    prefix_tokens: int = 0
    prefill_s: float = 0.0
    restore_s: float = 0.0
    restore_speedup: float = 0.0
    step_s: float = 0.0  # one token of the model
    go_back_of_step: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Give the report as plain values."""
        return asdict(self)


def measure_state(
    folder: Path,
    rounds: int = 5,
    tokens: int = TOKENS,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> StateReport:
    """Measure states on the disk that the model lies on.

    Args:
        folder: A model.
        rounds: Medians are taken of.
        tokens: Of the prefix that is computed once and restored.
        progress: Told what is being done.
        options: Fields of EngineConfig.

    Raises:
        UsageError: The disk cannot be measured.
    """
    report = StateReport()
    with tempfile.TemporaryDirectory(prefix="finback-bench-", dir=folder.parent) as place:
        _measure_k3(report, Path(place), rounds, progress)
        progress(f"a prefix of {tokens} tokens")
        measure_prefix(report, folder, Path(place), rounds, tokens, **options)
    return report


def measure_prefix(
    report: StateReport, folder: Path, place: Path, rounds: int, tokens: int, **options: Any
) -> None:
    """Compute a prefix once, and restore it in each round."""
    with LLM(folder, states=str(place / "states"), max_sequences=1, **options) as llm:
        size = llm.engine.model.shape.vocab_size
        ids = np.random.default_rng(1).integers(0, min(size, 500), tokens).tolist()
        done = llm.generate(ids, max_tokens=4, temperature=0, ignore_eos=True)
        report.prefill_s, report.step_s = done.stats.prompt_s, done.stats.decode_s / 3
        snapshots = llm.engine.snapshots
        assert snapshots is not None
        found = snapshots.find(ids)
        assert found is not None
        report.prefix_tokens, taken = found.position, []
        for _ in range(rounds):
            drop_cached([found.path])
            llm.wait_for_reads()
            start = time.perf_counter()
            prefix = ids[: found.position]
            state = snapshots.load(found, prefix, llm.engine.model, llm.engine.memory)
            taken.append(time.perf_counter() - start)
            assert state is not None
            state.release()
    report.restore_s = statistics.median(taken)
    report.restore_speedup = report.prefill_s / report.restore_s
    report.go_back_of_step = report.go_back_s / report.step_s


def _measure_k3(
    report: StateReport, place: Path, rounds: int, progress: Callable[[str], None]
) -> None:
    """Save and restore a state of Kimi K3's true shape after so many tokens."""
    shapes = _K3(TOKENS)
    state, tokens = shapes.state(), list(range(TOKENS))
    report.k3_state_bytes = state.num_bytes
    path = place / "k3.state"
    saves, ceilings, backs = [], [], []
    firsts, restores = list[float](), list[float]()
    memory = MemoryPool()
    with closing(Reader(Spans())) as reader:
        write_state(path, "bench", tokens, state)
        read_state(path, "bench", tokens, shapes, reader, memory).release()
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}: a state of Kimi K3's size")
            start = time.perf_counter()
            size = write_state(path, "bench", tokens, state)
            saves.append(time.perf_counter() - start)
            drop_cached([path])
            ceiling = measure_ceiling([path])
            if ceiling is None:
                raise UsageError(f"{place}: cannot be measured")
            ceilings.append(ceiling.gbps)
            for pool, rates in ((MemoryPool(), firsts), (memory, restores)):
                drop_cached([path])
                start = time.perf_counter()
                again = read_state(path, "bench", tokens, shapes, reader, pool)
                rates.append(size / (time.perf_counter() - start) / 1e9)
                if pool is not memory:
                    del again
            again.position += 4  # as if four drafts had been computed
            for part in again.layers.values():
                if isinstance(part, LatentState):
                    part.append(np.zeros((4, part.rows.shape[1]), np.float32))
                else:
                    part.pending = shapes.drafts(4)
            start = time.perf_counter()
            again.go_back(TOKENS + 2)
            backs.append(time.perf_counter() - start)
            again.release()
    report.k3_save_s = statistics.median(saves)
    report.k3_restore_gbps = statistics.median(restores)
    report.k3_first_restore_gbps = statistics.median(firsts)
    report.k3_restore_s = size / report.k3_restore_gbps / 1e9
    report.ceiling_gbps = statistics.median(ceilings)
    pairs = zip(restores, ceilings, strict=True)
    report.of_ceiling = statistics.median(rate / ceiling for rate, ceiling in pairs)
    report.go_back_s = statistics.median(backs)


class _K3:
    """The parts of a state of Kimi K3; all of a model that reading a state asks for."""

    def __init__(self, position: int) -> None:
        layout: Any = read_layout_of(find_config("kimi-k3"), "kimi-k3: ")
        self._kimi = layout.kimi
        self._position = position

    def state_shapes(self, position: int) -> dict[tuple[int, str], tuple[int, ...]]:
        kda, out = self._kimi.kda, dict[tuple[int, str], tuple[int, ...]]()
        for layer in range(self._kimi.num_layers):
            if layer in self._kimi.kda_layers:
                out[layer, "matrix"] = (kda.num_heads, kda.head_dim, kda.head_dim)
                out[layer, "history"] = (3, kda.num_taps - 1, kda.inner)
            else:
                out[layer, "rows"] = (position, self._kimi.mla.row_width)
        return out

    def state(self) -> SequenceState:
        """Make a state of numbers by chance."""
        rng, state = np.random.default_rng(0), SequenceState(position=self._position)
        shapes = self.state_shapes(self._position)
        for (layer, kind), shape in shapes.items():
            values = rng.standard_normal(shape, np.float32)
            if kind == "rows":
                state.layers[layer] = LatentState(shape[1])
                state.layers[layer].append(values)  # type: ignore[union-attr]
            elif kind == "matrix":
                part = RecurrentState.empty(shape, shapes[layer, "history"], state.memory)
                part.matrix[:] = values
                state.layers[layer] = part
        return state

    def drafts(self, count: int) -> Any:
        """Make what drafts leave in a layer."""
        from finback.kernels.ops import DeltaRows

        kda = self._kimi.kda
        wide = [np.zeros((count, kda.inner), np.float32) for _ in range(5)]
        beta = np.zeros((count, kda.num_heads), np.float32)
        return DeltaRows(wide[0], wide[1], wide[2], wide[3], beta, wide[4])
