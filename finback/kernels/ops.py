"""The operations a backend offers, with their shapes. All activations are float32, rows are tokens.

Row r of every result depends on row r of the inputs alone, with the same bits whatever the other
rows are. T tokens, D width, N outputs, H heads, K head width, E experts, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from finback.checkpoint.formats import Array, Weight
from finback.config import Activations

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between an expert's gate and up products.

    `silu`: silu(g)·u. `situ`: β·tanh(g/β)·sigmoid(g) · λ·tanh(u/λ), with u itself where λ is None.
    Source of situ: docs/architecture.md, "The model".
    """

    kind: Literal["silu", "situ"]
    beta: float = 1.0
    linear_beta: float | None = None


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How a router turns scores into experts and weights; see `Ops.route`."""

    top_k: int
    activation: Literal["sigmoid", "softmax"]
    renormalise: bool
    scale: float
    num_groups: int = 1
    top_groups: int = 1


Feed = Mapping[str, Weight]  # a gated feed-forward: w1 gate, w2 down, w3 up
Experts = Mapping[int, Feed]  # by number


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """What Kimi delta attention has besides matrices; C = H·K channels, J taps."""

    taps: Array  # (3, J, C) of q, k and v; the last tap multiplies the current token
    dt_bias: Array  # (C,) added to the decay's input
    a_log: Array  # (H,)
    norm: Array  # (K,)
    bound: float | None  # with it the log decay is bound·sigmoid(e^a·x), else -e^a·softplus(x)
    eps: float  # of the norm
    derived: dict[str, object] = field(default_factory=dict)  # what a backend keeps with it


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRows:
    """A sequence's tokens as the matrices of its layer gave them, before anything else."""

    q: Array  # (T, C), as are k, v, decay and gate
    k: Array
    v: Array
    decay: Array
    beta: Array  # (T, H)
    gate: Array

    def part(self, rows: slice) -> "DeltaRows":
        """Give some of the tokens; a view."""
        return DeltaRows(*(array[rows] for array in self.arrays))

    def copy(self) -> "DeltaRows":
        """Give the same in memory of its own."""
        return DeltaRows(*(array.copy() for array in self.arrays))

    def followed_by(self, later: "DeltaRows") -> "DeltaRows":
        """Give these tokens and later ones."""
        pairs = zip(self.arrays, later.arrays, strict=True)
        return DeltaRows(*(np.concatenate(pair) for pair in pairs))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """List the arrays in their order."""
        return (self.q, self.k, self.v, self.decay, self.beta, self.gate)

    @property
    def num_bytes(self) -> int:
        """Count the bytes."""
        return sum(array.nbytes for array in self.arrays)


# How rows are rounded before a product with quantised weights; 0 leaves them float32.
ACTIVATION_BITS: Mapping[Activations, int] = {"float32": 0, "int16": 16, "int8": 8}
ACTIVATION_GROUP = 32  # columns under one scale


class Ops(Protocol):
    """A backend."""

    name: str
    activations: Activations
    keeps_published_bytes: bool  # or resident weights grow to float32

    @property
    def description(self) -> str:
        """Say for people what computes, and on how much."""
        ...

    def resident(self, weight: Weight) -> Weight:
        """Take a weight that will stay in memory, in whatever format this backend computes on."""
        ...

    def linear(self, x: Array, weight: Weight) -> Array:
        """Multiply rows with a matrix: x (T, D), weight (N, D) -> x·Wᵀ (T, N)."""
        ...

    def linears(self, x: Array, weights: tuple[Weight, ...]) -> list[Array]:
        """Multiply the same rows with several matrices, each as `linear` does."""
        ...

    def embed(self, ids: Ids, weight: Weight) -> Array:
        """Look up rows: ids (T,), weight (V, D) -> (T, D)."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Scale to unit root mean square, then by `weight`: x (…, D), weight (D,) -> (…, D)."""
        ...

    def mix(self, entries: list[Array], weight: Array, norm: Array, eps: float) -> Array:
        """Fold entries, each (T, D), by a softmax over their normalised products with `weight`.

        The result is normalised with the weight `norm`, as by `rms_norm`.
        """
        ...

    def mlp(self, x: Array, feed: Feed, activation: Activation) -> Array:
        """Run a gated feed-forward: w2·glu(w1·x, w3·x), x (T, D) -> (T, D)."""
        ...

    def experts(
        self, x: Array, ids: Ids, experts: Experts, activation: Activation, parts: Array
    ) -> None:
        """Run experts for the rows that chose them, each as `mlp` does.

        x (T, D), ids (T, k); where an id is among `experts`, its result is written to parts
        (T, k, D), the rest is left as it is.
        """
        ...

    def add_experts(
        self, x: Array, ids: Ids, shares: Array, experts: Experts, activation: Activation, y: Array
    ) -> None:
        """Run experts for the rows that chose them, and add share · result to y (T, D).

        x (T, D), ids and shares (T, k). Experts are added in the order given; in ascending order,
        in one call or several, they give the bits of `experts` and `combine`.
        """
        ...

    def combine(self, parts: Array, ids: Ids, shares: Array) -> Array:
        """Sum parts (T, k, D) with shares (T, k), in ascending order of ids (T, k): -> (T, D)."""
        ...

    def route(self, logits: Array, bias: Array | None, rule: RouterRule) -> tuple[Ids, Array]:
        """Choose experts: logits (T, E), bias (E,) -> ids (T, k) best first, weights (T, k).

        The bias takes part in the choice only. Equal scores go to the lower number.
        """
        ...

    def gated(self, x: Array, gate: Array) -> Array:
        """Multiply with the logistic function of a gate of the same shape."""
        ...

    def delta_attention(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        history: Array,
        state: Array,
        kept: int | None = None,
    ) -> Array:
        """Run Kimi delta attention token by token: -> (T, C), before the output matrix.

        Short convolutions with SiLU, unit lengths, decay, gated delta rule, norm and gate.
        `history` (3, J-1, C), the last inputs of q, k and v, and `state` (H, K, K), key by
        value, are advanced in place by the first `kept` tokens, by all if None.
        """
        ...

    def latent_attention(
        self, q: Array, rows: Array, key: Array, value: Array, scale: float
    ) -> Array:
        """Attend causally over latent rows, in absorbed form.

        q (T, H, N + X), the part to be lifted first; rows (S, r + X), whose last T belong to
        these tokens; key (H, N, r) and value (H, M, r) lift a latent to a head -> (T, H, M).
        """
        ...
