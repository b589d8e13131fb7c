"""What Kimi K3 and Kimi-Linear have in common: the layer map, and which brick stands where."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from finback.checkpoint.hf import Fields
from finback.kernels.ops import Ops
from finback.models.attention import Mla, MlaShape
from finback.models.base import ModelShape
from finback.models.delta import Kda, KdaShape
from finback.models.experts import Moe, MoeShape
from finback.models.layers import Embedding, Head, Mlp, Norm, mlp_tensors
from finback.models.state import RecurrentState, SequenceState
from finback.models.weights import TensorSpec, Weights
from finback.storage.cache import ExpertCache

LATENT_VALUE_BYTES = 4  # latent rows are kept as float32


@dataclass(frozen=True, slots=True)
class KimiLayout:
    """The shared reading of a (text) config."""

    prefix: str
    num_layers: int
    width: int
    vocab_size: int
    max_positions: int
    dense_inner: int
    eps: float
    is_tied: bool
    kda_layers: frozenset[int]  # counted from 0
    kda: KdaShape
    mla: MlaShape
    moe: MoeShape

    @classmethod
    def read(cls, config: Fields, prefix: str, is_tied: bool = False) -> "KimiLayout":
        """Read every value these models depend on.

        Raises:
            CheckpointError: Naming the key and what it must be.
        """
        num_layers = config.integer("num_hidden_layers", high=10_000)
        if config.integer("num_nextn_predict_layers", 0, low=0):
            raise config.error(
                "num_nextn_predict_layers", "must be 0: draft layers are not supported"
            )
        context = (
            "max_position_embeddings"
            if config.has("max_position_embeddings")
            else "model_max_length"
        )
        return cls(
            prefix=prefix,
            num_layers=num_layers,
            width=config.integer("hidden_size"),
            vocab_size=config.integer("vocab_size"),
            max_positions=config.integer(context, high=1 << 40),
            dense_inner=config.integer("intermediate_size"),
            eps=config.number("rms_norm_eps", low=0.0, high=1.0),
            is_tied=is_tied or config.flag("tie_word_embeddings"),
            kda_layers=_read_layer_map(config.section("linear_attn_config"), num_layers),
            kda=KdaShape.read(config),
            mla=MlaShape.read(config),
            moe=MoeShape.read(config),
        )

    @property
    def shape(self) -> ModelShape:
        """Say what the config alone tells."""
        layers = range(self.num_layers)
        num_mla = self.num_layers - len(self.kda_layers)
        return ModelShape(
            num_layers=self.num_layers,
            width=self.width,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            routed_layers=tuple(i for i in layers if self.moe.is_routed(i)),
            num_experts=self.moe.num_experts,
            top_k=self.moe.rule.top_k,
            state_bytes=len(self.kda_layers) * self.kda.state_bytes,
            state_bytes_per_token=num_mla * self.mla.row_width * LATENT_VALUE_BYTES,
            part_bytes=self.kda.state_bytes if self.kda_layers else 0,
            part_bytes_per_token=self.mla.row_width * LATENT_VALUE_BYTES if num_mla else 0,
            draft_bytes=4 * len(self.kda_layers) * (5 * self.kda.inner + self.kda.num_heads),
            row_bytes=4 * (8 * self.width + self._routed_values),
            block_row_bytes=4 * self._block_values,
        )

    @property
    def _routed_values(self) -> int:
        """Count the values of a row around a routed layer: scores, choices, in and out."""
        moe = self.moe
        return 2 * moe.num_experts + 4 * moe.rule.top_k + 3 * (moe.latent or moe.width)

    @property
    def _block_values(self) -> int:
        """Count the values that a row needs while its block is in a layer, at most."""
        moe, mla = self.moe, self.mla
        outer = moe.latent or moe.width
        heads = mla.num_heads * (mla.nope_dim + mla.extra_dim + 2 * mla.value_dim)
        attention = max(8 * self.kda.inner, 3 * heads)
        feed = 2 * moe.rule.top_k * outer + 2 * max(self.dense_inner, moe.shared_inner)
        return 4 * self.width + max(attention, feed)

    def tensors(self) -> Iterator[TensorSpec]:
        """List every tensor both families have."""
        p, width = self.prefix, self.width
        yield TensorSpec(f"{p}model.embed_tokens.weight", (self.vocab_size, width), "embedding")
        if not self.is_tied:
            yield TensorSpec(f"{p}lm_head.weight", (self.vocab_size, width), "head")
        yield TensorSpec(f"{p}model.norm.weight", (width,), "norm")
        for layer in range(self.num_layers):
            at = f"{p}model.layers.{layer}."
            yield TensorSpec(f"{at}input_layernorm.weight", (width,), "norm")
            yield TensorSpec(f"{at}post_attention_layernorm.weight", (width,), "norm")
            attention: KdaShape | MlaShape = self.kda if layer in self.kda_layers else self.mla
            yield from attention.tensors(f"{at}self_attn.")
            if self.moe.is_routed(layer):
                yield from self.moe.tensors(f"{at}block_sparse_moe.", layer)
            else:
                yield from mlp_tensors(f"{at}mlp.", width, self.dense_inner, "dense")

    def load_ends(self, weights: Weights, ops: Ops) -> tuple[Embedding, Head]:
        """Load the embedding and the head, which may be one matrix."""
        name = f"{self.prefix}model.embed_tokens.weight"
        head = name if self.is_tied else f"{self.prefix}lm_head.weight"
        group = "embedding" if self.is_tied else "head"
        return Embedding(weights, name, ops), Head(weights, head, group, ops)


def _read_layer_map(linear: Fields, num_layers: int) -> frozenset[int]:
    """Read the two lists of layers, published counting from 1."""
    kda, full = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if sorted(kda + full) != list(range(1, num_layers + 1)):
        raise linear.error(
            "kda_layers", f"and full_attn_layers must name each layer from 1 to {num_layers} once"
        )
    return frozenset(n - 1 for n in kda)


def link_routed(layers: Sequence["Layer"]) -> None:
    """Tell each routed layer which one comes next, the first after the last, for guesses."""
    routed = [layer.feed for layer in layers if isinstance(layer.feed, Moe)]
    for number, one in enumerate(routed):
        one.following = routed[(number + 1) % len(routed)]


def state_shapes(
    layers: Sequence["Layer"], position: int
) -> dict[tuple[int, str], tuple[int, ...]]:
    """See `Model.state_shapes`."""
    return {
        (number, kind): shape
        for number, layer in enumerate(layers)
        for kind, shape in layer.attend.state_shapes(position).items()
    }


def settle(layers: Sequence["Layer"], state: SequenceState) -> None:
    """See `Model.settle`."""
    for number, layer in enumerate(layers):
        part = state.layers.get(number)
        if isinstance(layer.attend, Kda) and isinstance(part, RecurrentState):
            layer.attend.settle(part)


class Layer:
    """What every Kimi decoder layer has: attention and feed-forward, each behind its norm."""

    def __init__(
        self, layout: KimiLayout, index: int, weights: Weights, experts: ExpertCache, ops: Ops
    ) -> None:
        """Load the layer's resident weights."""
        at, eps = f"{layout.prefix}model.layers.{index}.", layout.eps
        self.attention_norm = Norm(weights, f"{at}input_layernorm.weight", eps, ops)
        self.feed_norm = Norm(weights, f"{at}post_attention_layernorm.weight", eps, ops)
        self.attend: Kda | Mla = attention_of(layout, index, weights, ops)
        self.feed: Moe | Mlp = feed_forward_of(layout, index, weights, experts, ops)


def attention_of(layout: KimiLayout, index: int, weights: Weights, ops: Ops) -> Kda | Mla:
    """Make the attention of one layer."""
    prefix = f"{layout.prefix}model.layers.{index}.self_attn."
    if index in layout.kda_layers:
        return Kda(layout.kda, index, weights, prefix, ops)
    return Mla(layout.mla, index, weights, prefix, ops)


def feed_forward_of(
    layout: KimiLayout, index: int, weights: Weights, experts: ExpertCache, ops: Ops
) -> Moe | Mlp:
    """Make the feed-forward of one layer."""
    prefix = f"{layout.prefix}model.layers.{index}."
    if layout.moe.is_routed(index):
        return Moe(layout.moe, index, weights, f"{prefix}block_sparse_moe.", experts, ops)
    return Mlp(layout.moe.activation, weights, f"{prefix}mlp.", ops)
