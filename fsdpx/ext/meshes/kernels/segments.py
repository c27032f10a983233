"""Reductions over segments of rows, in plain array code.

Values are (samples, rows, features). Segment i has the rows from offsets[i] up to, but not including, offsets[i + 1].
An empty segment has the sum 0 and the maximum 0."""

from __future__ import annotations

from typing import Any

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = [
    "add_gathered_rows", "gather_rows", "segment_max", "segment_softmax", "segment_softmax_backward", "segment_sum",
]  # fmt: skip


@kernel(bits=False)
def gather_rows(xp: Any, x: Any, index: Any) -> Any:
    """Return y with y[n, i] = x[n, index[i]]."""
    return xp.take(x, index, axis=1)


@kernel(bits=False)
def add_gathered_rows(xp: Any, y: Any, a: Any, a_index: Any, b: Any, b_index: Any) -> Any:
    """Return y[n, i] + a[n, a_index[i]] + b[n, b_index[i]] for each row i. The result may overwrite `y`."""
    return y + (xp.take(a, a_index, axis=1) + xp.take(b, b_index, axis=1))


@kernel(bits=False)
def segment_sum(xp: Any, values: Any, offsets: Any, order: Any) -> Any:
    """Return the sum of the rows of each segment, in their order.

    If `order` is not None, row i of the segments is values[:, order[i]]."""
    return _reduce(xp, xp.add, values if order is None else xp.take(values, order, axis=1), offsets, 0.0)


@kernel(bits=False)
def segment_max(xp: Any, values: Any, offsets: Any) -> tuple[Any, Any]:
    """Return the maximum of each feature over the rows of each segment, and the row that has it, or -1 in an empty
    segment. Of equal rows, the first is the maximum."""
    most = _reduce(xp, xp.maximum, values, offsets, -xp.inf)
    rows = xp.arange(values.shape[1])[None, :, None]
    is_most = values == xp.take(most, _find_segments(xp, offsets), axis=1)
    first = _reduce(xp, xp.minimum, xp.where(is_most, rows, values.shape[1]), offsets, values.shape[1])
    empty = (offsets[1:] == offsets[:-1])[None, :, None]
    return xp.where(empty, 0.0, most).astype(values.dtype), xp.where(empty, -1, first)


@kernel(bits=False)
def segment_softmax(xp: Any, scores: Any, offsets: Any) -> Any:
    """Return exp(score) / sum of exp(score) over the rows of the segment, for each feature."""
    segments = _find_segments(xp, offsets)
    y = xp.exp(scores - xp.take(_reduce(xp, xp.maximum, scores, offsets, -xp.inf), segments, axis=1))
    return y / xp.take(_reduce(xp, xp.add, y, offsets, 0.0), segments, axis=1)


@kernel(bits=False)
def segment_softmax_backward(xp: Any, y: Any, dy: Any, offsets: Any) -> Any:
    """Return the gradient of the scores of `segment_softmax`, given its result y and the gradient dy of y."""
    total = _reduce(xp, xp.add, y * dy, offsets, 0.0)
    return y * (dy - xp.take(total, _find_segments(xp, offsets), axis=1))


def _find_segments(xp: Any, offsets: Any) -> Any:
    """Return the segment of each row."""
    return xp.repeat(xp.arange(offsets.shape[0] - 1), (offsets[1:] - offsets[:-1]).tolist())


def _reduce(xp: Any, operation: Any, values: Any, offsets: Any, initial: float) -> Any:
    """Return the reduction of the rows of each segment by a ufunc, and `initial` for empty segments."""
    y = xp.full((values.shape[0], offsets.shape[0] - 1, values.shape[2]), initial, dtype=values.dtype)
    operation.at(y, (slice(None), _find_segments(xp, offsets)), values)
    return y
