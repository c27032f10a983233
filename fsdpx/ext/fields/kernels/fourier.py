"""Discrete Fourier transforms along one dim, and spectra, in plain array code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = ["fourier_along_dim", "sum_squares_by_index"]


@kernel(bits=False)
def fourier_along_dim(xp: Any, x: Any, dim: int, n: int, transform: str) -> Any:
    """Return the Fourier transform of x along dim `dim`, as the function `transform` of `numpy.fft` computes it.

    Parameters
    ----------
    x : array whose last dim has size 1 for real numbers, or size 2 for the real and imaginary parts of complex numbers.
        The last dim of the result has the same meaning
    dim : dim along which to transform
    n : number of cells along this dim; real cells have n // 2 + 1 modes
    transform : "rfft" from real cells to modes, "irfft" back, and "fft" and "ifft" for complex cells
    """
    given = x[..., 0] if transform == "rfft" else x[..., 0] + 1j * x[..., 1]
    y = getattr(xp.fft, transform)(given, n, axis=dim)
    return y[..., None] if transform == "irfft" else xp.stack([xp.real(y), xp.imag(y)], axis=-1)


@kernel(bits=False, narrow=0)
def sum_squares_by_index(xp: Any, modes: Any, index: Any, weights: Any, count: int) -> Any:
    """Return, for each row of modes (rows, *modes, 2), the weighted sum of |mode|^2 of all modes with the same index,
    as float64 (rows, count). `index` and `weights` are (*modes)."""
    rows = modes.shape[0]
    if getattr(xp, "holds_no_data", False) or not math.prod(modes.shape):
        return xp.zeros((rows, count), dtype=np.float64)
    power = (xp.square(modes[..., 0]) + xp.square(modes[..., 1])) * weights
    places = index.reshape(-1)
    return xp.stack([xp.bincount(places, row, count) for row in power.reshape(rows, places.shape[0])])
