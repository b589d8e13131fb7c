"""From a checkpoint to a model that can run, with the memory it was given."""

import logging
from dataclasses import dataclass
from math import prod
from pathlib import Path

from finback.checkpoint.index import Checkpoint, collection_paused
from finback.config import EngineConfig
from finback.errors import DamagedFile
from finback.kernels.ops import Ops
from finback.models.base import Layout, Model, read_layout
from finback.models.weights import (
    ExpertLayouts,
    TensorCheck,
    Weights,
    check_tensors,
    spine_groups,
)
from finback.spans import Spans
from finback.storage.arena import Arena
from finback.storage.cache import ExpertCache
from finback.storage.extents import place
from finback.storage.policies import POLICIES, Distance
from finback.storage.prefetch import Guesses
from finback.storage.reader import Reader
from finback.storage.spine import Group, Spine

logger = logging.getLogger(__name__)
MOST_GUESSES = 3  # experts of a layer: what can be read while the next layer's attention computes


@dataclass(frozen=True, slots=True)
class Needs:
    """A checked checkpoint, and what it needs memory for."""

    checkpoint: Checkpoint
    layout: Layout
    check: TensorCheck
    layouts: ExpertLayouts
    groups: tuple[Group, ...]  # of the spine
    slot_bytes: int  # the largest expert with its borders
    num_experts: int  # in all layers
    values_bytes: int  # what is kept as float32 values


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory is used. Made by the planner, kept by everything below."""

    budget: int
    parts: dict[str, int]  # bytes by what they are for
    num_slots: int
    streamed: frozenset[str]  # groups of the spine that are read again for every step
    rows_from_disk: bool  # the embedding is looked up in its file
    max_rows: int
    max_sequences: int
    max_resident: int  # of them, whose states stay in memory; the others' are spilled
    context: int
    reads_from_disk: bool  # in a step: experts or layers that are not all in memory


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with what it reads from. Close the reader when done."""

    model: Model
    experts: ExpertCache
    spine: Spine
    reader: Reader


def read_needs(checkpoint: Checkpoint) -> Needs:
    """Check a whole checkpoint and sum up what it needs; nothing but headers is read.

    Raises:
        CheckpointError: Something is missing, damaged or unsupported.
    """
    layout = read_layout(checkpoint)
    with collection_paused():
        check = check_tensors(checkpoint, layout.tensors())
        check.raise_if_broken(str(checkpoint.folder))
        layouts = ExpertLayouts(checkpoint, check)
    sizes = [place(layouts(*key).extents)[1] for key in layouts.keys]
    values = sum(
        4 * prod(stored.spec.shape)
        for stored in check.stored
        if stored.spec.expert is None and not stored.spec.is_matrix
    )
    return Needs(
        checkpoint=checkpoint,
        layout=layout,
        check=check,
        layouts=layouts,
        groups=tuple(spine_groups(checkpoint, check)),
        slot_bytes=max(sizes, default=0),
        num_experts=len(sizes),
        values_bytes=values,
    )


def load_model(
    needs: Needs, plan: MemoryPlan, ops: Ops, spans: Spans, config: EngineConfig
) -> Loaded:
    """Load what stays in memory.

    Raises:
        CheckpointError: A file changed, or holds weights that are no numbers.
        ReadError: A device failed.
    """
    reader = Reader(spans, config.read_threads, config.direct_reads)
    try:
        groups = needs.groups if ops.keeps_published_bytes else ()
        if plan.rows_from_disk and any(group.name == "head" for group in groups):
            groups = tuple(group for group in groups if group.name != "embedding")
        spine = Spine(groups, plan.streamed, reader, spans)
        weights = Weights(
            needs.checkpoint, needs.check, reader, ops, spine, spans, plan.rows_from_disk
        )
        shape = needs.layout.shape
        has_all = plan.num_slots >= needs.num_experts
        sizes = shape.num_layers, shape.num_experts, plan.num_slots
        policy = None if has_all else POLICIES[config.policy](*sizes)
        guesses = Guesses(MOST_GUESSES) if config.guesses and not has_all else None
        if config.heat is not None and isinstance(policy, Distance):
            _restore_heat(policy, Path(config.heat))
        arena = Arena(needs.slot_bytes, plan.num_slots)
        experts = ExpertCache(
            needs.layouts, reader, spans, arena, policy, shape.num_experts, guesses
        )
        model = needs.layout.build(weights, experts, ops)
        spine.load()
        weights.check_matrices()
        return Loaded(model, experts, spine, reader)
    except BaseException:
        reader.close()
        raise


def _restore_heat(policy: Distance, path: Path) -> None:
    """Begin with the heat of earlier runs; what cannot be used is said and left alone."""
    if not path.exists():
        return
    try:
        policy.restore(path)
    except DamagedFile as error:
        logger.warning("%s; starting without it", error)
