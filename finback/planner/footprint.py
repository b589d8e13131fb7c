"""A model's bytes by role, from its config and index alone where the shards are not there yet."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from finback.checkpoint.index import Checkpoint, compact_names
from finback.models.base import Layout, ModelShape, read_layout
from finback.models.weights import TensorCheck, check_tensors


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a checkpoint holds. `spine` is all that every token uses: everything but the experts."""

    model_type: str
    shape: ModelShape
    num_parameters: int
    tensors_by_role: dict[str, int]
    bytes_by_role: dict[str, int]
    formats: dict[str, str]  # of each role, most bytes first
    expert_bytes_per_token: int
    skipped_tensors: int
    skipped_bytes: int | None
    missing: list[str]
    missing_files: list[str]
    wrong: list[str]
    odd: list[str]  # neither needed nor known to belong to another part

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self.bytes_by_role.get("expert", 0)

    @property
    def spine_bytes(self) -> int:
        """Bytes of everything else."""
        return sum(self.bytes_by_role.values()) - self.expert_bytes

    @property
    def is_complete(self) -> bool:
        """Tell whether the model could be loaded."""
        return not (self.missing or self.missing_files or self.wrong)


def measure_footprint(checkpoint: Checkpoint) -> Footprint:
    """Sum up a checkpoint; nothing but JSON and headers is read.

    Raises:
        CheckpointError: The config or index cannot be read, or no family runs it.
    """
    layout = read_layout(checkpoint)
    check = check_tensors(checkpoint, layout.tensors())
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    formats: dict[str, Counter[str]] = {}
    parameters = 0
    for stored in check.stored:
        role = stored.spec.role
        tensors[role] += len(stored.names)
        sizes[role] += stored.num_bytes
        formats.setdefault(role, Counter())[stored.format] += stored.num_bytes
        parameters += prod(stored.spec.shape)
    skipped = [name for name in check.extra if name.startswith(layout.skipped or ("\0",))]
    return Footprint(
        model_type=str(checkpoint.config["model_type"]),
        shape=layout.shape,
        num_parameters=parameters,
        tensors_by_role=dict(tensors),
        bytes_by_role=dict(sizes),
        formats={
            role: " ".join(f for f, _ in counts.most_common()) for role, counts in formats.items()
        },
        expert_bytes_per_token=_expert_bytes_per_token(check, layout),
        skipped_tensors=len(skipped),
        skipped_bytes=_skipped_bytes(checkpoint, skipped, sum(sizes.values())),
        missing=compact_names(check.missing),
        missing_files=sorted(checkpoint.missing_files),
        wrong=check.wrong,
        odd=compact_names(set(check.extra) - set(skipped)),
    )


def _expert_bytes_per_token(check: TensorCheck, layout: Layout) -> int:
    """Sum up what a token reads when no expert is in memory: top-k mean experts a layer."""
    per_layer: Counter[int] = Counter()
    for stored in check.stored:
        if stored.spec.expert is not None:
            per_layer[stored.spec.expert[0]] += stored.num_bytes
    shape = layout.shape
    return sum(size * shape.top_k // shape.num_experts for size in per_layer.values())


def _skipped_bytes(checkpoint: Checkpoint, skipped: list[str], used: int) -> int | None:
    if not checkpoint.missing_files:
        return sum(checkpoint.tensors[name].num_bytes for name in skipped)
    return None if checkpoint.total_bytes is None else checkpoint.total_bytes - used
