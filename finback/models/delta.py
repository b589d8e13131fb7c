"""Kimi delta attention: short convolutions, a decay per channel, and the gated delta rule.

Source: Kimi Team 2025, "Kimi Linear: an expressive, efficient attention architecture"; the bounded
decay and the full-rank gate are Kimi K3's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from finback.checkpoint.formats import Array, Weight
from finback.checkpoint.hf import Fields
from finback.kernels.ops import Ops
from finback.models.base import TokenBatch
from finback.models.layers import Norm
from finback.models.state import RecurrentState
from finback.models.weights import TensorSpec, Weights

PADDED_HEADS = 128  # K3 publishes A_log padded with zeros to a multiple of this


@dataclass(frozen=True, slots=True)
class KdaShape:
    """Sizes of one delta-attention layer."""

    width: int
    num_heads: int
    head_dim: int
    num_taps: int
    bound: float | None  # with it the decay is bound·sigmoid, without it -exp·softplus
    full_rank_gate: bool
    eps: float

    @classmethod
    def read(cls, config: Fields) -> "KdaShape":
        """Read the sizes from a (text) config and its `linear_attn_config`."""
        linear = config.section("linear_attn_config")
        bound = None
        if linear.has("gate_lower_bound"):
            bound = linear.number("gate_lower_bound", low=-100.0, high=-1e-6)
        return cls(
            width=config.integer("hidden_size"),
            num_heads=linear.integer("num_heads", high=1 << 16),
            head_dim=linear.integer("head_dim", high=1 << 16),
            num_taps=linear.integer("short_conv_kernel_size", low=2, high=64),
            bound=bound,
            full_rank_gate=linear.flag("use_full_rank_gate"),
            eps=config.number("rms_norm_eps", low=0.0, high=1.0),
        )

    @property
    def inner(self) -> int:
        """Count the channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        """Count the float32 bytes of one sequence's state in one layer."""
        return 4 * (self.inner * self.head_dim + 3 * (self.num_taps - 1) * self.inner)

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """List the tensors of one layer."""
        width, inner, heads, dim = self.width, self.inner, self.num_heads, self.head_dim
        matrices = {name: (inner, width) for name in ("q_proj", "k_proj", "v_proj")}
        if self.full_rank_gate:
            matrices["g_proj"] = (inner, width)
        else:
            matrices |= {"g_a_proj": (dim, width), "g_b_proj": (inner, dim)}
        matrices |= {"f_a_proj": (dim, width), "f_b_proj": (inner, dim), "b_proj": (heads, width)}
        matrices["o_proj"] = (width, inner)
        for name, shape in matrices.items():
            yield TensorSpec(f"{prefix}{name}.weight", shape, "attention")
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            shape3, shape2 = (inner, 1, self.num_taps), (inner, self.num_taps)
            yield TensorSpec(f"{prefix}{name}.weight", shape3, "attention", "F32", (shape2,))
        padded = -(-heads // PADDED_HEADS) * PADDED_HEADS
        others = ((heads,), (1, 1, heads, 1))
        yield TensorSpec(f"{prefix}A_log", (padded,), "attention", "F32", others)
        yield TensorSpec(f"{prefix}dt_bias", (inner,), "attention", "F32")
        yield TensorSpec(f"{prefix}o_norm.weight", (dim,), "attention", "F32")


class Kda:
    """One delta-attention layer."""

    def __init__(
        self, shape: KdaShape, layer: int, weights: Weights, prefix: str, ops: Ops
    ) -> None:
        """Load the layer's weights."""
        self.shape, self.layer, self._ops = shape, layer, ops
        self._in = {n: weights.matrix(f"{prefix}{n}_proj.weight") for n in "qkv"}
        self._taps = {}  # (J, C), published as (C, 1, J)
        for n in "qkv":
            taps = weights.values(f"{prefix}{n}_conv1d.weight")
            self._taps[n] = np.ascontiguousarray(taps.reshape(shape.inner, shape.num_taps).T)
        gate = ("g_proj",) if shape.full_rank_gate else ("g_a_proj", "g_b_proj")
        self._gate = [weights.matrix(f"{prefix}{n}.weight") for n in gate]
        self._decay = [weights.matrix(f"{prefix}{n}.weight") for n in ("f_a_proj", "f_b_proj")]
        self._beta = weights.matrix(f"{prefix}b_proj.weight")
        self._a_log = weights.values(f"{prefix}A_log").reshape(-1)[: shape.num_heads]
        self._dt_bias = weights.values(f"{prefix}dt_bias")
        self._o_norm = Norm(weights, f"{prefix}o_norm.weight", shape.eps, ops)
        self._o = weights.matrix(f"{prefix}o_proj.weight")

    def new_state(self) -> RecurrentState:
        """Make the memory of a sequence that has seen nothing."""
        s = self.shape
        history = {n: np.zeros((s.num_taps - 1, s.inner), np.float32) for n in "qkv"}
        return RecurrentState(np.zeros((s.num_heads, s.head_dim, s.head_dim), np.float32), history)

    def __call__(self, u: Array, tokens: TokenBatch) -> Array:
        """Compute rows (T, D) -> (T, D), advancing each sequence's recurrent state."""
        ops, shape = self._ops, self.shape
        raw = {n: ops.linear(u, weight) for n, weight in self._in.items()}
        decay = ops.decay(
            self._heads(self._through(u, self._decay) + self._dt_bias), self._a_log, shape.bound
        )
        beta = ops.sigmoid(ops.linear(u, self._beta))
        out = np.empty((len(u), shape.num_heads, shape.head_dim), np.float32)
        for run in tokens.runs:
            state = run.state.layers[self.layer]
            assert isinstance(state, RecurrentState)
            q, k, v = (
                self._heads(ops.short_conv(raw[n][run.rows], state.history[n], self._taps[n]))
                for n in "qkv"
            )
            q, k = ops.unit(q, float(shape.head_dim) ** -0.5), ops.unit(k, 1.0)
            out[run.rows] = ops.delta_rule(q, k, v, decay[run.rows], beta[run.rows], state.matrix)
        gated = ops.gated(self._o_norm(out), self._heads(self._through(u, self._gate)))
        return ops.linear(gated.reshape(len(u), shape.inner), self._o)

    def _heads(self, x: Array) -> Array:
        return x.reshape(len(x), self.shape.num_heads, self.shape.head_dim)

    def _through(self, x: Array, matrices: list[Weight]) -> Array:
        for matrix in matrices:
            x = self._ops.linear(x, matrix)
        return x
