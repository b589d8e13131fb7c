"""A routed feed-forward: few of many streamed experts per token, and what stands around them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from finback.checkpoint.formats import Array
from finback.checkpoint.hf import Fields
from finback.kernels.ops import Activation, Experts, Ids, Ops, RouterRule
from finback.models.base import BLOCK_ROWS, TokenBatch
from finback.models.layers import Mlp, Norm, mlp_tensors, read_activation
from finback.models.weights import TensorSpec, Weights
from finback.storage.cache import ExpertCache


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Sizes and rules of a model's routed layers."""

    width: int
    num_experts: int
    inner: int
    latent: int | None  # experts work at this width between two projections
    latent_norm: bool
    shared_inner: int  # all shared experts as one; 0 without any
    activation: Activation
    rule: RouterRule
    eps: float
    first_dense: int
    every: int

    @classmethod
    def read(cls, config: Fields) -> "MoeShape":
        """Read the sizes and the router's rule from a (text) config."""
        num_experts = config.integer("num_experts", high=1 << 16)
        inner = config.integer("moe_intermediate_size")
        if config.has("topk_method"):
            config.choice("topk_method", ("noaux_tc",))
        groups = config.integer("num_expert_group", 1, high=num_experts)
        is_sigmoid = (
            config.choice("moe_router_activation_func", ("sigmoid", "softmax")) == "sigmoid"
        )
        rule = RouterRule(
            top_k=config.integer("num_experts_per_token", high=num_experts),
            activation="sigmoid" if is_sigmoid else "softmax",
            renormalise=config.flag("moe_renormalize", True),
            scale=config.number("routed_scaling_factor", 1.0),
            num_groups=groups,
            top_groups=config.integer("topk_group", groups, high=groups),
        )
        if num_experts % groups or (num_experts // groups) * rule.top_groups < rule.top_k:
            raise config.error(
                "num_expert_group", f"of {groups} does not divide {num_experts} experts usefully"
            )
        latent = (
            config.integer("routed_expert_hidden_size")
            if config.has("routed_expert_hidden_size")
            else None
        )
        return cls(
            width=config.integer("hidden_size"),
            num_experts=num_experts,
            inner=inner,
            latent=latent,
            latent_norm=latent is not None and config.flag("latent_moe_use_norm"),
            shared_inner=inner * config.integer("num_shared_experts", 0, low=0, high=1024),
            activation=read_activation(config),
            rule=rule,
            eps=config.number("rms_norm_eps", low=0.0, high=1.0),
            first_dense=config.integer("first_k_dense_replace", 0, low=0),
            every=config.integer("moe_layer_freq", 1),
        )

    def is_routed(self, layer: int) -> bool:
        """Tell whether a layer is routed or dense."""
        return layer >= self.first_dense and layer % self.every == 0

    def tensors(self, prefix: str, layer: int) -> Iterator[TensorSpec]:
        """List the tensors of one routed layer, experts last."""
        yield TensorSpec(f"{prefix}gate.weight", (self.num_experts, self.width), "router")
        yield TensorSpec(
            f"{prefix}gate.e_score_correction_bias", (self.num_experts,), "router", "F32"
        )
        if self.latent is not None:
            yield TensorSpec(
                f"{prefix}routed_expert_down_proj.weight", (self.latent, self.width), "latent"
            )
            yield TensorSpec(
                f"{prefix}routed_expert_up_proj.weight", (self.width, self.latent), "latent"
            )
        if self.latent is not None and self.latent_norm:
            yield TensorSpec(f"{prefix}routed_expert_norm.weight", (self.latent,), "latent")
        if self.shared_inner:
            yield from mlp_tensors(
                f"{prefix}shared_experts.", self.width, self.shared_inner, "shared expert"
            )
        outer = self.latent or self.width
        shapes = {"w1": (self.inner, outer), "w2": (outer, self.inner), "w3": (self.inner, outer)}
        for expert in range(self.num_experts):
            for name, shape in shapes.items():
                full = f"{prefix}experts.{expert}.{name}.weight"
                yield TensorSpec(full, shape, "expert", expert=(layer, expert))


# From this share of a layer's experts on they are read one after the other, like a whole layer.
SWEEP_SHARE = 0.6
Batches = Iterable[Experts]


class Moe:
    """One routed layer: w1 is gate, w3 up, w2 down."""

    def __init__(
        self,
        shape: MoeShape,
        layer: int,
        weights: Weights,
        prefix: str,
        experts: ExpertCache,
        ops: Ops,
    ) -> None:
        """Load all but the experts, which come through the cache when a step needs them."""
        self.shape, self.layer, self._experts, self._ops = shape, layer, experts, ops
        self._spans, self._spine = weights.spans, weights.spine
        self.following: Moe | None = None  # the next routed layer, for guesses
        self._has_latent = shape.latent is not None
        names = ["gate", *(["routed_expert_down_proj"] if self._has_latent else [])]
        self._in = tuple(weights.matrix(f"{prefix}{name}.weight") for name in names)
        self._bias = weights.values(f"{prefix}gate.e_score_correction_bias")
        if self._has_latent:
            self._up = weights.matrix(f"{prefix}routed_expert_up_proj.weight")
        self._norm = (
            Norm(weights, f"{prefix}routed_expert_norm.weight", shape.eps, ops)
            if shape.latent_norm
            else None
        )
        has_shared = shape.shared_inner > 0
        self._shared = (
            Mlp(shape.activation, weights, f"{prefix}shared_experts.", ops, "shared")
            if has_shared
            else None
        )

    def __call__(self, u: Array, tokens: TokenBatch) -> Array:
        """Compute rows (T, D) -> (T, D); each expert is read at most once whatever T is."""
        ops = self._ops
        with self._spans.span("router"):
            logits, *down = ops.linears(u, self._in)
            ids, shares = ops.route(logits, self._bias, self.shape.rule)
        if tokens.probe is not None:
            tokens.probe.routed(self.layer, ids, shares)
        z = down[0] if self._has_latent else u
        # Sorted so that experts lying side by side in a file are read one after the other.
        union = np.unique(ids).tolist()
        is_sweep = len(union) >= SWEEP_SHARE * self.shape.num_experts or len(u) > BLOCK_ROWS
        self._spans.count("experts_used", len(union))
        shared: Array | None = None
        leased = self._experts.lease(self.layer, union, in_order=is_sweep)
        with self._spans.span("experts"), leased as batches:
            if self._shared is not None:
                shared = self._shared(u)  # while experts are on their way
            if not is_sweep:
                self._guess_next(u)
            y = (self._in_turn if is_sweep else self._as_they_come)(z, ids, shares, batches)
            if is_sweep:
                self._read_ahead()
            if self._norm is not None:
                y = self._norm(y)
            if self._has_latent:
                y = ops.linear(y, self._up)
        return y if shared is None else y + shared

    def _as_they_come(self, z: Array, ids: Ids, shares: Array, batches: Batches) -> Array:
        """Compute experts in any order and sum them up in one: (T, D) -> (T, D)."""
        parts = np.empty((*ids.shape, z.shape[1]), np.float32)  # (T, k, D)
        for ready in batches:
            self._ops.experts(z, ids, ready, self.shape.activation, parts)
        return self._ops.combine(parts, ids, shares)

    def _in_turn(self, z: Array, ids: Ids, shares: Array, batches: Batches) -> Array:
        """Add experts up as they come in ascending order: the same bits, with less memory."""
        y = np.zeros_like(z)
        for ready in batches:
            self._ops.add_experts(z, ids, shares, ready, self.shape.activation, y)
        return y

    def _read_ahead(self) -> None:
        """Go on with the next routed layer, which will want most of its experts too."""
        if self.following is not None and self._experts.may_guess:
            everything = {"sweep": range(self.shape.num_experts)}
            self._experts.guess(self.following.layer, everything, self._experts.read_ahead)

    def _guess_next(self, u: Array) -> None:
        """Ask for experts of the next routed layer, by its router and what is known so far.

        A router is not asked that is not in memory yet, or whose token is not known yet; then the
        cache guesses by the last choice.
        """
        following = self.following
        if following is None or not self._experts.may_guess:
            return
        ways = {}
        if following.is_in_memory and following.layer > self.layer:  # in this step
            with self._spans.span("router"):
                logits = self._ops.linear(u, following._in[0])
                ids, shares = self._ops.route(logits, following._bias, self.shape.rule)
            best = np.argsort(-shares.ravel(), kind="stable")
            ways["router"] = list(dict.fromkeys(ids.ravel()[best].tolist()))
        self._experts.guess(following.layer, ways)

    @property
    def is_in_memory(self) -> bool:
        """Tell whether this layer's matrices stay in memory."""
        return self._spine.stays(f"layer {self.layer}")
