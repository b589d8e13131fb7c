"""Kimi delta attention: short convolutions, a decay per channel, and the gated delta rule.

Source: Kimi Team 2025, "Kimi Linear: an expressive, efficient attention architecture"; the bounded
decay and the full-rank gate are Kimi K3's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from finback.checkpoint.formats import Array
from finback.checkpoint.hf import Fields
from finback.kernels.ops import DeltaRows, DeltaWeights, Ops
from finback.models.base import Run, TokenBatch
from finback.models.layers import in_blocks
from finback.models.state import RecurrentState
from finback.models.weights import TensorSpec, Weights
from finback.storage.arena import MemoryPool

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
        names = ["q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"]
        names.append("g_proj" if shape.full_rank_gate else "g_a_proj")
        self._in = tuple(weights.matrix(f"{prefix}{name}.weight") for name in names)
        self._decay = weights.matrix(f"{prefix}f_b_proj.weight")
        if not shape.full_rank_gate:
            self._gate = weights.matrix(f"{prefix}g_b_proj.weight")
        taps = [weights.values(f"{prefix}{n}_conv1d.weight") for n in "qkv"]  # (C, 1, J)
        flat = [t.reshape(shape.inner, shape.num_taps).T for t in taps]
        self._rest = DeltaWeights(
            taps=np.ascontiguousarray(np.stack(flat)),
            dt_bias=weights.values(f"{prefix}dt_bias"),
            a_log=weights.values(f"{prefix}A_log").reshape(-1)[: shape.num_heads],
            norm=weights.values(f"{prefix}o_norm.weight"),
            bound=shape.bound,
            eps=shape.eps,
        )
        self._o = weights.matrix(f"{prefix}o_proj.weight")

    def new_state(self, memory: MemoryPool) -> RecurrentState:
        """Make the memory of a sequence that has seen nothing."""
        shapes = self.state_shapes(0)
        return RecurrentState.empty(shapes["matrix"], shapes["history"], memory)

    def state_shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Give the shapes of this layer's part of a state, whatever the position."""
        s = self.shape
        return {
            "matrix": (s.num_heads, s.head_dim, s.head_dim),
            "history": (3, s.num_taps - 1, s.inner),
        }

    def settle(self, state: RecurrentState) -> None:
        """Let drafts that stand enter the matrix."""
        if state.pending is not None:
            rows, state.pending = state.pending, None
            self._ops.delta_attention(rows, self._rest, state.history, state.matrix)

    def __call__(self, u: Array, tokens: TokenBatch) -> Array:
        """Compute rows (T, D) -> (T, D), advancing each sequence's recurrent state."""
        with tokens.states_of(self.layer):
            return in_blocks(self._rows, u, tokens)

    def _rows(self, u: Array, runs: tuple[Run, ...]) -> Array:
        ops = self._ops
        q, k, v, beta, decay, gate = ops.linears(u, self._in)
        decay = ops.linear(decay, self._decay)
        if not self.shape.full_rank_gate:
            gate = ops.linear(gate, self._gate)
        rows, parts = DeltaRows(q, k, v, decay, beta, gate), []
        for run in runs:
            state = run.state.enter(self.layer, self.new_state)
            some = rows if len(runs) == 1 else rows.part(run.rows)
            some, kept, before = state.take(some, len(some.q) - run.held)
            out = ops.delta_attention(some, self._rest, state.history, state.matrix, kept)
            parts.append(out[before:])
            if not run.is_cut:
                run.state.leave(self.layer)
        return ops.linear(parts[0] if len(parts) == 1 else np.concatenate(parts), self._o)
