"""Memory plans: what they add up to, what they give up first, what they refuse."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from finback.checkpoint.index import open_checkpoint
from finback.config import EngineConfig
from finback.errors import CapacityError, UsageError
from finback.hub.local import STORYTELLER
from finback.kernels.cpu import Cpu
from finback.kernels.library import instruction_sets
from finback.kernels.reference import Reference
from finback.models.loading import MemoryPlan, Needs, read_needs
from finback.planner.memory import plan_memory, rows_bytes, sweep_rows
from finback.storage.memory import Limits, peak_bytes, read_limits
from finback.units import parse_bytes
from tests.conftest import DATA

pytestmark = pytest.mark.skipif(
    not instruction_sets(), reason="needs the native library: install a C compiler and reinstall"
)
MIB = 1 << 20
LIMITS = Limits(total=64 << 30, free=48 << 30, group=None, resident=80 * MIB)


@pytest.fixture(scope="module")
def needs() -> Needs:
    """The storyteller, as if each of its groups and experts were a thousand times larger."""
    real = read_needs(open_checkpoint(STORYTELLER))
    for group in real.groups:
        group.num_bytes *= 1000
    return dataclasses.replace(real, slot_bytes=real.slot_bytes * 1000)


def plan(needs: Needs, memory: str, **options: object) -> MemoryPlan:
    config = EngineConfig(memory=memory, max_sequences=1, context=512, **options)  # type: ignore[arg-type]
    return plan_memory(needs, config, Cpu(), LIMITS)


def test_the_parts_stay_within_the_budget_and_more_memory_reads_less(needs: Needs) -> None:
    before: MemoryPlan | None = None
    for gib in (3, 4, 6, 8, 10, 12, 16, 24, 32):
        one = plan(needs, f"{gib}GiB")
        assert sum(one.parts.values()) <= one.budget == gib << 30
        assert one.num_slots >= 1
        if before is not None:
            assert len(one.streamed) <= len(before.streamed)
            if one.streamed == before.streamed:
                assert one.num_slots >= before.num_slots
        before = one
    assert before is not None
    assert not before.streamed
    assert before.num_slots == needs.num_experts


def test_what_every_token_uses_comes_before_experts(needs: Needs) -> None:
    spine = sum(group.num_bytes for group in needs.groups)
    one = plan(needs, str(spine + 400 * MIB + 10 * needs.slot_bytes))
    assert not one.streamed
    assert not one.rows_from_disk
    assert one.num_slots < needs.num_experts


def test_too_little_is_refused_with_the_least_that_works(needs: Needs) -> None:
    with pytest.raises(CapacityError, match=r"needs at least ([0-9]+) MiB") as refused:
        plan(needs, "1GiB")
    least = int(str(refused.value).split("at least ")[1].split(" MiB")[0])
    one = plan(needs, f"{least}MiB")
    assert one.num_slots >= 1
    assert one.max_sequences == 1
    with pytest.raises(CapacityError):
        plan(needs, f"{least - 1}MiB")


def test_the_smallest_limit_counts() -> None:
    needs = read_needs(open_checkpoint(DATA / "tiny-k3"))
    group = dataclasses.replace(LIMITS, group=300 * MIB)
    assert plan_memory(needs, EngineConfig(), Cpu(), group).budget == 300 * MIB
    config = EngineConfig(memory="8GiB")
    assert plan_memory(needs, config, Cpu(), group).budget == 300 * MIB
    config = EngineConfig(memory="25%")
    assert plan_memory(needs, config, Cpu(), LIMITS).budget == 16 << 30


def test_numpy_keeps_everything_or_refuses(needs: Needs) -> None:
    with pytest.raises(CapacityError, match="all layers as float32, without a C compiler"):
        plan_memory(needs, EngineConfig(memory="60MiB"), Reference(), LIMITS)


def test_sequences_and_rows_are_cut_before_anything_is_refused(needs: Needs) -> None:
    config = EngineConfig(memory="4GiB", max_sequences=100_000)
    one = plan_memory(needs, config, Cpu(), LIMITS)
    assert 1 <= one.max_sequences < 100_000
    assert one.parts["states"] <= 0.3 * one.budget


def test_this_machine_can_be_asked() -> None:
    limits = read_limits()
    assert 0 < limits.resident < limits.total
    assert 0 < limits.usable <= limits.free


def test_the_peak_is_of_this_process_and_not_of_the_one_that_started_it() -> None:
    ballast = np.ones(200 * MIB, np.uint8)
    code = "from finback.storage.memory import peak_bytes; print(peak_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5 * MIB < int(done.stdout) < 150 * MIB
    assert peak_bytes() > ballast.nbytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("4 GB", 4 * 10**9), ("1.5g", 3 << 29), ("512M", 512 << 20), ("7", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "101%", "4 parsecs", "1e9", "50%"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        parse_bytes(text)


def test_rows_are_as_many_as_save_reading_and_fit(needs: Needs) -> None:
    shape = needs.layout.shape
    assert sweep_rows(shape) == 847  # 48 experts, 4 used: 53 rows use 99 % of them
    assert plan(needs, "64GiB").max_rows == 847
    small = plan(needs, "4GiB", expert_slots=1)
    assert rows_bytes(shape, small.max_rows) == small.parts["rows"]
    assert plan(needs, "32GiB", max_rows=5000).max_rows == 5000
    huge = dataclasses.replace(shape, row_bytes=100 << 20)
    assert rows_bytes(huge, 2) - rows_bytes(huge, 1) > 100 << 20
    assert sweep_rows(dataclasses.replace(shape, routed_layers=())) == 256
