"""Weight formats: bytes a matrix takes, and the plain unpacking every kernel is compared with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from finback.checkpoint.safetensors import ITEM_BYTES

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

MXFP4_GROUP = 32
INT4_GROUP = 32
FP8_BLOCK = 128
# E2M1: one sign bit, then this index. Source: OCP Microscaling Formats 1.0, section 5.3.3.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Both values of a packed byte; the even column is in the low nibble.
_NIBBLE = np.concatenate([E2M1, -E2M1])
_PAIRS = np.stack([np.tile(_NIBBLE, 16), np.repeat(_NIBBLE, 16)], axis=1)  # (256, 2)
# Looked up as one 8-byte item a byte, and scaled by a table: three times faster than two gathers
# and ldexp, with the same bits (docs/log.md, "unpacking MXFP4 in NumPy").
_PAIR_ITEMS = _PAIRS.view(np.uint64).reshape(256)
_SCALES = np.ldexp(np.float32(1), np.arange(255) - 127).astype(np.float32)
_SCALES = np.append(_SCALES, np.float32(np.nan))
BAD_SCALE = "holds a scale that stands for no number"
MXFP4_BAD_SCALE = 255  # NaN in E8M0; no published weight has it


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor as published: a format, its logical shape, and the bytes of its parts.

    The parts are views into memory owned by whoever made the weight: for an expert, its lease.
    """

    format: str
    shape: tuple[int, ...]
    parts: tuple[Bytes, ...]
    derived: dict[str, object] = field(default_factory=dict)  # what a backend keeps with it


@dataclass(frozen=True, slots=True)
class Format:
    """How a format is stored.

    `suffixes` are the endings of the published tensor names after `….weight`, in order;
    `dtypes` the dtype of each part; `part_shapes` gives their shapes for a logical shape.
    """

    suffixes: tuple[str, ...]
    dtypes: tuple[str, ...]
    part_shapes: Callable[[tuple[int, ...]], tuple[tuple[int, ...], ...]]
    unpack: Callable[[tuple[Bytes, ...], tuple[int, ...]], Array]
    columns: int = 1  # a matrix must have a multiple of these

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Count the bytes of all parts."""
        return sum(
            prod(part) * ITEM_BYTES[dtype]
            for part, dtype in zip(self.part_shapes(shape), self.dtypes, strict=True)
        )


def has_bad_scale(weight: Weight) -> bool:
    """Tell whether a scale stands for no number, which no published weight has."""
    if weight.format == "mxfp4":
        return bool((weight.parts[1] == MXFP4_BAD_SCALE).any())
    if weight.format in ("int8", "fp8"):
        return not np.isfinite(weight.parts[1].view(np.float32)).all()
    if weight.format == "int4":  # bfloat16: infinities and NaN have every bit of the exponent
        bits = weight.parts[1].view(np.uint16)
        return bool(((bits & 0x7F80) == 0x7F80).any())
    return False


def unpack(weight: Weight) -> Array:
    """Give the values of a weight as a new float32 array of its logical shape."""
    return FORMATS[weight.format].unpack(weight.parts, weight.shape)


def _f32(parts: tuple[Bytes, ...], shape: tuple[int, ...]) -> Array:
    return parts[0].view(np.float32).reshape(shape).copy()


def _f16(parts: tuple[Bytes, ...], shape: tuple[int, ...]) -> Array:
    return parts[0].view(np.float16).reshape(shape).astype(np.float32)


def _bf16(parts: tuple[Bytes, ...], shape: tuple[int, ...]) -> Array:
    """Widen bfloat16, which is the upper half of a float32."""
    wide = parts[0].view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(shape)


def _mxfp4(parts: tuple[Bytes, ...], shape: tuple[int, ...]) -> Array:
    """Unpack codes (R, C/2) under scales (R, C/32): w = ±E2M1[index] · 2^(scale − 127)."""
    rows, columns = shape
    codes, scales = parts
    values = _PAIR_ITEMS.take(codes).view(np.float32).reshape(-1, MXFP4_GROUP)
    with np.errstate(over="ignore"):  # the two largest scales pass float32 and give infinity
        values *= _SCALES.take(scales).reshape(-1, 1)
    return values.reshape(shape)


def _int8(parts: tuple[Bytes, ...], shape: tuple[int, ...]) -> Array:
    """Unpack whole numbers under one float32 scale a row."""
    scale = parts[1].view(np.float32).reshape(-1, 1)
    return parts[0].view(np.int8).reshape(shape).astype(np.float32) * scale


def _int4(parts: tuple[Bytes, ...], shape: tuple[int, ...]) -> Array:
    """Unpack value + 8 in each nibble, the even column low, under one bfloat16 scale per 32."""
    rows, columns = shape
    codes = parts[0].reshape(rows, columns // 2)
    values = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.float32) - np.float32(8)
    scale = _bf16((parts[1],), (rows, columns // INT4_GROUP))
    out: Array = (values.reshape(rows, -1, INT4_GROUP) * scale[..., None]).reshape(shape)
    return out


def _fp8(parts: tuple[Bytes, ...], shape: tuple[int, ...]) -> Array:
    """Unpack E4M3 under one float32 scale per block of 128 × 128, cut at the edges."""
    bits = parts[0].reshape(shape).astype(np.uint32)
    size = ((bits & 0x7F) << 20).view(np.float32) * np.float32(2.0**120)
    values = np.where(bits & 0x80, -size, size)
    rows, columns = _fp8_parts(shape)[1]
    scale = parts[1].view(np.float32).reshape(rows, columns)
    wide = np.repeat(np.repeat(scale, FP8_BLOCK, 0), FP8_BLOCK, 1)[: shape[0], : shape[1]]
    out: Array = values * wide
    return out


def _int4_parts(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    rows, columns = shape
    return ((rows, columns // 8), (rows, columns // INT4_GROUP))


def _fp8_parts(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    rows, columns = shape
    return (shape, (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))


def _same(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (shape,)


def _mxfp4_parts(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    rows, columns = shape
    return ((rows, columns // 2), (rows, columns // MXFP4_GROUP))


FORMATS: Mapping[str, Format] = {
    "bf16": Format(("",), ("BF16",), _same, _bf16),
    "f16": Format(("",), ("F16",), _same, _f16),
    "f32": Format(("",), ("F32",), _same, _f32),
    # A row of whole numbers under one scale: how finback keeps a converted spine.
    "int8": Format(("", "_scale"), ("I8", "F32"), lambda shape: (shape, shape[:1]), _int8),
    # compressed-tensors' pack-quantized, symmetric.
    "int4": Format(("_packed", "_scale"), ("I32", "BF16"), _int4_parts, _int4, 32),
    "fp8": Format(("", "_scale_inv"), ("F8_E4M3", "F32"), _fp8_parts, _fp8),
    "mxfp4": Format(("_packed", "_scale"), ("U8", "U8"), _mxfp4_parts, _mxfp4, MXFP4_GROUP),
}
PLAIN_FORMATS: Mapping[str, str] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
