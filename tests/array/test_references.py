"""Every kernel in every format against NumPy in float64: on random shapes, and with denormals, Inf and NaN.

Relative to the sum of the magnitudes of an element's terms, not to the element: where terms cancel (a mean that is
subtracted, a gradient near its zero) no float32 code has digits left, whatever the size of the result. An exponential
counts its exponent as a term as well, since that is rounded too. GELU and SiLU forward are held to the element itself.
16-bit kernels compute in float32, so a 16-bit result may differ by half a unit of its last place beyond that.
"""

import math

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from references import BF16, F16, FAMILIES, TOLERANCE, agree, cases

from fsdpx.array import kernels
from fsdpx.array.kernels.compiled import convolution
from fsdpx.array.kernels.convolution import SlidingWindow

ROWS = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 130])
COLUMNS = st.integers(1, 140)
SCALE = st.sampled_from([1e-3, 1.0, 5.0])
MODE = st.sampled_from(["plain", "numba"])
FORMATS = st.sampled_from([np.dtype(np.float32), BF16, F16])
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)


def tried(number):
    return settings(derandomize=True, database=None, deadline=None, max_examples=examples(number))


def compare(family, mode, dtype, x, dy):
    """All kernels of a family on numbers as `dtype` has them."""
    x, dy = (a.astype(dtype).astype(np.float64) for a in (x, dy))
    for name, case in cases(family, x, dy, dtype):
        arrays = [a.astype(dtype) if a.dtype == np.float64 else a for a in case.arrays]
        with kernels.use(mode), np.errstate(all="ignore"):
            got = case.run(np, *arrays)
        assert got.dtype in (dtype, BF16, np.float32, np.float64), name
        try:
            agree(got, case, 1e-13 if dtype == np.float64 else TOLERANCE)
        except AssertionError as error:
            error.add_note(f"{name}, {mode}, {dtype.name}, {x.shape}")
            raise


@families
@tried(30)
@given(rows=ROWS, columns=COLUMNS, scale=SCALE, mode=MODE, dtype=FORMATS, seed=st.integers(0, 9))
def test_against_float64(family, rows, columns, scale, mode, dtype, seed):
    rng = np.random.default_rng(seed)
    compare(family, mode, dtype, rng.normal(size=(rows, columns)) * scale, rng.normal(size=(rows, columns)))


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.__name__ not in ("gelu", "products")], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("mode", ["plain", "numba"])
def test_in_float64(family, mode):
    """Without products of 16 bits, and without gelu, whose erfc is a polynomial for float32."""
    rng = np.random.default_rng(0)
    compare(family, mode, np.dtype(np.float64), rng.normal(size=(33, 37)) * 3, rng.normal(size=(33, 37)))


def test_gelu_in_float64(mode):
    """Its reference among the families rounds what is recomputed, as float32 does."""
    x = np.random.default_rng(0).normal(size=(33, 37)) * 3
    below = np.vectorize(math.erfc)(-x / math.sqrt(2.0)) / 2
    slope = below + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(kernels.gelu(np, x), x * below, rtol=1e-12, atol=1e-30)
    np.testing.assert_allclose(kernels.gelu_backward(np, x, np.ones_like(x)), slope, rtol=1e-12, atol=1e-14)


@families
@tried(20)
@given(
    shape=st.tuples(st.sampled_from([1, 2, 5, 33]), st.integers(1, 40)),
    share=st.sampled_from([0.01, 0.05, 0.3]),
    mode=MODE,
    dtype=FORMATS,
    seed=st.integers(0, 99),
)
def test_denormals_inf_and_nan_come_out_where_float64_has_them(family, shape, share, mode, dtype, seed):
    rng = np.random.default_rng(seed)
    least = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}[dtype.name]
    special = np.array([np.nan, np.inf, -np.inf, least, -least, 3 * least, -77 * least])
    x, dy = (
        np.where(rng.random(shape) < share, special[rng.integers(0, special.size, shape)], rng.normal(size=shape))
        for _ in range(2)
    )
    compare(family, mode, dtype, x, dy)


def test_every_kernel_has_a_reference():
    """A kernel that is added is added there, too."""
    x = np.ones((2, 3))
    known = {name for family in FAMILIES for name, _ in cases(family, x, x, BF16)}
    assert known - {"product"} == set(kernels.__all__) - {"NUMBA", "chosen", "use"}


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, F16], ids=str)
def test_winograd_takes_inf_to_its_tile_and_no_further(dtype):
    """A tile of 4 x 4 results is made of differences of all its pixels."""
    rng, window = np.random.default_rng(0), SlidingWindow((3, 3), (1, 1), (1, 1))
    x, weight = (rng.normal(size=shape).astype(dtype) for shape in ((1, 16, 16, 16), (16, 16, 3, 3)))
    assert convolution.suits_winograd(x.shape, weight.shape, window)
    clean = kernels.conv2d(np, x, weight, None, window)
    x[0, 3, 5, 6] = np.inf
    with np.errstate(invalid="ignore"):
        got = kernels.conv2d(np, x, weight, None, window)
    odd = ~np.isfinite(got.astype(np.float32))
    assert odd[:, :, 4:7, 5:8].all()
    odd[:, :, 4:8, 4:8] = True
    assert not odd[:, :, :4].any()
    np.testing.assert_array_equal(got[~odd], clean[~odd])
    assert (~odd).sum() == 16 * (16 * 16 - 4 * 4)


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
