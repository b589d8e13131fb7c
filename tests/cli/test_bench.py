"""`finback bench kernels` gives the figures it promises."""

import pytest

from finback.bench.kernels import PRODUCTS, measure_kernels
from finback.kernels.library import instruction_sets

pytestmark = pytest.mark.skipif(
    not instruction_sets(), reason="needs the native library: install a C compiler and reinstall"
)


def test_a_report_has_every_product_beside_its_limits() -> None:
    report = measure_kernels(row_counts=(1, 17), rounds=1, memory_bytes=1).as_json()
    assert list(report["memory_read_gbps"])[0] == "1"
    threads = len(report["memory_read_gbps"])
    assert len(report["rows"]) == threads * 2 * len(PRODUCTS)
    for row in report["rows"]:
        assert row["gbps"] > 0
        memory = report["memory_read_gbps"][str(row["threads"])]
        assert row["of_memory_read"] == pytest.approx(row["gbps"] / memory)
        sgemm = report["sgemm_gflops"][str(row["threads"])][str(row["rows"])]
        assert row["of_sgemm"] == pytest.approx(row["gflops"] / sgemm)
