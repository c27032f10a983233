"""Error of the amplitude spectrum of a field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.kernels.memory_order import put_channels_first
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.cell_reductions import all_reduce_over_parts
from fsdpx.ext.fields.fourier import make_mode_partition, transform_cells_to_modes, transform_modes_to_cells
from fsdpx.ext.fields.halo import get_local_range
from fsdpx.ext.fields.kernels import sum_squares_by_index
from fsdpx.ext.fields.losses import FieldLoss
from fsdpx.nn.gradient_accumulation import accumulation_dtype
from fsdpx.nn.layer import Array, LayerContext, require_finite_arguments
from fsdpx.nn.losses import compute_difference_target_and_weights
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["SpectrumRMSE"]


class SpectrumRMSE(FieldLoss):
    """Error of the amplitude spectrum of each channel, averaged over channels and samples.

    The amplitude A_k at wavenumber k is the square root of the sum of |Fourier coefficient|^2 over all modes whose
    wavenumber, defined as in `BandRMSE`, rounds to k. The squares of all A_k therefore add up to the mean square of the
    field. The error is sqrt(sum_k (A_k(y) - A_k(target))^2), which is at most the `RMSE`. The error does not depend on
    phases. A shifted field has the same spectrum, but a smooth average of possible fields has a different one.

    Each rank transforms lines of cells that it receives from the other ranks along a dim. No rank holds the full field.

    Parameters
    ----------
    low, high : wavenumbers k to compare, low <= k < high; default 0 and None (all wavenumbers)
    log : whether to compare logarithms, sqrt(mean_k log((A_k(y) + eps) / (A_k(target) + eps))^2), so that small scales
        count as much as large scales; default False
    eps : number added to amplitudes if `log`; default 1e-6
    weights, skipna : as in `RelativeL2`; both fields are multiplied by the square root of the weights, as with a window
        function, and squares are divided by the mean weight
    """

    needs_grid = True
    reads_any_memory_order = True
    kernel_names = ("channels_last", "fourier_along_dim", "sum_squares_by_index")

    def __init__(
        self,
        low: float = 0,
        high: float | None = None,
        log: bool = False,
        eps: float = 1e-6,
        weights: Any = None,
        skipna: bool = False,
    ) -> None:
        super().__init__(weights, skipna)
        require_finite_arguments(self, low=low, high=low if high is None else high, eps=eps)
        if low < 0 or (high is not None and high <= low):
            raise ConfigError(f"SpectrumRMSE: wavenumbers are from low >= 0 to a larger one, got {low}, {high}")
        if not eps > 0:
            raise ConfigError(f"SpectrumRMSE: eps must be above 0, got {eps}")
        self.low, self.high, self.log, self.eps = low, high, bool(log), float(eps)

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        if y.ndim < 3:
            raise ShapeError(f"{self!r} wants (samples, channels, *cells), got {tuple(y.shape)}")
        xp, channels, dims = env.xp, y.shape[1], tuple(range(2, y.ndim))
        parts = self.parts or FieldPartition.on_one_rank(y.shape[2:])
        both = xp.empty((y.shape[0], 2 * channels, *y.shape[2:]), dtype=accumulation_dtype(y.dtype))
        if self.weights is None and not self.skipna:
            both[:, :channels], both[:, channels:] = (put_channels_first(xp, a) for a in (y, target))
            root = None
            mass = xp.full(y.shape[:2], float(math.prod(y.shape[2:])), dtype=np.float64)
        else:
            error, known, w = compute_difference_target_and_weights(env, y, target, self.weights, self.skipna)
            root = xp.sqrt(w)
            both[:, :channels], both[:, channels:] = (error + known) * root, known * root
            mass = xp.broadcast_to(w, y.shape).sum(axis=dims, dtype=np.float64)
        modes = transform_cells_to_modes(env, both, parts, "SpectrumRMSE")
        shells = self._get_shells(env, parts, modes.dtype)
        rows = modes.reshape(math.prod(modes.shape[:2]), *modes.shape[2:])
        squares = sum_squares_by_index(xp, rows, shells.index, shells.multiplicity, shells.total)
        squares = squares.reshape(*modes.shape[:2], shells.total)
        sums = [mass[..., None], squares[:, :channels], squares[:, channels:]]
        sums = all_reduce_over_parts(env, xp.concatenate(sums, axis=2), "SpectrumRMSE")
        mass, found = sums[..., 0], xp.sqrt(sums[..., 1:])
        inverse = 1.0 / xp.where(mass > 0, mass, 1.0)
        found = found * xp.sqrt(inverse / max(math.prod(parts.shape), 1))[..., None]
        spectra = found[..., : shells.total], found[..., shells.total :]
        value, slopes = self._compute_error_and_derivative(xp, *spectra, shells)
        total, weight = self._compute_loss_share(env, value, mass)
        factors = slopes * inverse[..., None]
        return total, weight, (modes[:, :channels], factors, shells, root, parts, y.dtype)

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        modes, factors, shells, root, parts, dtype = saved
        of_shells = (factors * seed).astype(modes.dtype)
        scaled = modes * env.xp.take(of_shells, shells.index_of_parts, axis=2)
        dy = transform_modes_to_cells(env, scaled, parts, "SpectrumRMSE")
        return (dy if root is None else dy * root).astype(dtype)

    def _compute_error_and_derivative(
        self, xp: Any, of_y: Array, of_target: Array, shells: _Shells
    ) -> tuple[Array, Array]:
        """Return the error of each channel, and the derivative of this error with respect to each amplitude of y,
        divided by that amplitude. Amplitudes are (samples, channels, wavenumbers)."""
        k, high = np.arange(shells.total), math.inf if self.high is None else self.high
        counted = xp.asarray(((k >= self.low) & (k < high)).astype(np.float64))
        if self.log:
            apart, scale = xp.log((of_y + self.eps) / (of_target + self.eps)), 1.0 / (of_y + self.eps)
            counted = counted / max(float(counted.sum()), 1.0)
        else:
            apart, scale = of_y - of_target, 1.0
        value = xp.sqrt((counted * apart * apart).sum(axis=2))
        below = of_y * value[..., None]
        return value, xp.where(below > 0, counted * apart * scale / xp.where(below > 0, below, 1.0), 0.0)

    def _get_shells(self, env: LayerContext, parts: FieldPartition, dtype: Any) -> _Shells:
        """Return the wavenumbers of this rank's modes. The result is cached."""
        ranges = tuple(get_local_range(env, cuts, d) for d, cuts in enumerate(make_mode_partition(parts).cuts))
        key = "shells of modes", parts.shape, ranges, np.dtype(dtype).str
        if key not in env.constants:
            env.constants[key] = _make_shells(env, parts.shape, ranges, dtype)
        return env.constants[key]


class _Shells(NamedTuple):
    """The modes of this rank, grouped by wavenumber.

    Attributes
    ----------
    total : number of wavenumbers of the full field
    index : wavenumber of each mode, rounded
    index_of_parts : `index` with each wavenumber given twice: for the real and for the imaginary part of a mode
    multiplicity : 2 for modes that also stand for their complex conjugates, otherwise 1
    """

    total: int
    index: Array
    index_of_parts: Array
    multiplicity: Array


def _make_shells(env: LayerContext, shape: Sequence[int], ranges: Sequence[tuple[int, int]], dtype: Any) -> _Shells:
    """Return the wavenumbers of the modes in `ranges`, for a real field of `shape` cells."""
    n, squares = shape[-1], np.zeros(())
    for size, (start, stop) in zip(shape, ranges, strict=True):
        k = np.arange(start, stop)
        squares = np.add.outer(squares, np.minimum(k, size - k) ** 2.0)
    last = np.arange(*ranges[-1])
    many = np.broadcast_to(np.where((last == 0) | (2 * last == n), 1.0, 2.0), squares.shape)
    longest = math.sqrt(sum((size // 2) ** 2 for size in shape))
    index = np.rint(np.sqrt(squares)).astype(np.int64)
    of_parts = np.repeat(index[..., None], 2, axis=-1)
    return _Shells(round(longest) + 1, *map(env.xp.asarray, (index, of_parts, many.astype(dtype))))
