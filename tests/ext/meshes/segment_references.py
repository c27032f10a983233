"""Float64 references of the mesh kernels: a family for `references.py`, which imports this file at its end."""

from inspect import isfunction

import numpy as np
from references import Case, Cases
from segment_kernels import MOST, OFFSETS, ORDER, SEGMENTS

from fsdpx.ext.meshes import kernels

__all__ = ["FAMILIES", "KERNELS"]


def segments(x, dy, dtype) -> Cases:
    """Two samples of nine rows with three features, segment by segment."""
    rows, slope = np.resize(x, (2, 9, 3)), np.resize(dy, (2, 9, 3))

    def reduce(a, function):
        """Apply a function to the rows of each segment; the result is 0 if there are none."""
        found = [a[:, i:j] for i, j in zip(OFFSETS[:-1], OFFSETS[1:], strict=True)]
        return np.stack([function(one) if one.shape[1] else np.zeros((2, 3)) for one in found], axis=1)

    def sum_rows(a):
        return reduce(a, lambda one: one.sum(axis=1))

    largest = reduce(rows, lambda one: one.max(axis=1))
    e = np.exp(rows - largest[:, SEGMENTS])
    softmax = e / sum_rows(e)[:, SEGMENTS]
    y = np.resize(np.abs(x), (2, 9, 3))
    product = sum_rows(y * slope)[:, SEGMENTS]
    sizes = np.abs(y) * (np.abs(slope) + sum_rows(np.abs(y * slope))[:, SEGMENTS])
    taken, other = np.array([1, 0, 1]), np.array([2, 2, 0])

    def add_rows(xp, a, b, c):
        return kernels.add_gathered_row_pairs(xp, a.copy(), b, taken, c, other)

    added = [rows[:, :3], rows, slope]
    return {
        "add_gathered_row_pairs": [
            Case(
                add_rows,
                (rows[:, :3], rows, slope),
                added[0] + added[1][:, taken] + added[2][:, other],
                np.abs(added[0]) + np.abs(added[1][:, taken]) + np.abs(added[2][:, other]),
                rounded=np.abs(added[1][:, taken]) + np.abs(added[2][:, other]),
            )
        ],
        "segment_sum": [
            Case(
                lambda xp, a, order=order: kernels.segment_sum(xp, a, OFFSETS, order, MOST),
                (rows,),
                sum_rows(rows if order is None else rows[:, order]),
                sum_rows(np.abs(rows if order is None else rows[:, order])),
            )
            for order in (None, ORDER)
        ],
        "segment_max": [Case(lambda xp, a: kernels.segment_max(xp, a, OFFSETS, MOST)[0], (rows,), largest, 0.0)],
        "segment_softmax": [
            Case(
                lambda xp, a: kernels.segment_softmax(xp, a, OFFSETS, SEGMENTS, MOST),
                (rows,),
                softmax,
                softmax * (4.0 + np.abs(rows - largest[:, SEGMENTS])),
            )
        ],
        "segment_softmax_backward": [
            Case(
                lambda xp, a, b: kernels.segment_softmax_backward(xp, a, b, OFFSETS, SEGMENTS, MOST),
                (y, slope),
                y * (slope - product),
                sizes,
            )
        ],
    }


FAMILIES = (segments,)
KERNELS = {name for name in vars(kernels) if isfunction(getattr(kernels, name))}
