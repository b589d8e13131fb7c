"""`finback bench`: this machine's limits and how near finback comes to them."""

from typing import TYPE_CHECKING, Annotated

import typer

from finback.cli import output

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
