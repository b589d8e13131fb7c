"""Decoding from disk beside the disk's own ceiling, in one run.

The ceiling is measured by plain threads that only read (`storage/probe.py`), then the reader alone
on experts, then decoding with the memory that was asked for. Rounds alternate; medians.
"""

import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finback.checkpoint.formats import Bytes, Weight
from finback.checkpoint.index import open_checkpoint
from finback.errors import UsageError
from finback.kernels.ops import Ops
from finback.llm import LLM
from finback.models.loading import read_needs
from finback.spans import Profile, Spans
from finback.storage.arena import BLOCK, huge_bytes, reserve
from finback.storage.extents import Extent, find, place
from finback.storage.memory import peak_bytes
from finback.storage.probe import DiskRate, measure_again, measure_ceiling
from finback.storage.reader import Reader, Ticket

AT_ONCE = 16  # experts under way, as in a layer of Kimi K3


@dataclass(slots=True)
class StreamReport:
    """Medians of all rounds; `decode` as `Profile.as_json`."""

    ceiling_gbps: float = 0.0
    again_gbps: float | None = None  # plain threads that make decoding's requests once more
    reader_gbps: float = 0.0
    reader_core_s_per_gb: float = 0.0
    ceiling_core_s_per_gb: float = 0.0  # of the plain threads that measure the ceiling
    huge_page_share: float | None = None
    decode: dict[str, Any] = field(default_factory=dict)
    load_s: float = 0.0
    peak_memory_bytes: int = 0
    budget_bytes: int = 0
    plan: dict[str, int] = field(default_factory=dict)
    streamed_groups: int = 0
    expert_slots: int = 0
    rounds: list[dict[str, float | None]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Give the report as plain values."""
        return asdict(self)


def measure_stream(
    folder: Path,
    tokens: int = 4,
    rounds: int = 5,
    cold: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> StreamReport:
    """Measure the disk, the reader, and decoding.

    Args:
        folder: A checkpoint, best of several times the memory.
        tokens: Decoded in each round.
        rounds: Of ceiling, reader and decoding in turn.
        cold: Drop the page cache's share of the files first.
        progress: Told what is being done.
        options: Fields of EngineConfig.

    Raises:
        UsageError: The model has no experts on disk to speak of.
    """
    checkpoint = open_checkpoint(folder)
    paths = [folder / name for name in checkpoint.files]
    if cold:
        drop_cached(paths)
    report = StreamReport()
    with closing(ExpertReads(folder)) as experts:
        progress("loading")
        start = time.perf_counter()
        with LLM(folder, **options) as llm:
            report.load_s = time.perf_counter() - start
            report.budget_bytes, report.plan = llm.plan.budget, dict(llm.plan.parts)
            report.streamed_groups = len(llm.plan.streamed)
            report.expert_slots = llm.plan.num_slots
            _decode(llm, 1)
            _measure_rounds(report, llm, experts, paths, tokens, rounds, progress)
        report.huge_page_share = experts.huge_page_share
    report.peak_memory_bytes = peak_bytes()
    return report


def _measure_rounds(
    report: StreamReport,
    llm: LLM,
    experts: "ExpertReads",
    paths: list[Path],
    tokens: int,
    rounds: int,
    progress: Callable[[str], None],
) -> None:
    """Take ceiling, reader and decoding in turn, and write the medians into the report."""
    rows: list[_Round] = []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}: disk")
        ceiling = measure_ceiling(paths, memory=experts.memory)
        if ceiling is None:
            raise UsageError(f"{llm.folder}: too small to measure a disk with")
        progress(f"round {number + 1} of {rounds}: reader")
        reader, core = experts.measure()
        progress(f"round {number + 1} of {rounds}: decoding")
        with llm.record_reads() as requests:
            profile = _decode(llm, tokens)
        progress(f"round {number + 1} of {rounds}: the same reads alone")
        again = measure_again(last_of(requests, profile.bytes_read), memory=experts.memory)
        rows.append(_Round(ceiling, reader, core, profile, again))
    report.ceiling_gbps = statistics.median(row.ceiling.gbps for row in rows)
    report.ceiling_core_s_per_gb = statistics.median(row.ceiling.core_s_per_gb for row in rows)
    report.reader_gbps = statistics.median(row.reader_gbps for row in rows)
    report.reader_core_s_per_gb = statistics.median(row.reader_core_s_per_gb for row in rows)
    figures = [row.profile.as_json(tokens, row.ceiling.gbps) for row in rows]
    report.decode = {name: _median([f[name] for f in figures]) for name in figures[0]}
    pairs = [(row.profile.gbps, row.again.gbps) for row in rows if row.again is not None]
    report.again_gbps = statistics.median(alone for _, alone in pairs) if pairs else None
    shares = [rate / alone for rate, alone in pairs]
    report.decode["of_again"] = statistics.median(shares) if shares else None
    report.rounds = [row.as_json(tokens) for row in rows]


@dataclass(frozen=True, slots=True)
class _Round:
    ceiling: DiskRate
    reader_gbps: float
    reader_core_s_per_gb: float
    profile: Profile
    again: DiskRate | None

    def as_json(self, tokens: int) -> dict[str, float | None]:
        return {
            "ceiling_gbps": self.ceiling.gbps,
            "reader_gbps": self.reader_gbps,
            "again_gbps": None if self.again is None else self.again.gbps,
            "gbps": self.profile.gbps,
            "tokens_per_s": tokens / self.profile.wall_s,
        }


def last_of(requests: list[Extent], num_bytes: int) -> list[Extent]:
    """Give the last requests, those that read about so many bytes."""
    total = 0
    for at in range(len(requests) - 1, -1, -1):
        total += requests[at].num_bytes
        if total >= num_bytes:
            return requests[at:]
    return requests


def drop_cached(paths: list[Path]) -> None:
    """Drop the page cache's share of files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _decode(llm: LLM, tokens: int) -> Profile:
    prompt: list[int] = np.random.default_rng().integers(0, 500, 3).tolist()  # other experts
    done = llm.generate(prompt, max_tokens=tokens + 1, temperature=0, ignore_eos=True)
    llm.wait_for_reads()
    return done.stats.decode


def _median(values: list[Any]) -> Any:
    """Give the median of figures, of each in tables."""
    if isinstance(values[0], dict):
        names = {name for value in values for name in value}
        return {n: _median([value.get(n, 0) for value in values]) for n in sorted(names)}
    return statistics.median(values)


class ExpertReads:
    """The reader alone, on experts in random order, sixteen under way."""

    def __init__(self, folder: Path) -> None:
        self._layouts = read_needs(open_checkpoint(folder)).layouts
        keys = self._layouts.keys
        if not keys:
            raise UsageError(f"{folder}: has no experts to read")
        self._keys = random.sample(keys, min(len(keys), 8 * AT_ONCE))
        sizes = [place(self._layouts(*key).extents)[1] for key in self._keys]
        self._slot = max(sizes)
        self.memory: Bytes = reserve(self._slot * AT_ONCE)
        self.memory[::BLOCK] = 0  # taken now, so that the memory plan knows of it
        self.huge_page_share: float | None = None
        self._reader = Reader(Spans())
        self._weight: Weight | None = None

    def weight(self, ops: Ops) -> Weight:
        """Give one matrix of an expert, to measure products with; read once."""
        if self._weight is None:
            layout = self._layouts(*self._keys[0])
            starts, size = place(layout.extents)
            memory = reserve(size)
            self._reader.wait([self._reader.submit(layout.extents, memory)])
            part = layout.matrices["w1"]
            parts = tuple(find(memory, layout.extents, starts, a, b) for a, b in part.ranges)
            self._weight = ops.resident(Weight(part.format, part.shape, parts))
        return self._weight

    def measure(self) -> tuple[float, float]:
        """Read the experts once: GB/s and core-seconds a GB."""
        wanted = [self._layouts(*key).extents for key in self._keys]
        done = sum(extent.num_bytes for extents in wanted for extent in extents)
        slots = [self.memory[n * self._slot : (n + 1) * self._slot] for n in range(AT_ONCE)]
        start, cpu = time.perf_counter(), time.process_time()
        flying: list[Ticket] = []
        for number, extents in enumerate(wanted):
            if len(flying) == AT_ONCE:
                self._reader.wait([flying.pop(0)])
            flying.append(self._reader.submit(extents, slots[number % AT_ONCE]))
        self._reader.wait(flying)
        taken, cpu = time.perf_counter() - start, time.process_time() - cpu
        huge = huge_bytes(self.memory)
        self.huge_page_share = None if huge is None else huge / max(1, self.memory.nbytes)
        return done / taken / 1e9, cpu / (done / 1e9)

    def close(self) -> None:
        self._reader.close()
