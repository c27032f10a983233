"""Casts to 16 bits and back on the bits: every float16 and bf16, ties, ends, NaN; sums in float32."""

import ml_dtypes
import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.array import kernels
from fsdpx.array.random import Stretch

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


def chances(start, stop):
    """The 16 bits of each place of a stream, one by one, from the definition."""
    key0, key1 = (int(key) & 0xFFFFFFFF for key in Stretch(3, "a", 0, 1).keys)

    def mix(n):
        n = (n ^ n >> 16) * 0x7FEB352D & 0xFFFFFFFF
        n = (n ^ n >> 15) * 0x846CA68B & 0xFFFFFFFF
        return n ^ n >> 16

    places = range(start, stop)
    return np.array([mix(mix(p & 0xFFFFFFFF ^ key0) ^ key1 ^ p >> 32) >> 16 for p in places], np.uint32)


@pytest.mark.parametrize(("start", "size"), [(0, 1), (1, 2), (3, 9), (5, 1000), (2, 0), (2**32 - 5, 9), (2**33, 70)])
def test_rounded_by_chance_bit_by_bit(mode, start, size):
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    out = np.empty(size, FORMATS[1])
    kernels.round_randomly(np, x, out, Stretch(3, "a", start, start + size))
    want = (x.view(np.uint32) + chances(start, start + size)) >> 16
    np.testing.assert_array_equal(out.view(np.uint16), want.astype(np.uint16))


def test_rounding_by_chance_is_right_in_the_mean_and_moves_to_a_neighbour(mode):
    n = 1 << 16
    for value in (1.0 + 2.0**-10, -3.3, 1e-40, 65504.7):
        x, out = np.full(n, value, np.float32), np.empty(n, FORMATS[1])
        kernels.round_randomly(np, x, out, Stretch(0, str(value), 0, n))
        got = out.astype(np.float64)
        low, high = np.unique(got)
        step = high - low
        assert low < np.float32(value) < high
        assert high == np.nextafter(np.float64(low).astype(FORMATS[1]), FORMATS[1].type(np.inf)).astype(np.float64)
        assert abs(got.mean() - np.float64(np.float32(value))) < 5 * step / 2 / n**0.5  # five standard deviations


def test_what_is_exact_or_no_number_stays_when_rounded_by_chance(mode):
    h = every(FORMATS[1])
    out = np.empty_like(h)
    with np.errstate(invalid="ignore"):
        kernels.round_randomly(np, h.astype(np.float32), out, Stretch(0, "x", 0, h.size))
        same(out, h)
