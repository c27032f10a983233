"""Products of 16-bit matrices: every library within the rounding of its formats, in every layout."""

from collections.abc import Iterator

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, lay

from fsdpx.array import blas, kernels, parallel
from fsdpx.array.blas import halves, onednn
from fsdpx.array.namespace import dtype
from fsdpx.array.random import Stretch
from fsdpx.errors import ConfigError

BF16 = dtype("bf16")
LIBRARIES = list(halves.available())
SIZES = st.one_of(st.integers(0, 5), st.sampled_from([31, 32, 33, 64, 65, 130]))


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    yield
    halves.choose(None)
    blas.threads(1)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(BF16)


@pytest.mark.parametrize("wide", [True, False])
@settings(max_examples=examples(40), deadline=None)
@given(SIZES, SIZES, SIZES, st.tuples(*[st.sampled_from(LAYOUTS)] * 2), st.integers(0, 99))
def test_products_biases_and_sums(wide, m, k, n, layouts, seed) -> None:
    """Terms are exact in float32; sums are rounded k times there, and a 16-bit result once more."""
    a, b, bias = normal((m, k), seed), normal((k, n), seed + 1), normal((n,), seed + 2)
    exact = [x.astype("f8") for x in (a, b, bias)]
    want = exact[0] @ exact[1]
    size = np.abs(exact[0]) @ np.abs(exact[1]) + np.abs(exact[2]) + 1
    bound = (k + 4) * 2.0**-23 * size + (0 if wide else 2.0**-8 * (np.abs(want) + np.abs(exact[2]) + 1))
    for name in LIBRARIES:
        halves.choose(name)
        out = np.full((m, n), np.nan, np.float32 if wide else BF16)
        halves.product(out, lay(a, layouts[0]), lay(b, layouts[1]), bias=bias)
        assert np.all(np.abs(out.astype("f8") - want - exact[2]) <= bound), name
        out[...] = 1
        halves.product(out, lay(a, layouts[0]), lay(b, layouts[1]), accumulate=True)
        assert np.all(np.abs(out.astype("f8") - want - 1) <= bound), name


@pytest.mark.parametrize("name", LIBRARIES)
def test_inf_and_nan_go_where_they_belong(name: str) -> None:
    halves.choose(name)
    a, b = normal((6, 40), 0), normal((40, 5), 1)
    a[1, 3], b[7, 2] = np.inf, np.nan
    out = np.empty((6, 5), np.float32)
    halves.product(out, a, b)
    with np.errstate(invalid="ignore"):
        want = a.astype("f8") @ b.astype("f8")
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(out), np.isinf(want))


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_bits_of_a_product_are_the_same_wherever_arrays_lie(name: str) -> None:
    halves.choose(name)
    a, b = normal((33, 65), 0), normal((65, 31), 1)
    seen = set()
    for shift in (0, 1, 3, 17):
        x = np.empty(a.size + shift, BF16)[shift:].reshape(a.shape)
        x[...] = a
        out = np.empty((33, 31), np.float32)
        halves.product(out, x, b)
        seen.add(out.tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("name", LIBRARIES)
def test_cut_among_threads(name: str) -> None:
    halves.choose(name)
    a, b = normal((700, 300), 0), normal((300, 400), 1)
    want, got = np.empty((700, 400), np.float32), np.zeros((700, 400), np.float32)
    halves.product(want, a, b)
    blas.threads(2)
    halves.product(got, a, b, accumulate=True)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_library_that_computes_wrongly_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        path, version = "libwrong.so", "0"

        def product(self, out, a, b, accumulate, bias):
            out[...] = a.astype("f4") @ b.astype("f4")
            if out.size > 100:
                out[-1, -1] += 0.1

    monkeypatch.setattr(onednn, "found", Wrong)
    monkeypatch.setattr(halves, "instructions", lambda kind: ("avx512_bf16",))
    halves._default.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"oneDNN in libwrong.so \(0\) multiplies wrongly"):
            assert halves.chosen() == halves.WIDENED
    finally:
        halves._default.cache_clear()


def test_without_instructions_operands_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "instructions", lambda kind: ())
    halves._default.cache_clear()
    try:
        assert halves.chosen() == halves.WIDENED
    finally:
        halves._default.cache_clear()


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"16-bit products by 'cublas' are not here: choose one of .*widened"):
        halves.choose("cublas")


TARGET = np.arange(33) * 5 % 71
KERNELS = {
    "add": lambda k, x, y, b: k.add(np, x, y),
    "add_bias": lambda k, x, y, b: [h := x.copy(), k.add_bias(np, h, b)][0],
    "bias_gelu": lambda k, x, y, b: [h := x.copy(), k.bias_gelu(np, h, b)],
    "bias_gelu tanh": lambda k, x, y, b: [h := x.copy(), k.bias_gelu(np, h, b, "tanh")],
    "channel_affine": lambda k, x, y, b: k.channel_affine(np, x, *_channels()),
    "channel_norm_backward": lambda k, x, y, b: k.channel_norm_backward(np, x, y, *_channels(), _channels()[0]),
    "channel_squares norm": lambda k, x, y, b: k.channel_squares(np, x, _channels()[0]),
    "channel_sums norm": lambda k, x, y, b: k.channel_sums(np, x),
    "channel_sums_with norm": lambda k, x, y, b: k.channel_sums_with(np, x, y, *_channels()[:2]),
    "cross_entropy": lambda k, x, y, b: [np.array(v) for v in k.cross_entropy(np, x, TARGET[: len(x)])],
    "cross_entropy_backward": lambda k, x, y, b: k.cross_entropy_backward(np, x, TARGET[: len(x)], _moments(x)[0], 0.5),
    "drop": lambda k, x, y, b: k.drop(np, x, Stretch(0, "a", 5, 5 + x.size), 0.4),
    "drop_backward": lambda k, x, y, b: k.drop_backward(np, x, y > 0, 0.4),
    "embedding_backward": lambda k, x, y, b: [
        table := np.ones((71, 71), np.float32),
        k.embedding_backward(np, table, TARGET[: len(x)], x),
    ][:1],
    "embedding_backward 16": lambda k, x, y, b: [
        table := np.ones((71, 71), BF16),
        k.embedding_backward(np, table, TARGET[: len(x)], y),
    ][:1],
    "gelu": lambda k, x, y, b: k.gelu(np, x),
    "gelu_backward": lambda k, x, y, b: k.gelu_backward(np, x, y),
    "gelu_backward tanh": lambda k, x, y, b: k.gelu_backward(np, x, y, "tanh"),
    "gelu_recompute": lambda k, x, y, b: [h := y.copy(), k.gelu_recompute(np, x, h)],
    "gelu_recompute tanh": lambda k, x, y, b: [h := y.copy(), k.gelu_recompute(np, x, h, "tanh")],
    "layer_norm": lambda k, x, y, b: k.layer_norm(np, x, b, b, 1e-5),
    "layer_norm alone": lambda k, x, y, b: k.layer_norm(np, x, None, None, 1e-5),
    "layer_norm_backward_input": lambda k, x, y, b: k.layer_norm_backward_input(np, x, b, *_moments(x), y),
    "layer_norm_backward_params": lambda k, x, y, b: [
        sums := np.ones((2, 71), np.float32),
        k.layer_norm_backward_params(np, x, *_moments(x), y, sums[0], sums[1]),
    ][:1],
    "layer_norm_backward_params 16": lambda k, x, y, b: [
        sums := np.ones((2, 71), BF16),
        k.layer_norm_backward_params(np, x, *_moments(x), y, sums[0], None),
    ][:1],
    "rms_norm": lambda k, x, y, b: k.rms_norm(np, x, b, 1e-5),
    "rms_norm_backward_input": lambda k, x, y, b: k.rms_norm_backward_input(np, x, b, _moments(x)[1], y),
    "sigmoid": lambda k, x, y, b: k.sigmoid(np, x),
    "silu": lambda k, x, y, b: k.silu(np, x),
    "silu_backward": lambda k, x, y, b: k.silu_backward(np, x, y),
    "softmax": lambda k, x, y, b: k.softmax(np, x),
    "softmax_backward": lambda k, x, y, b: k.softmax_backward(np, y, b + 0 * y),
    "square_sum norm": lambda k, x, y, b: np.array(k.square_sum(np, x.reshape(-1))),
    "squared_error norm": lambda k, x, y, b: np.array(k.squared_error(np, x, y)),
    "squared_error_backward": lambda k, x, y, b: k.squared_error_backward(np, x, y, 0.25),
    "sum_rows": lambda k, x, y, b: [out := np.ones(x.shape[1], np.float32), k.sum_rows(np, x, out)][0],
    "sum_rows 16": lambda k, x, y, b: [out := b.copy(), k.sum_rows(np, x, out, False)][0],
}
"""Kernels whose compiled code works on the bits of bfloat16, with what they change."""


def _channels() -> list[np.ndarray]:
    """Three numbers for each column."""
    return [np.linspace(low, 1, 71, dtype=np.float32) for low in (-1, 0.5, 0.1)]


def _moments(x: np.ndarray) -> list[np.ndarray]:
    """A mean and a rstd for each row."""
    return [np.linspace(low, 1, len(x), dtype=np.float32) for low in (-1, 0.5)]


VALUES = [0.0, -0.0, 1e-40, -1e-39, 3e38, -3e38, 88.0, -88.0]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("layout", ["rows", "columns", "every second"])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_kernels_on_bits_are_the_plain_ones(name: str, layout: str, rows: int) -> None:
    """Both compute in float32 and round once; denormals, large numbers and ragged sizes among them."""
    x, y, bias = normal((rows, 71), 3), normal((rows, 71), 4), normal((71,), 5)
    if "norm" not in name:  # whose squares overflow
        x[:1, : len(VALUES)] = VALUES
    x, y = lay(x, layout), lay(y, layout)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"), kernels.use("plain"):
        want = KERNELS[name](kernels, x, y, bias)
    got = KERNELS[name](kernels, x, y, bias)
    for one, other in zip(_each(got), _each(want), strict=True):
        assert one.dtype == other.dtype
        step = 2.0**-8 if one.dtype == BF16 else 2.0**-20  # a tie may fall to either side
        wide = [v.astype(np.float64) for v in (one, other)]
        tiny = 1e-30 if "norm" not in name else 1e-5  # sums in another order
        np.testing.assert_allclose(wide[0], wide[1], rtol=2 * step, atol=tiny)


def _each(found: object) -> list[np.ndarray]:
    return list(found) if isinstance(found, list | tuple) else [found]  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["gelu", "silu", "add"])
def test_nan_and_inf_pass_through_kernels_on_bits(name: str) -> None:
    x = np.array([[np.nan, np.inf, -np.inf, 1.0]], np.float32).astype(BF16)
    got = KERNELS[name](kernels, x, np.zeros_like(x), x[0])
    assert np.isnan(got[0, 0])
    assert got[0, 1] == np.inf
    assert got[0, 3] > 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 70, 8), (1, 1, 1, 4), (0, 2, 5, 4)])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_of_bfloat16_is_that_of_its_numbers(causal: bool, shape: tuple[int, ...], threads: int) -> None:
    """Computed in float32, head by head, and rounded once."""
    q, k, v, do = (normal(shape, seed) for seed in range(4))
    wide = [a.astype(np.float32) for a in (q, k, v, do)]
    parallel.set_threads(threads)
    try:
        o, lse = kernels.attention(np, q, k, v, causal, 0.3)
        d = kernels.attention_backward(np, q, k, v, o, lse, do, causal, 0.3)
    finally:
        parallel.set_threads(1)
    want, want_lse = kernels.attention(np, *wide[:3], causal, 0.3)
    assert (o.dtype, lse.dtype, d.dtype) == (BF16, np.float32, BF16)
    np.testing.assert_allclose(o.astype("f4"), want, rtol=2.0**-8, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    slopes = kernels.attention_backward(np, *wide[:3], o.astype("f4"), lse, wide[3], causal, 0.3)
    np.testing.assert_allclose(d.astype("f4"), slopes, rtol=2.0**-8, atol=1e-5)
    assert o.swapaxes(1, 2).flags.c_contiguous


def test_attention_of_bfloat16_to_keys_of_another_length() -> None:
    q, do = normal((2, 3, 30, 8), 0), normal((2, 3, 30, 8), 1)
    k, v = normal((2, 3, 41, 8), 2), normal((2, 3, 41, 8), 3)
    o, lse = kernels.attention(np, q, k, v, False, 0.3)
    got = kernels.attention_backward(np, q, k, v, o, lse, do, False, 0.3)
    wide = [a.astype("f4") for a in (q, k, v, o)]
    want = kernels.attention_backward(np, *wide, lse, do.astype("f4"), False, 0.3)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == BF16
        np.testing.assert_allclose(one.astype("f4"), other, rtol=2.0**-8, atol=1e-5)
