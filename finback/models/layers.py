"""Bricks every family uses: dense feed-forward, norm, the activation named by a config."""

from collections.abc import Iterator

from finback.checkpoint.formats import Array
from finback.checkpoint.hf import Fields
from finback.kernels.ops import Activation, Ops
from finback.models.base import TokenBatch
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


class Mlp:
    """A feed-forward that every token goes through: down(glu(gate u, up u))."""

    def __init__(self, activation: Activation, weights: Weights, prefix: str, ops: Ops) -> None:
        """Load the three matrices."""
        self._activation, self._ops = activation, ops
        names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        self._feed = {n: weights.matrix(f"{prefix}{name}.weight") for n, name in names.items()}

    def __call__(self, u: Array, tokens: TokenBatch | None = None) -> Array:
        """Compute rows: (T, D) -> (T, D). Whose they are does not matter here."""
        return self._ops.mlp(u, self._feed, self._activation)


class Norm:
    """A root mean square norm with its weight."""

    def __init__(self, weights: Weights, name: str, eps: float, ops: Ops) -> None:
        """Load the weight."""
        self.weight, self._eps, self._ops = weights.values(name), eps, ops

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis."""
        return self._ops.rms_norm(x, self.weight, self._eps)
