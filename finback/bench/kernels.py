"""Products of the native kernels beside this machine's memory read rate and NumPy's matrix rate."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from finback.checkpoint.formats import FORMATS, Bytes, Weight
from finback.config import Activations
from finback.kernels.cpu import Cpu
from finback.kernels.library import available_threads, read_memory

ROWS, COLUMNS = 3072, 3584  # an expert's gate in Kimi K3
ROW_COUNTS = (1, 2, 4, 8, 16, 64, 256)
PRODUCTS: tuple[tuple[str, Activations], ...] = (
    ("mxfp4", "int8"),
    ("mxfp4", "int16"),
    ("mxfp4", "float32"),
    ("int8", "float32"),
    ("int4", "float32"),
    ("fp8", "float32"),
    ("bf16", "float32"),
    ("f16", "float32"),
    ("f32", "float32"),
)
MEMORY_BYTES = 280_000_000  # more than the caches of most machines
FEW = 16  # up to so many rows a product is bound by memory, so all matrices take part
ROUNDS = 5
SGEMM = """
import json, sys, time
import numpy as np
R, C, rounds = (int(a) for a in sys.argv[1:4])
w = np.ones((R, C), np.float32)
out = {}
for n in map(int, sys.argv[4:]):
    x, times = np.ones((n, C), np.float32), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        x @ w.T
        times.append(time.perf_counter() - start)
    out[n] = 2 * R * C * n / sorted(times[1:])[rounds // 2] / 1e9
print(json.dumps(out))
"""


@dataclass(slots=True)
class KernelRow:
    """One product: rates, and their share of the limits measured in the same run."""

    kernel: str
    weights: str
    activations: str
    rows: int
    threads: int
    gbps: float
    gflops: float
    of_memory_read: float
    of_sgemm: float


@dataclass(slots=True)
class KernelReport:
    """All products, and the limits they are compared with."""

    isa: str
    memory_read_gbps: dict[str, float] = field(default_factory=dict)
    sgemm_gflops: dict[str, dict[str, float]] = field(default_factory=dict)
    rows: list[KernelRow] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Give the report as plain values."""
        return asdict(self)


def measure_kernels(
    row_counts: tuple[int, ...] = ROW_COUNTS,
    rounds: int = ROUNDS,
    memory_bytes: int = MEMORY_BYTES,
    progress: Callable[[str], None] = lambda _: None,
) -> KernelReport:
    """Measure every product at 1 and all threads; medians of alternating rounds."""
    report = KernelReport(Cpu().isa)
    weights = {fmt: list(_weights(fmt, memory_bytes)) for fmt, _ in PRODUCTS}
    for threads in dict.fromkeys((1, available_threads())):
        progress(f"{threads} threads: NumPy")
        sgemm = _sgemm(threads, row_counts, rounds)
        reads: list[float] = []
        times: dict[tuple[str, Activations, int], list[float]] = {}
        for rows in row_counts:
            progress(f"{threads} threads: {rows} rows")
            for _ in range(rounds):
                reads.append(_read_rate(weights["mxfp4"], threads))
                for fmt, activations in PRODUCTS:
                    chosen = weights[fmt] if rows <= FEW else weights[fmt][:2]
                    cpu = Cpu(threads, activations=activations)
                    taken = _seconds(cpu, chosen, rows)
                    times.setdefault((fmt, activations, rows), []).append(taken)
        memory = statistics.median(reads)
        report.memory_read_gbps[str(threads)] = memory
        report.sgemm_gflops[str(threads)] = sgemm
        for (fmt, activations, rows), all_taken in times.items():
            seconds = statistics.median(all_taken)
            gbps = FORMATS[fmt].num_bytes((ROWS, COLUMNS)) / seconds / 1e9
            gflops = 2 * ROWS * COLUMNS * rows / seconds / 1e9
            share = (gbps / memory, gflops / sgemm[str(rows)])
            row = KernelRow("linear", fmt, activations, rows, threads, gbps, gflops, *share)
            report.rows.append(row)
    return report


def _weights(fmt: str, memory_bytes: int) -> Iterator[Weight]:
    """Make enough random matrices to fill a part of memory; values near one, none subnormal."""
    rng = np.random.default_rng(1)
    for _ in range(max(2, memory_bytes // FORMATS[fmt].num_bytes((ROWS, COLUMNS)))):
        yield Weight(fmt, (ROWS, COLUMNS), tuple(_parts(fmt, rng)))


def _parts(fmt: str, rng: np.random.Generator) -> Iterator[Bytes]:
    count = ROWS * COLUMNS
    if fmt == "mxfp4":
        yield rng.integers(0, 256, count // 2, np.uint8)
        yield rng.integers(118, 122, count // 32, np.uint8)
        return
    if fmt in ("int8", "int4", "fp8"):
        # Scales of one: bfloat16 for int4, float32 for the others; no FP8 code that is no number.
        yield rng.integers(0, 0x7F, count // 2 if fmt == "int4" else count, np.uint8)
        scales = np.prod(FORMATS[fmt].part_shapes((ROWS, COLUMNS))[1])
        one = np.array([0x3F80], np.uint16) if fmt == "int4" else np.ones(1, np.float32)
        yield np.repeat(one, scales).view(np.uint8)
        return
    values = rng.random(count, np.float32) - np.float32(0.5)
    if fmt == "bf16":
        yield (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        yield values.astype(np.float16 if fmt == "f16" else np.float32).view(np.uint8)


def _seconds(cpu: Cpu, weights: list[Weight], rows: int) -> float:
    """Time one product with each matrix; give the mean."""
    x = np.random.default_rng(2).standard_normal((rows, COLUMNS)).astype(np.float32)
    start = time.perf_counter()
    for weight in weights:
        cpu.linear(x, weight)
    return (time.perf_counter() - start) / len(weights)


def _read_rate(weights: list[Weight], threads: int) -> float:
    """Read all packed codes once: GB/s."""
    Cpu(threads)
    start = time.perf_counter()
    for weight in weights:
        read_memory(weight.parts[0])
    taken = time.perf_counter() - start
    return sum(weight.parts[0].nbytes for weight in weights) / taken / 1e9


def _sgemm(threads: int, row_counts: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Measure NumPy's float32 product of this shape in its own process: GFLOP/s by rows."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    env |= {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    sizes = map(str, (ROWS, COLUMNS, rounds, *row_counts))
    done = subprocess.run(
        [sys.executable, "-c", SGEMM, *sizes], capture_output=True, text=True, check=True, env=env
    )
    rates: dict[str, float] = json.loads(done.stdout)
    return rates
