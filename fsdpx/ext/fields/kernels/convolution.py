"""Convolutions of fields with any number of dims in plain array code, with one matmul per window offset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = ["WindowStrides", "correlate", "correlate_backward_input", "correlate_backward_params"]

GradientTarget = tuple[Any, bool] | None
"""The array for a gradient, and whether to add the gradient to the array instead of overwriting it. None if the
gradient is not needed."""


def write_or_add_gradient(target: Any, value: Any) -> None:
    """Write `value` to a gradient array, or add it to this array. `target` is (array, whether to add)."""
    out, add = target
    if add:
        out += value.astype(out.dtype, copy=False)
    else:
        out[...] = value


class WindowStrides(NamedTuple):
    """A sliding window. Along each dim, output i reads the cells i * stride + offset * dilation + first, for window
    offsets from 0 to kernel - 1. Cells outside the field count as zeros."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    first: tuple[int, ...]
    groups: int

    def iterate_window_offsets(
        self, sizes: Sequence[int], cells: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]:
        """Yield (offset, index of outputs, index of cells) for each window offset. The index of outputs selects the
        outputs whose cell at this offset is inside the field, and the index of cells selects these cells.

        `sizes` is the number of outputs along each dim, and `cells` is the number of input cells along each dim."""
        for offset in product(*map(range, self.kernel)):
            outputs, met = [slice(None)] * 2, [slice(None)] * 2
            for i, s, d, first, size, n in zip(offset, *self[1:4], sizes, cells, strict=True):
                begin = first + i * d
                start, stop = max(-(begin // s), 0), min((n - 1 - begin) // s + 1, size)
                outputs.append(slice(start, max(stop, start)))
                met.append(slice(begin + start * s, begin + (stop - 1) * s + 1, s) if stop > start else slice(0, 0))
            if all(one.stop is None or one.stop > one.start for one in outputs):
                yield offset, tuple(outputs), tuple(met)

    def ravel_window_offset(self, offset: tuple[int, ...]) -> int:
        """Return the flat index of a window offset, in C order."""
        at = 0
        for i, many in zip(offset, self.kernel, strict=True):
            at = at * many + i
        return at


LANES = 16
"""Number of channels that the Winograd kernels process at a time. The total number of channels must be a multiple of
this number."""
TILE = 4
"""Height and width of a Winograd tile, in outputs."""
MIN_TILES = 32
"""Minimum number of tiles for Winograd's algorithm. With fewer tiles, reading the weights takes more time than the
algorithm saves."""
MIN_FILLED_SHARE = 0.6
"""Minimum fraction of the tiles' pixels that must be inside the output. Below this fraction, Winograd's algorithm saves
little time."""
GROUP_OUTPUTS = 8
"""Minimum number of outputs that fill the lanes of compiled convolutions. Groups with fewer outputs are computed
together, as one convolution in which most weights are 0."""


def suits_winograd(shape: Sequence[int], weight: Sequence[int], strides: WindowStrides, sizes: Sequence[int]) -> bool:
    """Return whether Winograd's algorithm applies to fields and weights of these shapes, and is likely to be faster
    than other algorithms. In fields of three dims, the algorithm is applied along the last two dims, and products are
    also summed along the first dim."""
    edge, ones = strides.first[-1], (1,) * len(sizes)
    if strides.kernel[-2:] != (3, 3) or strides[1:3] != (ones, ones) or strides.groups != 1:
        return False
    if strides.first[-2] != edge or not -2 <= edge <= 0:
        return False
    if any(size != n - 2 - 2 * edge for size, n in zip(sizes[-2:], shape[-2:], strict=True)):
        return False
    for size, n, window, first in zip(sizes[:-2], shape[-len(sizes) : -2], strides.kernel, strides.first, strict=False):
        inside = sum(max(min(size, n - first - a) - max(-first - a, 0), 0) for a in range(window))
        # most slices that the windows cover lie outside the array, as can happen at the edge of a rank's part
        if 2 * inside < size * window:
            return False
    tiles = count_winograd_tiles(sizes[-2]) * count_winograd_tiles(sizes[-1])
    filled = math.prod(sizes[-2:]) >= MIN_FILLED_SHARE * tiles * TILE * TILE
    many = shape[0] * math.prod(sizes[:-2]) * tiles >= MIN_TILES
    return filled and many and weight[0] % LANES == 0 and weight[1] % LANES == 0


def count_winograd_tiles(size: int) -> int:
    """Return the number of Winograd tiles along a dim of `size` outputs."""
    return -(-size // TILE)


def is_matmul(strides: WindowStrides, cells: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether the convolution is a single matmul, which requires a window of one cell that moves over the full
    field with stride 1."""
    one = {*strides.kernel, *strides.stride} == {1} and not any(strides.first) and strides.groups == 1
    return one and tuple(cells) == tuple(sizes)


def is_depthwise(strides: WindowStrides, weight: Sequence[int]) -> bool:
    """Return whether each group has one input channel, and too few outputs to fill a vector."""
    return strides.groups > 1 and weight[1] == 1 and weight[0] // strides.groups < GROUP_OUTPUTS


def _choose_algorithm(
    strides: WindowStrides, cells: Sequence[int], weight: Sequence[int], sizes: Sequence[int], overwrites: bool = True
) -> tuple[str, float]:
    """Return the name of the algorithm that the compiled code uses for this convolution, and a size on which its speed
    depends.

    For one-cell windows, the size is the number of windows. Otherwise, it is the length of a row of outputs divided by
    the length of the window, because windows near the ends of a row have fewer cells inside the field. `overwrites` is
    False if the result is added to an array."""
    if is_depthwise(strides, weight):
        return "depthwise", sizes[-1] / strides.kernel[-1]
    if overwrites and is_matmul(strides, cells[2:], sizes):
        return "of a cell", float(cells[0] * math.prod(sizes))
    winograd = overwrites and suits_winograd(cells, weight, strides, sizes)
    return "winograd" * winograd, sizes[-1] / strides.kernel[-1]


def _choose_forward_algorithm(
    x: Any, weight: Any, bias: Any, strides: WindowStrides, sizes: Sequence[int], out: Any = None
) -> tuple[str, float]:
    return _choose_algorithm(strides, x.shape, weight.shape, sizes, out is None)


def _choose_backward_input_algorithm(
    weight: Any, dy: Any, strides: WindowStrides, shape: Sequence[int], bias: Any = None
) -> tuple[str, float]:
    if any(s > 1 and d > 1 for s, d in zip(strides.stride, strides.dilation, strict=True)):
        return "by place", 1.0
    return _choose_algorithm(strides, shape, weight.shape, dy.shape[2:], bias is None)


def _choose_backward_params_algorithm(
    x: Any, dy: Any, strides: WindowStrides, weight: GradientTarget, bias: GradientTarget
) -> tuple[str, float]:
    return ("", 1.0) if weight is None else _choose_algorithm(strides, x.shape, weight[0].shape, dy.shape[2:])


@kernel(bits=False, into=("out",), choose_algorithm=_choose_forward_algorithm)
def correlate(
    xp: Any, x: Any, weight: Any, bias: Any | None, strides: WindowStrides, sizes: Sequence[int], out: Any = None
) -> Any:
    """Return y[b, o] = sum over c and window offsets of weight[o, c, offset] x[b, c, window at offset] + bias[o].

    Shapes are x (samples, channels, *cells), weight (outputs, channels / groups, *kernel) and y (samples, outputs,
    *sizes). If `out` is given, the result is added to it, and `bias` must be None."""
    y = xp.zeros((x.shape[0], weight.shape[0], *sizes), dtype=x.dtype) if out is None else out
    groups = strides.groups
    for offset, outputs, cells in strides.iterate_window_offsets(sizes, x.shape[2:]):
        into = y[outputs]
        products = xp.matmul(_get_weights_at_offset(weight, offset, groups), _split_into_groups(x[cells], groups))
        into += products.reshape(into.shape).astype(y.dtype, copy=False)
    if bias is not None:
        y += bias.reshape(-1, *(1,) * len(sizes))
    return y


@kernel(bits=False, choose_algorithm=_choose_backward_input_algorithm)
def correlate_backward_input(
    xp: Any, weight: Any, dy: Any, strides: WindowStrides, shape: Sequence[int], bias: Any | None = None
) -> Any:
    """Return the gradient of the input, which has shape `shape`, given the gradient `dy` of the output. If given,
    `bias` (channels,) is added to the result."""
    groups, sizes = strides.groups, dy.shape[2:]
    dx = xp.zeros(tuple(shape), dtype=dy.dtype)
    for offset, outputs, cells in strides.iterate_window_offsets(sizes, shape[2:]):
        into = dx[cells]
        turned = _get_weights_at_offset(weight, offset, groups).swapaxes(1, 2)
        into += xp.matmul(turned, _split_into_groups(dy[outputs], groups)).reshape(into.shape)
    if bias is not None:
        dx += bias.reshape(-1, *(1,) * len(sizes))
    return dx


@kernel(narrow=0, bits=False, choose_algorithm=_choose_backward_params_algorithm)
def correlate_backward_params(
    xp: Any, x: Any, dy: Any, strides: WindowStrides, weight: GradientTarget, bias: GradientTarget
) -> None:
    """Write the gradients of weight and bias to the arrays in their targets, or add them to these arrays. Each target
    is (array, whether to add), or None if the gradient is not needed."""
    sizes, groups = dy.shape[2:], strides.groups
    if weight is not None:
        out, add = weight
        if not add:
            out[...] = 0
        for offset, outputs, cells in strides.iterate_window_offsets(sizes, x.shape[2:]):
            there, here = _split_into_groups(dy[outputs], groups), _split_into_groups(x[cells], groups)
            into = out[(slice(None), slice(None), *offset)]
            into += xp.matmul(there, here.swapaxes(2, 3)).sum(axis=0).reshape(into.shape)
    if bias is not None:
        write_or_add_gradient(bias, dy.sum(axis=(0, *range(2, dy.ndim))))


def _get_weights_at_offset(weight: Any, offset: tuple[int, ...], groups: int) -> Any:
    """Return the weights at one window offset, (groups, outputs / groups, channels / groups)."""
    return weight[(slice(None), slice(None), *offset)].reshape(groups, weight.shape[0] // groups, weight.shape[1])


def _split_into_groups(x: Any, groups: int) -> Any:
    """Return x as (samples, groups, channels / groups, cells)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))
