"""`finback bench`: this machine's limits and how near finback comes to them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finback.cli import output
from finback.cli.run import ContextOption, MemoryOption, SpineOption
from finback.errors import UsageError
from finback.units import human_bytes

if TYPE_CHECKING:
    from finback.bench.kernels import KernelReport

app = typer.Typer(
    no_args_is_help=True, help="Measure this machine's limits and finback beside them."
)


@app.command("kernels")
def kernels(
    rounds: Annotated[int, typer.Option(help="Rounds to take the median of.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the products beside memory's read rate and NumPy's matrix rate of the same run."""
    from finback.bench.kernels import measure_kernels

    report = measure_kernels(rounds=rounds, progress=lambda text: output.talk(output.dim(text)))
    if as_json:
        output.json_data(report.as_json())
    else:
        output.data(_as_text(report))


@app.command("peers")
def peers(
    model: Annotated[
        Path,
        typer.Argument(
            help="A Kimi K3 checkpoint that fits into memory three times; where there is none, "
            "a small one of random weights is written there.",
            metavar="DIR",
        ),
    ],
    tokens: Annotated[int, typer.Option(help="Tokens a round.", min=2)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds to take the median of.", min=1)] = 5,
    threads: Annotated[
        int | None, typer.Option(help="Threads of both; all cores if left out.", min=1)
    ] = None,
    from_disk: Annotated[
        bool, typer.Option("--from-disk", help="Compare a model larger than memory.")
    ] = False,
    sequences: Annotated[
        int, typer.Option(help="With --from-disk: answers written at the same time.", min=1)
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Decode beside llama.cpp: the same weights, everything in memory, rounds in turn.

    Needs the oracle extra. The weights are written a second time, as DIR.gguf. With --from-disk
    each round is a process of its own; run it in a control group that limits memory.
    """
    from finback.bench.peers import compare_from_disk, compare_with_llama_cpp

    if sequences > 1 and not from_disk:
        raise UsageError("--sequences belongs to --from-disk")
    gguf = model.with_name(model.name + ".gguf")

    def progress(text: str) -> None:
        output.talk(output.dim(text))

    if from_disk:
        report = compare_from_disk(
            model, gguf, tokens, rounds, threads, sequences=sequences, progress=progress
        )
    else:
        report = compare_with_llama_cpp(model, gguf, tokens, rounds, threads, progress)
    if as_json:
        output.json_data(report.as_json())
        return
    rows = [
        (name, f"{rate:.2f}", f"{report.of_llama_cpp[name]:.2f}")
        for name, rate in report.tokens_per_s.items()
    ]
    output.data(
        f"{report.threads} threads, {human_bytes(report.bytes_per_token)} touched per token; "
        f"medians of {rounds} rounds of {report.tokens} tokens.\n\n"
        + output.table(("engine", "tokens/s", "of llama.cpp"), rows)
    )


@app.command("stream")
def stream(
    model: Annotated[Path, typer.Argument(help="A model folder.", metavar="DIR")],
    memory: MemoryOption = "auto",
    spine: SpineOption = "published",
    tokens: Annotated[int, typer.Option(help="Tokens a round.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds to take the median of.", min=1)] = 5,
    cold: Annotated[bool, typer.Option("--cold", help="Drop cached pages first.")] = False,
    guesses: Annotated[
        bool, typer.Option("--guesses/--no-guesses", help="Read ahead what may be wanted.")
    ] = True,
    threads: Annotated[int | None, typer.Option(help="Computing threads.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure decoding from disk beside this disk's ceiling, in one run."""
    from finback.bench.stream import measure_stream
    from finback.hub.local import find_model

    report = measure_stream(
        find_model(model),
        tokens,
        rounds,
        cold,
        lambda text: output.talk(output.dim(text)),
        memory=memory,
        spine=spine,
        guesses=guesses,
        max_sequences=1,
        threads=threads,
    )
    if as_json:
        output.json_data(report.as_json())
        return
    d = report.decode
    share = d["of_again"]
    again = "" if share is None else f", {share:.2f} of the same reads alone"
    output.data(
        f"disk      {report.ceiling_gbps:.2f} GB/s; the reader alone {report.reader_gbps:.2f} "
        f"({report.reader_gbps / report.ceiling_gbps:.2f} of it), "
        f"{report.reader_core_s_per_gb:.3f} core-seconds per GB, plain threads "
        f"{report.ceiling_core_s_per_gb:.3f}\n"
        f"decode    {d['tokens_per_s']:.3g} tokens/s, {human_bytes(d['bytes_per_token'])} read "
        f"per token, {d['gbps']:.2f} GB/s ({d['of_ceiling']:.2f} of the disk"
        f"{again})\n"
        f"seconds   {d['wall_s']:.2f}: computing {d['compute_s']:.2f}, waiting "
        f"{d['wait_s']:.2f}, other {d['other_s']:.2f}; reading {d['read_s']:.2f} beside it\n"
        f"experts   {d['hit_rate']:.0%} were in memory, {report.expert_slots} slots; "
        f"{report.streamed_groups} layers read for every token\n"
        f"memory    {human_bytes(report.peak_memory_bytes)} at most, "
        f"{human_bytes(report.budget_bytes)} allowed; loaded in {report.load_s:.2f} s"
    )


@app.command("batch")
def batch(
    model: Annotated[Path, typer.Argument(help="A model folder.", metavar="DIR")],
    memory: MemoryOption = "auto",
    spine: SpineOption = "published",
    sequences: Annotated[
        str, typer.Option(help="Numbers of sequences to compare, with commas between.")
    ] = "1,8,32,64",
    tokens: Annotated[int, typer.Option(help="Tokens of each sequence a round.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds to take the median of.", min=1)] = 5,
    context: ContextOption = 64,
    resident: Annotated[
        int | None,
        typer.Option(help="States that stay in memory; the others are spilled.", min=1),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Drop cached pages first.")] = False,
    threads: Annotated[int | None, typer.Option(help="Computing threads.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure many sequences in one pass beside what disk and arithmetic allow, in one run."""
    from finback.bench.batch import measure_batch
    from finback.hub.local import find_model

    report = measure_batch(
        find_model(model),
        _numbers(sequences),
        tokens,
        rounds,
        cold,
        lambda text: output.talk(output.dim(text)),
        memory=memory,
        spine=spine,
        context=context,
        resident_sequences=resident,
        threads=threads,
    )
    if as_json:
        output.json_data(report.as_json())
        return
    rows = [
        (
            str(r.sequences),
            f"{r.tokens_per_s:.3g}",
            f"{r.speedup:.2f}",
            f"{r.bound_tokens_per_s:.3g}",
            f"{r.of_bound:.2f}",
            human_bytes(r.expert_bytes_per_token),
            human_bytes(r.union_bytes_per_step),
            f"{r.step_s:.2f}",
            f"{r.wait_s:.2f}",
            human_bytes(r.state_spill_bytes),
        )
        for r in report.rows
    ]
    header = (
        "sequences",
        "tokens/s",
        "speedup",
        "bound",
        "of bound",
        "read per token",
        "used per step",
        "s per step",
        "waiting",
        "spilled",
    )
    output.data(
        f"disk {report.ceiling_gbps:.2f} GB/s, products {report.matrix_gflops:.0f} GFLOP/s with "
        f"experts, {report.spine_gflops:.0f} with the rest; "
        f"{human_bytes(report.peak_memory_bytes)} at most of "
        f"{human_bytes(report.budget_bytes)}; medians of {rounds} rounds\n\n"
        + output.table(header, rows)
    )


@app.command("draft")
def draft(
    model: Annotated[Path, typer.Argument(help="A model folder.", metavar="DIR")],
    memory: MemoryOption = "auto",
    spine: SpineOption = "published",
    tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=2)] = 96,
    rounds: Annotated[int, typer.Option(help="Rounds to take the median of.", min=1)] = 3,
    cold: Annotated[bool, typer.Option("--cold", help="Drop cached pages first.")] = False,
    threads: Annotated[int | None, typer.Option(help="Computing threads.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure drafts beside none, where a text repeats its prompt with edits, and in prose."""
    from finback.bench.draft import measure_drafts
    from finback.hub.local import find_model

    report = measure_drafts(
        find_model(model),
        tokens,
        rounds,
        cold,
        lambda text: output.talk(output.dim(text)),
        memory=memory,
        spine=spine,
        threads=threads,
        max_sequences=1,
        context=4 * tokens,
    )
    if as_json:
        output.json_data(report.as_json())
        return
    rows = [
        (
            r.task,
            r.drafts,
            f"{r.tokens_per_s:.3g}",
            f"{r.speedup:.2f}",
            f"{r.tokens_per_step:.2f}",
            f"{r.stood:g} of {r.drafted:g}",
        )
        for r in report.rows
    ]
    header = ("task", "drafts", "tokens/s", "speedup", "tokens a pass", "stood")
    output.data(output.table(header, rows, left=(0, 1)))


@app.command("state")
def state(
    model: Annotated[Path, typer.Argument(help="A model folder.", metavar="DIR")],
    memory: MemoryOption = "auto",
    spine: SpineOption = "published",
    tokens: Annotated[int, typer.Option(help="Of the prefix that is restored.", min=16)] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds to take the median of.", min=1)] = 5,
    threads: Annotated[int | None, typer.Option(help="Computing threads.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure keeping and restoring states beside the disk, and restoring beside computing."""
    from finback.bench.state import measure_state
    from finback.hub.local import find_model

    report = measure_state(
        find_model(model),
        rounds,
        tokens,
        lambda text: output.talk(output.dim(text)),
        memory=memory,
        spine=spine,
        threads=threads,
        context=tokens + 64,
    )
    if as_json:
        output.json_data(report.as_json())
        return
    r = report
    output.data(
        f"Kimi K3   {human_bytes(r.k3_state_bytes)} of state: kept in {r.k3_save_s:.2f} s, "
        f"restored in {r.k3_restore_s:.2f} s, {r.k3_restore_gbps:.2f} GB/s of the disk's "
        f"{r.ceiling_gbps:.2f} ({r.of_ceiling:.2f}); into new memory "
        f"{r.k3_first_restore_gbps:.2f}\n"
        f"prefix    {r.prefix_tokens} tokens computed in {r.prefill_s:.2f} s, restored in "
        f"{r.restore_s:.4f} s ({r.restore_speedup:.0f} times faster)\n"
        f"drafts    going back in a state of Kimi K3's size takes {r.go_back_s * 1e3:.2f} ms, "
        f"{r.go_back_of_step:.2%} of a step of this model"
    )


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"--sequences {text!r}: give numbers with commas between, as 1,8,32")
    return numbers


def _as_text(report: "KernelReport") -> str:
    reads = ", ".join(
        f"{g:.1f} GB/s ({t} thread{'s' if t != '1' else ''})"
        for t, g in report.memory_read_gbps.items()
    )
    rows = [
        (
            f"{r.weights} × {r.activations}",
            str(r.threads),
            str(r.rows),
            f"{r.gbps:.1f}",
            f"{r.of_memory_read:.2f}",
            f"{r.gflops:.0f}",
            f"{r.of_sgemm:.2f}",
        )
        for r in report.rows
    ]
    header = ("weights × activations", "threads", "rows", "GB/s", "of read", "GFLOP/s", "of sgemm")
    return (
        f"{report.isa}; memory read by threads: {reads}. GB/s are of packed weights, sgemm is\n"
        "NumPy's float32 product of the same shape; medians. A busy machine gives odd shares.\n\n"
        f"{output.table(header, rows)}"
    )
