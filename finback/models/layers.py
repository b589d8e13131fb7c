"""Bricks every family uses: embedding, head, dense feed-forward, norm, a config's activation."""

from collections.abc import Callable, Generator, Iterator

import numpy as np

from finback.checkpoint.formats import Array
from finback.checkpoint.hf import Fields
from finback.kernels.ops import Activation, Ids, Ops
from finback.models.base import BLOCK_ROWS, Run, TokenBatch
from finback.models.weights import Role, TensorSpec, Weights


def read_activation(config: Fields) -> Activation:
    """Read `hidden_act` and SiTU's two bounds."""
    kind = config.choice("hidden_act", ("silu", "situ"))
    if kind == "silu":
        return Activation("silu")
    linear = None
    if config.has("activation_situ_linear_beta"):
        linear = config.number("activation_situ_linear_beta", low=1e-3)
    return Activation("situ", config.number("activation_situ_beta", 1.0, low=1e-3), linear)


def mlp_tensors(prefix: str, width: int, inner: int, role: Role) -> Iterator[TensorSpec]:
    """List the three matrices of a dense feed-forward."""
    yield TensorSpec(f"{prefix}gate_proj.weight", (inner, width), role)
    yield TensorSpec(f"{prefix}up_proj.weight", (inner, width), role)
    yield TensorSpec(f"{prefix}down_proj.weight", (width, inner), role)


def in_blocks(
    compute: Callable[[Array, tuple[Run, ...]], Array], u: Array, tokens: TokenBatch
) -> Array:
    """Compute rows (T, D) -> (T, D), so many at a time that what they need is bounded."""
    if len(u) <= BLOCK_ROWS:
        return compute(u, tokens.runs)
    out = np.empty_like(u)
    for rows, runs in tokens.blocks():
        out[rows] = compute(u[rows], runs)
    return out


class Mlp:
    """A feed-forward that every token goes through: down(glu(gate u, up u))."""

    def __init__(
        self, activation: Activation, weights: Weights, prefix: str, ops: Ops, phase: str = "dense"
    ) -> None:
        """Load the three matrices; `phase` is what its time is counted under."""
        self._activation, self._ops = activation, ops
        self._spans, self._phase = weights.spans, phase
        names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        self._feed = {n: weights.matrix(f"{prefix}{name}.weight") for n, name in names.items()}

    def __call__(self, u: Array, tokens: TokenBatch | None = None) -> Array:
        """Compute rows: (T, D) -> (T, D). Whose they are does not matter here."""
        with self._spans.span(self._phase):
            return self._ops.mlp(u, self._feed, self._activation)


class Norm:
    """A root mean square norm with its weight."""

    def __init__(self, weights: Weights, name: str, eps: float, ops: Ops) -> None:
        """Load the weight."""
        self.weight, self._eps, self._ops = weights.values(name), eps, ops

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis."""
        return self._ops.rms_norm(x, self.weight, self._eps)


class Embedding:
    """Looks tokens up, in memory or in the file."""

    def __init__(self, weights: Weights, name: str, ops: Ops) -> None:
        """Load the matrix, unless its rows are to be read when they are needed."""
        self._weights, self._name, self._ops = weights, name, ops
        self._matrix = None if weights.rows_from_disk else weights.matrix(name)

    def __call__(self, ids: Ids) -> Array:
        """Give rows: (T,) -> (T, D)."""
        with self._weights.spans.span("embedding"):
            if self._matrix is not None:
                return self._ops.embed(ids, self._matrix)
            unique, places = np.unique(ids, return_inverse=True)
            return self._ops.embed(places, self._weights.rows(self._name, unique))


class Head:
    """Turns rows into logits."""

    def __init__(self, weights: Weights, name: str, group: str, ops: Ops) -> None:
        """Load the matrix; `group` is the spine's group that holds it."""
        self._matrix, self._group = weights.matrix(name), group
        self._spine, self._spans, self._ops = weights.spine, weights.spans, ops

    def __call__(self, x: Array, at_once: int) -> Generator[Array]:
        """Give logits, some rows at a time: (R, D) -> (at_once, V) until there are R."""
        if len(x) == 0:
            return
        with self._spine.lease(self._group):
            for start in range(0, len(x), at_once):
                with self._spans.span("head"):
                    logits = self._ops.linear(x[start : start + at_once], self._matrix)
                yield logits
