"""Many sequences in one pass beside what disk and arithmetic allow, in one run.

The bound of a round is counted, not fitted: bytes that were read at the disk's ceiling, and
multiplications that were done at this machine's matrix rates (of experts as they are stored, and of
bfloat16 for the rest); the larger of the two, as if the other were hidden behind it. Where layers
are read again for every step a ceiling of random pieces is none: there the bytes count at the rate
of the same requests alone. Rounds of all numbers of sequences alternate; medians.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from finback.bench.stream import ExpertReads, drop_cached, last_of
from finback.checkpoint.formats import Weight
from finback.checkpoint.index import open_checkpoint
from finback.config import SamplingParams
from finback.errors import UsageError
from finback.kernels.ops import Ops
from finback.llm import LLM
from finback.models.loading import Needs, read_needs
from finback.spans import Profile
from finback.storage.memory import peak_bytes
from finback.storage.probe import measure_again, measure_ceiling

MATRIX_ROWS = 64  # of the products that this machine's matrix rate is measured with
PROMPT = 3  # tokens


@dataclass(slots=True)
class BatchRow:
    """One number of sequences; medians over the rounds."""

    sequences: int
    tokens_per_s: float = 0.0
    speedup: float = 0.0  # over one sequence
    bound_tokens_per_s: float = 0.0
    of_bound: float = 0.0
    expert_bytes_per_token: float = 0.0
    spine_bytes_per_token: float = 0.0
    union_bytes_per_step: float = 0.0  # of all experts that a step uses, in memory or not
    state_spill_bytes: float = 0.0  # written in a step, and read again in the next
    read_term_s: float = 0.0  # a step's bytes at the ceiling
    compute_term_s: float = 0.0  # a step's multiplications at the matrix rate
    step_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class BatchReport:
    """All numbers of sequences, and the limits of the same run."""

    ceiling_gbps: float = 0.0
    # Of the same requests alone: the disk's limit where layers are read again for every step.
    again_gbps: float | None = None
    matrix_gflops: float = 0.0  # with experts
    spine_gflops: float = 0.0  # with bfloat16
    rows: list[BatchRow] = field(default_factory=list)
    budget_bytes: int = 0
    peak_memory_bytes: int = 0
    plan: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Give the report as plain values."""
        return asdict(self)


def measure_batch(
    folder: Path,
    sequences: Sequence[int] = (1, 8, 32, 64),
    tokens: int = 4,
    rounds: int = 5,
    cold: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> BatchReport:
    """Decode with different numbers of sequences.

    Args:
        folder: A checkpoint, best of several times the memory.
        sequences: How many at once.
        tokens: Steps of each round.
        rounds: Of all numbers in turn.
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
    needs, report = read_needs(checkpoint), BatchReport()
    progress("loading")
    with (
        closing(ExpertReads(folder)) as experts,
        LLM(folder, max_sequences=max(sequences), **options) as llm,
    ):
        if llm.plan.max_sequences < max(sequences):
            raise UsageError(
                f"{folder}: {max(sequences)} sequences need more memory than there is; "
                f"{llm.plan.max_sequences} fit"
            )
        report.budget_bytes, report.plan = llm.plan.budget, dict(llm.plan.parts)
        limits: list[_Limits] = []
        found: dict[int, list[BatchRow]] = {count: [] for count in sequences}
        flops = flops_per_token(needs)
        decode(llm, max(sequences), 1)
        for number in range(rounds):
            for count in sequences:
                progress(f"round {number + 1} of {rounds}: {count} sequences")
                profile, limit = _measure_round(llm, experts, paths, needs, count, tokens)
                limits.append(limit)
                found[count].append(_row(profile, count, tokens, flops, limit, needs.slot_bytes))
    report.ceiling_gbps = statistics.median(limit.ceiling_gbps for limit in limits)
    agains = [limit.again_gbps for limit in limits if limit.again_gbps is not None]
    report.again_gbps = statistics.median(agains) if agains else None
    rates = zip(*(limit.matrix_gflops for limit in limits), strict=True)
    report.matrix_gflops, report.spine_gflops = map(statistics.median, rates)
    report.rows = [_median_row(count, rows) for count, rows in found.items()]
    for row in report.rows:
        row.speedup = row.tokens_per_s / report.rows[0].tokens_per_s
    report.peak_memory_bytes = peak_bytes()
    return report


def _measure_round(
    llm: LLM, experts: ExpertReads, paths: list[Path], needs: Needs, count: int, tokens: int
) -> tuple[Profile, "_Limits"]:
    """Measure the limits of this machine, and what a number of sequences makes of them."""
    ceiling = measure_ceiling(paths, memory=experts.memory)
    if ceiling is None:
        raise UsageError(f"{llm.folder}: too small to measure a disk with")
    rates = measure_matrices(llm.ops, experts.weight(llm.ops), needs)
    with llm.record_reads() as requests:
        profile = decode(llm, count, tokens)
    again = None
    if llm.plan.streamed:  # of which the ceiling on random pieces is none
        again = measure_again(last_of(requests, profile.bytes_read), memory=experts.memory)
    return profile, _Limits(ceiling.gbps, None if again is None else again.gbps, rates)


def decode(llm: LLM, count: int, tokens: int) -> Profile:
    """Extend `count` sequences by `tokens` each, all in every step; prompts are not counted."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens + 2)
    rng = np.random.default_rng()
    numbers = [llm.engine.add(rng.integers(0, 500, PROMPT).tolist(), params) for _ in range(count)]
    try:
        begun: set[int] = set()
        while len(begun) < count:
            begun |= {delta.number for delta in llm.engine.step()}
        start = llm.spans.snapshot()
        for _ in range(tokens):
            llm.engine.step()
        return llm.spans.since(start)
    finally:
        for number in numbers:
            llm.engine.abort(number)
        llm.wait_for_reads()


def measure_matrices(ops: Ops, expert: Weight, needs: Needs) -> tuple[float, float]:
    """Measure products of many rows with an expert's matrix, and with one in bfloat16: GFLOP/s."""
    width = needs.layout.shape.width
    values = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32)
    upper = values.view(np.uint8).reshape(width, width, 4)[..., 2:]
    plain = Weight("bf16", (width, width), (np.ascontiguousarray(upper).reshape(-1),))
    return _measure_matrix(ops, expert), _measure_matrix(ops, ops.resident(plain))


def _measure_matrix(ops: Ops, weight: Weight, seconds: float = 0.3) -> float:
    x = np.random.default_rng(0).standard_normal((MATRIX_ROWS, weight.shape[1])).astype(np.float32)
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        ops.linear(x, weight)
        taken = time.perf_counter() - start
        rates.append(2 * MATRIX_ROWS * prod(weight.shape) / taken / 1e9)
    return statistics.median(rates)


@dataclass(frozen=True, slots=True)
class _Limits:
    ceiling_gbps: float
    again_gbps: float | None
    matrix_gflops: tuple[float, float]  # of experts, of the rest


def flops_per_token(needs: Needs) -> tuple[float, float]:
    """Count what a token multiplies and adds with matrices: of experts, of the rest."""
    spine = experts = 0
    for stored in needs.check.stored:
        spec = stored.spec
        if spec.expert is not None:
            experts += prod(spec.shape)
        elif len(spec.shape) == 2 and spec.role not in ("embedding", "residual", "norm"):
            spine += prod(spec.shape)
    shape = needs.layout.shape
    return 2.0 * experts * shape.top_k / max(1, shape.num_experts), 2.0 * spine


def _row(
    profile: Profile,
    count: int,
    tokens: int,
    flops: tuple[float, float],
    limits: _Limits,
    slot_bytes: int,
) -> BatchRow:
    counts = profile.counts
    spine, experts = counts.get("bytes_read_spine", 0), counts.get("bytes_read_expert", 0)
    spilled = counts.get("bytes_spilled", 0)
    states = counts.get("bytes_read_state", 0) + spilled
    read = (spine + experts + states) / (limits.again_gbps or limits.ceiling_gbps) / 1e9
    per_token = sum(f / rate / 1e9 for f, rate in zip(flops, limits.matrix_gflops, strict=True))
    compute = count * tokens * per_token
    bound = count * tokens / max(read, compute)
    rate = count * tokens / profile.wall_s
    return BatchRow(
        sequences=count,
        tokens_per_s=rate,
        bound_tokens_per_s=bound,
        of_bound=rate / bound,
        expert_bytes_per_token=experts / count / tokens,
        spine_bytes_per_token=spine / count / tokens,
        state_spill_bytes=spilled / tokens,
        union_bytes_per_step=counts.get("experts_used", 0) * slot_bytes / tokens,
        read_term_s=read / tokens,
        compute_term_s=compute / tokens,
        step_s=profile.wall_s / tokens,
        wait_s=profile.wait_s / tokens,
    )


def _median_row(count: int, rows: list[BatchRow]) -> BatchRow:
    names = [name for name in asdict(rows[0]) if name != "sequences"]
    values = {name: statistics.median(getattr(row, name) for row in rows) for name in names}
    return BatchRow(sequences=count, **values)
