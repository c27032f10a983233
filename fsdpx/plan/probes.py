"""Kernel calls that are timed to measure a machine. The same calls are also run on shape-only arrays, to count the
work of each one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import Any

import numpy as np

from fsdpx import optim
from fsdpx.core.array import kernels, shapes
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.shapes.flop_counter import counting_work, record_traffic
from fsdpx.ext.fields import kernels as field_kernels
from fsdpx.ext.fields.kernels import WindowStrides
from fsdpx.nn.gradient_accumulation import accumulation_dtype
from fsdpx.optim import ShardSegment, ShardSegments

__all__ = [
    "find_names_of_measured_kernels", "iterate_matmul_calls", "iterate_weight_heavy_convolution_calls",
    "make_calls_of_all_memory_bound_kernels",
]  # fmt: skip

Call = Callable[[], Any]

WIDTH, CHANNELS = 64, 16
"""Number of columns of a matrix, and number of channels of a field."""
PAIRS = WindowStrides((2, 2), (2, 2), (1, 1), (0, 0), 1)
"""Window for which the pooling kernels are measured: 2 x 2 cells with stride 2."""


@lru_cache(1)
def find_names_of_measured_kernels() -> frozenset[str]:
    """Return the names of all kernels that `measure-machine` measures."""
    calls = [make_calls_of_all_memory_bound_kernels(shapes, name, 1) for name in ("float32", "bf16")]
    with counting_work() as work:
        for call in chain(*calls, iterate_matmul_calls(shapes, "float32")):
            call()
    return frozenset({one.kernel for one in work.passes} | {one.kernel for one in work.products})


def make_calls_of_all_memory_bound_kernels(xp: Any, name: str, nbytes: int) -> list[Call]:
    """For each memory-bound kernel, return a function that calls this kernel on arrays of dtype `name`. Each call reads
    and writes about `nbytes` bytes."""
    kind = parse_dtype(name)
    n = max(nbytes // (3 * kind.itemsize) // 1024, 1) * 1024 // WIDTH
    a, b, c = (xp.full((n, WIDTH), 0.5, dtype=kind) for _ in range(3))
    return [
        lambda: a * b, lambda: xp.exp(a), lambda: xp.sum(a, axis=1, dtype=np.float64), lambda: xp.copyto(c, a),
        *_list_elementwise_calls(xp, a, b, c), *_list_rowwise_calls(xp, a, b), *_list_channel_norm_calls(xp, n, kind),
        *_list_pooling_calls(xp, n, kind), *_list_cast_and_update_calls(xp, n, kind),
    ]  # fmt: skip


def _list_elementwise_calls(xp: Any, a: Any, b: Any, c: Any) -> list[Call]:
    k, row = kernels, xp.full((WIDTH,), 0.5, dtype=a.dtype)
    return [
        lambda: k.relu(xp, a), lambda: k.relu_backward(xp, a, b), lambda: k.sigmoid(xp, a),
        lambda: k.sigmoid_backward(xp, a, b), lambda: k.silu(xp, a),
        lambda: k.silu_backward(xp, a, b), lambda: k.gelu(xp, a), lambda: k.gelu_backward(xp, a, b),
        lambda: k.recompute_gelu_and_backward(xp, a, c), lambda: k.bias_gelu(xp, c, row), lambda: k.gated(xp, a, b),
        lambda: k.gated_backward(xp, a, b, c), lambda: k.add(xp, a, b), lambda: k.add_bias(xp, c, row),
        lambda: k.squared_error(xp, a, b), lambda: k.squared_error_backward(xp, a, b, 0.5),
    ]  # fmt: skip


def _list_rowwise_calls(xp: Any, a: Any, b: Any) -> list[Call]:
    """Return calls of norms, softmax, losses and other kernels that work on the rows of a matrix."""
    k, total = kernels, accumulation_dtype(a.dtype)
    w = xp.full((WIDTH,), 0.5, dtype=a.dtype)
    sums, mean, rstd = (xp.full((m,), 0.5, dtype=total) for m in (WIDTH, len(a), len(a)))
    labels, heads = xp.zeros((len(a),), dtype=np.int64), a.reshape(1, len(a), 2, WIDTH // 2)
    turn = xp.full((len(a), WIDTH // 4), 0.5, dtype=total)
    return [
        lambda: k.sum_rows(xp, a, sums), lambda: k.softmax(xp, a), lambda: k.softmax_backward(xp, a, b),
        lambda: k.layer_norm(xp, a, w, w, 1e-5), lambda: k.layer_norm_backward_input(xp, a, w, mean, rstd, b),
        lambda: k.layer_norm_backward_params(xp, a, mean, rstd, b, sums, sums),
        lambda: k.rms_norm(xp, a, w, 1e-5), lambda: k.rms_norm_backward_input(xp, a, w, rstd, b),
        lambda: k.rms_norm_backward_params(xp, a, rstd, b, sums), lambda: k.rotate(xp, heads, turn, turn),
        lambda: k.cross_entropy(xp, a, labels), lambda: k.cross_entropy_backward(xp, a, labels, rstd, 0.5),
        lambda: k.embedding_backward(xp, xp.zeros((WIDTH, WIDTH), dtype=a.dtype), labels, b),
    ]  # fmt: skip


def _make_field(xp: Any, samples: int, cells: tuple[int, ...], channels: int, dtype: Any) -> Any:
    """Return an array (samples, channels, *cells) in channels-last memory layout, the layout of arrays that field
    kernels return."""
    return xp.moveaxis(xp.full((samples, *cells, channels), 0.5, dtype=dtype), -1, 1)


def _list_channel_norm_calls(xp: Any, n: int, dtype: Any) -> list[Call]:
    """Return calls of the kernels that normalize the channels of fields."""
    k, cells = kernels, (8, n * WIDTH // CHANNELS // 16)
    x, dy = (_make_field(xp, 2, cells, CHANNELS, dtype) for _ in range(2))
    one = xp.full((CHANNELS,), 0.5, dtype=accumulation_dtype(dtype))
    each, f = xp.full((2, CHANNELS), 0.5, dtype=one.dtype), field_kernels
    return [
        lambda: f.channel_means_and_square_deviations(xp, x), lambda: f.group_norm_affine(xp, x, each, each, each),
        lambda: f.group_norm_gradient_sums_by_channel(xp, dy, x, each, each),
        lambda: f.group_norm_backward(xp, dy, x, each, each, each, each),
        lambda: k.channel_sums(xp, x), lambda: k.channel_squares(xp, x, one),
        lambda: k.channel_affine(xp, x, one, one, one), lambda: k.channel_gradient_sums(xp, dy, x, one, one),
        lambda: k.channel_norm_backward_input(xp, dy, x, one, one, one, one),
    ]  # fmt: skip


def _list_pooling_calls(xp: Any, n: int, dtype: Any) -> list[Call]:
    k, cells = field_kernels, (16, n * WIDTH // CHANNELS // 16)
    half, x = (cells[0] // 2, cells[1] // 2), _make_field(xp, 1, cells, CHANNELS, dtype)
    dy, winner = (_make_field(xp, 1, half, CHANNELS, one) for one in (dtype, np.int32))
    shape, each = (1, CHANNELS, *cells), np.arange(half[0])
    double = k.CellMatrix.from_entries(np.concatenate([2 * each, 2 * each + 1]), np.tile(each, 2), np.ones(cells[0]),
                                        (cells[0], half[0]))  # fmt: skip
    return [
        lambda: k.multiply_along_dim(xp, dy, 2, double),
        lambda: k.max_pool(xp, x, PAIRS, half), lambda: k.max_pool_backward(xp, dy, winner, PAIRS, shape),
        lambda: k.avg_pool(xp, x, PAIRS, half, 4), lambda: k.avg_pool_backward(xp, dy, PAIRS, shape, 4),
    ]  # fmt: skip


def _list_cast_and_update_calls(xp: Any, n: int, dtype: Any) -> list[Call]:
    """If `dtype` has 16 bits, return calls that cast between `dtype` and float32, the dtype in which sums are
    accumulated. Otherwise, return a call of an optimizer update."""
    size, total = n * WIDTH, accumulation_dtype(dtype)
    short, long = (xp.full((size,), 0.5, dtype=one) for one in (dtype, total))
    calls = [lambda: kernels.store(xp, short, long), lambda: kernels.store(xp, long, short)][: 2 * (dtype != total)]
    if dtype == total:
        p, g, *slots = (xp.full((size,), 0.5, dtype=dtype) for _ in range(4))
        calls.append(lambda: _run_or_count_update(xp, p, g, dict(zip(("m", "v"), slots, strict=True))))
    return calls


def _run_or_count_update(xp: Any, p: Any, g: Any, slots: dict[str, Any]) -> None:
    if getattr(xp, "holds_no_data", False):
        record_traffic(p, g, *slots.values(), p, *slots.values(), kernel="update")
        return
    adam = optim.AdamW()
    adam.update(xp, p, g, slots, lr=1e-3, step=1, segments=ShardSegments((ShardSegment("p", 0, p.size, 0, p.size),)))


CHANNEL_COUNTS = (2, 8, 32)
"""Numbers of input and of output channels of convolutions."""
CELL, LINE, CUBE, IMAGE, TALL = (1,), (3,), (3, 3, 3), (3, 3), (9, 3)
"""Window shapes of convolutions, with 1, 3, 27, 9 and 27 cells. Winograd's algorithm applies to CUBE and IMAGE."""
FIELDS: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {
    LINE: ((4,), (16,), (64,)), TALL: ((64, 4), (64, 16), (64, 64)), IMAGE: ((8, 8), (64, 64)),
    CELL: ((1 << 13,), (1 << 16,)),
}  # fmt: skip
"""Sizes of fields for each window. Some fields have short rows, where windows often extend beyond the ends of the row,
and others have long rows. The fields for TALL have the same row lengths as those for LINE, and therefore the same
numbers of windows per row."""
DEPTHWISE_CASES = (LINE, (16,)), (LINE, (64,)), (CUBE, (8, 8, 16)), (CUBE, (8, 8, 64))
"""(Window, field size) of the depthwise convolutions to time. For both windows, fields have rows of 16 and of 64
cells."""
ELEMENTS = 1 << 18
"""Approximate number of elements of a field, over all samples. It is large enough that the Python code around a call
takes negligible time."""


def iterate_matmul_calls(xp: Any, name: str) -> Iterator[Call]:
    """Yield calls of the kernels that consist of matrix products, such as convolutions, at each point of the measured
    grid of sizes.

    Convolutions in 16 bits are left out, because they consist of convolutions in float32 and two casts."""
    kind = parse_dtype(name)
    yield from _iterate_attention_calls(xp, kind)
    if kind.itemsize == 2:
        return
    for window, ends in ((LINE, CHANNEL_COUNTS), (TALL, CHANNEL_COUNTS), (IMAGE, (16, 64)), (CELL, CHANNEL_COUNTS)):
        for inner, outer, cells in product(ends, ends, FIELDS[window]):
            numbers = ELEMENTS * (window != CELL)
            yield from _iterate_convolution_calls(xp, kind, inner, outer, window, cells, numbers=numbers)
    for apart, field in DEPTHWISE_CASES:
        yield from _iterate_convolution_calls(xp, kind, CHANNELS, CHANNELS, apart, field, CHANNELS)


MANY = 256
"""Number of input and of output channels in the measured convolutions with few cells. In these convolutions, reordering
the weights takes as long as the matrix products."""


def iterate_weight_heavy_convolution_calls(xp: Any, name: str) -> Iterator[Call]:
    """Yield calls of convolutions with few cells and many weights. Their time shows how long it takes to reorder the
    weights."""
    for window, cells, few in ((CUBE, (2, 2, 2), 8), (IMAGE, (4, 4), 512)):
        yield from _iterate_convolution_calls(xp, parse_dtype(name), MANY, MANY, window, cells, numbers=few * MANY)


def _iterate_convolution_calls(
    xp: Any, dtype: Any, inner: int, outer: int, window: tuple[int, ...], cells: tuple[int, ...], groups: int = 1,
    numbers: int = ELEMENTS,
) -> Iterator[Call]:  # fmt: skip
    """Yield calls of a convolution's forward pass, and of its backward passes for inputs and for parameters. The
    convolution has `inner` input and `outer` output channels. The number of samples is chosen so that the larger of the
    two fields (input or output) has about `numbers` elements."""
    samples = max(numbers // (prod(cells) * max(inner, outer)), 1)
    ones = (1,) * len(window)
    strides = WindowStrides(window, ones, ones, tuple(-(k // 2) for k in window), groups)
    x, dy = (_make_field(xp, samples, cells, channels, dtype) for channels in (inner, outer))
    weight = xp.full((outer, inner // groups, *window), 0.5, dtype=dtype)
    gradient, bias = xp.full(weight.shape, 0.5, dtype=dtype), xp.full((outer,), 0.5, dtype=dtype)
    yield lambda: field_kernels.correlate(xp, x, weight, bias, strides, cells)
    yield lambda: field_kernels.correlate_backward_input(xp, weight, dy, strides, (samples, inner, *cells))
    yield lambda: field_kernels.correlate_backward_params(xp, x, dy, strides, (gradient, True), (bias, False))


HEADS = (4, 256, 64)
"""Number of heads, number of tokens, and number of features per head in attention."""


def _iterate_attention_calls(xp: Any, dtype: Any) -> Iterator[Call]:
    q, k, v, do = (xp.full((1, *HEADS), 0.01, dtype=dtype) for _ in range(4))
    yield lambda: kernels.attention(xp, q, k, v, True, 0.125)
    o, lse = kernels.attention(xp, q, k, v, True, 0.125)
    yield lambda: kernels.attention_backward(xp, q, k, v, o, lse, do, True, 0.125)
