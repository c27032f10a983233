"""Depthwise convolutions, and convolutions with small groups, over one to three dims with channels last.

As in `direct`, a strip of neighboring outputs stays in registers. In contrast to `direct`, both cells and weights are
loaded as vectors of channels, because each channel, or group of channels, has its own weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.compiled.scalar import use_widest_vectors
from fsdpx.core.array.parallel import parallel_for_range
from fsdpx.ext.fields.kernels.compiled.direct import (
    NARROW,
    NARROW_ROWS,
    NEAR_BYTES,
    WIDE,
    WIDE_ROWS,
    choose_strip_output_count,
    direct_backward_input,
    find_sample_and_run_of_output_line,
    make_direct_convolution_arguments,
    make_strip_convolution_loop,
    make_weight_gradient_loop,
    reshape_to_three_dims,
    round_up_to_lanes,
)
from fsdpx.ext.fields.kernels.convolution import WindowStrides

__all__ = [
    "GROUP_SIZES", "add_depthwise_weight_gradient", "convolve_depthwise", "convolve_small_groups",
    "depthwise_backward_input", "small_groups_backward_input",
]  # fmt: skip

OFFSETS = 8
"""Maximum number of window offsets along the last dim whose gradients stay in registers."""

GROUP_SIZES = 2, 4
"""Group sizes, in channels, for which `convolve_small_groups` is compiled. For these sizes, processors have a fast
instruction that copies one channel of a group to all lanes of the group."""

_wide_strip, _narrow_strip = (
    make_strip_convolution_loop(WIDE, WIDE_ROWS, True),
    make_strip_convolution_loop(NARROW, NARROW_ROWS, True),
)
_strip_of_pairs, _strip_of_fours = (make_strip_convolution_loop(WIDE, WIDE_ROWS, True, size) for size in GROUP_SIZES)
_wide_outer, _narrow_outer = (make_weight_gradient_loop(nbytes, OFFSETS, True) for nbytes in (WIDE, NARROW))


@jit
def _convolve_lines(from_line, to_line, x, y, x_steps, y_steps, moves, runs, bounds, sizes, packed, start, add, group):
    """Compute output lines `from_line` to `to_line`. The arguments are the same as for `_convolve_lines` in `direct`,
    except for `packed` and `group`.

    `packed` holds the weights as (blocks, offsets, group, lanes), where `group` is the number of channels of a group.
    Each block has as many lanes as a wide vector; only the last block can be smaller, with as many lanes as a narrow
    vector, and only if `group` is 1."""
    use_widest_vectors()
    like, word = packed.dtype.type(0), packed.itemsize
    places = sizes[0] * sizes[1] * sizes[2]
    for line in range(from_line, to_line):
        n, a, i = find_sample_and_run_of_output_line(line, runs[0, : bounds[0]])
        lo0, n0 = runs[0, a, 2], runs[0, a, 3] - runs[0, a, 2]
        x_line = x + n * x_steps[0] + i * moves[0, 0] + moves[0, 2] + lo0 * moves[0, 1]
        y_line = y + n * y_steps[0] + i * y_steps[1]
        for b in range(bounds[1]):
            for c in range(bounds[2]):
                lo1, n1, lo2, n2 = runs[1, b, 2], runs[1, b, 3], runs[2, c, 2], runs[2, c, 3]
                n1, n2 = n1 - lo1, n2 - lo2
                down, right = runs[1, b, 0], runs[2, c, 0]
                high, long = runs[1, b, 1] - down, runs[2, c, 1] - right
                x_out, x_in, y_out, y_in = moves[1, 0], moves[2, 0], y_steps[2], y_steps[3]
                # strips along dim 1 read cells that are far apart in memory, so use them only if dim 2 is too short
                if long < min(high, WIDE_ROWS):
                    high, long, x_out, x_in, y_out, y_in = long, high, x_in, x_out, y_in, y_out
                for h in range(high):
                    x_at = x_line + down * moves[1, 0] + moves[1, 2] + lo1 * moves[1, 1] + h * x_out
                    x_at += right * moves[2, 0] + moves[2, 2] + lo2 * moves[2, 1]
                    y_at = y_line + down * y_steps[2] + right * y_steps[3] + h * y_out
                    first = 0
                    while first < start.size:
                        wide = start.size - first > NARROW // word
                        nbytes, limit = (WIDE, WIDE_ROWS) if wide else (NARROW, NARROW_ROWS)
                        cell = nbytes * group
                        steps = (sizes[1] * sizes[2] * cell, sizes[2] * cell, cell)
                        w_at = packed.ctypes.data + first * places * group * word
                        w_at += lo0 * steps[0] + lo1 * steps[1] + lo2 * steps[2]
                        start_at, x_moves = start.ctypes.data + first * word, (moves[0, 1], moves[1, 1], moves[2, 1])
                        at = 0
                        while at < long:
                            rows = choose_strip_output_count(long - at, limit)
                            xs, ys = x_at + first * word + at * x_in, y_at + first * word + at * y_in
                            begin, step = (ys, y_in) if add else (start_at, 0)
                            if group == 4:
                                _strip_of_fours(like, rows, ys, y_in, begin, step, xs, x_in, w_at,
                                                (n0, n1, n2), x_moves, steps, 1)  # fmt: skip
                            elif group == 2:
                                _strip_of_pairs(like, rows, ys, y_in, begin, step, xs, x_in, w_at,
                                                (n0, n1, n2), x_moves, steps, 1)  # fmt: skip
                            elif wide:
                                _wide_strip(like, rows, ys, y_in, begin, step, xs, x_in, w_at,
                                               (n0, n1, n2), x_moves, steps, 1)  # fmt: skip
                            else:
                                _narrow_strip(like, rows, ys, y_in, begin, step, xs, x_in, w_at,
                                                 (n0, n1, n2), x_moves, steps, 1)  # fmt: skip
                            at += rows
                        first += nbytes // word


@jit
def _add_weight_gradient(
    from_plane, to_plane, x, dy, x_steps, y_steps, moves, runs, bounds, sizes, packed, channels, samples
):
    """Add the gradients of some of the weights to `packed`, which has the same layout as in `_convolve_lines`. The
    weights are those at the window offsets `from_plane` to `to_plane`, counted along the first two dims together. The
    other arguments are the same as for `_convolve_lines` in `direct`."""
    use_widest_vectors()
    like, word = packed.dtype.type(0), packed.itemsize
    places = sizes[0] * sizes[1] * sizes[2]
    for n in range(samples):
        for a in range(bounds[0]):
            for i in range(runs[0, a, 0], runs[0, a, 1]):
                for b in range(bounds[1]):
                    for c in range(bounds[2]):
                        right, long = runs[2, c, 0], runs[2, c, 1] - runs[2, c, 0]
                        tall = max(NEAR_BYTES // (long * (moves[2, 0] + channels * word)), 1)
                        for j in range(runs[1, b, 0], runs[1, b, 1], tall):
                            high = min(tall, runs[1, b, 1] - j)
                            x_at = x + n * x_steps[0] + i * moves[0, 0] + j * moves[1, 0] + right * moves[2, 0]
                            x_at += moves[0, 2] + moves[1, 2] + moves[2, 2]
                            y_at = dy + n * y_steps[0] + i * y_steps[1] + j * y_steps[2] + right * y_steps[3]
                            for plane in range(from_plane, to_plane):
                                p, q = plane // sizes[1], plane % sizes[1]
                                if not (runs[0, a, 2] <= p < runs[0, a, 3] and runs[1, b, 2] <= q < runs[1, b, 3]):
                                    continue
                                for place in range(runs[2, c, 2], runs[2, c, 3], OFFSETS):
                                    rows = min(OFFSETS, runs[2, c, 3] - place)
                                    cell = x_at + p * moves[0, 1] + q * moves[1, 1] + place * moves[2, 1]
                                    row = (p * sizes[1] + q) * sizes[2] + place
                                    first = 0
                                    while first < channels:
                                        wide = channels - first > NARROW // word
                                        nbytes = WIDE if wide else NARROW
                                        to = packed.ctypes.data + first * places * word + row * nbytes
                                        source, slope = cell + first * word, y_at + first * word
                                        x_moves, y_moves = (moves[1, 0], moves[2, 0]), (y_steps[2], y_steps[3])
                                        if wide:
                                            _wide_outer(like, rows, to, source, moves[2, 1], slope, (high, long),
                                                           x_moves, y_moves)  # fmt: skip
                                        else:
                                            _narrow_outer(like, rows, to, source, moves[2, 1], slope, (high, long),
                                                             x_moves, y_moves)  # fmt: skip
                                        first += nbytes // word


def convolve_depthwise(
    x: np.ndarray, weight: np.ndarray, bias: Any, strides: WindowStrides, y: np.ndarray, add: bool
) -> None:
    """Convolve each channel of x with its kernels in `weight` (outputs, 1, *kernel). Write the result plus `bias`
    (outputs,) to y, or add the result to y if `add` is true. x and y have channels last."""
    if y.size:
        outputs = _pad_channels(y) if add else _allocate_full_rows(y)
        _convolve_full_vectors(_repeat_channels(x, y.shape[-1]), weight, bias, strides, outputs, add)
        if outputs is not y:
            y[...] = outputs[..., : y.shape[-1]]


def depthwise_backward_input(
    weight: np.ndarray, dy: np.ndarray, strides: WindowStrides, dx: np.ndarray, bias: Any
) -> None:
    """Write the gradient of the input, plus `bias` (channels,), to `dx`."""
    each, slope, channels = dy.shape[-1] // dx.shape[-1], _pad_channels(dy), dx.shape[-1]
    of_outputs = dx if each == 1 and _has_full_rows(dx) else np.empty((*dx.shape[:-1], slope.shape[-1]), dx.dtype)
    direct_backward_input(weight, slope, strides, of_outputs, None, _convolve_full_vectors)
    if of_outputs is not dx:
        np.sum(of_outputs[..., : dy.shape[-1]].reshape(*dx.shape[:-1], channels, each), axis=-1, out=dx)
    if bias is not None:
        dx += bias


def add_depthwise_weight_gradient(x: np.ndarray, dy: np.ndarray, strides: WindowStrides, dw: np.ndarray) -> None:
    """Add the gradient of the weights to dw (outputs, 1, *kernel)."""
    if not dy.size:
        return
    slope, field = _pad_channels(dy), _repeat_channels(x, dy.shape[-1])
    plan = make_direct_convolution_arguments(
        strides, None, field.shape, field.strides, slope.shape, slope.strides, True
    )
    if plan is None:
        return
    places, sizes, _, *rest = plan
    planes, channels = int(sizes[0] * sizes[1]), slope.shape[-1]
    packed = np.zeros(channels * planes * int(sizes[2]), x.dtype)
    rest = [get_data_pointer(field), get_data_pointer(slope), *rest, sizes, packed, channels, x.shape[0]]
    parallel_for_range(_add_weight_gradient, 0, planes, *rest)
    window = [slice(first, first + count) for count, first, _ in places.tolist()][5 - dw.ndim :]
    gradient = _unpack_weights_from_lanes(packed, channels)[: dw.shape[0]]
    dw[:, 0][(slice(None), *window)] += gradient.reshape(dw.shape[0], *sizes[5 - dw.ndim :])


def _convolve_full_vectors(
    x: np.ndarray, weight: np.ndarray, bias: Any, strides: WindowStrides, y: np.ndarray, add: bool, places: Any = None
) -> None:
    """Convolve each group of channels of x with its kernels in `weight` (channels, size of a group, *kernel). The other
    arguments are the same as for `convolve_direct`. The channels of x and y must fill whole vectors. `weight` and
    `bias` need not be padded to whole vectors, so they may have fewer channels than x and y."""
    plan = (
        make_direct_convolution_arguments(strides, places, x.shape, x.strides, y.shape, y.strides, add)
        if y.size
        else None
    )
    if plan is None:
        return
    found, sizes, lines, *rest = plan
    weights, group = reshape_to_three_dims(weight), weight.shape[1]
    for dim, (count, first, step) in enumerate(found.tolist(), 2):
        if count < weights.shape[dim] or step != 1:
            weights = weights.take(range(first, first + count * step, step), dim)
    weights = weights.transpose(0, 2, 3, 4, 1).reshape(len(weights), math.prod(sizes.tolist()) * group)
    packed, begin = _pack_weights_into_lanes(weights, y.shape[-1], x.dtype), np.zeros(y.shape[-1], x.dtype)
    if bias is not None:
        begin[: bias.size] = bias
    rest = [get_data_pointer(x), get_data_pointer(y), *rest, sizes, packed, begin, add, group]
    parallel_for_range(_convolve_lines, 0, lines, *rest)


def convolve_small_groups(
    x: np.ndarray, weight: np.ndarray, bias: Any, strides: WindowStrides, y: np.ndarray, add: bool
) -> None:
    """Convolve each group of channels of x with the group's kernels in `weight`, (outputs, channels of a group,
    *kernel). The number of channels of a group must be one of GROUP_SIZES. The other arguments are the same as for
    `convolve_depthwise`. The channels of x and y must fill whole WIDE vectors."""
    _convolve_full_vectors(_pad_channels(x), weight, bias, strides, y, add)


def small_groups_backward_input(
    weight: np.ndarray, dy: np.ndarray, strides: WindowStrides, dx: np.ndarray, bias: Any
) -> None:
    """Write the gradient of the input of `convolve_small_groups`, plus `bias` (channels,), to `dx`."""
    size = weight.shape[1]
    turned = weight.reshape(-1, size, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    direct_backward_input(turned, _pad_channels(dy), strides, dx, bias, _convolve_full_vectors)


def _repeat_channels(x: np.ndarray, outputs: int) -> np.ndarray:
    """Return x with each channel repeated once for each of its outputs. Channels of zeros are appended so that the
    channels fill whole vectors."""
    return _pad_channels(x if outputs == x.shape[-1] else np.repeat(x, outputs // x.shape[-1], axis=-1))


def _allocate_full_rows(like: np.ndarray) -> np.ndarray:
    """Return `like` if its channels fill whole vectors. Otherwise, return a new array with the same shape, except that
    the number of channels is rounded up to whole vectors."""
    channels = round_up_to_lanes(like.shape[-1], like.dtype)
    return like if _has_full_rows(like) else np.empty((*like.shape[:-1], channels), like.dtype)


def _pad_channels(x: np.ndarray) -> np.ndarray:
    """Return x with channels of zeros added so that the channels fill whole vectors, or x itself if they already do."""
    if _has_full_rows(x):
        return x
    padded = np.zeros((*x.shape[:-1], round_up_to_lanes(x.shape[-1], x.dtype)), x.dtype)
    padded[..., : x.shape[-1]] = x
    return padded


def _has_full_rows(x: np.ndarray) -> bool:
    full = x.shape[-1] == round_up_to_lanes(x.shape[-1], x.dtype)
    return full and x.strides[-1] == x.itemsize and x.flags.aligned


def _pack_weights_into_lanes(weights: np.ndarray, channels: int, dtype: Any) -> np.ndarray:
    """Pack weights (channels or fewer, offsets) into blocks (offsets, lanes). The lanes of a block take WIDE bytes,
    except that the last block is narrower if too few channels remain."""
    lanes = WIDE // dtype.itemsize
    rows = np.zeros((channels, weights.shape[1]), dtype)
    rows[: len(weights)] = weights
    full = channels // lanes * lanes
    wide = rows[:full].reshape(full // lanes, lanes, weights.shape[1]).transpose(0, 2, 1)
    return np.concatenate([wide.reshape(-1), rows[full:].T.reshape(-1)])


def _unpack_weights_from_lanes(packed: np.ndarray, channels: int) -> np.ndarray:
    """Return the weights (channels, offsets) that `_pack_weights_into_lanes` packed into `packed`."""
    lanes, offsets = WIDE // packed.itemsize, packed.size // channels
    full = channels // lanes * lanes
    wide = packed[: full * offsets].reshape(full // lanes, offsets, lanes).transpose(0, 2, 1).reshape(full, offsets)
    return np.concatenate([wide, packed[full * offsets :].reshape(offsets, channels - full).T])
