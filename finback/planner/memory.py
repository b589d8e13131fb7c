"""The memory budget: how much there is, and what each part of it is for.

    budget = interpreter + values + states + rows + spine (whole, or two buffers) + expert slots

Planned before a weight is read, and refused with the least that would work. What every token uses
comes before experts: a byte of it is read again for every step, one of an expert only sometimes.
"""

from dataclasses import dataclass
from math import ceil, log, log1p, prod

from finback.config import SEQUENCES, EngineConfig
from finback.engine.drafts import MOST as MOST_DRAFTS
from finback.errors import CapacityError
from finback.kernels.ops import Ops
from finback.models.base import BLOCK_ROWS, HEAD_ROWS, ModelShape
from finback.models.loading import MemoryPlan, Needs
from finback.storage.memory import Limits, read_limits
from finback.storage.spine import Group, buffer_sizes
from finback.units import human_bytes, parse_bytes

CONTEXT = 16_384  # tokens of a sequence, unless more is asked for
MARGIN = 48 << 20  # threads, fragments, what nobody counts
MOST_OF_STATES, MOST_OF_ROWS = 0.25, 0.125  # shares of the budget
MOST_ASKED = 0.4  # the share of each where a number was asked for
LEAST_ROWS = 256  # of a step, where memory allows
BUFFERED_LAYERS = 3  # of a spilled state: one is written, one computes, one comes
SPARE_SLOTS = 4  # besides the experts of one token, so that reads never wait for computing


def plan_memory(
    needs: Needs,
    config: EngineConfig,
    ops: Ops,
    limits: Limits | None = None,
    reserved: int = 0,
) -> MemoryPlan:
    """Divide the memory there is, less `reserved` bytes for a model that drafts.

    Raises:
        CapacityError: It is not enough; the text says what would be.
        UsageError: `config.memory` is no size.
    """
    limits = read_limits() if limits is None else limits
    budget = _budget(config, limits)
    shape, slot = needs.layout.shape, needs.slot_bytes
    context = min(config.context or CONTEXT, shape.max_positions)
    per_sequence = shape.state_bytes + context * shape.state_bytes_per_token
    if config.drafts != "off":
        per_sequence += MOST_DRAFTS * shape.draft_bytes
    elif config.states is not None:
        per_sequence += shape.draft_bytes  # of the prompt's last token
    fixed = {"interpreter": limits.resident + MARGIN, "values": 2 * needs.values_bytes}
    fixed |= {"drafts": reserved} if reserved else {}
    spine = _Spine.of(needs, ops)
    minimum = fixed | {
        f"one sequence of {context} tokens": per_sequence,
        "one row": rows_bytes(shape, 1),
        spine.least_is: spine.least,
        "one expert": slot,
    }
    spare = budget - sum(minimum.values())
    if spare < 0:
        raise CapacityError(_refusal(needs, minimum, budget, limits.why(config.memory)))
    wanted = min(needs.num_experts, config.expert_slots or shape.top_k + SPARE_SLOTS)
    most_of_states = MOST_OF_STATES if config.max_sequences is None else MOST_ASKED
    more = (config.max_sequences or SEQUENCES) - 1  # than the one that is in the minimum
    part = BUFFERED_LAYERS * max(shape.part_bytes, context * shape.part_bytes_per_token)
    room = int(spare * most_of_states)
    resident, spilled = _sequences(room, more, per_sequence, part, config)
    sequences = resident + spilled
    rows = _rows(shape, config, spare)
    states = resident * per_sequence + spilled * part
    parts = fixed | {"states": states, "rows": rows_bytes(shape, rows)}
    left = budget - sum(parts.values())
    streamed = spine.streamed(left - wanted * slot, config.stream_spine)
    parts["spine"] = spine.bytes_with(streamed)
    slots = (left - parts["spine"]) // slot if slot else 0
    slots = min(slots, needs.num_experts, config.expert_slots or needs.num_experts)
    parts["experts"] = slots * slot
    return MemoryPlan(
        budget=budget,
        parts=parts,
        num_slots=slots,
        streamed=streamed,
        rows_from_disk=bool(streamed),
        max_rows=rows,
        max_sequences=sequences,
        max_resident=resident,
        context=context,
        reads_from_disk=bool(streamed) or slots < needs.num_experts,
    )


def _sequences(
    room: int, more: int, per_sequence: int, part: int, config: EngineConfig
) -> tuple[int, int]:
    """Say how many states stay in memory besides the first, and how many are spilled.

    Spilling is for those that were asked for: each costs a few layers' parts instead of all.
    """
    fit = min(more, room // max(1, per_sequence))
    if config.resident_sequences is not None:
        fit = min(fit, config.resident_sequences - 1)
    if fit == more or config.max_sequences is None or not config.spill:
        return 1 + fit, 0
    if part >= per_sequence and config.resident_sequences is None:
        return 1 + fit, 0  # a model of few layers
    # The most that stay so that the others' parts fit too.
    fit = min(fit, max(0, (room - more * part) // max(1, per_sequence - part)))
    return 1 + fit, min(more - fit, (room - fit * per_sequence) // max(1, part))


def rows_bytes(shape: ModelShape, rows: int) -> int:
    """Give the bytes of a step: of all rows, of a block in a layer, and of some at the head."""
    block, at_head = min(rows, BLOCK_ROWS), min(rows, HEAD_ROWS)
    return rows * shape.row_bytes + block * shape.block_row_bytes + at_head * 4 * shape.vocab_size


def sweep_rows(shape: ModelShape) -> int:
    """Give from how many rows on more of them save hardly any reading of experts.

    B rows of uniform routes use the share 1 − (1 − k/E)^B of a layer's experts. When that is 99 %
    a step reads nearly everything; sixteen times as many rows read a sixteenth of it each.
    """
    if not shape.routed_layers or shape.top_k >= shape.num_experts:
        return LEAST_ROWS
    whole = log(0.01) / log1p(-shape.top_k / shape.num_experts)
    return max(LEAST_ROWS, ceil(16 * whole))


def _rows(shape: ModelShape, config: EngineConfig, spare: int) -> int:
    """Choose the rows of a step: what was asked for or is of use, as far as there is memory."""
    wanted = config.max_rows or sweep_rows(shape)
    share = MOST_OF_ROWS if config.max_rows is None else MOST_ASKED
    room = int(spare * share) + rows_bytes(shape, 1)
    low, high = 1, wanted
    while low < high:  # the largest number that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rows_bytes(shape, middle) <= room else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class _Spine:
    """What every token uses: how little of it there can be in memory, and what stays."""

    groups: list[Group]  # that may be read again for every step
    whole: int  # bytes with everything in memory
    can_stream: bool

    @classmethod
    def of(cls, needs: Needs, ops: Ops) -> "_Spine":
        if not ops.keeps_published_bytes:  # all of it as float32, or nothing
            matrices = (s for s in needs.check.stored if s.spec.expert is None and s.spec.is_matrix)
            return cls([], sum(4 * prod(stored.spec.shape) for stored in matrices), False)
        is_tied = all(group.name != "head" for group in needs.groups)
        # Rows of an embedding that is no head are looked up in the file.
        groups = [g for g in needs.groups if g.name != "embedding" or is_tied]
        return cls(groups, sum(group.num_bytes for group in needs.groups), True)

    @property
    def least(self) -> int:
        """Give the fewest bytes that work."""
        return min(self.bytes_with(self._names), self.whole) if self.can_stream else self.whole

    @property
    def least_is(self) -> str:
        """Say what those are."""
        return "two layers" if self.can_stream else "all layers as float32, without a C compiler"

    def streamed(self, room: int, wanted: bool | None) -> frozenset[str]:
        """Choose what is read again for every step, so that the rest fits into `room`."""
        if not self.can_stream or (self.whole <= room and not wanted):
            return frozenset()
        chosen = set(self._names)
        for group in self.groups if not wanted else ():
            without = frozenset(chosen - {group.name})
            if self.bytes_with(without) <= room:
                chosen.discard(group.name)
        return frozenset(chosen)

    def bytes_with(self, streamed: frozenset[str]) -> int:
        """Count the bytes in memory when some groups are read again for every step."""
        if not streamed:
            return self.whole
        kept = sum(group.num_bytes for group in self.groups if group.name not in streamed)
        return kept + sum(buffer_sizes(self.groups, streamed))

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(group.name for group in self.groups)


def _budget(config: EngineConfig, limits: Limits) -> int:
    """Take the smallest of what was asked for, what the group may have, and what is free."""
    if config.memory == "auto":
        return limits.usable
    return min(limits.usable, parse_bytes(config.memory, limits.total))


def _refusal(needs: Needs, minimum: dict[str, int], budget: int, why: str) -> str:
    parts = ", ".join(f"{human_bytes(size)} for {name}" for name, size in minimum.items())
    return (
        f"{needs.checkpoint.folder}: needs at least {_mib(sum(minimum.values()))}, the budget is "
        f"{_mib(budget)} ({why}); the least is {parts}. Give it more memory, or a smaller --context"
    )


def _mib(size: int) -> str:
    return f"{-(-size // (1 << 20))} MiB"
