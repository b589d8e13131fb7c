"""What a family gives, what a step computes, and how a checkpoint finds its family."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol

import numpy as np
import numpy.typing as npt

import finback.models
from finback.checkpoint.formats import Array
from finback.checkpoint.hf import Fields
from finback.checkpoint.index import Checkpoint
from finback.errors import UnsupportedModel
from finback.kernels.ops import Ids, Ops
from finback.models.state import SequenceState, StateSpill
from finback.models.weights import TensorSpec, Weights
from finback.storage.cache import ExpertCache

BLOCK_ROWS = 256  # computed together where a layer takes rows in turn
HEAD_ROWS = 64  # whose logits are in memory together
ALIASES: Mapping[str, str] = {}  # renamed twins: published model_type -> file here


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What can be said about a model from its config alone. Bytes are of float32 states."""

    num_layers: int
    width: int
    vocab_size: int
    max_positions: int
    routed_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    state_bytes: int
    state_bytes_per_token: int
    part_bytes: int  # the most of a state that one layer has,
    part_bytes_per_token: int  # and for each token
    draft_bytes: int  # of a sequence's state for each draft that is not settled
    row_bytes: int  # of a row of a step, through all layers
    block_row_bytes: int  # besides, of each of the rows that are computed together in a layer


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of a batch that belong to one sequence."""

    state: SequenceState
    start: int
    stop: int
    is_cut: bool = False  # more rows of the sequence follow in the same step
    held: int = 0  # of the rows at the end: they do not enter the state before the next step

    @property
    def rows(self) -> slice:
        """Select these rows of the batch."""
        return slice(self.start, self.stop)


class Probe(Protocol):
    """Looks on during a step, for tests and traces. Must not change what it is given."""

    def hidden(self, layer: int, x: Array) -> None:
        """See the running sum (T, D) after a layer."""
        ...

    def routed(self, layer: int, ids: Ids, weights: Array) -> None:
        """See the chosen experts (T, k), best first, and their weights."""
        ...


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What one step computes: tokens of any number of sequences, flattened."""

    ids: Ids  # (T,)
    runs: tuple[Run, ...]
    wanted: npt.NDArray[np.int64]  # (R,) rows whose logits are wanted, ascending
    probe: Probe | None = None
    spill: StateSpill | None = None  # has the states that are not in memory

    def states_of(self, layer: int) -> AbstractContextManager[None]:
        """Have all states' parts of a layer in memory."""
        if self.spill is None:
            return nullcontext()
        return self.spill.lease(layer, [run.state for run in self.runs])

    def blocks(self, size: int = BLOCK_ROWS) -> Iterator[tuple[slice, tuple[Run, ...]]]:
        """Cut the rows into pieces of at most `size`, each with the parts of runs it holds.

        A run with several rows held, which is short, stays in one piece.
        """
        start = 0
        while start < len(self.ids):
            stop = min(start + size, len(self.ids))
            for run in self.runs:
                if run.held > 1 and start < run.start < stop < run.stop:
                    stop = run.start
            yield (
                slice(start, stop),
                tuple(
                    Run(
                        run.state,
                        max(run.start, start) - start,
                        min(run.stop, stop) - start,
                        run.is_cut or run.stop > stop,
                        max(0, min(run.stop, stop) - max(run.stop - run.held, start)),
                    )
                    for run in self.runs
                    if run.start < stop and run.stop > start
                ),
            )
            start = stop


class Model(Protocol):
    """A loaded model."""

    shape: ModelShape

    def forward(self, tokens: TokenBatch) -> Array:
        """Push rows through all layers, advancing the states: -> what the head takes (R, D)."""
        ...

    def state_shapes(self, position: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """Give the shapes of all parts of a state after `position` tokens, by layer and kind."""
        ...

    def settle(self, state: SequenceState) -> None:
        """Let drafts that stand enter every layer, so that the state is of one boundary."""
        ...

    def logits(self, rows: Array, at_once: int) -> Generator[Array]:
        """Turn rows (R, D) into logits, `at_once` rows at a time: -> (at_once, V) float32.

        The head is in memory until the iterator ends or is closed.
        """
        ...


class Layout(Protocol):
    """A family's reading of one config."""

    shape: ModelShape
    skipped: tuple[str, ...]  # prefixes of tensors that are not part of the text model

    def tensors(self) -> Iterable[TensorSpec]:
        """List every tensor the model needs."""
        ...

    def build(self, weights: Weights, experts: ExpertCache, ops: Ops) -> Model:
        """Load what stays in memory and make the model."""
        ...


def read_layout(checkpoint: Checkpoint) -> Layout:
    """Find the family named by `model_type` and let it read the config.

    Raises:
        UnsupportedModel: No file here bears that name.
        CheckpointError: A value of the config is missing or impossible.
    """
    return read_layout_of(checkpoint.config, f"{checkpoint.folder / 'config.json'}: ")


def read_layout_of(config: Mapping[str, object], where: str) -> Layout:
    """Read a bare config; `where` begins its errors. Raises as `read_layout`."""
    model_type = config.get("model_type")
    read = _families().get(ALIASES.get(str(model_type), str(model_type)))
    if read is None:
        known = ", ".join(sorted([*_families(), *ALIASES]))
        raise UnsupportedModel(
            f"{where}model_type {model_type!r} is not supported; finback runs {known}"
        )
    return read(Fields(config, where))


def _families() -> dict[str, Callable[[Fields], Layout]]:
    """Find the families: the modules beside this one that say how to read a config."""
    found = {}
    for module in iter_modules(finback.models.__path__):
        read = getattr(import_module(f"finback.models.{module.name}"), "read_config", None)
        if read is not None:
            found[module.name] = read
    return found
