"""Casts to 16 bits and back on the bits: every float16 and bf16, ties, ends, NaN; sums in float32."""

import ml_dtypes
import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.array import kernels

FORMATS = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=examples(100))
both = pytest.mark.parametrize("half", FORMATS, ids=lambda d: d.name)


def every(half):
    return np.arange(1 << 16, dtype=np.uint16).view(half)


def same(got, want):
    with np.errstate(invalid="ignore"):  # signalling NaN
        nan, seen = np.isnan(want.astype(np.float64)), np.isnan(got.astype(np.float64))
    bits = np.dtype(f"u{got.itemsize}")
    assert np.array_equal(seen, nan)
    assert np.array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


@both
def test_every_number_is_widened_exactly(mode, half):
    h = every(half)
    with np.errstate(invalid="ignore"):
        same(kernels.widened(np, h), h.astype(np.float32))


@both
def test_numbers_around_every_tie_are_rounded_to_even(mode, half):
    h = every(half)
    exact = h[np.isfinite(h.astype(np.float32))].astype(np.float64)
    exact = np.unique(exact)
    ties = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)  # 1 bit more than 16-bit floats have: exact
    x = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    with np.errstate(all="ignore"):
        same(kernels.narrowed(np, x, half), x.astype(half))


@both
def test_ends(mode, half):
    tiny = np.finfo(np.float32).smallest_subnormal
    x = np.array([0.0, -0.0, np.inf, -np.inf, tiny, -tiny, 1e-38, 65519.9, 65520, 65536, 3.4e38, -3.4e38], np.float32)
    with np.errstate(all="ignore"):
        same(kernels.narrowed(np, x, half), x.astype(half))


@both
def test_nan_stays_nan_whatever_its_bits(mode, half):
    x = np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0x7FFFFFFF, 0x7F80FFFF], np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        assert np.isnan(kernels.narrowed(np, x, half).astype(np.float32)).all()


@both
@SETTINGS
@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=70), mode=st.sampled_from(["plain", "numba"]))
def test_any_bits_are_rounded_as_ml_dtypes_and_numpy_round(half, bits, mode):
    x = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(all="ignore"), kernels.use(mode):
        same(kernels.narrowed(np, x, half), x.astype(half))


@both
def test_sums_are_made_in_float32(mode, half):
    rng = np.random.default_rng(0)
    h, total = rng.normal(size=1001).astype(half), rng.normal(size=1001).astype(np.float32)
    want = total + h.astype(np.float32)
    kernels.add_widened(np, h, total)
    same(total, want)


@both
def test_strided_and_wider_arrays(mode, half):
    x = np.linspace(-3, 3, 40)
    out = np.zeros(40, half)[::2]
    kernels.store(np, x[::2], out)
    same(out.copy(), x[::2].astype(half))
