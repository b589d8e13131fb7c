"""Every backend's operations against loops in float64, written from the formulas.

The backends are NumPy and the native library with every instruction set this machine has.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.checkpoint.formats import Weight, unpack
from finback.config import Activations
from finback.errors import UsageError
from finback.kernels.cpu import Cpu
from finback.kernels.library import instruction_sets
from finback.kernels.ops import (
    ACTIVATION_BITS,
    Activation,
    DeltaRows,
    DeltaWeights,
    Ops,
    RouterRule,
)
from finback.kernels.reference import (
    Reference,
    delta_rule,
    glu,
    log_decay,
    short_conv,
)

rng = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def _fresh_numbers() -> None:
    """Give each test the same random numbers, whichever ran before it."""
    rng.bit_generator.state = np.random.default_rng(3).bit_generator.state


@pytest.fixture(params=["numpy", *instruction_sets()])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Each backend in turn."""
    return Reference() if request.param == "numpy" else Cpu(threads=2, isa=request.param)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def weight(values: np.ndarray) -> Weight:
    return Weight("f32", values.shape, (values.reshape(-1).view(np.uint8),))


def close(got: np.ndarray, expected: np.ndarray, limit: float = 1e-5) -> None:
    np.testing.assert_allclose(got, expected, rtol=limit, atol=limit)


def test_linear_and_embed(ops: Ops) -> None:
    x, w = normal(5, 33), normal(7, 33)
    close(ops.linear(x, weight(w)), x.astype(np.float64) @ w.T.astype(np.float64))
    np.testing.assert_array_equal(ops.embed(np.array([6, 0, 6]), weight(w)), w[[6, 0, 6]])


def test_a_list_of_products_is_each_product(ops: Ops) -> None:
    for tokens in (0, 1, 5):
        x = normal(tokens, 64)
        weights = tuple(ops.resident(packed(fmt, 40, 64)) for fmt in FORMATS)
        for _ in range(2):  # the second time from what was kept of the first
            for got, one in zip(ops.linears(x, weights), weights, strict=True):
                np.testing.assert_array_equal(got, ops.linear(x, one))


FORMATS = ("f32", "bf16", "f16", "mxfp4", "int8", "int4", "fp8")
BY_32 = ("mxfp4", "int4")  # formats whose columns come in groups
# Rows and columns on and off the borders of tiles and blocks.
SHAPES = [(1, 32), (3, 64), (4, 96), (5, 160), (16, 32), (17, 1024), (70, 288), (130, 160)]
ODD_SHAPES = [(2, 1), (7, 31), (9, 33), (33, 100)]


def packed(fmt: str, rows: int, columns: int) -> Weight:
    """Make a random weight; MXFP4 with every code, scales from tiny to huge."""
    if fmt == "mxfp4":
        codes = rng.integers(0, 256, rows * columns // 2, np.uint8)
        scales = rng.integers(100, 140, rows * columns // 32).astype(np.uint8)
        return Weight(fmt, (rows, columns), (codes, scales))
    if fmt == "int4":
        codes = rng.integers(0, 256, rows * columns // 2, np.uint8)
        scales = (normal(rows * columns // 32).view(np.uint32) >> 16).astype(np.uint16)
        return Weight(fmt, (rows, columns), (codes, scales.view(np.uint8)))
    if fmt == "int8":
        whole = rng.integers(-128, 128, rows * columns).astype(np.int8)
        return Weight(fmt, (rows, columns), (whole.view(np.uint8), normal(rows).view(np.uint8)))
    if fmt == "fp8":
        codes = rng.integers(0, 256, rows * columns).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # no number
        blocks = -(-rows // 128) * -(-columns // 128)
        return Weight(fmt, (rows, columns), (codes, normal(blocks).view(np.uint8)))
    values = normal(rows, columns)
    if fmt == "bf16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
        return Weight(fmt, values.shape, (raw.reshape(-1).view(np.uint8),))
    raw = values.astype(np.float16) if fmt == "f16" else values
    return Weight(fmt, values.shape, (raw.reshape(-1).view(np.uint8),))


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_of_every_format_against_float64(ops: Ops, fmt: str) -> None:
    for rows, columns in SHAPES + (ODD_SHAPES if fmt not in BY_32 else []):
        w, x = packed(fmt, rows, columns), normal(9, columns)
        wide = unpack(w).astype(np.float64)
        error = np.abs(ops.linear(x, ops.resident(w)) - x.astype(np.float64) @ wide.T)
        # Relative to the sum of the sizes of what is added.
        assert (error <= 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(wide).T) + 1e-30).all()


@given(
    fmt=st.sampled_from(FORMATS),
    activations=st.sampled_from(sorted(ACTIVATION_BITS)),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 12),
    tokens=st.integers(1, 70),
    threads=st.integers(1, 4),
    data=st.data(),
)
def test_a_row_has_the_same_bits_whatever_it_is_computed_with(
    fmt: str,
    activations: Activations,
    rows: int,
    blocks: int,
    tokens: int,
    threads: int,
    data: st.DataObject,
) -> None:
    """Any rows of a product, computed alone or together, on any threads."""
    columns = 32 * blocks if fmt in BY_32 else 32 * blocks - data.draw(st.integers(0, 31))
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    w, x = packed(fmt, rows, columns), normal(tokens, columns)
    for isa in instruction_sets():
        whole = Cpu(1, isa, activations).linear(x, w)
        part = Cpu(threads, isa, activations).linear(x[start:stop], w)
        np.testing.assert_array_equal(part, whole[start:stop])


def delta_case(
    tokens: int, heads: int, width: int, bound: float | None
) -> tuple[DeltaRows, DeltaWeights]:
    channels = heads * width
    rows = DeltaRows(
        *(normal(tokens, channels) for _ in range(4)),
        normal(tokens, heads),
        normal(tokens, channels),
    )
    weights = DeltaWeights(
        taps=normal(3, 4, channels),
        dt_bias=normal(channels),
        a_log=normal(heads),
        norm=normal(width),
        bound=bound,
        eps=1e-5,
    )
    return rows, weights


@given(
    cuts=st.lists(st.integers(1, 12), max_size=4),
    threads=st.integers(1, 4),
    width=st.sampled_from([4, 20, 64, 80]),
)
def test_attention_and_recurrence_have_the_same_bits_in_any_pieces(
    cuts: list[int], threads: int, width: int
) -> None:
    T, H, N, X, r, M = 13, 3, 8, 4, 24, 6
    borders = sorted({0, T, *(c for c in cuts if c < T)})
    pieces = list(itertools.pairwise(borders))
    delta, weights = delta_case(T, H, width, -5.0)
    q, rows = normal(T, H, N + X), normal(T, r + X)
    key, value = normal(H, N, r), normal(H, M, r)
    for isa in instruction_sets():
        results = []
        for parts in ([(0, T)], pieces):
            cpu, out = Cpu(threads, isa), []
            state = np.zeros((H, width, width), np.float32)
            history = np.zeros((3, 3, H * width), np.float32)
            for a, b in parts:
                o = cpu.delta_attention(delta.part(slice(a, b)), weights, history, state)
                seen = cpu.latent_attention(q[a:b], rows[:b], key, value, 0.3)
                out.append(np.concatenate([o, seen.reshape(b - a, -1)], 1))
            results.append((np.concatenate(out), state, history))
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("fmt", FORMATS)
def test_more_rows_and_columns_than_a_block_has(fmt: str) -> None:
    for isa in instruction_sets():
        w, x = packed(fmt, 21, 1120), normal(215, 1120)
        for activations in ACTIVATION_BITS if fmt == "mxfp4" else ("float32",):
            cpu = Cpu(threads=2, isa=isa, activations=activations)
            whole = cpu.linear(x, w)
            for start, stop in ((0, 1), (62, 67), (95, 98), (100, 205), (190, 215)):
                np.testing.assert_array_equal(cpu.linear(x[start:stop], w), whole[start:stop])


@pytest.mark.parametrize(("activations", "limit"), [("int16", 1e-4), ("int8", 2e-2)])
def test_rounded_products_against_the_reference(activations: Activations, limit: float) -> None:
    oracle = Reference(activations)
    for isa in instruction_sets():
        cpu = Cpu(isa=isa, activations=activations)
        for rows, columns in SHAPES:
            w, x = packed("mxfp4", rows, columns), normal(9, columns) * 3
            x[3] = 0
            x[4, :32] = 0
            exact = x.astype(np.float64) @ unpack(w).astype(np.float64).T
            typical = np.sqrt(np.square(exact).mean())
            got = cpu.linear(x, w)
            assert np.abs(got - oracle.linear(x, w)).max() <= 3e-6 * np.abs(exact).max()
            assert np.sqrt(np.square(got - exact).mean()) < limit * typical


def test_no_number_in_no_number_out(ops: Ops) -> None:
    """A row with a NaN or an infinity gives no finite result; its neighbours are not touched."""
    for activations in ACTIVATION_BITS:
        chosen = Reference(activations) if ops.name == "numpy" else Cpu(2, activations=activations)
        w, x = packed("mxfp4", 20, 96), normal(4, 96)
        clean = chosen.linear(x, w)
        x[1, 40], x[2, 7] = np.nan, np.inf
        with np.errstate(all="ignore"):
            got = chosen.linear(x, w)
        assert not np.isfinite(got[1:3]).any()
        np.testing.assert_array_equal(got[[0, 3]], clean[[0, 3]])


def test_every_code_and_scale_in_every_product() -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), 255)  # 512 columns a row, a row a scale
    scales = np.repeat(np.arange(255, dtype=np.uint8), 16)
    w = Weight("mxfp4", (255, 512), (codes, scales))
    x = normal(2, 512) * np.float32(1e-3)
    with np.errstate(over="ignore"):
        wide = unpack(w).astype(np.float64)
    keep = np.isfinite(wide).all(1)
    exact = x.astype(np.float64) @ wide[keep].T
    size = np.abs(x).astype(np.float64) @ np.abs(wide[keep]).T
    for isa in instruction_sets():
        for activations, limit in (("float32", 1e-6), ("int16", 1e-4), ("int8", 2e-2)):
            got = Cpu(isa=isa, activations=activations).linear(x, w)[:, keep]
            assert (np.abs(got - exact) <= limit * size + 1e-41).all()


@pytest.mark.parametrize("fmt", ["f32", "bf16", "f16"])
def test_special_values_of_published_formats(ops: Ops, fmt: str) -> None:
    known = {
        "f32": [0, 1, 0x80000001, 0x7F7FFFFF, 0x3F800000],
        "bf16": [0, 1, 0x8001, 0x3F80, 0x7F00],
        "f16": [0, 1, 0x8001, 0x03FF, 0x7BFF, 0x8400, 0x3C00],
    }
    bits = known[fmt]
    raw = np.array(bits, np.uint32 if fmt == "f32" else np.uint16).view(np.uint8)
    w = Weight(fmt, (len(bits), 1), (raw,))
    got = ops.linear(np.ones((1, 1), np.float32), ops.resident(w))
    np.testing.assert_array_equal(got[0], unpack(w)[:, 0])


def test_no_rows_are_no_work(ops: Ops) -> None:
    none = np.empty((0, 32), np.float32)
    for fmt in FORMATS:
        w = ops.resident(packed(fmt, 5, 32))
        assert ops.linear(none, w).shape == (0, 5)
    w = ops.resident(packed("f32", 32, 32))
    act = Activation("situ", 4.0, 25.0)
    parts = np.empty((0, 2, 32), np.float32)
    ops.experts(none, np.empty((0, 2), np.int64), {1: {"w1": w, "w2": w, "w3": w}}, act, parts)
    assert ops.combine(parts, np.empty((0, 2), np.int64), none[:, :2]).shape == (0, 32)
    assert ops.mix([none, none], normal(32), normal(32), 1e-5).shape == (0, 32)
    assert ops.rms_norm(none, normal(32), 1e-5).shape == (0, 32)
    assert ops.route(none, None, rule())[0].shape == (0, 2)


def test_wrong_arrays_are_refused_by_name() -> None:
    for isa in instruction_sets():
        cpu, w = Cpu(isa=isa), packed("f32", 3, 8)
        for x in (normal(2, 7), normal(2, 16)[:, ::2], np.zeros((2, 8))):
            with pytest.raises(ValueError, match="x must be contiguous float32"):
                cpu.linear(x, w)
        with pytest.raises(ValueError, match="gate must be contiguous float32"):
            cpu.gated(normal(2, 3), normal(2, 6)[:, ::2])
        with pytest.raises(ValueError, match="as many columns"):
            cpu.linears(normal(2, 8), (w, packed("f32", 3, 9)))


def test_weights_that_are_not_what_they_say_are_refused() -> None:
    for isa in instruction_sets():
        cpu, x = Cpu(isa=isa), normal(2, 32)
        short = Weight("f32", (3, 32), (np.zeros(3 * 32 * 4 - 4, np.uint8),))
        with pytest.raises(ValueError, match="380 bytes are no f32 weight"):
            cpu.linear(x, short)
        with pytest.raises(ValueError, match="are no mxfp4 weight"):
            cpu.linear(normal(2, 33), Weight("mxfp4", (1, 33), (np.zeros(17, np.uint8),) * 2))
        good, bad = packed("f32", 4, 32), packed("f32", 32, 5)
        parts, ids = np.empty((2, 1, 32), np.float32), np.zeros((2, 1), np.int64)
        with pytest.raises(ValueError, match=r"w2 of expert 0 is \(32, 5\), not \(32, 4\)"):
            cpu.experts(x, ids, {0: {"w1": good, "w2": bad, "w3": good}}, Activation("silu"), parts)
        with pytest.raises(ValueError, match="cannot choose among 3 experts"):
            cpu.route(normal(1, 3), None, rule(top_k=4))


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(UsageError, match="'mmx' is not available"):
        Cpu(isa="mmx")


def test_rms_norm(ops: Ops) -> None:
    x, w = normal(3, 8), normal(8)
    expected = [[v / math.sqrt(np.mean(row.astype(float) ** 2) + 1e-5) for v in row] for row in x]
    close(ops.rms_norm(x, w, 1e-5), np.array(expected) * w)


def test_mix_weighs_raw_entries_by_normalised_scores(ops: Ops) -> None:
    entries, w, norm = [normal(4, 6) for _ in range(3)], normal(6), normal(6)
    out = ops.mix(entries, w, norm, 1e-5)
    for t in range(4):
        e = [entry[t].astype(float) for entry in entries]
        s = [float((v / math.sqrt(np.mean(v**2) + 1e-5)) @ w) for v in e]
        a = np.exp(s) / np.sum(np.exp(s))
        mixed = sum(a[i] * e[i] for i in range(3))
        close(out[t], mixed / math.sqrt(np.mean(mixed**2) + 1e-5) * norm)


def identity(width: int) -> Weight:
    return weight(np.eye(width, dtype=np.float32))


@pytest.mark.parametrize("linear", [25.0, 1.5, None])
def test_situ(ops: Ops, linear: float | None) -> None:
    """Of a feed-forward whose matrices change nothing: u is x, so g and u are the same."""
    x, one = normal(3, 9) * 9, identity(9)
    xd = x.astype(float)
    second = xd if linear is None else linear * np.tanh(xd / linear)
    expected = 4 * np.tanh(xd / 4) / (1 + np.exp(-xd)) * second
    act = Activation("situ", 4.0, linear)
    close(ops.mlp(x, {"w1": one, "w2": one, "w3": one}, act), expected)


def test_silu(ops: Ops) -> None:
    x, one, up = normal(2, 9), identity(9), normal(9, 9)
    wide = x.astype(float)
    expected = wide / (1 + np.exp(-wide)) * (wide @ up.T.astype(float))
    close(ops.mlp(x, {"w1": one, "w2": one, "w3": weight(up)}, Activation("silu")), expected)


@pytest.mark.parametrize("far", [1e4, -1e4, 88.0, -120.0])
def test_sigmoid_does_not_overflow(ops: Ops, far: float) -> None:
    got = ops.gated(np.ones((1, 2), np.float32), np.array([[far, 0.0]], np.float32))
    assert abs(got[0, 0] - (far > 0)) < 1e-38
    assert got[0, 1] == 0.5


def test_no_number_passes_a_gate(ops: Ops) -> None:
    nan, ones = np.full((2, 40), np.nan, np.float32), np.ones((2, 40), np.float32)
    assert np.isnan(ops.gated(ones, nan)).all()
    for act in (Activation("silu"), Activation("situ", 4.0, 25.0)):
        one = identity(40)
        assert np.isnan(ops.mlp(nan, {"w1": one, "w2": one, "w3": one}, act)).all()
    for name in ("q", "k", "v", "decay", "beta", "gate"):
        rows, weights = delta_case(3, 2, 20, -5.0)
        getattr(rows, name)[1] = np.nan
        state, history = np.zeros((2, 20, 20), np.float32), np.zeros((3, 3, 40), np.float32)
        with np.errstate(all="ignore"):
            out = ops.delta_attention(rows, weights, history, state)
        assert np.isnan(out[1]).all(), name
        assert np.isfinite(out[0]).all()


def test_experts_compute_the_rows_that_chose_them(ops: Ops) -> None:
    act = Activation("silu")
    shapes = {"w1": (5, 32), "w2": (32, 5), "w3": (5, 32)}
    experts = {e: {n: weight(normal(*shape)) for n, shape in shapes.items()} for e in (7, 2)}
    x, ids = normal(4, 32), np.array([[7, 2], [2, 9], [9, 8], [7, 2]])
    parts = np.full((4, 2, 32), np.float32(-3))
    ops.experts(x, ids, experts, act, parts)
    for t in range(4):
        for place in range(2):
            w = experts.get(int(ids[t, place]))
            if w is None:
                assert (parts[t, place] == -3).all()
                continue
            w1, w2, w3 = (unpack(w[n]) for n in ("w1", "w2", "w3"))
            expected = glu(x[t, None] @ w1.T, x[t, None] @ w3.T, act)[0] @ w2.T
            np.testing.assert_allclose(
                parts[t, place], expected, atol=1e-6 * np.abs(expected).max()
            )
    shares = normal(4, 2)
    close(ops.combine(parts, ids, shares), (shares[:, :, None] * parts).sum(1))


def test_experts_added_up_in_pieces_give_the_bits_of_their_sum(ops: Ops) -> None:
    act, rng = Activation("situ", 4.0, 25.0), np.random.default_rng(3)
    shapes = {"w1": (20, 64), "w2": (64, 20), "w3": (20, 64)}
    experts = {e: {n: weight(normal(*shape)) for n, shape in shapes.items()} for e in range(9)}
    x, shares = normal(33, 64), normal(33, 4)
    ids = np.argsort(rng.random((33, 9)), 1)[:, :4].copy()
    parts = np.empty((33, 4, 64), np.float32)
    for number in rng.permutation(9):
        ops.experts(x, ids, {int(number): experts[int(number)]}, act, parts)
    whole = ops.combine(parts, ids, shares)
    for cuts in ((0, 9), (0, 1, 5, 9), range(10)):
        y = np.zeros((33, 64), np.float32)
        for start, stop in itertools.pairwise(cuts):
            some = {e: experts[e] for e in range(start, stop)}
            ops.add_experts(x, ids, shares, some, act, y)
        np.testing.assert_array_equal(y, whole)


def test_more_rows_than_are_computed_at_once(ops: Ops) -> None:
    """Experts with few and with many rows, and a feed-forward of more than 256."""
    act, fmt = Activation("situ", 4.0, 25.0), "f32"
    shapes = {"w1": (64, 32), "w2": (32, 64), "w3": (64, 32)}
    feeds = {e: {n: packed(fmt, *s) for n, s in shapes.items()} for e in range(5)}
    x, ids = normal(600, 32), np.argsort(rng.random((600, 5)), axis=1)[:, :2].copy()
    ids[:300, 0], ids[:300, 1] = 3, 4  # more rows than fit beside the others
    parts = np.zeros((600, 2, 32), np.float32)
    ops.experts(x, ids, feeds, act, parts)
    for e, feed in feeds.items():
        rows, places = np.nonzero(ids == e)
        np.testing.assert_array_equal(parts[rows, places], ops.mlp(x, feed, act)[rows])


def test_short_conv_continues_over_borders() -> None:
    x, taps = normal(11, 6), normal(4, 6)
    whole, history = (
        short_conv(x, np.zeros((3, 6), np.float32), taps),
        np.zeros((3, 6), np.float32),
    )
    parts = [short_conv(x[a:b], history, taps) for a, b in ((0, 1), (1, 3), (3, 11))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(history, x[-3:])
    for t in range(11):
        for c in range(6):
            y = sum(float(taps[j, c]) * float(x[t - 3 + j, c]) for j in range(4) if t - 3 + j >= 0)
            assert abs(whole[t, c] - y / (1 + math.exp(-y))) < 1e-5


def test_decay_in_both_forms() -> None:
    x, a = normal(2, 3, 4) * 5, normal(3)
    rate = np.exp(a.astype(float))[:, None]
    close(log_decay(x, a, -5.0), -5.0 / (1 + np.exp(-rate * x)))
    close(log_decay(x, a, None), -rate * np.log1p(np.exp(x.astype(float))))


def test_delta_rule_step_by_step() -> None:
    H, K, T = 2, 5, 6
    q, k, v = normal(T, H, K), normal(T, H, K), normal(T, H, K)
    g, beta = -np.abs(normal(T, H, K)), np.abs(normal(T, H))
    start = normal(H, K, K)
    state = start.copy()
    out = delta_rule(q, k, v, g, beta, state)
    for h in range(H):
        s = start[h].astype(float)
        for t in range(T):
            s = np.diag(np.exp(g[t, h].astype(float))) @ s
            s = s + beta[t, h] * np.outer(k[t, h], v[t, h] - s.T @ k[t, h])
            close(out[t, h], s.T @ q[t, h], 1e-4)
        close(state[h], s, 1e-4)


@pytest.mark.parametrize("kept", range(7))
@pytest.mark.parametrize("width", [5, 64])
def test_tokens_that_are_not_kept_leave_no_trace(ops: Ops, kept: int, width: int) -> None:
    T, H, C = 6, 2, 2 * width
    rows, w = delta_case(T, H, width, -5.0)
    start, before = normal(H, width, width), normal(3, 3, C)
    whole = ops.delta_attention(rows, w, before.copy(), start.copy())
    state, history = start.copy(), before.copy()
    out = ops.delta_attention(rows, w, history, state, kept)
    np.testing.assert_array_equal(out, whole)
    wanted, remembered = start.copy(), before.copy()
    if kept:
        ops.delta_attention(rows.part(slice(kept)), w, remembered, wanted)
    np.testing.assert_array_equal(state, wanted)
    np.testing.assert_array_equal(history, remembered)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("width", [5, 64, 72])
def test_delta_attention_step_by_step(ops: Ops, bound: float | None, width: int) -> None:
    """The whole piece in float64, from raw products to the gated output."""
    T, H, C = 6, 2, 2 * width
    rows, w = delta_case(T, H, width, bound)
    start, before = normal(H, width, width), normal(3, 3, C)
    state, history = start.copy(), before.copy()
    out = ops.delta_attention(rows, w, history, state)
    s = start.astype(float)
    raw = (rows.q, rows.k, rows.v)
    inputs = [np.concatenate(z).astype(float) for z in zip(before, raw, strict=True)]
    for t in range(T):
        conv = [(z[t : t + 4] * taps).sum(0) for z, taps in zip(inputs, w.taps, strict=True)]
        q, k, v = ((y / (1 + np.exp(-y))).reshape(H, width) for y in conv)
        q /= np.sqrt(np.square(q).sum(1, keepdims=True) + 1e-6) * math.sqrt(width)
        k /= np.sqrt(np.square(k).sum(1, keepdims=True) + 1e-6)
        x = (rows.decay[t] + w.dt_bias).astype(float).reshape(H, width)
        rate = np.exp(w.a_log.astype(float))[:, None]
        decay = -rate * np.log1p(np.exp(x)) if bound is None else bound / (1 + np.exp(-rate * x))
        beta = 1 / (1 + np.exp(-rows.beta[t].astype(float)))
        s *= np.exp(decay)[:, :, None]
        error = v - np.einsum("hkv,hk->hv", s, k)
        s += np.einsum("h,hk,hv->hkv", beta, k, error)
        o = np.einsum("hkv,hk->hv", s, q)
        o /= np.sqrt(np.square(o).mean(1, keepdims=True) + 1e-5)
        gate = 1 / (1 + np.exp(-rows.gate[t].astype(float)))
        close(out[t], (o * w.norm).reshape(-1) * gate, 1e-4)
    close(state, s, 1e-4)
    np.testing.assert_array_equal(history, np.stack(raw)[:, -3:])


def test_latent_attention_is_attention_over_lifted_rows(ops: Ops) -> None:
    H, N, X, r, M, S, T = 3, 4, 2, 5, 6, 9, 3
    q, rows, key, value = (
        normal(T, H, N + X),
        normal(S, r + X),
        normal(H, N, r),
        normal(H, M, r),
    )
    out = ops.latent_attention(q, rows, key, value, 0.4)
    for t in range(T):
        seen = rows[: S - T + t + 1].astype(float)
        for h in range(H):
            keys = np.concatenate([seen[:, :r] @ key[h].T, seen[:, r:]], 1)
            s = q[t, h] @ keys.T * 0.4
            p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
            close(out[t, h], p @ (seen[:, :r] @ value[h].T), 1e-4)


def rule(**changes: object) -> RouterRule:
    base = {"top_k": 2, "activation": "sigmoid", "renormalise": True, "scale": 1.5}
    return RouterRule(**(base | changes))  # type: ignore[arg-type]


def test_the_router_chooses_with_bias_and_weighs_without(ops: Ops) -> None:
    logits = np.array([[0.0, 1.0, 2.0, -1.0]], np.float32)
    bias = np.array([0.9, 0.0, 0.0, 0.0], np.float32)
    ids, weights = ops.route(logits, bias, rule())
    assert ids.tolist() == [[0, 2]]
    s = 1 / (1 + np.exp(-np.array([0.0, 2.0])))
    close(weights[0], 1.5 * s / s.sum())


def test_equal_scores_go_to_the_lower_number(ops: Ops) -> None:
    ids, _ = ops.route(np.zeros((1, 6), np.float32), None, rule(top_k=3))
    assert ids.tolist() == [[0, 1, 2]]


def test_groups_are_chosen_by_their_two_best(ops: Ops) -> None:
    logits = np.array([[5.0, -9.0, -9.0, 1.0, 1.0, -9.0]], np.float32)  # two groups of three
    ids, _ = ops.route(logits, None, rule(num_groups=2, top_groups=1))
    assert ids.tolist() == [[3, 4]]


def test_softmax_without_renormalising(ops: Ops) -> None:
    logits = normal(2, 5)
    ids, weights = ops.route(logits, None, rule(activation="softmax", renormalise=False, scale=1.0))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    close(weights, np.take_along_axis(p, ids, -1))
