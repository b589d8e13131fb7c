"""Kimi K3, text model: KDA and gated MLA under block attention residuals, latent MoE, SiTU."""

import dataclasses
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from finback.checkpoint.formats import Array
from finback.checkpoint.hf import Fields
from finback.kernels.ops import Ops
from finback.models.base import ModelShape, TokenBatch
from finback.models.kimi import KimiLayout, Layer, link_routed, settle, state_shapes
from finback.models.layers import Norm
from finback.models.state import SequenceState
from finback.models.weights import TensorSpec, Weights
from finback.storage.cache import ExpertCache

PREFIX = "language_model."
FOLDS = ("self_attention_res", "mlp_res")


@dataclass(frozen=True, slots=True)
class Layout:
    """K3's reading of a config: the shared Kimi parts and the residual blocks."""

    kimi: KimiLayout
    block: int
    skipped: tuple[str, ...] = ("vision_tower.", "mm_projector.")

    @property
    def shape(self) -> ModelShape:
        """Say what the config alone tells."""
        shape = self.kimi.shape
        bank = 4 * self.kimi.width * (self.kimi.num_layers // self.block + 1)
        return dataclasses.replace(shape, row_bytes=shape.row_bytes + bank)

    def tensors(self) -> Iterator[TensorSpec]:
        """List every tensor of the text model."""
        width = self.kimi.width
        yield from self.kimi.tensors()
        for layer in range(self.kimi.num_layers):
            for fold in FOLDS:
                yield from _fold_tensors(f"{PREFIX}model.layers.{layer}.{fold}", width)
        yield from _fold_tensors(f"{PREFIX}model.output_attn_res", width)

    def build(self, weights: Weights, experts: ExpertCache, ops: Ops) -> "KimiK3":
        """Load what stays in memory and make the model."""
        return KimiK3(self, weights, experts, ops)


def read_config(config: Fields) -> Layout:
    """Read a `config.json` whose `text_config` is the model's.

    Raises:
        CheckpointError: A value is missing or impossible.
    """
    text = config.section("text_config")
    kimi = KimiLayout.read(text, PREFIX, config.flag("tie_word_embeddings"))
    return Layout(kimi, text.integer("attn_res_block_size"))


def _fold_tensors(name: str, width: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}_norm.weight", (width,), "residual")
    yield TensorSpec(f"{name}_proj.weight", (1, width), "residual", as_values=True)


class AttentionResidual:
    """One attention residual with the norm after it.

    A softmax over the banked block starts and the running sum; of one entry it is that entry.
    """

    def __init__(self, weights: Weights, name: str, norm: Norm, eps: float, ops: Ops) -> None:
        """Load norm and projection of the scores, which occur only as their product."""
        scores, proj = weights.values(f"{name}_norm.weight"), weights.values(f"{name}_proj.weight")
        self._weight, self._norm = scores * proj.reshape(-1), norm.weight
        self._eps, self._ops = eps, ops

    def __call__(self, bank: list[Array], x: Array) -> Array:
        """Mix entries, each (T, D), into one and normalise it."""
        return self._ops.mix([*bank, x], self._weight, self._norm, self._eps)


class ResidualLayer(Layer):
    """A Kimi layer with the two attention residuals in front of its norms."""

    def __init__(
        self, layout: Layout, index: int, weights: Weights, experts: ExpertCache, ops: Ops
    ) -> None:
        """Load the layer's resident weights."""
        super().__init__(layout.kimi, index, weights, experts, ops)
        self.is_block_start = index % layout.block == 0
        norms = (self.attention_norm, self.feed_norm)
        self.attention_fold, self.feed_fold = (
            AttentionResidual(
                weights, f"{PREFIX}model.layers.{index}.{name}", norm, layout.kimi.eps, ops
            )
            for name, norm in zip(FOLDS, norms, strict=True)
        )


class KimiK3:
    """The model."""

    def __init__(self, layout: Layout, weights: Weights, experts: ExpertCache, ops: Ops) -> None:
        """Load everything but the experts."""
        self.shape, self._ops, eps = layout.shape, ops, layout.kimi.eps
        self._spine, self._spans = weights.spine, weights.spans
        self._embedding, self._head = layout.kimi.load_ends(weights, ops)
        self._layers = [
            ResidualLayer(layout, i, weights, experts, ops) for i in range(layout.kimi.num_layers)
        ]
        link_routed(self._layers)
        norm = Norm(weights, f"{PREFIX}model.norm.weight", eps, ops)
        self._output_fold = AttentionResidual(
            weights, f"{PREFIX}model.output_attn_res", norm, eps, ops
        )

    def forward(self, tokens: TokenBatch) -> Array:
        """Push rows through all layers: -> (R, D).

        The bank of block starts begins empty for every token: it is no state.
        """
        x, bank = self._embedding(tokens.ids), list[Array]()  # (T, D)
        for index, layer in enumerate(self._layers):
            with self._spans.span("residual"):
                u = layer.attention_fold(bank, x)
            if layer.is_block_start:
                bank.append(x)  # the raw running sum, not u
            with self._spine.lease(f"layer {index}"):
                with self._spans.span("attention"):
                    a = layer.attend(u, tokens)
                if index == len(self._layers) - 1:  # only wanted rows are of use from here
                    a, x = a[tokens.wanted], x[tokens.wanted]
                    bank = [entry[tokens.wanted] for entry in bank]
                with self._spans.span("residual"):
                    x = a if layer.is_block_start else x + a
                    u = layer.feed_fold(bank, x)
                if len(x):
                    x = x + layer.feed(u, tokens)
            if tokens.probe is not None:
                tokens.probe.hidden(index, x)
        return self._output_fold(bank, x)

    def state_shapes(self, position: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """See `Model.state_shapes`."""
        return state_shapes(self._layers, position)

    def settle(self, state: SequenceState) -> None:
        """See `Model.settle`."""
        settle(self._layers, state)

    def logits(self, rows: Array, at_once: int) -> Generator[Array]:
        """See `Model.logits`."""
        return self._head(rows, at_once)
