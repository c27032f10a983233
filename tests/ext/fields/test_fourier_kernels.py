"""Compiled Fourier transforms against those of NumPy: lengths, dims, threads, and lines that must not affect others."""

from __future__ import annotations

import numpy as np
import pytest

from fsdpx.core.array import parallel
from fsdpx.core.array.kernels import use_mode
from fsdpx.ext.fields.kernels import fourier_along_dim

TOLERANCE = {"float32": 1e-6, "float64": 4e-15}
TRANSFORMS = ("rfft", "fft", "ifft", "irfft")


def draw(transform: str, n: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers of `shape`, whose 0 becomes the number of elements along the dim."""
    elements = n // 2 + 1 if transform == "irfft" else n
    cells = [elements if size == 0 else size for size in shape]
    rng = np.random.default_rng([n, *cells])
    return rng.standard_normal((*cells, 1 if transform == "rfft" else 2)).astype(dtype)


def compare(x: np.ndarray, dim: int, n: int, transform: str) -> None:
    with use_mode("plain"):
        want = fourier_along_dim(np, x.astype(np.float64), dim, n, transform)
    with use_mode("numba"):
        got = fourier_along_dim(np, x, dim, n, transform)
    assert (got.shape, got.dtype) == (want.shape, x.dtype)
    assert np.max(np.abs(got - want), initial=0.0) <= TOLERANCE[x.dtype.name] * np.max(np.abs(want), initial=0.0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_any_length_are_those_of_numpy(transform: str, dtype: str) -> None:
    """Lengths with prime factors above 7 are transformed by NumPy."""
    for n in (*range(1, 26), 27, 30, 49, 64, 77, 90, 105, 128, 210, 243):
        compare(draw(transform, n, dtype, (3, 0)), 1, n, transform)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0, 21), (4, 37, 0), (1, 3, 0, 2, 4), (0, 40)])
def test_transforms_along_any_dim_are_those_of_numpy(transform: str, shape: tuple[int, ...]) -> None:
    dim, n = shape.index(0), 12
    for dtype in TOLERANCE:
        compare(draw(transform, n, dtype, shape), dim, n, transform)
    empty = draw(transform, n, "float64", (*shape, 1))[..., :0, :]
    compare(empty, dim, n, transform)


def test_views_and_read_only_arrays_are_transformed() -> None:
    x = np.random.default_rng(0).standard_normal((6, 4, 20, 2))
    x.flags.writeable = False
    compare(x.transpose(2, 1, 0, 3), 0, 20, "fft")
    compare(x[::2, :, :, :1], 2, 20, "rfft")


@pytest.mark.parametrize("n", [12, 15])
def test_a_line_does_not_affect_others(n: int) -> None:
    """Neither NaN nor large numbers: a temperature may lie next to a humidity."""
    for transform in TRANSFORMS:
        x = draw(transform, n, "float32", (40, 0))
        want = fourier_along_dim(np, x, 1, n, transform)
        for value in (np.nan, 3e8):
            changed = x.copy()
            changed[7] = value
            got = fourier_along_dim(np, changed, 1, n, transform)
            np.testing.assert_array_equal(np.delete(got, 7, axis=0), np.delete(want, 7, axis=0))


@pytest.mark.parametrize("size", [2, 4])
def test_threads_share_the_lines(size: int) -> None:
    for transform in TRANSFORMS:
        x = draw(transform, 48, "float32", (2000, 0))
        want = fourier_along_dim(np, x, 1, 48, transform)
        parallel.set_threads(size)
        try:
            np.testing.assert_array_equal(fourier_along_dim(np, x, 1, 48, transform), want)
        finally:
            parallel.set_threads(1)
