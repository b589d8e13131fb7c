"""Every operation in plain NumPy, float32: slow, short, obviously right; the oracle of the others.

Matrix products run row by row, because a library's product of many rows rounds differently from
that of one. So a row's bits do not depend on what it was computed with.
"""

import numpy as np

from finback.checkpoint.formats import Array, Weight, unpack
from finback.config import Activations
from finback.kernels.ops import (
    ACTIVATION_BITS,
    ACTIVATION_GROUP,
    Activation,
    DeltaRows,
    DeltaWeights,
    Experts,
    Feed,
    Ids,
    RouterRule,
)

L2_EPS = 1e-6  # inside the root, as in the model's own kernels


class Reference:
    """The NumPy backend."""

    name = "numpy"
    description = "NumPy"
    keeps_published_bytes = False

    def __init__(self, activations: Activations = "float32") -> None:
        """Choose how rows are rounded before products with quantised weights."""
        self.activations: Activations = activations

    def resident(self, weight: Weight) -> Weight:
        """Unpack once: NumPy can only multiply float32. What rounds its rows stays as it is."""
        if weight.format == "mxfp4":
            return weight
        return Weight("f32", weight.shape, (unpack(weight).reshape(-1).view(np.uint8),))

    def linear(self, x: Array, weight: Weight) -> Array:
        """See `Ops.linear`."""
        if weight.format == "mxfp4":
            x = rounded(x, ACTIVATION_BITS[self.activations])
        return _product(x, _values(weight))

    def linears(self, x: Array, weights: tuple[Weight, ...]) -> list[Array]:
        """See `Ops.linears`."""
        return [self.linear(x, weight) for weight in weights]

    def embed(self, ids: Ids, weight: Weight) -> Array:
        """See `Ops.embed`."""
        return _values(weight)[ids]

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """See `Ops.rms_norm`. Source: Zhang and Sennrich 2019, equation 4, eps inside the root."""
        mean = np.square(x).mean(-1, keepdims=True)
        out: Array = x / np.sqrt(mean + np.float32(eps)) * weight
        return out

    def mix(self, entries: list[Array], weight: Array, norm: Array, eps: float) -> Array:
        """See `Ops.mix`. The raw entries are mixed; only their scores use the normalised ones."""
        values = np.stack(entries, axis=1)  # (T, N, D)
        size = np.sqrt(np.square(values).mean(-1) + np.float32(eps))
        shares = _softmax((values * weight).sum(-1) / size)  # (T, N)
        out = shares[:, 0, None] * values[:, 0]
        for n in range(1, len(entries)):
            out += shares[:, n, None] * values[:, n]
        return self.rms_norm(out, norm, eps)

    def mlp(self, x: Array, feed: Feed, activation: Activation) -> Array:
        """See `Ops.mlp`."""
        gate, up = self.linear(x, feed["w1"]), self.linear(x, feed["w3"])
        return self.linear(glu(gate, up, activation), feed["w2"])

    def experts(
        self, x: Array, ids: Ids, experts: Experts, activation: Activation, parts: Array
    ) -> None:
        """See `Ops.experts`."""
        for number, w in experts.items():
            rows, places = np.nonzero(ids == number)
            parts[rows, places] = self.mlp(x[rows], w, activation)

    def add_experts(
        self, x: Array, ids: Ids, shares: Array, experts: Experts, activation: Activation, y: Array
    ) -> None:
        """See `Ops.add_experts`."""
        for number, w in experts.items():
            rows, places = np.nonzero(ids == number)
            y[rows] += shares[rows, places, None] * self.mlp(x[rows], w, activation)

    def combine(self, parts: Array, ids: Ids, shares: Array) -> Array:
        """See `Ops.combine`."""
        out = np.zeros((len(parts), parts.shape[2]), np.float32)
        rows = np.arange(len(parts))
        for places in np.argsort(ids, axis=1).T:
            out += shares[rows, places, None] * parts[rows, places]
        return out

    def route(self, logits: Array, bias: Array | None, rule: RouterRule) -> tuple[Ids, Array]:
        """See `Ops.route`. Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2."""
        scores = sigmoid(logits) if rule.activation == "sigmoid" else _softmax(logits)
        choice = scores if bias is None else scores + bias
        if rule.num_groups > rule.top_groups:
            groups = choice.reshape(len(choice), rule.num_groups, -1)
            best_two = np.sort(groups, -1)[..., -2:].sum(-1)  # (T, groups)
            keep = np.argsort(-best_two, axis=-1, kind="stable")[:, : rule.top_groups]
            kept = np.zeros(best_two.shape, bool)
            np.put_along_axis(kept, keep, True, -1)
            choice = np.where(kept[..., None], groups, -np.inf).reshape(choice.shape)
        ids = np.argsort(-choice, axis=-1, kind="stable")[:, : rule.top_k]
        weights = np.take_along_axis(scores, ids, -1)
        # One expert alone keeps its score: so the vendor's code and the other implementations.
        if rule.renormalise and rule.top_k > 1:
            weights = weights / (weights.sum(-1, keepdims=True) + np.float32(1e-20))
        return ids, weights * np.float32(rule.scale)

    def gated(self, x: Array, gate: Array) -> Array:
        """See `Ops.gated`."""
        out: Array = x * sigmoid(gate)
        return out

    def delta_attention(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        history: Array,
        state: Array,
        kept: int | None = None,
    ) -> Array:
        """See `Ops.delta_attention`. Source: Kimi Team 2025, "Kimi Linear", section 3."""
        if kept is not None and kept < len(rows.q):
            first, rest = rows.part(slice(kept)), rows.part(slice(kept, None))
            certain = self.delta_attention(first, weights, history, state)
            drafts = self.delta_attention(rest, weights, history.copy(), state.copy())
            return np.concatenate([certain, drafts])
        heads, width = len(state), state.shape[1]

        def by_head(x: Array) -> Array:
            return x.reshape(len(x), heads, width)

        q, k, v = (
            by_head(short_conv(x, history[n], weights.taps[n]))
            for n, x in enumerate((rows.q, rows.k, rows.v))
        )
        q, k = unit(q, float(width) ** -0.5), unit(k, 1.0)
        decay = log_decay(by_head(rows.decay + weights.dt_bias), weights.a_log, weights.bound)
        out = delta_rule(q, k, v, decay, sigmoid(rows.beta), state)
        out = self.rms_norm(out, weights.norm, weights.eps) * sigmoid(by_head(rows.gate))
        return out.reshape(rows.q.shape)

    def latent_attention(
        self, q: Array, rows: Array, key: Array, value: Array, scale: float
    ) -> Array:
        """See `Ops.latent_attention`. Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.3."""
        rank, nope = key.shape[-1], key.shape[1]
        out = np.empty((len(q), len(value), value.shape[1]), np.float32)
        for t in range(len(q)):
            seen = rows[: len(rows) - len(q) + t + 1]
            in_latent = np.matmul(q[t, :, None, :nope], key)[:, 0]  # (H, r)
            scores = np.concatenate([in_latent, q[t, :, nope:]], axis=-1) @ seen.T  # (H, S)
            mixed = _softmax(scores * np.float32(scale)) @ seen[:, :rank]
            out[t] = np.matmul(value, mixed[:, :, None])[:, :, 0]
        return out


def glu(gate: Array, up: Array, activation: Activation) -> Array:
    """Join a gated pair element by element: (T, N), (T, N) -> (T, N)."""
    if activation.kind == "silu":
        return gate * sigmoid(gate) * up
    beta = np.float32(activation.beta)
    out: Array = beta * np.tanh(gate / beta) * sigmoid(gate)
    if activation.linear_beta is not None:
        linear = np.float32(activation.linear_beta)
        up = linear * np.tanh(up / linear)
    out *= up
    return out


def sigmoid(x: Array) -> Array:
    """Apply the logistic function; written with tanh, which cannot overflow."""
    half = np.float32(0.5)
    out: Array = half + half * np.tanh(half * x)
    return out


def short_conv(x: Array, history: Array, taps: Array) -> Array:
    """Convolve each channel causally, then SiLU: x (T, C), taps (J, C) -> (T, C).

    `history` (J-1, C), the inputs before x, becomes the last ones.
    """
    padded = np.concatenate([history, x])
    history[:] = padded[len(padded) - len(history) :]
    y: Array = padded[: len(x)] * taps[0]
    for j in range(1, len(taps)):
        y += padded[j : j + len(x)] * taps[j]
    y *= sigmoid(y)
    return y


def unit(x: Array, scale: float) -> Array:
    """Scale the last axis to length one, then by `scale`."""
    length = np.sqrt(np.square(x).sum(-1, keepdims=True) + np.float32(L2_EPS))
    out: Array = x / length * np.float32(scale)
    return out


def log_decay(x: Array, a_log: Array, bound: float | None) -> Array:
    """Give the log decay: x (T, H, K), a_log (H,) -> (T, H, K), all below zero.

    Source: Kimi Team 2025, "Kimi Linear"; the bounded form is Kimi K3's.
    """
    rate = np.exp(a_log)[:, None]
    if bound is None:
        out: Array = -rate * np.logaddexp(np.float32(0), x)
        return out
    return np.float32(bound) * sigmoid(rate * x)


def delta_rule(q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array) -> Array:
    """Run the gated delta rule token by token; the error is taken against the decayed state.

    q, k, v, decay (T, H, K), beta (T, H) -> (T, H, K); `state` (H, K, K) is advanced in place.
    Source: Kimi Team 2025, "Kimi Linear", equation 1:
    S ← (I − β k kᵀ) Diag(e^g) S + β k vᵀ, o = Sᵀ q.
    """
    out = np.empty_like(v)
    forget = np.exp(decay)
    for t in range(len(q)):
        state *= forget[t, :, :, None]
        error = v[t] - np.matmul(k[t, :, None, :], state)[:, 0]
        state += (beta[t, :, None] * k[t])[:, :, None] * error[:, None, :]
        out[t] = np.matmul(q[t, :, None, :], state)[:, 0]
    return out


def rounded(x: Array, bits: int) -> Array:
    """Round rows to 16 or 8 bits under one scale per 32 columns; 0 bits change nothing.

    q = nearest of x / s with s = largest |x| of the group / (2^(bits-1) − 1); the result is q · s.
    """
    if bits == 0 or x.size == 0:
        return x
    largest = np.float32(2 ** (bits - 1) - 1)
    groups = x.reshape(len(x), -1, ACTIVATION_GROUP)
    size = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(size > 0, largest / size, np.float32(0))
    out: Array = (np.rint(groups * inverse) * (size / largest)).reshape(x.shape)
    return out


def _values(weight: Weight) -> Array:
    """Give a weight's values, without a copy where it is float32 already."""
    if weight.format == "f32":
        return weight.parts[0].view(np.float32).reshape(weight.shape)
    return unpack(weight)


def _product(x: Array, values: Array) -> Array:
    out = np.empty((len(x), len(values)), np.float32)
    for row, result in zip(x, out, strict=True):
        np.dot(values, row, out=result)
    return out


def _softmax(x: Array) -> Array:
    shifted = np.exp(x - x.max(-1, keepdims=True))
    out: Array = shifted / shifted.sum(-1, keepdims=True)
    return out
