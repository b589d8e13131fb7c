"""The operations a backend offers, with their shapes. All activations are float32, rows are tokens.

Row r of every result depends on row r of the inputs alone, with the same bits whatever the other
rows are. T tokens, D width, N outputs, H heads, K head width, E experts, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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


Experts = Mapping[int, Mapping[str, Weight]]  # by number: w1 gate, w2 down, w3 up

# How rows are rounded before a product with quantised weights; 0 leaves them float32.
ACTIVATION_BITS: Mapping[Activations, int] = {"float32": 0, "int16": 16, "int8": 8}
ACTIVATION_GROUP = 32  # columns under one scale


class Ops(Protocol):
    """A backend."""

    name: str
    activations: Activations
    keeps_published_bytes: bool  # or resident weights grow to float32

    def resident(self, weight: Weight) -> Weight:
        """Take a weight that will stay in memory, in whatever format this backend computes on."""
        ...

    def linear(self, x: Array, weight: Weight) -> Array:
        """Multiply rows with a matrix: x (T, D), weight (N, D) -> x·Wᵀ (T, N)."""
        ...

    def embed(self, ids: Ids, weight: Weight) -> Array:
        """Look up rows: ids (T,), weight (V, D) -> (T, D)."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Scale to unit root mean square, then by `weight`: x (…, D), weight (D,) -> (…, D)."""
        ...

    def mix(self, entries: list[Array], weight: Array, eps: float) -> Array:
        """Fold entries, each (T, D), by a softmax over their normalised products with `weight`."""
        ...

    def glu(self, gate: Array, up: Array, activation: Activation) -> Array:
        """Join a gated pair element by element: (T, N), (T, N) -> (T, N)."""
        ...

    def experts(
        self, x: Array, ids: Ids, experts: Experts, activation: Activation, parts: Array
    ) -> None:
        """Run experts for the rows that chose them: w2·glu(w1·x, w3·x).

        x (T, D), ids (T, k); where an id is among `experts`, its result is written to parts
        (T, k, D), the rest is left as it is.
        """
        ...

    def combine(self, parts: Array, shares: Array) -> Array:
        """Sum parts (T, k, D) with shares (T, k), in the order of k: -> (T, D)."""
        ...

    def route(self, logits: Array, bias: Array | None, rule: RouterRule) -> tuple[Ids, Array]:
        """Choose experts: logits (T, E), bias (E,) -> ids (T, k) best first, weights (T, k).

        The bias takes part in the choice only. Equal scores go to the lower number.
        """
        ...

    def short_conv(self, x: Array, history: Array, taps: Array) -> Array:
        """Convolve each channel causally, then SiLU: x (T, C), taps (J, C) -> (T, C).

        The last tap multiplies the current token. `history` (J-1, C) becomes the last rows.
        """
        ...

    def unit(self, x: Array, scale: float) -> Array:
        """Scale the last axis to length one (with 1e-6 under the root), then by `scale`."""
        ...

    def decay(self, x: Array, a_log: Array, bound: float | None) -> Array:
        """Give the log decay of KDA: x (T, H, K), a_log (H,) -> (T, H, K), all below zero.

        bound·sigmoid(e^a·x) with a (negative) bound, -e^a·softplus(x) without.
        """
        ...

    def sigmoid(self, x: Array) -> Array:
        """Apply the logistic function element by element."""
        ...

    def gated(self, x: Array, gate: Array) -> Array:
        """Multiply with the logistic function of a gate of the same shape."""
        ...

    def delta_rule(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array
    ) -> Array:
        """Run the gated delta rule token by token.

        q, k, v, decay (T, H, K), beta (T, H) -> (T, H, K). `state` (H, K, K), key by value, is
        advanced in place.
        """
        ...

    def latent_attention(
        self, q: Array, q_extra: Array, rows: Array, key: Array, value: Array, scale: float
    ) -> Array:
        """Attend causally over latent rows, in absorbed form.

        q (T, H, N) and q_extra (T, H, X); rows (S, r + X), whose last T belong to these tokens;
        key (H, N, r) and value (H, M, r) lift a latent to a head -> (T, H, M).
        """
        ...
