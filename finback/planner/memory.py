"""The memory budget: how much there is, and what each part of it is for.

    budget = interpreter + values + states + rows + spine (whole, or two buffers) + expert slots

Planned before a weight is read, and refused with the least that would work. What every token uses
comes before experts: a byte of it is read again for every step, one of an expert only sometimes.
"""

from collections.abc import Sequence
from math import prod

from finback.config import EngineConfig
from finback.errors import CapacityError
from finback.kernels.ops import Ops
from finback.models.loading import MemoryPlan, Needs
from finback.storage.memory import Limits, read_limits
from finback.storage.spine import Group, buffer_sizes
from finback.units import human_bytes, parse_bytes

CONTEXT = 16_384  # tokens of a sequence, unless more is asked for
MARGIN = 48 << 20  # threads, fragments, what nobody counts
MOST_OF_STATES, MOST_OF_ROWS = 0.25, 0.125  # shares of the budget
SPARE_SLOTS = 4  # besides the experts of one token, so that reads never wait for computing


def plan_memory(
    needs: Needs, config: EngineConfig, ops: Ops, limits: Limits | None = None
) -> MemoryPlan:
    """Divide the memory there is.

    Raises:
        CapacityError: It is not enough; the text says what would be.
        UsageError: `config.memory` is no size.
    """
    limits = read_limits() if limits is None else limits
    budget = _budget(config, limits)
    shape = needs.layout.shape
    context = min(config.context or CONTEXT, shape.max_positions)
    per_sequence = shape.state_bytes + context * shape.state_bytes_per_token
    fixed = {"interpreter": limits.resident + MARGIN, "values": 2 * needs.values_bytes}
    if not ops.keeps_published_bytes:
        return _for_numpy(needs, config, budget, fixed, context, per_sequence)
    base = sum(fixed.values())
    sizes = {group.name: group.num_bytes for group in needs.groups}
    is_tied = "head" not in sizes
    groups = [g for g in needs.groups if g.name != "embedding" or is_tied]
    names = frozenset(group.name for group in groups)
    least_spine = min(sum(buffer_sizes(groups, names)), sum(sizes.values()))
    least = base + per_sequence + shape.row_bytes + least_spine + needs.slot_bytes
    if least > budget:
        raise CapacityError(
            f"{needs.checkpoint.folder}: needs at least {_mib(least)}, the budget is "
            f"{_mib(budget)} ({limits.why(config.memory)}); "
            f"the least is {human_bytes(base)} for the process and small weights, "
            f"{human_bytes(per_sequence)} for one sequence of {context} tokens, "
            f"{human_bytes(least_spine)} for two layers and {human_bytes(needs.slot_bytes)} for "
            "one expert. Give it more memory, or a smaller --context"
        )
    wanted = min(needs.num_experts, config.expert_slots or shape.top_k + SPARE_SLOTS)
    spare = budget - least
    max_sequences = 1 + min(
        config.max_sequences - 1, int(spare * MOST_OF_STATES) // max(1, per_sequence)
    )
    max_rows = 1 + min(config.max_rows - 1, int(spare * MOST_OF_ROWS) // shape.row_bytes)
    states, rows = max_sequences * per_sequence, max_rows * shape.row_bytes
    left = budget - base - states - rows
    whole = sum(sizes.values())
    is_whole = whole + wanted * needs.slot_bytes <= left and not config.stream_spine
    if is_whole:
        streamed: frozenset[str] = frozenset()
        spine = whole
    else:
        room = left - min(wanted * needs.slot_bytes, left - least_spine)
        resident = [] if config.stream_spine else _as_many_as_fit(groups, room)
        streamed = names - frozenset(resident)
        spine = sum(sizes[name] for name in resident) + sum(buffer_sizes(groups, streamed))
    slots = max(1, (left - spine) // needs.slot_bytes) if needs.slot_bytes else 0
    slots = min(slots, needs.num_experts, config.expert_slots or needs.num_experts)
    parts = fixed | {
        "states": states,
        "rows": rows,
        "spine": spine,
        "experts": slots * needs.slot_bytes,
    }
    return MemoryPlan(
        budget=budget,
        parts=parts,
        num_slots=slots,
        streamed=streamed,
        rows_from_disk=not is_whole,
        max_rows=max_rows,
        max_sequences=max_sequences,
        context=context,
    )


def _budget(config: EngineConfig, limits: Limits) -> int:
    """Take the smallest of what was asked for, what the group may have, and what is free."""
    most = limits.usable
    if config.memory == "auto":
        return most
    return min(most, parse_bytes(config.memory, limits.total))


def _as_many_as_fit(groups: Sequence[Group], room: int) -> list[str]:
    """Choose groups that stay in memory beside the buffers for the others."""
    chosen: list[str] = []
    size = 0
    for group in groups:
        others = frozenset(g.name for g in groups) - {*chosen, group.name}
        if size + group.num_bytes + sum(buffer_sizes(groups, others)) <= room:
            chosen.append(group.name)
            size += group.num_bytes
    return chosen


def _for_numpy(
    needs: Needs,
    config: EngineConfig,
    budget: int,
    fixed: dict[str, int],
    context: int,
    per_sequence: int,
) -> MemoryPlan:
    """Plan for the backend that keeps matrices as float32: all of them, or not at all."""
    shape = needs.layout.shape
    spine = sum(
        4 * prod(stored.spec.shape)
        for stored in needs.check.stored
        if stored.spec.expert is None and stored.spec.is_matrix
    )
    base = sum(fixed.values()) + per_sequence + shape.row_bytes + spine
    if base + needs.slot_bytes > budget:
        raise CapacityError(
            f"{needs.checkpoint.folder}: without the native library what every token uses takes "
            f"{human_bytes(spine)} as float32, {human_bytes(budget)} of memory may be used; "
            "reinstall finback where there is a C compiler"
        )
    slots = (budget - base) // needs.slot_bytes if needs.slot_bytes else 0
    slots = min(slots, needs.num_experts, config.expert_slots or needs.num_experts)
    parts = fixed | {
        "states": per_sequence,
        "rows": shape.row_bytes,
        "spine": spine,
        "experts": slots * needs.slot_bytes,
    }
    return MemoryPlan(
        budget=budget,
        parts=parts,
        num_slots=slots,
        streamed=frozenset(),
        rows_from_disk=False,
        max_rows=config.max_rows,
        max_sequences=config.max_sequences,
        context=context,
    )


def _mib(size: int) -> str:
    return f"{-(-size // (1 << 20))} MiB"
