"""Reductions over segments of rows, in plain array code.

Values are (samples, rows, features). Segment i consists of the rows offsets[i] to offsets[i + 1] - 1. `most` is the
number of rows in the longest segment. The sum and the maximum of an empty segment are 0. Rows are reduced in order, so
that results do not depend on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = ["add_gathered_row_pairs", "segment_max", "segment_softmax", "segment_softmax_backward", "segment_sum"]


@kernel(bits=False)
def add_gathered_row_pairs(xp: Any, y: Any, a: Any, a_index: Any, b: Any, b_index: Any) -> Any:
    """Return y[n, i] + a[n, a_index[i]] + b[n, b_index[i]] for each row i. The result may overwrite `y`."""
    return y + (xp.take(a, a_index, axis=1) + xp.take(b, b_index, axis=1))


@kernel(bits=False)
def segment_sum(xp: Any, values: Any, offsets: Any, order: Any, most: int) -> Any:
    """Return the sum of the rows of each segment.

    Each segment is a range of rows (dim 1) of `values` or, if `order` is given, of values[:, order]."""
    y = xp.zeros((values.shape[0], offsets.shape[0] - 1, values.shape[2]), dtype=values.dtype)
    for rows, inside in _iterate_kth_rows_of_segments(xp, offsets, most):
        found = xp.take(values, rows if order is None else xp.take(order, rows), axis=1)
        y += xp.where(inside, found, 0.0).astype(y.dtype)
    return y


@kernel(bits=False)
def segment_max(xp: Any, values: Any, offsets: Any, most: int) -> tuple[Any, Any]:
    """Return the maximum of each feature over the rows of each segment, and the index of the row that has this maximum,
    or -1 for an empty segment. Ties go to the first row; NaN compares greater than any number."""
    y = xp.zeros((values.shape[0], offsets.shape[0] - 1, values.shape[2]), dtype=values.dtype)
    winner = xp.full(y.shape, -1, dtype="int64")
    for rows, inside in _iterate_kth_rows_of_segments(xp, offsets, most):
        found = xp.take(values, rows, axis=1)
        better = inside & ((found > y) | (found != found) | (winner < 0))
        y, winner = xp.where(better, found, y), xp.where(better, rows[None, :, None], winner)
    return y, winner


@kernel(bits=False)
def segment_softmax(xp: Any, scores: Any, offsets: Any, segments: Any, most: int) -> Any:
    """Return exp(score) divided by the sum of exp(score) over the rows of the same segment, for each feature.
    `segments` contains the segment index of each row."""
    highest = segment_max.__wrapped__(xp, scores, offsets, most)[0]  # type: ignore[attr-defined]
    y = xp.exp(scores - xp.take(highest, segments, axis=1))
    total = segment_sum.__wrapped__(xp, y, offsets, None, most)  # type: ignore[attr-defined]
    return y / xp.take(total, segments, axis=1)


@kernel(bits=False)
def segment_softmax_backward(xp: Any, y: Any, dy: Any, offsets: Any, segments: Any, most: int) -> Any:
    """Return the gradient with respect to the scores in `segment_softmax`, given its result y and the gradient dy of
    y."""
    total = segment_sum.__wrapped__(xp, y * dy, offsets, None, most)  # type: ignore[attr-defined]
    return y * (dy - xp.take(total, segments, axis=1))


def _iterate_kth_rows_of_segments(xp: Any, offsets: Any, most: int) -> Iterator[tuple[Any, Any]]:
    """For k = 1, 2, ..., yield (rows, inside). `rows` holds the index of the k-th row of each segment, and `inside` is
    a mask (1, segments, 1) that is True for the segments that have a k-th row."""
    for i in range(most):
        rows = offsets[:-1] + i
        inside = rows < offsets[1:]
        yield xp.where(inside, rows, 0), inside[None, :, None]
