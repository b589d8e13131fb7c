"""From a checkpoint to a model that can run."""

from dataclasses import dataclass
from math import prod

from finback.checkpoint.index import Checkpoint
from finback.errors import CapacityError
from finback.kernels.ops import Ops
from finback.models.base import Model, read_layout
from finback.models.weights import TensorCheck, Weights, check_tensors
from finback.spans import Spans
from finback.storage.cache import ExpertCache
from finback.storage.memory import available_bytes
from finback.storage.reader import Reader
from finback.units import human_bytes


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
        CapacityError: What every token uses does not fit into memory.
    """
    layout = read_layout(checkpoint)
    check = check_tensors(checkpoint, layout.tensors())
    check.raise_if_broken(str(checkpoint.folder))
    _refuse_what_does_not_fit(checkpoint, check, ops)
    reader = Reader(spans)
    try:
        weights = Weights(checkpoint, check, reader, ops)
        experts = ExpertCache(weights.expert_layout, reader, spans, expert_cache_bytes)
        return Loaded(layout.build(weights, experts, ops), experts, reader)
    except BaseException:
        reader.close()
        raise


def _refuse_what_does_not_fit(checkpoint: Checkpoint, check: TensorCheck, ops: Ops) -> None:
    """Compare the spine, as this backend keeps it, with the memory there is."""
    spine = [stored for stored in check.stored if stored.spec.expert is None]
    if ops.keeps_published_bytes:
        needed = sum(stored.num_bytes for stored in spine)
    else:
        needed = sum(4 * prod(stored.spec.shape) for stored in spine)
    available = available_bytes()
    if available is not None and needed > available:
        raise CapacityError(
            f"{checkpoint.folder}: what every token uses takes {human_bytes(needed)}, "
            f"{human_bytes(available)} of memory are free; close other programs, or take a machine "
            "with more memory. Streaming this part from disk is not supported yet."
        )
