"""Float64 references of the mesh kernels: a family for `references.py`, which imports this file at its end."""

from inspect import isfunction

import numpy as np
from references import Case, Cases
from segment_kernels import MOST, OFFSETS, ORDER, SEGMENTS

from fsdpx.ext.meshes import kernels


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
    taken, other, few, in_order = np.array([1, 0, 1]), np.array([2, 2, 0]), rows[:, :3], rows[:, ORDER]
    first, second = rows[:, taken], slope[:, other]

    def add_rows(xp, a, b, c):
        return kernels.add_gathered_row_pairs(xp, a.copy(), b, taken, c, other)

    def case(kernel, arrays, want, size, *layout) -> Case:
        """A kernel that takes the layout of segments after the arrays."""
        return Case(lambda xp, *given: kernel(xp, *given, *layout), arrays, want, size)

    added = np.abs(first) + np.abs(second)
    by_row = OFFSETS, SEGMENTS, MOST
    terms = softmax * (4.0 + np.abs(rows - largest[:, SEGMENTS]))
    return {
        "add_gathered_row_pairs": [
            Case(add_rows, (few, rows, slope), few + first + second, np.abs(few) + added, rounded=added)
        ],
        "segment_sum": [
            case(kernels.segment_sum, (rows,), sum_rows(rows), sum_rows(np.abs(rows)), OFFSETS, None, MOST),
            case(kernels.segment_sum, (rows,), sum_rows(in_order), sum_rows(np.abs(in_order)), OFFSETS, ORDER, MOST),
        ],
        "segment_max": [Case(lambda xp, a: kernels.segment_max(xp, a, OFFSETS, MOST)[0], (rows,), largest, 0.0)],
        "segment_softmax": [case(kernels.segment_softmax, (rows,), softmax, terms, *by_row)],
        "segment_softmax_backward": [
            case(kernels.segment_softmax_backward, (y, slope), y * (slope - product), sizes, *by_row)
        ],
    }


FAMILIES = (segments,)
KERNELS = {name for name in vars(kernels) if isfunction(getattr(kernels, name))}
