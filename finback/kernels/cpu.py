"""The native backend: the only caller of the library's kernels, checking all it passes on."""

import itertools
import os
from ctypes import Array as CArray
from ctypes import addressof, byref, c_char, c_int64, c_void_p
from functools import cache

import numpy as np

from finback.checkpoint.formats import FORMATS, Array, Weight, unpack
from finback.config import Activations
from finback.errors import UsageError
from finback.kernels.library import (
    ACTIVATION_NUMBERS,
    FORMAT_NUMBERS,
    ActivationStruct,
    DeltaStruct,
    DeltaWeightsStruct,
    LatentStruct,
    RouterStruct,
    WeightStruct,
    available_threads,
    instruction_sets,
    library,
)
from finback.kernels.ops import (
    ACTIVATION_BITS,
    Activation,
    DeltaRows,
    DeltaWeights,
    Experts,
    Feed,
    Ids,
    RouterRule,
)

_FLOAT32 = np.dtype(np.float32)


def _pointer(name: str, array: Array, shape: tuple[int, ...]) -> int:
    """Give the address of a C-contiguous float32 array of exactly this shape."""
    if array.dtype != _FLOAT32 or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous float32 {shape}, not {array.dtype} {array.shape}"
        )
    return _address(array)


def _address(array: Array) -> int:
    """Give the address of an array, the fast way where there is one."""
    if array.size and array.flags.writeable:
        # Twice as fast as .ctypes.data; arrays are buffers, which their stubs do not say.
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    return array.ctypes.data


class Cpu:
    """The native backend. Threads and instruction set are the process's, whoever set them last."""

    name = "cpu"
    keeps_published_bytes = True

    def __init__(
        self,
        threads: int | None = None,
        isa: str | None = None,
        activations: Activations = "float32",
    ) -> None:
        """Choose threads (all available without a number), instruction set (the best), rounding.

        Raises:
            UsageError: There is no library, or no such instruction set on this machine.
        """
        loaded = library()
        if loaded is None:
            raise UsageError("the native library was not built; install a C compiler and reinstall")
        self._lib, self.activations = loaded, activations
        self._bits = ACTIVATION_BITS[activations]
        if isa is not None and not loaded.finback_set_isa(isa.encode()):
            raise UsageError(f"instruction set {isa!r} is not available on this machine")
        wanted = os.environ.get("FINBACK_ISA")
        if isa is None and wanted and wanted not in instruction_sets():
            raise UsageError(
                f"FINBACK_ISA is {wanted!r}, but this machine and build have "
                f"{', '.join(instruction_sets())}"
            )
        self._threads = threads or available_threads()
        loaded.finback_set_threads(self._threads)

    @property
    def isa(self) -> str:
        """Name the instruction set in use."""
        return bytes(self._lib.finback_isa()).decode()

    @property
    def description(self) -> str:
        """Name the instruction set and the number of threads."""
        return f"{self.isa}, {self._threads} thread{'s' if self._threads > 1 else ''}"

    def resident(self, weight: Weight) -> Weight:
        """Keep the published bytes: the kernels compute on them."""
        return weight

    def linear(self, x: Array, weight: Weight) -> Array:
        """See `Ops.linear`."""
        return self.linears(x, (weight,))[0]

    def linears(self, x: Array, weights: tuple[Weight, ...]) -> list[Array]:
        """See `Ops.linears`: one list of products for all threads."""
        tokens, cols = len(x), weights[0].shape[1]
        pointers, sizes = _list_of(weights)
        flat = np.empty(tokens * sizes[-1], np.float32)
        self._lib.finback_linears(
            _pointer("x", x, (tokens, cols)),
            tokens,
            pointers,
            len(weights),
            self._bits,
            _address(flat),
        )
        if tokens == 1:
            row = flat[None]
            return [row[:, a:b] for a, b in itertools.pairwise((0, *sizes))]
        out, start = [], 0
        for end in sizes:
            out.append(flat[start * tokens : end * tokens].reshape(tokens, end - start))
            start = end
        return out

    def embed(self, ids: Ids, weight: Weight) -> Array:
        """See `Ops.embed`: the rows asked for are unpacked, no others."""
        rows, cols = weight.shape
        chosen = tuple(part.reshape(rows, -1)[ids].reshape(-1) for part in weight.parts)
        return unpack(Weight(weight.format, (len(ids), cols), chosen))

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """See `Ops.rms_norm`."""
        width = x.shape[-1]
        y = np.empty_like(x)
        self._lib.finback_rms_norm(
            _pointer("x", x, x.shape),
            _pointer("weight", weight, (width,)),
            eps,
            x.size // width,
            width,
            _address(y),
        )
        return y

    def mix(self, entries: list[Array], weight: Array, norm: Array, eps: float) -> Array:
        """See `Ops.mix`."""
        rows, width = shape = entries[0].shape
        y = np.empty(shape, np.float32)
        self._lib.finback_mix(
            (c_void_p * len(entries))(*[_pointer("entry", e, shape) for e in entries]),
            len(entries),
            _pointer("weight", weight, (width,)),
            _pointer("norm", norm, (width,)),
            eps,
            rows,
            width,
            _address(y),
        )
        return y

    def mlp(self, x: Array, feed: Feed, activation: Activation) -> Array:
        """See `Ops.mlp`."""
        tokens, width = len(x), feed["w1"].shape[1]
        pointers = (c_void_p * 3)(*_feed(feed, width, feed["w1"].shape[0], ""))
        y = np.empty((tokens, width), np.float32)
        self._lib.finback_mlp(
            _pointer("x", x, (tokens, width)),
            tokens,
            pointers,
            byref(_activation(activation)),
            self._bits,
            _address(y),
        )
        return y

    def experts(
        self, x: Array, ids: Ids, experts: Experts, activation: Activation, parts: Array
    ) -> None:
        """See `Ops.experts`."""
        (tokens, top_k), width = ids.shape, x.shape[1]
        self._lib.finback_experts(
            _pointer("x", x, (tokens, width)),
            tokens,
            _ids(ids),
            top_k,
            *_experts(experts, width),
            len(experts),
            byref(_activation(activation)),
            self._bits,
            _pointer("parts", parts, (tokens, top_k, width)),
        )

    def add_experts(
        self, x: Array, ids: Ids, shares: Array, experts: Experts, activation: Activation, y: Array
    ) -> None:
        """See `Ops.add_experts`."""
        (tokens, top_k), width = ids.shape, x.shape[1]
        self._lib.finback_add_experts(
            _pointer("x", x, (tokens, width)),
            tokens,
            _ids(ids),
            _pointer("shares", shares, (tokens, top_k)),
            top_k,
            *_experts(experts, width),
            len(experts),
            byref(_activation(activation)),
            self._bits,
            _pointer("y", y, (tokens, width)),
        )

    def combine(self, parts: Array, ids: Ids, shares: Array) -> Array:
        """See `Ops.combine`."""
        tokens, top_k, width = parts.shape
        if ids.shape != (tokens, top_k):
            raise ValueError(f"ids are {ids.shape}, not {(tokens, top_k)}")
        y = np.empty((tokens, width), np.float32)
        self._lib.finback_combine(
            _pointer("parts", parts, parts.shape),
            _ids(ids),
            _pointer("shares", shares, (tokens, top_k)),
            tokens,
            top_k,
            width,
            _pointer("y", y, y.shape),
        )
        return y

    def route(self, logits: Array, bias: Array | None, rule: RouterRule) -> tuple[Ids, Array]:
        """See `Ops.route`."""
        tokens, experts = logits.shape
        ids = np.empty((tokens, rule.top_k), np.int64)
        weights = np.empty((tokens, rule.top_k), np.float32)
        self._lib.finback_route(
            _pointer("logits", logits, logits.shape),
            None if bias is None else _pointer("bias", bias, (experts,)),
            byref(_router(rule, experts)),
            tokens,
            ids.ctypes.data,
            _address(weights),
        )
        return ids, weights

    def gated(self, x: Array, gate: Array) -> Array:
        """See `Ops.gated`."""
        y = np.empty_like(gate)
        width = gate.shape[-1]
        self._lib.finback_gated(
            _pointer("x", x, gate.shape),
            _pointer("gate", gate, gate.shape),
            gate.size // width,
            width,
            _address(y),
        )
        return y

    def delta_attention(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        history: Array,
        state: Array,
        kept: int | None = None,
    ) -> Array:
        """See `Ops.delta_attention`."""
        heads, width, _ = state.shape
        tokens, (_, num_taps, channels) = len(rows.q), weights.taps.shape
        shape = (tokens, heads * width)
        struct = DeltaStruct(
            tokens,
            heads,
            width,
            num_taps,
            _pointer("q", rows.q, shape),
            _pointer("k", rows.k, shape),
            _pointer("v", rows.v, shape),
            _pointer("decay", rows.decay, shape),
            _pointer("beta", rows.beta, (tokens, heads)),
            _pointer("gate", rows.gate, shape),
        )
        out = np.empty(shape, np.float32)
        self._lib.finback_delta_attention(
            byref(struct),
            _delta_weights(weights, heads, width),
            tokens if kept is None else min(kept, tokens),
            _pointer("history", history, (3, num_taps - 1, channels)),
            _pointer("state", state, (heads, width, width)),
            _address(out),
        )
        return out

    def latent_attention(
        self, q: Array, rows: Array, key: Array, value: Array, scale: float
    ) -> Array:
        """See `Ops.latent_attention`."""
        (tokens, heads, _), (_, nope, rank), width = q.shape, key.shape, value.shape[1]
        extra = rows.shape[1] - rank
        sizes = LatentStruct(tokens, len(rows), heads, nope, extra, rank, width, scale)
        out = np.empty((tokens, heads, width), np.float32)
        self._lib.finback_latent_attention(
            byref(sizes),
            _pointer("q", q, (tokens, heads, nope + extra)),
            _pointer("rows", rows, (len(rows), rank + extra)),
            _pointer("key", key, (heads, nope, rank)),
            _pointer("value", value, (heads, width, rank)),
            _address(out),
        )
        return out


def _described(weight: Weight) -> int:
    """Describe a weight for the library, once, and give the address of that.

    The description lives and dies with the weight.
    """
    found = weight.derived.get("cpu")
    if found is None:
        rows, cols = weight.shape
        fmt, size = FORMATS[weight.format], sum(part.nbytes for part in weight.parts)
        if size != fmt.num_bytes(weight.shape) or cols % fmt.columns:
            raise ValueError(f"{size} bytes are no {weight.format} weight of shape {weight.shape}")
        scale = weight.parts[1].ctypes.data if len(weight.parts) > 1 else None
        data = weight.parts[0].ctypes.data
        found = WeightStruct(FORMAT_NUMBERS[weight.format], rows, cols, data, scale)
        weight.derived["cpu"] = found
    assert isinstance(found, WeightStruct)
    return addressof(found)


def _list_of(weights: tuple[Weight, ...]) -> tuple[CArray[c_void_p], list[int]]:
    """Describe a list of weights for the library, once: their addresses and running row counts.

    The description is kept with the first of them, for the list that asked last.
    """
    kept, name = weights[0].derived, "cpu list" if len(weights) > 1 else "cpu one"
    found = kept.get(name)
    if isinstance(found, tuple) and (found[0] is weights or len(weights) == 1):
        return found[1], found[2]
    if len({weight.shape[1] for weight in weights}) > 1:
        raise ValueError("all weights of a list must have as many columns as x")
    pointers = (c_void_p * len(weights))(*[_described(weight) for weight in weights])
    sizes = list(itertools.accumulate(weight.shape[0] for weight in weights))
    kept[name] = (weights, pointers, sizes) if len(weights) > 1 else (None, pointers, sizes)
    return pointers, sizes


def _ids(ids: Ids) -> int:
    if ids.dtype != np.int64 or not ids.flags.c_contiguous:
        raise ValueError(f"ids must be contiguous int64, not {ids.dtype}")
    return ids.ctypes.data


def _experts(experts: Experts, width: int) -> tuple[CArray[c_int64], CArray[c_void_p]]:
    """Give experts' numbers and the addresses of their weights, three each."""
    addresses: list[int] = []
    inner = next(iter(experts.values()))["w1"].shape[0] if experts else 0
    for number, feed in experts.items():
        addresses += _feed(feed, width, inner, f" of expert {number}")
    return (c_int64 * len(experts))(*experts), (c_void_p * len(addresses))(*addresses)


def _feed(feed: Feed, width: int, inner: int, whose: str) -> tuple[int, int, int]:
    """Describe the three weights of a feed-forward, once: addresses in the order w1, w2, w3."""
    kept = feed["w1"].derived
    found = kept.get("cpu feed")
    if isinstance(found, tuple) and found[0] is feed and found[1] == (width, inner):
        addresses: tuple[int, int, int] = found[2]
        return addresses
    wanted = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
    for name, shape in wanted.items():
        if feed[name].shape != shape:
            raise ValueError(f"{name}{whose} is {feed[name].shape}, not {shape}")
    addresses = (_described(feed["w1"]), _described(feed["w2"]), _described(feed["w3"]))
    kept["cpu feed"] = (feed, (width, inner), addresses)
    return addresses


def _delta_weights(weights: DeltaWeights, heads: int, width: int) -> int:
    """Describe the small weights of a delta-attention layer, once."""
    found = weights.derived.get("cpu")
    if found is None:
        channels = heads * width
        found = DeltaWeightsStruct(
            _pointer("taps", weights.taps, (3, weights.taps.shape[1], channels)),
            _pointer("dt_bias", weights.dt_bias, (channels,)),
            _pointer("a_log", weights.a_log, (heads,)),
            _pointer("norm", weights.norm, (width,)),
            weights.bound or 0.0,
            weights.eps,
        )
        weights.derived["cpu"] = found
    assert isinstance(found, DeltaWeightsStruct)
    return addressof(found)


@cache
def _router(rule: RouterRule, experts: int) -> RouterStruct:
    if not 1 <= rule.top_k <= experts or experts % rule.num_groups:
        raise ValueError(f"{rule} cannot choose among {experts} experts")
    return RouterStruct(
        experts,
        rule.top_k,
        rule.num_groups,
        rule.top_groups,
        rule.activation == "sigmoid",
        rule.renormalise,
        rule.scale,
    )


@cache
def _activation(activation: Activation) -> ActivationStruct:
    kind = activation.kind
    if kind == "situ" and activation.linear_beta is not None:
        kind = "bounded situ"  # type: ignore[assignment]
    return ActivationStruct(
        ACTIVATION_NUMBERS[kind], activation.beta, activation.linear_beta or 0.0
    )
