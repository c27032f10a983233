"""Pooling over fields of one to three dims: the maximum or the mean of the cells under a window."""

from __future__ import annotations

import math
from functools import lru_cache, reduce
from typing import Any, ClassVar

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.cell_reductions import all_reduce_over_parts
from fsdpx.ext.fields.conv import ConvWindow, Sizes, WindowLayer, expand_to_dims, get_local_shape
from fsdpx.ext.fields.halo import FieldLayer, compute_output_bounds_of_ranks, get_local_range, require_field_shape
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.ext.fields.kernels import (
    CellMatrix,
    WindowStrides,
    avg_pool,
    avg_pool_backward,
    max_pool,
    max_pool_backward,
    multiply_along_dim,
)
from fsdpx.nn.gradient_accumulation import accumulation_dtype
from fsdpx.nn.layer import Array, LayerContext, Params
from fsdpx.nn.shard_specs import FieldPartition

__all__ = [
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d", "MaxPool1d",
    "MaxPool2d", "MaxPool3d",
]  # fmt: skip


class Pool(WindowLayer):
    """Base class for pooling over the cells under a sliding window. Partitioned fields are handled as in `Conv`."""

    padding_value: ClassVar[float] = 0.0
    """Value of the padding cells beyond the ends of a field."""

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil_mode: bool
    ) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.ceil_mode = bool(ceil_mode)
        step = kernel_size if stride is None else stride
        sizes = kernel_size, step, padding, dilation
        self.window = ConvWindow.from_arguments(self, self.dims, *sizes, "zeros", self.ceil_mode)
        if any(2 * p > k for p, k in zip(self.window.low, self.window.kernel, strict=True)):
            name = type(self).__name__
            raise ConfigError(f"{name}: padding {padding!r} must be at most half of kernel_size {kernel_size!r}")

    def exchange_window_halo(self, env: LayerContext, x: Array) -> tuple[Array, Any, WindowStrides, tuple[int, ...]]:
        """Exchange the halo that this rank's windows need, and return all cells under these windows. Communicates with
        neighboring ranks.

        Returns the cells, the halo specs, the windows, and the number of outputs along each dim. Raises ShapeError if
        no window fits into the field."""
        require_field_shape(self, x, self.dims)
        outputs, halos, kernel_padding = self.plan_outputs_halo_and_padding(self.get_partition(x))
        strides = self.window.make_window_strides(tuple(-pad for pad in kernel_padding))
        return exchange_halo(env, x, halos, self.padding_value), halos, strides, get_local_shape(env, outputs)


class MaxPool(Pool):
    """Max pooling: the maximum under each window of (samples, channels, *cells). Base class of `MaxPool1d`,
    `MaxPool2d` and `MaxPool3d`.

    If several cells share the maximum, the first of them gets the gradient. NaN compares greater than any number.

    Parameters
    ----------
    kernel_size : size of the window: one number for all dims, or one per dim, as for stride, padding and dilation
    stride : number of cells by which the window moves; if None (default), kernel_size
    padding : number of padding cells with value -inf beyond each end, at most half of kernel_size; default 0
    dilation : distance between the cells of a window; default 1
    ceil_mode : whether windows that begin inside the field and reach beyond its end also produce outputs; default
        False
    """

    padding_value = -math.inf
    kernel_names = ("max_pool", "max_pool_backward")

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1, *,
        ceil_mode: bool = False,
    ) -> None:  # fmt: skip
        self.dilation = dilation
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        wide, halos, strides, sizes = self.exchange_window_halo(env, x)
        y, winner = max_pool(env.xp, wide, strides, sizes)
        return y, (tuple(wide.shape), halos, strides, winner)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        shape, halos, strides, winner = saved
        dwide = max_pool_backward(env.xp, dy, winner, strides, shape)
        return exchange_halo_backward(env, dwide, halos), ()


class AvgPool(Pool):
    """Average pooling: the mean under each window of (samples, channels, *cells). Base class of `AvgPool1d`,
    `AvgPool2d` and `AvgPool3d`.

    Parameters
    ----------
    kernel_size, stride, padding, ceil_mode : as in `MaxPool`; padding cells are 0
    count_include_pad : whether the mean includes padding cells; default True
    divisor_override : divisor of the sums; if None (default), sums are divided by the number of cells
    """

    kernel_names = ("avg_pool", "avg_pool_backward")

    def __init__(
        self, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> None:  # fmt: skip
        self.count_include_pad, self.divisor_override = bool(count_include_pad), divisor_override
        if divisor_override is not None and (not hasattr(divisor_override, "__index__") or divisor_override == 0):
            raise ConfigError(f"{type(self).__name__}: divisor_override={divisor_override!r} must be a whole number")
        super().__init__(kernel_size, stride, padding, 1, ceil_mode)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        wide, halos, strides, sizes = self.exchange_window_halo(env, x)
        shares = self._compute_reciprocal_counts(env, self.get_partition(x), x.dtype)
        y = avg_pool(env.xp, wide, strides, sizes, self._get_divisor(shares))
        return y if shares is None else y * shares, (tuple(wide.shape), halos, strides, shares)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        shape, halos, strides, shares = saved
        dy = dy if shares is None else dy * shares
        dwide = avg_pool_backward(env.xp, dy, strides, shape, self._get_divisor(shares))
        return exchange_halo_backward(env, dwide, halos), ()

    def _get_divisor(self, shares: Array | None) -> int:
        return 1 if shares is not None else self.divisor_override or math.prod(self.window.kernel)

    def _compute_reciprocal_counts(self, env: LayerContext, parts: FieldPartition, dtype: Any) -> Array | None:
        """Return 1 / (number of averaged cells) for each output of this rank, or None if all outputs average the same
        number of cells."""
        all_count = not self.ceil_mode and (self.count_include_pad or not any(self.window.low))
        if self.divisor_override is not None or all_count:
            return None
        counts = []
        for d, cuts in enumerate(self.window.partition_outputs(parts).cuts):
            n, s, k, pad = parts.shape[d], self.window.stride[d], self.window.kernel[d], self.window.low[d]
            counted = pad if self.count_include_pad else 0
            begin = np.arange(*get_local_range(env, cuts, d)) * s - pad
            counts.append(np.minimum(begin + k, n + counted) - np.maximum(begin, -counted))
        return env.xp.asarray((1.0 / reduce(np.multiply.outer, counts)).astype(dtype))


class MaxPool1d(MaxPool, dims=1):
    """Max pooling over (samples, channels, length), with the parameters of `MaxPool`."""


class MaxPool2d(MaxPool, dims=2):
    """Max pooling over (samples, channels, height, width), with the parameters of `MaxPool`."""


class MaxPool3d(MaxPool, dims=3):
    """Max pooling over (samples, channels, depth, height, width), with the parameters of `MaxPool`."""


class AvgPool1d(AvgPool, dims=1):
    """Average pooling over (samples, channels, length), with the parameters of `AvgPool`."""


class AvgPool2d(AvgPool, dims=2):
    """Average pooling over (samples, channels, height, width), with the parameters of `AvgPool`."""


class AvgPool3d(AvgPool, dims=3):
    """Average pooling over (samples, channels, depth, height, width), with the parameters of `AvgPool`."""


class AdaptiveAvgPool(FieldLayer):
    """Average pooling of (samples, channels, *cells) to a given output size, with windows chosen as in PyTorch. Base
    class of `AdaptiveAvgPool1d`, `AdaptiveAvgPool2d` and `AdaptiveAvgPool3d`.

    Along a dim with n cells and o outputs, output i is the mean of the cells from floor(i n / o) up to, but not
    including, ceil((i + 1) n / o). On a grid of ranks, each rank sums over its own cells, and an all-reduce adds these
    sums. There is one all-reduce in the forward pass and one in the backward pass. The output is a field that is
    partitioned over the same ranks. With output_size 1, the first rank that has cells holds the output.

    Parameters
    ----------
    output_size : number of output cells: one number for all dims, or one per dim; 1 means a mean over the full field
    """

    kernel_names = ("multiply_along_dim",)

    def __init__(self, output_size: Sizes) -> None:
        self.output_size = output_size
        self._many = expand_to_dims(self, "output_size", output_size, self.dims, 1)

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        """Return the partition of the outputs. Each output belongs to the rank that owns the first cell of its
        window."""
        rows = zip(parts.cuts, self._many, strict=True)
        return parts.with_cuts(
            tuple(
                compute_output_bounds_of_ranks(cuts, [-(-cut * many // cuts[-1]) for cut in cuts], many)
                for cuts, many in rows
            )
        )

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_field_shape(self, x, self.dims)
        parts = self.get_partition(x)
        if not all(parts.shape):
            raise ShapeError(f"{self!r} finds no mean of a field of shape {parts.shape}")
        y = kernels.to_float32(env.xp, x)
        for d, (table, _) in enumerate(self._make_averaging_matrices(env, parts)):
            y = multiply_along_dim(env.xp, y, d + 2, table)
        y = all_reduce_over_parts(env, env.xp.ascontiguousarray(y), env.random.path)
        return kernels.cast_float_to_dtype(env.xp, y[self._get_local_result_index(env, parts)], x.dtype), parts

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        whole = env.xp.zeros((*dy.shape[:2], *self._many), dtype=accumulation_dtype(dy.dtype))
        whole[self._get_local_result_index(env, saved)] = kernels.to_float32(env.xp, dy)
        dx = all_reduce_over_parts(env, whole, env.random.path)
        for d, (_, turned) in enumerate(self._make_averaging_matrices(env, saved)):
            dx = multiply_along_dim(env.xp, dx, d + 2, turned)
        return kernels.cast_float_to_dtype(env.xp, dx, dy.dtype), ()

    def _get_local_result_index(self, env: LayerContext, parts: FieldPartition) -> tuple[slice, ...]:
        """Return the index that selects this rank's outputs from an array of all outputs."""
        cells = (slice(*get_local_range(env, cuts, d)) for d, cuts in enumerate(self.partition_outputs(parts).cuts))
        return (slice(None), slice(None), *cells)

    def _make_averaging_matrices(self, env: LayerContext, parts: FieldPartition) -> list[tuple[CellMatrix, CellMatrix]]:
        """Return a pair of matrices for each dim: the matrix that maps this rank's cells to their weighted
        contributions to all outputs, and its transpose."""
        rows = enumerate(zip(parts.cuts, self._many, strict=True))
        return [_make_averaging_matrix(*get_local_range(env, cuts, d), cuts[-1], many) for d, (cuts, many) in rows]


@lru_cache(1 << 8)
def _make_averaging_matrix(start: int, stop: int, total: int, many: int) -> tuple[CellMatrix, CellMatrix]:
    """Return the matrix that maps the cells [start, stop) out of `total` cells to `many` outputs, and its transpose."""
    at, i = np.arange(start, stop), np.arange(many)[:, None]
    begin, end = i * total // many, -(-(i + 1) * total // many)
    outputs, cells = np.nonzero((at >= begin) & (at < end))
    table = CellMatrix.from_entries(outputs, cells, 1.0 / (end - begin)[outputs, 0], (many, stop - start))
    return table, table.transpose()


class AdaptiveAvgPool1d(AdaptiveAvgPool, dims=1):
    """Adaptive average pooling over (samples, channels, length), with the parameters of `AdaptiveAvgPool`."""


class AdaptiveAvgPool2d(AdaptiveAvgPool, dims=2):
    """Adaptive average pooling over (samples, channels, height, width), with the parameters of `AdaptiveAvgPool`."""


class AdaptiveAvgPool3d(AdaptiveAvgPool, dims=3):
    """Adaptive average pooling over (samples, channels, depth, height, width), with the parameters of
    `AdaptiveAvgPool`."""
