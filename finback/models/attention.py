"""Multi-head latent attention without positions, in absorbed form over one latent row a token.

Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1; the output gate is Kimi K3's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from finback.checkpoint.formats import Array
from finback.checkpoint.hf import Fields
from finback.kernels.ops import Ops
from finback.models.base import Run, TokenBatch
from finback.models.layers import Norm, in_blocks
from finback.models.state import LatentState
from finback.models.weights import TensorSpec, Weights

LATENT_EPS = 1e-6  # the two latent norms are built without the config's rms_norm_eps


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Sizes of one latent-attention layer."""

    width: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    extra_dim: int  # published as qk_rope_head_dim; never rotated in these models
    value_dim: int
    has_gate: bool

    @classmethod
    def read(cls, config: Fields) -> "MlaShape":
        """Read the sizes from a (text) config.

        Raises:
            CheckpointError: A value is missing or impossible, or asks for rotated positions.
        """
        if not config.flag("mla_use_nope"):
            raise config.error(
                "mla_use_nope", "is false: rotary positions are not supported for this family"
            )
        return cls(
            width=config.integer("hidden_size"),
            num_heads=config.integer("num_attention_heads", high=1 << 16),
            q_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
            kv_rank=config.integer("kv_lora_rank"),
            nope_dim=config.integer("qk_nope_head_dim", high=1 << 16),
            extra_dim=config.integer("qk_rope_head_dim", high=1 << 16),
            value_dim=config.integer("v_head_dim", high=1 << 16),
            has_gate=config.flag("mla_use_output_gate"),
        )

    @property
    def row_width(self) -> int:
        """Count the values remembered of one token."""
        return self.kv_rank + self.extra_dim

    def tensors(self, prefix: str) -> Iterator[TensorSpec]:
        """List the tensors of one layer."""
        heads, width = self.num_heads, self.width
        queries = heads * (self.nope_dim + self.extra_dim)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.q_rank is None:
            shapes["q_proj"] = (queries, width)
        else:
            shapes["q_a_proj"] = (self.q_rank, width)
            shapes["q_a_layernorm"] = (self.q_rank,)
            shapes["q_b_proj"] = (queries, self.q_rank)
        shapes["kv_a_proj_with_mqa"] = (self.row_width, width)
        shapes["kv_a_layernorm"] = (self.kv_rank,)
        shapes["kv_b_proj"] = (heads * (self.nope_dim + self.value_dim), self.kv_rank)
        if self.has_gate:
            shapes["g_proj"] = (heads * self.value_dim, width)
        shapes["o_proj"] = (width, heads * self.value_dim)
        for name, shape in shapes.items():
            is_lift = name == "kv_b_proj"  # split by head and used from both sides
            full = f"{prefix}{name}.weight"
            yield TensorSpec(full, shape, "attention", as_values=is_lift)


class Mla:
    """One latent-attention layer."""

    def __init__(
        self, shape: MlaShape, layer: int, weights: Weights, prefix: str, ops: Ops
    ) -> None:
        """Load the layer's weights."""
        self.shape, self.layer, self._ops = shape, layer, ops
        self._has_query_rank = shape.q_rank is not None
        first = "q_a_proj" if self._has_query_rank else "q_proj"
        names = [first, "kv_a_proj_with_mqa", *(["g_proj"] if shape.has_gate else [])]
        self._in = tuple(weights.matrix(f"{prefix}{name}.weight") for name in names)
        if self._has_query_rank:
            self._q_b = weights.matrix(f"{prefix}q_b_proj.weight")
            self._q_norm = Norm(weights, f"{prefix}q_a_layernorm.weight", LATENT_EPS, ops)
        self._kv_norm = Norm(weights, f"{prefix}kv_a_layernorm.weight", LATENT_EPS, ops)
        lift = weights.values(f"{prefix}kv_b_proj.weight")
        lift = lift.reshape(shape.num_heads, shape.nope_dim + shape.value_dim, shape.kv_rank)
        self._key = np.ascontiguousarray(lift[:, : shape.nope_dim])
        self._value = np.ascontiguousarray(lift[:, shape.nope_dim :])
        self._o = weights.matrix(f"{prefix}o_proj.weight")

    def new_state(self) -> LatentState:
        """Make the memory of a sequence that has seen nothing."""
        return LatentState(self.shape.row_width)

    def state_shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Give the shape of this layer's part of a state."""
        return {"rows": (position, self.shape.row_width)}

    def __call__(self, u: Array, tokens: TokenBatch) -> Array:
        """Compute rows (T, D) -> (T, D), extending each sequence's latent rows."""
        with tokens.states_of(self.layer):
            return in_blocks(self._rows, u, tokens)

    def _rows(self, u: Array, runs: tuple[Run, ...]) -> Array:
        ops, shape = self._ops, self.shape
        q, down, *gate = ops.linears(u, self._in)
        if self._has_query_rank:
            q = ops.linear(self._q_norm(q), self._q_b)
        q = q.reshape(len(u), shape.num_heads, shape.nope_dim + shape.extra_dim)
        latent = self._kv_norm(np.ascontiguousarray(down[:, : shape.kv_rank]))
        rows = np.concatenate([latent, down[:, shape.kv_rank :]], axis=1)
        out = np.empty((len(u), shape.num_heads, shape.value_dim), np.float32)
        scale = float(shape.nope_dim + shape.extra_dim) ** -0.5
        for run in runs:
            state = run.state.enter(self.layer, lambda _: self.new_state())
            seen = state.append(rows[run.rows])
            out[run.rows] = ops.latent_attention(q[run.rows], seen, self._key, self._value, scale)
            if not run.is_cut:
                run.state.leave(self.layer)
        joined = out.reshape(len(u), -1)
        if gate:
            joined = ops.gated(joined, gate[0])
        return ops.linear(joined, self._o)
