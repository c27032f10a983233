"""Kernels in float32 and bfloat16 against float64, to 1e-6 of the terms that make an element.

Relative to the sum of the magnitudes of an element's terms, not to the element: where terms cancel (a mean that is
subtracted, a gradient near its zero) no float32 code has digits left, whatever the size of the result. An exponential
counts its exponent as a term as well, since that is rounded too. GELU and SiLU forward are held to the element itself.
16-bit kernels compute in float32, so a result in bfloat16 may differ by half a unit of its last place beyond that.
"""

import math

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.array import kernels
from fsdpx.array.kernels.activation import CUBIC, SLOPE
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.random import Stretch

TOLERANCE = 1e-6
BF16 = dtype_of("bf16")
UNIT = 2.0**-8
"""Rounding to bfloat16 changes a number by at most this part of it, or by half of its smallest number."""
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(30))
ROWS = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 130])
COLUMNS = st.integers(1, 140)
SCALE = st.sampled_from([1e-3, 1.0, 5.0])
EPS = 1e-5

erf = np.vectorize(math.erfc, otypes=[np.float64])


def below(x):
    return 0.5 * erf(-x / math.sqrt(2.0))


def single(x):
    """Sums, in float32 whatever the format of the elements."""
    return np.asarray(x, np.float32)


def bell(x):
    return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def logistic(x):
    return np.exp(-np.logaddexp(0.0, -x))


def gelu(x, dy, dtype):
    want = x * below(x)
    return [(kernels.gelu, (x,), want, np.abs(want))]


def gelu_backward(x, dy, dtype):
    want = dy * (below(x) + x * bell(x))
    return [(kernels.gelu_backward, (x, dy), want, np.abs(dy) * (below(x) + np.abs(x) * bell(x)))]


def gelu_tanh(x, dy, dtype):
    u = x * (1.0 + CUBIC * x * x) * SLOPE
    s, slope = logistic(u), (1.0 + 3.0 * CUBIC * x * x) * SLOPE
    spread = 1.0 + np.abs(u) * (1.0 - s)
    want = dy * (s + x * s * (1.0 - s) * slope)
    return [
        (lambda xp, a: kernels.gelu(xp, a, "tanh"), (x,), x * s, np.abs(x) * s * spread),
        (
            lambda xp, a, b: kernels.gelu_backward(xp, a, b, "tanh"),
            (x, dy),
            want,
            np.abs(dy) * s * (spread + np.abs(x) * slope * (1.0 + np.abs(u))),
        ),
    ]


def silu(x, dy, dtype):
    s = logistic(x)
    return [
        (kernels.sigmoid, (x,), s, s),
        (kernels.relu, (x,), np.maximum(x, 0), 0 * s),
        (kernels.relu_backward, (x, dy), dy * (x > 0), 0 * s),
        (kernels.silu, (x,), x * s, np.abs(x) * s),
        (
            kernels.silu_backward,
            (x, dy),
            dy * (s + x * s * (1 - s)),
            np.abs(dy) * (s + np.abs(x) * s * (1 - s)) * (1 + np.abs(x)),
        ),
    ]


def softmax(x, dy, dtype):
    top = x.max(axis=1, keepdims=True)
    y = np.exp(x - top)
    y /= y.sum(axis=1, keepdims=True)
    y32 = y.astype(dtype).astype(np.float64)
    along = np.sum(y32 * dy, axis=1, keepdims=True)
    size = y32 * (np.abs(dy) + np.sum(y32 * np.abs(dy), axis=1, keepdims=True))
    return [
        (kernels.softmax, (x,), y, y * (1.0 + np.abs(x - top))),
        (kernels.softmax_backward, (y32, dy), y32 * (dy - along), size),
    ]


def layer_norm(x, dy, dtype):
    w, b = np.linspace(-1, 2, x.shape[1]).astype(dtype).astype(np.float64), np.ones(x.shape[1])
    mean, rstd = x.mean(axis=1), 1.0 / np.sqrt(x.var(axis=1) + EPS)
    mean32, rstd32 = (a.astype(np.float32).astype(np.float64) for a in (mean, rstd))
    m, r = mean32[:, None], rstd32[:, None]
    n, h = (x - m) * r, dy * w
    size_n = (np.abs(x) + np.abs(x).mean(axis=1, keepdims=True)) * r
    dx = (h - h.mean(axis=1, keepdims=True) - n * (h * n).mean(axis=1, keepdims=True)) * r
    size_h = np.abs(h) + np.abs(h).mean(axis=1, keepdims=True)
    size_dx = (size_h + size_n * (np.abs(h) * size_n).mean(axis=1, keepdims=True)) * r
    y = (x - mean[:, None]) * rstd[:, None] * w + b
    gw, gb = np.zeros(x.shape[1]), np.ones(x.shape[1])

    def params(xp, *arrays):
        sums = [single(a) for a in (gw.copy(), gb.copy())]
        kernels.layer_norm_backward_params(xp, *arrays, *sums)
        return np.stack(sums)

    want = np.stack([np.sum(dy * n, axis=0), 1.0 + np.sum(dy, axis=0)])
    size = np.stack([np.sum(np.abs(dy) * size_n, axis=0), 1.0 + np.sum(np.abs(dy), axis=0)])
    return [
        (lambda xp, *a: kernels.layer_norm(xp, *a, EPS)[0], (x, w, b), y, size_n * np.abs(w) + np.abs(b)),
        (kernels.layer_norm_backward_input, (x, w, single(mean), single(rstd), dy), dx, size_dx),
        (params, (x, single(mean), single(rstd), dy), want, size),
    ]


def rms_norm(x, dy, dtype):
    w = np.linspace(-1, 2, x.shape[1]).astype(dtype).astype(np.float64)
    rstd = 1.0 / np.sqrt((x * x).mean(axis=1) + EPS)
    r = rstd.astype(np.float32).astype(np.float64)
    n, h = x * r[:, None], dy * w
    dx = (h - n * (h * n).mean(axis=1, keepdims=True)) * r[:, None]
    size = (np.abs(h) + np.abs(n) * np.abs(h * n).mean(axis=1, keepdims=True)) * r[:, None]
    y = x * rstd[:, None] * w
    return [
        (lambda xp, *a: kernels.rms_norm(xp, *a, EPS)[0], (x, w), y, np.abs(y)),
        (kernels.rms_norm_backward_input, (x, w, single(rstd), dy), dx, size),
    ]


def losses(x, dy, dtype):
    target = (np.arange(x.shape[0]) * 7) % x.shape[1]
    top = x.max(axis=1)
    lse = np.log(np.exp(x - top[:, None]).sum(axis=1)) + top
    lse32 = lse.astype(np.float32).astype(np.float64)
    picked = np.take_along_axis(x, target[:, None], axis=1)[:, 0]
    p, hit = np.exp(x - lse32[:, None]), np.arange(x.shape[1]) == target[:, None]
    size, errors = p * (1.0 + np.abs(x - lse32[:, None])) + hit, np.square(x - dy)
    entropy, sizes = np.logaddexp(0.0, x) - x * dy, np.abs(x) + np.abs(x * dy) + 1.0
    return [
        (lambda xp, a: np.float64(kernels.cross_entropy(xp, a, target)[0]), (x,), (lse - picked).sum(),
         (np.abs(lse) + np.abs(picked) + 1.0).sum()),
        (lambda xp, a, b: kernels.cross_entropy_backward(xp, a, target, b, 0.5), (x, single(lse)), (p - hit) / 2,
         size / 2),
        (lambda xp, a, b: np.float64(kernels.squared_error(xp, a, b)), (x, dy), errors.sum(), errors.sum()),
        (lambda xp, a, b: np.float64(kernels.binary_entropy(xp, a, b)), (x, dy), entropy.sum(), sizes.sum()),
        (lambda xp, a, b: kernels.binary_entropy_backward(xp, a, b, 0.5), (x, dy), (logistic(x) - dy) / 2,
         logistic(x) + np.abs(dy)),
        (lambda xp, a, b: kernels.squared_error_backward(xp, a, b, 0.5), (x, dy), (x - dy) / 2, np.abs(x) + np.abs(dy)),
    ]  # fmt: skip


def sums(x, dy, dtype):
    w = dy[0] if len(dy) else np.ones(x.shape[1])

    def bias_gelu(xp, h, bias):
        h = h.copy()
        return np.stack([kernels.bias_gelu(xp, h, bias), h])

    def rows(accumulate):
        def run(xp, a, b):
            b = single(b)
            kernels.sum_rows(xp, a, b, accumulate)
            return b

        return run

    def add_bias(xp, y, bias):
        y = y.copy()
        kernels.add_bias(xp, y, bias)
        return y

    h = (x + w).astype(np.float32).astype(dtype).astype(np.float64)
    total, size = x.sum(axis=0), np.abs(x).sum(axis=0)
    return [
        (kernels.add, (x, dy), x + dy, np.abs(x) + np.abs(dy)),
        (add_bias, (x, w), x + w, np.abs(x) + np.abs(w)),
        (bias_gelu, (x, w), np.stack([h * below(h), h]), np.abs(np.stack([h * below(h), h]))),
        (rows(True), (x, w), total + w, size + np.abs(w)),
        (rows(False), (x, w), total, size),
        (lambda xp, a: np.float64(kernels.square_sum(xp, a.reshape(-1))), (x,), (x * x).sum(), (x * x).sum()),
        (lambda xp, a: kernels.square_sums(xp, a.reshape(-1), 16), (x,), blocks(x), blocks(x)),
    ]


def lookups(x, dy, dtype):
    index = (np.arange(len(x)) * 7) % 5
    table, size = np.ones((5, x.shape[1])), np.ones((5, x.shape[1]))
    np.add.at(table, index, x)
    np.add.at(size, index, np.abs(x))

    def add(xp, a):
        rows = np.ones(table.shape, np.float32)
        kernels.embedding_backward(xp, rows, index, a)
        return rows

    return [(add, (x,), table, size)]


def dropped(x, dy, dtype):
    """The numbers are those of float64."""
    y, keep = kernels.drop(np, x, numbers(x.size), 0.3)
    return [
        (lambda xp, a: kernels.drop(xp, a, numbers(a.size), 0.3)[0], (x,), y, np.abs(y)),
        (lambda xp, a: kernels.drop(xp, a, numbers(a.size), 0.3)[1].astype("f8"), (x,), keep, 0.0 * keep),
        (lambda xp, a: kernels.drop_backward(xp, a, keep, 0.3), (dy,), dy * keep / 0.7, np.abs(dy)),
    ]


def numbers(size):
    return Stretch(3, "dropout", 1, 1 + size)


def channels(x, dy, dtype):
    """Batch norm with columns as channels."""
    mean, scale = (np.linspace(low, 2, x.shape[1]).astype("f4").astype("f8") for low in (-1, 0.5))
    m, s, n = single(mean), single(scale), (x - mean) * scale
    size_n = (np.abs(x) + np.abs(mean)) * scale
    sums, size = ([a.sum(axis=0) for a in pair] for pair in ((dy, dy * n), (np.abs(dy), np.abs(dy) * size_n)))
    size_dx = (np.abs(dy) + np.abs(mean) + (np.abs(x) + np.abs(mean)) * scale) * scale
    dx = (dy - mean - (x - mean) * scale) * scale
    return [
        (kernels.channel_sums, (x,), x.sum(axis=0), np.abs(x).sum(axis=0)),
        (kernels.channel_squares, (x, m), np.square(x - mean).sum(axis=0), np.square(size_n / scale).sum(axis=0)),
        (kernels.channel_affine, (x, m, s, m), n + mean, size_n + np.abs(mean)),
        (kernels.channel_sums_with, (dy, x, m, s), np.concatenate(sums), np.concatenate(size)),
        (kernels.channel_norm_backward, (dy, x, m, s, m, s), dx, size_dx),
    ]


def blocks(x):
    flat = np.square(x.reshape(-1))
    return np.array([flat[at : at + 16].sum() for at in range(0, flat.size, 16)])


@pytest.mark.parametrize(
    "cases",
    [gelu, gelu_backward, gelu_tanh, silu, softmax, layer_norm, rms_norm, losses, sums, lookups, dropped, channels],
    ids=lambda f: f.__name__,
)  # fmt: skip
@SETTINGS
@given(
    rows=ROWS,
    columns=COLUMNS,
    scale=SCALE,
    mode=st.sampled_from(["plain", "numba"]),
    dtype=st.sampled_from([np.dtype(np.float32), BF16]),
    seed=st.integers(0, 9),
)
def test_against_float64(cases, rows, columns, scale, mode, dtype, seed):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(rows, columns)) * scale).astype(dtype).astype(np.float64)
    dy = rng.normal(size=(rows, columns)).astype(dtype).astype(np.float64)
    for run, arrays, want, size in cases(x, dy, dtype):
        with kernels.use(mode):
            got = run(np, *(a.astype(dtype) if a.dtype == np.float64 else a for a in arrays))
        assert got.shape == np.shape(want)
        assert got.dtype in (dtype, np.float32, np.float64)
        error, allowed = np.abs(got.astype(np.float64) - want), TOLERANCE * np.asarray(size) + 1e-42
        if got.dtype == BF16:
            allowed = allowed + UNIT * (np.abs(want) + allowed) + 2.0**-134
        assert (error <= allowed).all(), (run, (error / allowed).max())


SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e38, -1e38, 3e38, np.inf, -np.inf, np.nan, 1.0], np.float32)


def test_special_values_of_elementwise_kernels(mode):
    with np.errstate(all="ignore"):
        got = kernels.gelu(np, SPECIAL)
        np.testing.assert_array_equal(got[[0, 1, 5, 6, 7, 8]], np.float32([0, 0, 1e38, 0, 3e38, np.inf]))
        assert np.isnan(got[10])
        assert got[11] == np.float32(0.8413447)
        slope = kernels.gelu_backward(np, SPECIAL[:8], np.ones(8, np.float32))
        np.testing.assert_allclose(slope, [0.5, 0.5, 0.5, 0.5, 0.5, 1, 0, 1], atol=1e-30, rtol=1e-7)
        np.testing.assert_array_equal(kernels.sigmoid(np, SPECIAL[[0, 5, 6, 8, 9]]), [0.5, 1, 0, 1, 0])
        np.testing.assert_array_equal(kernels.add(np, SPECIAL, SPECIAL[::-1]), SPECIAL + SPECIAL[::-1])


def test_rows_without_anything_finite(mode):
    x = np.array([[-np.inf, -np.inf], [-np.inf, 2.0], [np.inf, 1.0]], np.float32)
    with np.errstate(all="ignore"):
        y = kernels.softmax(np, x)
    assert np.isnan(y[0]).all()
    assert y[1].tolist() == [0.0, 1.0]
    assert np.isnan(y[2, 0])
    total, weight, lse = kernels.cross_entropy(np, x[1:2], np.array([1]))
    assert (total, weight, lse.tolist()) == (0.0, 1.0, [2.0])


def test_huge_logits(mode):
    x = np.array([[1e38, -1e38, 0.0], [-1e38, -1e38, -1e38]], np.float32)
    total, _, lse = kernels.cross_entropy(np, x, np.array([0, 2]))
    np.testing.assert_allclose(lse, x.max(axis=1))
    assert total == 0.0 or abs(total) < 2.0
    assert np.isfinite(kernels.cross_entropy_backward(np, x, np.array([0, 2]), lse, 1.0)).all()
