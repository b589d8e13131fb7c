"""Kimi-Linear: KDA and MLA with plain residuals, full-width experts, SiLU."""

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


@dataclass(frozen=True, slots=True)
class Layout:
    """Kimi-Linear's reading of a config."""

    kimi: KimiLayout
    skipped: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        """Say what the config alone tells."""
        return self.kimi.shape

    def tensors(self) -> Iterator[TensorSpec]:
        """List every tensor of the model."""
        return self.kimi.tensors()

    def build(self, weights: Weights, experts: ExpertCache, ops: Ops) -> "KimiLinear":
        """Load what stays in memory and make the model."""
        return KimiLinear(self, weights, experts, ops)


def read_config(config: Fields) -> Layout:
    """Read a flat `config.json`.

    Raises:
        CheckpointError: A value is missing or impossible.
    """
    if config.has("attn_res_block_size"):
        raise config.error("attn_res_block_size", "is set, which this family does not have")
    return Layout(KimiLayout.read(config, ""))


class KimiLinear:
    """The model."""

    def __init__(self, layout: Layout, weights: Weights, experts: ExpertCache, ops: Ops) -> None:
        """Load everything but the experts."""
        self.shape, self._ops = layout.shape, ops
        self._spine, self._spans = weights.spine, weights.spans
        self._embedding, self._head = layout.kimi.load_ends(weights, ops)
        self._layers = [
            Layer(layout.kimi, i, weights, experts, ops) for i in range(layout.kimi.num_layers)
        ]
        link_routed(self._layers)
        self._norm = Norm(weights, "model.norm.weight", layout.kimi.eps, ops)

    def forward(self, tokens: TokenBatch) -> Array:
        """Push rows through all layers: -> (R, D)."""
        x = self._embedding(tokens.ids)  # (T, D)
        for index, layer in enumerate(self._layers):
            with self._spine.lease(f"layer {index}"):
                with self._spans.span("attention"):
                    x = x + layer.attend(layer.attention_norm(x), tokens)
                if index == len(self._layers) - 1:  # only wanted rows are of use from here
                    x = x[tokens.wanted]
                if len(x):
                    x = x + layer.feed(layer.feed_norm(x), tokens)
            if tokens.probe is not None:
                tokens.probe.hidden(index, x)
        return self._norm(x)

    def state_shapes(self, position: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """See `Model.state_shapes`."""
        return state_shapes(self._layers, position)

    def settle(self, state: SequenceState) -> None:
        """See `Model.settle`."""
        settle(self._layers, state)

    def logits(self, rows: Array, at_once: int) -> Generator[Array]:
        """See `Model.logits`."""
        return self._head(rows, at_once)
