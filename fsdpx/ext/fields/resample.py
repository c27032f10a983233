"""Layers that change the resolution of fields: transposed convolutions and upsampling."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.core.array.kernels.memory_order import put_channels_last
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.conv import ConvWindow, Sizes, expand_to_dims, make_conv_specs, require_divisible_channels
from fsdpx.ext.fields.halo import (
    FieldLayer,
    HaloSpec,
    compute_output_bounds_of_ranks,
    get_local_range,
    get_rank_along,
    require_field_shape,
)  # fmt: skip
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.ext.fields.kernels import (
    CellMatrix,
    WindowStrides,
    correlate,
    correlate_backward_input,
    correlate_backward_params,
    multiply_along_dim,
)
from fsdpx.nn.gradient_accumulation import get_gradient_and_whether_to_add
from fsdpx.nn.init import Init
from fsdpx.nn.layer import Array, LayerContext, ParameterSpec, Params
from fsdpx.nn.shard_specs import Cuts, FieldPartition

__all__ = ["ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Upsample"]


class ConvTranspose(FieldLayer):
    """Transposed convolution of (samples, in_channels, *cells), with PyTorch's arguments and results. Base class of
    `ConvTranspose1d`, `ConvTranspose2d` and `ConvTranspose3d`.

    The operation is the gradient of a convolution with respect to its input, plus a bias. The parameters are
    `weight (in_channels, out_channels / groups, *kernel_size)` and `bias (out_channels,)`, initialized from U(-k, k)
    with k = 1/sqrt(out_channels / groups * prod(kernel_size)). The layer maps n cells along a dim to
    `(n - 1) * stride - 2 * padding + dilation * (kernel_size - 1) + output_padding + 1` cells.

    Parameters
    ----------
    in_channels, out_channels : size of dim 1 of the input and of the output
    kernel_size : size of the window: one number for all dims, or one per dim, as for stride, padding, output_padding
        and dilation
    stride : number of output cells by which the window moves; default 1
    padding : number of cells removed from each side of the result; default 0
    output_padding : number of cells added at the end of each dim; it must be less than stride or dilation; default 0
    groups : number of groups of channels; the outputs of a group depend only on its own input channels. Default 1
    bias : whether there is a bias; default True
    dilation : distance between the cells of a window; default 1
    init : initial values of `weight`; if None (default), the uniform distribution
    """

    kernel_names = ("channels_last", "correlate", "correlate_backward_input", "correlate_backward_params")

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Sizes, stride: Sizes = 1, padding: Sizes = 0,
        output_padding: Sizes = 0, groups: int = 1, bias: bool = True, dilation: Sizes = 1, *,
        init: Init | None = None,
    ) -> None:  # fmt: skip
        require_divisible_channels(self, in_channels, out_channels, groups)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation
        self.output_padding, self.bias, self.init = output_padding, bool(bias), init
        expand_to_dims(self, "padding", padding, self.dims, 0)
        self.window = ConvWindow.from_arguments(self, self.dims, kernel_size, stride, padding, dilation, "zeros")
        self.more = expand_to_dims(self, "output_padding", output_padding, self.dims, 0)
        rows = zip(self.more, self.window.stride, self.window.dilation, strict=True)
        if any(m >= max(s, d) for m, s, d in rows):
            raise ConfigError(
                f"{type(self).__name__}: output_padding {output_padding!r} must be smaller than stride {stride!r} or "
                f"dilation {dilation!r}"
            )

    def specs(self) -> dict[str, ParameterSpec]:
        return make_conv_specs(self, (self.in_channels, self.out_channels // self.groups, *self.window.kernel))

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_field_shape(self, x, self.dims, self.in_channels)
        parts = self.get_partition(x)
        outputs = self.partition_outputs(parts)
        if min(outputs.shape) < 1:
            raise ShapeError(f"{self!r} leaves nothing of a field of shape {parts.shape}")
        halos = self._find_halos(parts, outputs)
        wide = exchange_halo(env, put_channels_last(env.xp, x), halos)
        strides, sizes = self._locate_windows_and_count_outputs(env, halos, outputs)
        shape = x.shape[0], self.out_channels, *sizes
        y = correlate_backward_input(env.xp, p["weight"], wide, strides, shape, p.get("bias"))
        return y, (wide, halos, strides)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        wide, halos, strides = saved
        dwide = correlate(env.xp, dy, p["weight"], None, strides, wide.shape[2:])
        return exchange_halo_backward(env, dwide, halos), (wide, strides, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        wide, strides, dy = kept
        correlate_backward_params(env.xp, dy, wide, strides, get_gradient_and_whether_to_add(g, "weight"), None)
        correlate_backward_params(env.xp, dy, dy, strides, None, get_gradient_and_whether_to_add(g, "bias"))

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        """Return the partition of the outputs. Along each dim, outputs i * stride to (i + 1) * stride - 1 belong to the
        rank that owns input cell i. Any further outputs belong to the last rank that has cells."""
        made = []
        for d, cuts in enumerate(parts.cuts):
            s, p = self.window.stride[d], self.window.low[d]
            total = max((cuts[-1] - 1) * s - 2 * p + self.window.spans[d] + self.more[d], 0)
            made.append(compute_output_bounds_of_ranks(cuts, [cut * s for cut in cuts], total))
        return parts.with_cuts(tuple(made))

    def _find_halos(self, parts: FieldPartition, outputs: FieldPartition) -> tuple[HaloSpec, ...]:
        """Return one halo spec per dim, with the input cells that contribute to each rank's outputs."""
        made = []
        for d, (cuts, out) in enumerate(zip(parts.cuts, outputs.cuts, strict=True)):
            s, p, span = self.window.stride[d], self.window.low[d], self.window.spans[d]
            needs = tuple(
                (min(-((span - 1 - a - p) // s), (a + p) // s), (b - 1 + p) // s + 1) if b > a else (start, start)
                for a, b, start in zip(out, out[1:], cuts, strict=False)
            )
            made.append(HaloSpec(d + 2, cuts, tuple((max(a, 0), max(min(b, cuts[-1]), max(a, 0))) for a, b in needs)))
        return tuple(made)

    def _locate_windows_and_count_outputs(
        self, env: LayerContext, halos: tuple[HaloSpec, ...], outputs: FieldPartition
    ) -> tuple[WindowStrides, tuple[int, ...]]:
        """Return two values: the window of the underlying convolution, and the number of this rank's outputs along each
        dim. The window's positions are relative to this rank's outputs."""
        window, firsts, sizes = self.window, [], []
        for d, (halo, out) in enumerate(zip(halos, outputs.cuts, strict=True)):
            start, stop = get_local_range(env, out, d)
            needed, _ = halo.needs[get_rank_along(env, out, d)]
            firsts.append(needed * window.stride[d] - window.low[d] - start)
            sizes.append(stop - start)
        return window.make_window_strides(tuple(firsts), self.groups), tuple(sizes)


class ConvTranspose1d(ConvTranspose, dims=1):
    """Transposed convolution over (samples, in_channels, length), with the parameters of `ConvTranspose`."""


class ConvTranspose2d(ConvTranspose, dims=2):
    """Transposed convolution over (samples, in_channels, height, width), with the parameters of `ConvTranspose`."""


class ConvTranspose3d(ConvTranspose, dims=3):
    """Transposed convolution over (samples, in_channels, depth, height, width), with the parameters of
    `ConvTranspose`."""


UPSAMPLE = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")
DIMS = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}


class Upsample(FieldLayer):
    """Interpolates (samples, channels, *cells) to another resolution, like PyTorch's Upsample.

    In mode "nearest", cell indices are computed in integer arithmetic: with n cells and N outputs, output o takes the
    value of cell floor(o n / N). In float64, PyTorch selects the same cells. In float32, rounding errors make PyTorch
    select the previous cell for some sizes.

    Parameters
    ----------
    size : number of cells of the full output: one number for all dims, or one per dim; if None (default), use
        `scale_factor`
    scale_factor : factor by which the number of cells is multiplied, instead of `size`: one number for all dims, or one
        per dim
    mode : "nearest" (default), "nearest-exact", "linear" (1 dim), "bilinear" or "bicubic" (2 dims), or "trilinear" (3
        dims)
    align_corners : for the last four modes, whether the centers of the first input and output cells coincide, and also
        the centers of the last input and output cells; None (default) means False
    """

    kernel_names = ("multiply_along_dim",)

    def __init__(
        self, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None
    ) -> None:
        if (size is None) == (scale_factor is None):
            raise ConfigError("Upsample: give size or scale_factor, one of them")
        if mode not in UPSAMPLE:
            raise ConfigError(f"Upsample: mode={mode!r}: choose one of {', '.join(UPSAMPLE)}")
        if align_corners is not None and mode.startswith("nearest"):
            raise ConfigError(f"Upsample: align_corners is of modes other than {mode!r}: leave it out")
        self.size, self.scale_factor, self.mode, self.align_corners = size, scale_factor, mode, align_corners
        name, value, kind = ("size", size, Integral) if scale_factor is None else ("scale_factor", scale_factor, Real)
        self._each = tuple(value) if isinstance(value, tuple | list) else value
        if not all(isinstance(n, kind) and 0 < float(n) < math.inf for n in np.array([self._each], object).flat):
            raise ConfigError(f"Upsample: {name}={value!r}: give a number above 0, or one for each dim")

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        dims = x.ndim - 2
        if not 1 <= dims <= 3 or DIMS.get(self.mode, dims) != dims:
            raise ShapeError(f"{self!r} wants (samples, channels, *cells), got {tuple(x.shape)}")
        parts = self.get_partition(x)
        outputs, sizes_and_ratios = self.partition_outputs(parts), self._find_sizes_and_ratios(parts.shape)
        rows = enumerate(zip(parts.cuts, outputs.cuts, sizes_and_ratios, strict=True))
        how = self.mode, bool(self.align_corners)
        plans = [
            _plan_halo_and_matrices_along_dim(d, a, b, get_rank_along(env, a, d), *size, *how, dims)
            for d, (a, b, size) in rows
        ]
        halos, tables, turned = zip(*plans, strict=True)
        y = kernels.to_float32(env.xp, exchange_halo(env, x, halos))
        for d, table in enumerate(tables):
            y = multiply_along_dim(env.xp, y, d + 2, table)
        y = kernels.cast_float_to_dtype(env.xp, y, x.dtype)
        return y, (turned, halos)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        turned, halos = saved
        dtype, dy = dy.dtype, kernels.to_float32(env.xp, dy)
        for d, table in reversed(list(enumerate(turned))):
            dy = multiply_along_dim(env.xp, dy, d + 2, table)
        dy = kernels.cast_float_to_dtype(env.xp, dy, dtype)
        return exchange_halo_backward(env, dy, halos), ()

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        """Return the partition of the outputs. Along a dim with n cells and N outputs, output o belongs to the rank
        that owns input cell floor(o n / N).

        Parameters
        ----------
        parts : partition of the input

        Returns
        -------
        FieldPartition
        """
        made = []
        for cuts, (total, _) in zip(parts.cuts, self._find_sizes_and_ratios(parts.shape), strict=True):
            made.append(compute_output_bounds_of_ranks(cuts, [-(-cut * total // cuts[-1]) for cut in cuts], total))
        return parts.with_cuts(tuple(made))

    def _find_sizes_and_ratios(self, shape: tuple[int, ...]) -> list[tuple[int, Fraction]]:
        """Return, for each dim, the number of output cells and the exact ratio of input to output cells as a
        fraction."""
        each = self._each if isinstance(self._each, tuple) else (self._each,) * len(shape)
        if len(each) != len(shape):
            raise ShapeError(f"{self!r} is of {len(each)} dims, and the field has {len(shape)}")
        rows = list(zip(shape, each, strict=True))
        if self.size is not None:
            found = [(int(total), Fraction(n, int(total))) for n, total in rows]
        else:
            found = [(math.floor(n * float(factor)), 1 / _to_simplest_fraction(float(factor))) for n, factor in rows]
        if not all(shape) or min(found)[0] < 1:
            raise ShapeError(f"{self!r} leaves nothing of a field of shape {shape}")
        return found


LARGEST_DENOMINATOR = 10**6


def _to_simplest_fraction(factor: float) -> Fraction:
    """Return the fraction with a small denominator that a floating-point scale factor stands for, such as 11 / 10 for
    1.1."""
    return Fraction(factor).limit_denominator(LARGEST_DENOMINATOR) or Fraction(factor)


@lru_cache(256)
def _plan_halo_and_matrices_along_dim(
    d: int, cuts: Cuts, outputs: Cuts, rank: int, total: int, ratio: Fraction, mode: str, align_corners: bool, dims: int
) -> tuple[HaloSpec, CellMatrix, CellMatrix]:
    """Return the halo for interpolation along dim d, the matrix that maps the cells of `rank` to its outputs, and the
    transpose of this matrix."""
    taps, weights = _make_interpolation_table(mode, cuts[-1], total, ratio, align_corners, dims)
    needs = tuple(
        (int(taps[:, a:b].min()), int(taps[:, a:b].max()) + 1) if b > a else (start, start)
        for a, b, start in zip(outputs, outputs[1:], cuts, strict=False)
    )
    halo, mine = HaloSpec(d + 2, cuts, needs), slice(outputs[rank], outputs[rank + 1])
    taps, weights = taps[:, mine] - needs[rank][0], weights[:, mine]
    numbers = np.broadcast_to(np.arange(taps.shape[1]), taps.shape)
    o, cell, weight = (a.T.reshape(-1) for a in (numbers, taps, weights))
    table = CellMatrix.from_entries(o, cell, weight, (taps.shape[1], halo.count_needed_cells(rank)))
    return halo, table, table.transpose()


def _make_interpolation_table(
    mode: str, n: int, total: int, ratio: Fraction, align_corners: bool, dims: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays (taps, outputs) for `total` outputs along a dim of `n` cells: the input cells from which each
    output is interpolated, and the weights of these cells.

    As in PyTorch, some modes ignore `ratio` if the output has as many cells as the input, or twice as many."""
    o = np.arange(total)
    if total in (n, 2 * n) and mode == "nearest" and dims == 2:
        return (o // (total // n))[None], np.ones((1, total))
    if total == n and mode.endswith("linear"):
        return o[None], np.ones((1, total))
    if mode.startswith("nearest"):
        at = (2 * o + mode.endswith("exact")) * ratio.numerator // (2 * ratio.denominator)
        return np.minimum(at, n - 1)[None], np.ones((1, total))
    x = o * ((n - 1) / (total - 1) if total > 1 else 0.0) if align_corners else (o + 0.5) * float(ratio) - 0.5
    if mode == "bicubic":
        first = np.floor(x).astype(int)
        t = x - first
        taps = np.clip(first + np.arange(-1, 3)[:, None], 0, n - 1)
        return taps, np.stack([_evaluate_cubic(distance) for distance in (t + 1, t, 1 - t, 2 - t)])
    x = np.maximum(x, 0.0)
    first = np.minimum(np.floor(x).astype(int), n - 1)
    share = x - first
    return np.stack([first, np.minimum(first + 1, n - 1)]), np.stack([1 - share, share])


def _evaluate_cubic(t: np.ndarray, a: float = -0.75) -> np.ndarray:
    """Return the cubic kernel of Keys (1981) at distance t. By default, the coefficient `a` is PyTorch's."""
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return np.where(t <= 1, near, far)
