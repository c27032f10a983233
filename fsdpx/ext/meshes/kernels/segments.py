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
    y = xp.zeros((values.shape[0], offsets.shape[0] - 1, values.shape[2]), dtype=values.dtype)
    if order is not None:
        values = xp.take(values, order, axis=1)
    xp.add.at(y, (slice(None), _find_segments(xp, offsets)), values)
    return y


@kernel(bits=False)
def segment_max(xp: Any, values: Any, offsets: Any) -> tuple[Any, Any]:
    """Return the maximum of each feature over the rows of each segment, and the row that has it, or -1 in an empty
    segment. Of equal rows, the first is the maximum."""
    most = _find_max(xp, values, offsets)
    rows = xp.arange(values.shape[1])[None, :, None]
    is_most = values == xp.take(most, _find_segments(xp, offsets), axis=1)
    first = xp.full(most.shape, values.shape[1], dtype="int64")
    candidates = xp.where(is_most, rows, values.shape[1])
    xp.minimum.at(first, (slice(None), _find_segments(xp, offsets)), candidates)
    empty = (offsets[1:] == offsets[:-1])[None, :, None]
    return xp.where(empty, 0.0, most).astype(values.dtype), xp.where(empty, -1, first)


@kernel(bits=False)
def segment_softmax(xp: Any, scores: Any, offsets: Any) -> Any:
    """Return exp(score) / sum of exp(score) over the rows of the segment, for each feature."""
    segments = _find_segments(xp, offsets)
    y = xp.exp(scores - xp.take(_find_max(xp, scores, offsets), segments, axis=1))
    total = xp.zeros((scores.shape[0], offsets.shape[0] - 1, scores.shape[2]), dtype=scores.dtype)
    xp.add.at(total, (slice(None), segments), y)
    return y / xp.take(total, segments, axis=1)


@kernel(bits=False)
def segment_softmax_backward(xp: Any, y: Any, dy: Any, offsets: Any) -> Any:
    """Return the gradient of the scores of `segment_softmax`, given its result y and the gradient dy of y."""
    segments = _find_segments(xp, offsets)
    total = xp.zeros((y.shape[0], offsets.shape[0] - 1, y.shape[2]), dtype=y.dtype)
    xp.add.at(total, (slice(None), segments), y * dy)
    return y * (dy - xp.take(total, segments, axis=1))


def _find_segments(xp: Any, offsets: Any) -> Any:
    """Return the segment of each row."""
    return xp.repeat(xp.arange(offsets.shape[0] - 1), (offsets[1:] - offsets[:-1]).tolist())


def _find_max(xp: Any, values: Any, offsets: Any) -> Any:
    most = xp.full((values.shape[0], offsets.shape[0] - 1, values.shape[2]), -xp.inf, dtype=values.dtype)
    xp.maximum.at(most, (slice(None), _find_segments(xp, offsets)), values)
    return most
