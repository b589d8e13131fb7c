"""The native backend: the only caller of the library's kernels, checking all it passes on."""

import os
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
    LatentStruct,
    RouterStruct,
    WeightStruct,
    available_threads,
    instruction_sets,
    library,
)
from finback.kernels.ops import ACTIVATION_BITS, Activation, Experts, Ids, RouterRule


def _pointer(name: str, array: Array, shape: tuple[int, ...]) -> int:
    """Give the address of a C-contiguous float32 array of exactly this shape."""
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous float32 {shape}, not {array.dtype} {array.shape}"
        )
    if array.flags.writeable and array.size:
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
        loaded.finback_set_threads(threads or available_threads())

    @property
    def isa(self) -> str:
        """Name the instruction set in use."""
        return bytes(self._lib.finback_isa()).decode()

    def resident(self, weight: Weight) -> Weight:
        """Keep the published bytes: the kernels compute on them."""
        return weight

    def linear(self, x: Array, weight: Weight) -> Array:
        """See `Ops.linear`."""
        rows, cols = weight.shape
        y = np.empty((len(x), rows), np.float32)
        self._lib.finback_linear(
            _pointer("x", x, (len(x), cols)), len(x), _described(weight), self._bits, y.ctypes.data
        )
        return y

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
            y.ctypes.data,
        )
        return y

    def mix(self, entries: list[Array], weight: Array, eps: float) -> Array:
        """See `Ops.mix`."""
        rows, width = entries[0].shape
        pointers = (c_void_p * len(entries))(
            *(_pointer("entry", e, (rows, width)) for e in entries)
        )
        y = np.empty((rows, width), np.float32)
        self._lib.finback_mix(
            pointers,
            len(entries),
            _pointer("weight", weight, (width,)),
            eps,
            rows,
            width,
            y.ctypes.data,
        )
        return y

    def glu(self, gate: Array, up: Array, activation: Activation) -> Array:
        """See `Ops.glu`."""
        y = np.empty_like(gate)
        self._lib.finback_glu(
            _pointer("gate", gate, gate.shape),
            _pointer("up", up, gate.shape),
            byref(_activation(activation)),
            len(gate),
            gate.shape[1],
            y.ctypes.data,
        )
        return y

    def experts(
        self, x: Array, ids: Ids, experts: Experts, activation: Activation, parts: Array
    ) -> None:
        """See `Ops.experts`."""
        tokens, top_k = ids.shape
        if ids.dtype != np.int64 or not ids.flags.c_contiguous:
            raise ValueError(f"ids must be contiguous int64, not {ids.dtype}")
        width = x.shape[1]
        addresses = []
        for number, w in experts.items():
            inner = w["w1"].shape[0]
            wanted = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
            for name, shape in wanted.items():
                if w[name].shape != shape:
                    raise ValueError(f"{name} of expert {number} is {w[name].shape}, not {shape}")
                addresses.append(_described(w[name]))
        self._lib.finback_experts(
            _pointer("x", x, (tokens, width)),
            tokens,
            ids.ctypes.data,
            top_k,
            (c_int64 * len(experts))(*experts),
            (c_void_p * len(addresses))(*addresses),
            len(experts),
            byref(_activation(activation)),
            self._bits,
            _pointer("parts", parts, (tokens, top_k, width)),
        )

    def combine(self, parts: Array, shares: Array) -> Array:
        """See `Ops.combine`."""
        tokens, top_k, width = parts.shape
        y = np.empty((tokens, width), np.float32)
        self._lib.finback_combine(
            _pointer("parts", parts, parts.shape),
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
        if not 1 <= rule.top_k <= experts or experts % rule.num_groups:
            raise ValueError(f"{rule} cannot choose among {experts} experts")
        ids = np.empty((tokens, rule.top_k), np.int64)
        weights = np.empty((tokens, rule.top_k), np.float32)
        router = RouterStruct(
            experts,
            rule.top_k,
            rule.num_groups,
            rule.top_groups,
            rule.activation == "sigmoid",
            rule.renormalise,
            rule.scale,
        )
        self._lib.finback_route(
            _pointer("logits", logits, logits.shape),
            None if bias is None else _pointer("bias", bias, (experts,)),
            byref(router),
            tokens,
            ids.ctypes.data,
            weights.ctypes.data,
        )
        return ids, weights

    def short_conv(self, x: Array, history: Array, taps: Array) -> Array:
        """See `Ops.short_conv`."""
        num_taps, channels = taps.shape
        y = np.empty_like(x)
        self._lib.finback_short_conv(
            _pointer("x", x, (len(x), channels)),
            _pointer("history", history, (num_taps - 1, channels)),
            _pointer("taps", taps, taps.shape),
            len(x),
            channels,
            num_taps,
            y.ctypes.data,
        )
        return y

    def unit(self, x: Array, scale: float) -> Array:
        """See `Ops.unit`."""
        width = x.shape[-1]
        y = np.empty_like(x)
        self._lib.finback_unit(
            _pointer("x", x, x.shape), scale, x.size // width, width, y.ctypes.data
        )
        return y

    def decay(self, x: Array, a_log: Array, bound: float | None) -> Array:
        """See `Ops.decay`."""
        tokens, heads, width = x.shape
        y = np.empty_like(x)
        self._lib.finback_decay(
            _pointer("x", x, x.shape),
            _pointer("a_log", a_log, (heads,)),
            bound or 0.0,
            tokens,
            heads,
            width,
            y.ctypes.data,
        )
        return y

    def sigmoid(self, x: Array) -> Array:
        """See `Ops.sigmoid`."""
        return self._gated(None, x)

    def gated(self, x: Array, gate: Array) -> Array:
        """See `Ops.gated`."""
        return self._gated(_pointer("x", x, gate.shape), gate)

    def delta_rule(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array
    ) -> Array:
        """See `Ops.delta_rule`."""
        tokens, heads, width = q.shape
        out = np.empty_like(q)
        pointers = [_pointer(n, a, q.shape) for n, a in zip("qkvg", (q, k, v, decay), strict=True)]
        self._lib.finback_delta_rule(
            *pointers,
            _pointer("beta", beta, (tokens, heads)),
            _pointer("state", state, (heads, width, width)),
            tokens,
            heads,
            width,
            out.ctypes.data,
        )
        return out

    def latent_attention(
        self, q: Array, q_extra: Array, rows: Array, key: Array, value: Array, scale: float
    ) -> Array:
        """See `Ops.latent_attention`."""
        tokens, heads, nope = q.shape
        extra, rank, width = q_extra.shape[2], key.shape[2], value.shape[1]
        sizes = LatentStruct(tokens, len(rows), heads, nope, extra, rank, width, scale)
        out = np.empty((tokens, heads, width), np.float32)
        self._lib.finback_latent_attention(
            byref(sizes),
            _pointer("q", q, q.shape),
            _pointer("q_extra", q_extra, (tokens, heads, extra)),
            _pointer("rows", rows, (len(rows), rank + extra)),
            _pointer("key", key, (heads, nope, rank)),
            _pointer("value", value, (heads, width, rank)),
            out.ctypes.data,
        )
        return out

    def _gated(self, x: int | None, gate: Array) -> Array:
        y = np.empty_like(gate)
        width = gate.shape[-1]
        self._lib.finback_gated(
            x, _pointer("gate", gate, gate.shape), gate.size // width, width, y.ctypes.data
        )
        return y


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


@cache
def _activation(activation: Activation) -> ActivationStruct:
    kind = activation.kind
    if kind == "situ" and activation.linear_beta is not None:
        kind = "bounded situ"  # type: ignore[assignment]
    return ActivationStruct(
        ACTIVATION_NUMBERS[kind], activation.beta, activation.linear_beta or 0.0
    )
