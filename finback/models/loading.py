"""From a checkpoint to a model that can run."""

from dataclasses import dataclass

from finback.checkpoint.index import Checkpoint
from finback.kernels.ops import Ops
from finback.models.base import Model, read_layout
from finback.models.weights import Weights, check_tensors
from finback.spans import Spans
from finback.storage.cache import ExpertCache
from finback.storage.reader import Reader


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with what it reads from. Close the reader when done."""

    model: Model
    experts: ExpertCache
    reader: Reader


def load_model(checkpoint: Checkpoint, ops: Ops, spans: Spans, expert_cache_bytes: int) -> Loaded:
    """Check the whole checkpoint, then load what stays in memory.

    Raises:
        CheckpointError: Something is missing, damaged or unsupported; nothing was loaded.
    """
    layout = read_layout(checkpoint)
    check = check_tensors(checkpoint, layout.tensors())
    check.raise_if_broken(str(checkpoint.folder))
    reader = Reader(spans)
    try:
        weights = Weights(checkpoint, check, reader, ops)
        experts = ExpertCache(weights.expert_layout, reader, spans, expert_cache_bytes)
        return Loaded(layout.build(weights, experts, ops), experts, reader)
    except BaseException:
        reader.close()
        raise
