"""Decoding beside llama.cpp: the same weights, everything in memory, rounds in turn.

llama.cpp comes from the registry (`pip install finback[oracle]`: xllamacpp and gguf), keeps the
checkpoint's types and may repack them, as it does by default. It runs in a process of its own,
loaded once; between its rounds it only waits.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finback.bench.stream import drop_cached
from finback.checkpoint.index import open_checkpoint
from finback.config import Activations
from finback.errors import FinbackError, UsageError
from finback.kernels.library import available_threads
from finback.llm import LLM
from finback.planner.footprint import measure_footprint
from finback.planner.synth import cut_down, find_config, synthesise

PROMPT = [5, 17, 99]
# All 16 experts of four routed layers, and a spine of as much again: about 1.7 GB a token.
SMALL: dict[str, Any] = {
    "layers": 5,
    "hidden": 1536,
    "experts": 16,
    "changes": {"vocab_size": 32000},
}
WAYS: tuple[Activations, ...] = ("int16", "int8", "float32")


@dataclass(slots=True)
class PeerReport:
    """Tokens a second of every engine: medians, and all rounds."""

    threads: int
    tokens: int
    bytes_per_token: int
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    of_llama_cpp: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Give the report as plain values."""
        return asdict(self)


def compare_with_llama_cpp(
    folder: Path,
    gguf: Path,
    tokens: int = 32,
    rounds: int = 5,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> PeerReport:
    """Decode with both, in alternating rounds.

    Args:
        folder: A K3 checkpoint that fits into memory three times; written where there is none.
        gguf: The same as GGUF; written if it is not there.
        tokens: Tokens a round.
        rounds: Rounds of each engine; medians are reported.
        threads: Computing threads of both; all cores if None.
        progress: Told what is being done.

    Raises:
        UsageError: The registry packages are not installed.
        FinbackError: llama.cpp did not run.
    """
    _require_packages()
    threads = threads or available_threads()
    if not folder.exists():
        progress(f"writing random weights to {folder}")
        synthesise(folder, cut_down(find_config("kimi-k3"), **SMALL))
    _write_gguf(folder, gguf, progress)
    footprint = measure_footprint(open_checkpoint(folder))
    spine = footprint.spine_bytes - footprint.bytes_by_role["embedding"]
    report = PeerReport(threads, tokens, footprint.expert_bytes_per_token + spine)
    with ExitStack() as stack:
        progress("loading")
        engines: dict[str, Callable[[], float]] = {}
        for way in WAYS:
            options: dict[str, Any] = {"threads": threads, "activations": way}
            llm = stack.enter_context(LLM(folder, **options))
            engines[f"finback {way}"] = lambda llm=llm: _decode(llm, tokens)  # type: ignore[misc]
        peer = stack.enter_context(_LlamaCpp(gguf, threads))
        engines["llama.cpp"] = lambda: peer.decode(tokens)
        for run in engines.values():
            run()
        for number in range(rounds):
            for name, run in engines.items():
                progress(f"round {number + 1} of {rounds}: {name}")
                report.rounds.setdefault(name, []).append(run())
    report.tokens_per_s = {n: statistics.median(r) for n, r in report.rounds.items()}
    theirs = report.tokens_per_s["llama.cpp"]
    report.of_llama_cpp = {n: rate / theirs for n, rate in report.tokens_per_s.items()}
    return report


def compare_from_disk(
    folder: Path,
    gguf: Path,
    tokens: int = 6,
    rounds: int = 5,
    threads: int | None = None,
    memory: str = "auto",
    sequences: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> PeerReport:
    """Decode a model larger than memory with both, one process after the other.

    Run it where memory is limited for all processes together, in a control group. llama.cpp maps
    its file; its repacking copies all weights into memory and so is left out as a second engine,
    which counts as 0 where it is killed. Loading is not timed.

    Args:
        folder: A K3 checkpoint larger than the memory.
        gguf: The same as GGUF; written if it is not there.
        tokens: Tokens a round.
        rounds: Rounds of each engine; medians are reported.
        threads: Computing threads of both; all cores if None.
        memory: finback's budget.
        sequences: Answered at the same time. Of several, the rate is that of all their tokens, with
            their short prompts in the time.
        progress: Told what is being done.

    Raises:
        UsageError: The registry packages are not installed.
    """
    _require_packages()
    threads = threads or available_threads()
    _write_gguf(folder, gguf, progress)
    checkpoint = open_checkpoint(folder)
    footprint = measure_footprint(checkpoint)
    spine = footprint.spine_bytes - footprint.bytes_by_role["embedding"]
    report = PeerReport(threads, tokens, footprint.expert_bytes_per_token + spine)
    files = [folder / name for name in checkpoint.files]
    engines = {
        "finback int16": ["finback", str(folder), memory],
        "llama.cpp --repack 0": ["llama.cpp", str(gguf), "mapped"],
        "llama.cpp": ["llama.cpp", str(gguf), "default"],
    }
    for number in range(rounds):
        for name, (engine, path, how) in engines.items():
            if report.rounds.get(name) == [0.0]:
                continue  # killed: it will be again
            progress(f"round {number + 1} of {rounds}: {name}")
            drop_cached([*files, gguf])
            command = [sys.executable, "-m", "finback.bench.peers", engine, path, str(threads), how]
            command.append(str(sequences))
            done = subprocess.run(
                command, input=f"{tokens}\n", capture_output=True, text=True, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            rate = json.loads(lines[-1])["tokens_per_s"] if lines else 0.0
            report.rounds.setdefault(name, []).append(rate)
    report.tokens_per_s = {n: statistics.median(r) for n, r in report.rounds.items()}
    theirs = max(rate for name, rate in report.tokens_per_s.items() if "llama" in name)
    report.of_llama_cpp = {
        n: rate / theirs if theirs else 0.0 for n, rate in report.tokens_per_s.items()
    }
    return report


def _write_gguf(folder: Path, gguf: Path, progress: Callable[[str], None]) -> None:
    if gguf.exists():
        return
    from finback.bench.gguf_writer import write_gguf

    progress("writing the same weights as GGUF")
    part = gguf.with_suffix(".part")
    write_gguf(folder, part, keep_types=True)
    part.replace(gguf)


def _decode(llm: LLM, tokens: int) -> float:
    done = llm.generate(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True)
    return done.stats.tokens_per_s


def _require_packages() -> None:
    from importlib.util import find_spec

    if any(find_spec(name) is None for name in ("gguf", "xllamacpp")):
        raise UsageError("llama.cpp is not installed; pip install 'finback[oracle]'")


class _LlamaCpp:
    """A process that decodes when told to."""

    def __init__(self, gguf: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "finback.bench.peers",
                "llama.cpp",
                str(gguf),
                str(threads),
                "default",
                "1",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def decode(self, tokens: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                rate: float = json.loads(line)["tokens_per_s"]
                return rate
        raise FinbackError(f"llama.cpp ended with code {self._process.wait()}")

    def __enter__(self) -> "_LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _serve(engine: str, path: str, threads: int, how: str, sequences: int) -> None:
    """Be the other process: decode so many tokens for each number on standard input."""
    make = _finback if engine == "finback" else _llama
    decode = make(path, threads, how, sequences)
    for line in sys.stdin:
        print(json.dumps({"tokens_per_s": decode(int(line))}), flush=True)


def _prompts(sequences: int) -> list[list[int]]:
    return [[PROMPT[0] + number, *PROMPT[1:]] for number in range(sequences)]


def _finback(path: str, threads: int, memory: str, sequences: int) -> Callable[[int], float]:
    llm = LLM(path, threads=threads, memory=memory, max_sequences=sequences, context=64)
    if sequences == 1:
        return lambda tokens: _decode(llm, tokens)

    def decode(tokens: int) -> float:
        start = time.perf_counter()
        llm.generate(_prompts(sequences), max_tokens=tokens, temperature=0, ignore_eos=True)
        return sequences * tokens / (time.perf_counter() - start)

    return decode


def _llama(path: str, threads: int, how: str, sequences: int) -> Callable[[int], float]:
    import xllamacpp  # type: ignore[import-untyped,import-not-found,unused-ignore]

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256 * sequences, sequences, 0
    params.warmup = False
    if how == "mapped":
        params.no_extra_bufts = True
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def answer(prompt: list[int], tokens: int) -> float:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        rate: float = server.handle_completions(body)["timings"]["predicted_per_second"]
        return rate

    def decode(tokens: int) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(sequences) as pool:
            rates = list(pool.map(answer, _prompts(sequences), [tokens] * sequences))
        taken = time.perf_counter() - start
        return rates[0] if sequences == 1 else sequences * tokens / taken

    return decode


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
