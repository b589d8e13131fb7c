"""Running a model directly, without an engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finback.checkpoint.index import open_checkpoint
from finback.config import EngineConfig
from finback.kernels.ops import Ops
from finback.kernels.reference import Reference
from finback.models.base import Model, Run, TokenBatch
from finback.models.loading import Loaded, load_model, read_needs
from finback.models.state import SequenceState
from finback.planner.memory import plan_memory
from finback.spans import Spans


@dataclass
class Recorder:
    """A probe that keeps what it sees."""

    layers: list[np.ndarray] = field(default_factory=list)
    routes: dict[int, np.ndarray] = field(default_factory=dict)

    def hidden(self, layer: int, x: np.ndarray) -> None:
        assert layer == len(self.layers)
        self.layers.append(x.copy())

    def routed(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        self.routes[layer] = ids.copy()


def load(folder: Path, ops: Ops | None = None, **options: Any) -> Model:
    """Load a model, with the reference backend unless another is given."""
    return load_all(folder, ops, **options).model


def load_all(
    folder: Path, ops: Ops | None = None, spans: Spans | None = None, **options: Any
) -> Loaded:
    """Load a model with what it reads from; `options` are fields of EngineConfig."""
    backend = Reference() if ops is None else ops
    config, needs = EngineConfig(**options), read_needs(open_checkpoint(folder))
    plan = plan_memory(needs, config, backend)
    return load_model(needs, plan, backend, spans or Spans(), config)


def extend(
    model: Model, state: SequenceState, ids: Any, probe: Recorder | None = None
) -> np.ndarray:
    """Push ids through a model as one batch: logits of every row."""
    tokens = np.asarray(ids, np.int64)
    run = Run(state, 0, len(tokens))
    out = logits_of(model, TokenBatch(tokens, (run,), np.arange(len(tokens)), probe))
    state.position += len(tokens)
    return out


def logits_of(model: Model, tokens: TokenBatch) -> np.ndarray:
    """Run a batch, and give the logits of the rows it wants."""
    rows = model.forward(tokens)
    none = np.empty((0, model.shape.vocab_size), np.float32)
    return np.concatenate([none, *model.logits(rows, 16)])


def in_chunks(model: Model, ids: Any, size: int) -> np.ndarray:
    """Push ids through a model `size` at a time."""
    state = SequenceState()
    return np.concatenate(
        [extend(model, state, ids[n : n + size]) for n in range(0, len(ids), size)]
    )
