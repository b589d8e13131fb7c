"""Unpacking against the definitions, value by value."""

import numpy as np
import pytest

from finback.checkpoint.formats import FORMATS, Weight, unpack

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_mxfp4_every_code_and_scale() -> None:
    codes = np.arange(256, dtype=np.uint8)  # every pair of nibbles
    for scale in range(255):
        packed = codes.reshape(8, 32)
        scales = np.full((8, 2), scale, np.uint8)
        got = unpack(Weight("mxfp4", (8, 64), (packed.reshape(-1), scales.reshape(-1))))
        expected = [
            (-1.0 if nibble & 8 else 1.0) * E2M1[nibble & 7] * 2.0 ** (scale - 127)
            for byte in codes.tolist()
            for nibble in (byte & 15, byte >> 4)
        ]
        with np.errstate(over="ignore"):
            values = np.array(expected, np.float64).astype(np.float32)
        np.testing.assert_array_equal(got.reshape(-1), values)


def test_mxfp4_scales_belong_to_32_columns() -> None:
    packed = np.full((1, 32), 0x22, np.uint8)  # every value 1.0 before the scale
    got = unpack(Weight("mxfp4", (1, 64), (packed.reshape(-1), np.array([127, 129], np.uint8))))
    np.testing.assert_array_equal(got[0], [1.0] * 32 + [4.0] * 32)


def test_bf16_is_the_upper_half_of_a_float32() -> None:
    bits = np.arange(65536, dtype=np.uint32)
    expected = (bits << 16).view(np.float32)
    got = unpack(Weight("bf16", (65536,), (bits.astype(np.uint16).view(np.uint8),)))
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("f32", np.float32)])
def test_plain_floats(name: str, dtype: type) -> None:
    values = np.array([[0, -1.5, 65504, 6e-8]], dtype)
    np.testing.assert_array_equal(
        unpack(Weight(name, (1, 4), (values.view(np.uint8).reshape(-1),))),
        values.astype(np.float32),
    )


def test_bytes_of_one_k3_expert() -> None:
    size = FORMATS["mxfp4"].num_bytes
    assert 2 * size((3072, 3584)) + size((3584, 3072)) == 17_547_264


def test_fp8_every_code_under_its_block_scale() -> None:
    codes = np.arange(256, dtype=np.uint8)
    rows, columns = 130, 256
    scales = np.array([[1.0, 2.0], [0.5, -3.0]], np.float32)
    parts = (np.tile(codes, rows), scales.reshape(-1).view(np.uint8))
    got = unpack(Weight("fp8", (rows, columns), parts))
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
        value = -size if code & 0x80 else size
        for row in (0, 127, 128, 129):
            assert got[row, code] == value * scales[row // 128, code // 128]


def test_int4_is_value_plus_eight_low_nibble_first() -> None:
    codes = np.arange(256, dtype=np.uint8)[:32]
    scales = np.array([0x3F80, 0x4000], np.uint16)  # 1 and 2 in bfloat16
    got = unpack(Weight("int4", (1, 64), (codes, scales.view(np.uint8))))[0]
    nibbles = [n for byte in codes.tolist() for n in (byte & 15, byte >> 4)]
    expected = [(n - 8) * (1.0 if c < 32 else 2.0) for c, n in enumerate(nibbles)]
    np.testing.assert_array_equal(got, expected)


def test_int8_has_one_scale_a_row() -> None:
    whole = np.array([[-128, 0, 127], [1, 2, 3]], np.int8)
    scales = np.array([0.5, 4.0], np.float32)
    parts = (whole.reshape(-1).view(np.uint8), scales.view(np.uint8))
    got = unpack(Weight("int8", (2, 3), parts))
    np.testing.assert_array_equal(got, [[-64, 0, 63.5], [4, 8, 12]])


@pytest.mark.parametrize("name", FORMATS)
def test_parts_have_the_bytes_a_format_says(name: str) -> None:
    fmt = FORMATS[name]
    shapes = fmt.part_shapes((256, 384))
    assert len(shapes) == len(fmt.suffixes) == len(fmt.dtypes)
    per_weight = {
        "f32": 4,
        "bf16": 2,
        "f16": 2,
        "int8": 1,
        "fp8": 1,
        "int4": 0.5625,
        "mxfp4": 0.53125,
    }
    assert fmt.num_bytes((256, 384)) == pytest.approx(256 * 384 * per_weight[name], rel=0.011)
