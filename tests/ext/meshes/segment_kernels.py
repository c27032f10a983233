"""Calls of the mesh kernels, with which tests compare their implementations."""

from typing import Any

import numpy as np

OFFSETS = np.array([0, 3, 3, 4, 9])
"""Segments of three rows, of none, of one and of five."""
SEGMENTS = np.repeat(np.arange(4), np.diff(OFFSETS))
MOST = 5
ORDER = np.array([4, 0, 8, 2, 2, 7, 1, 3, 5])
INDEX = np.array([1, 0, 1])
ROWS, SLOPES, FEW = (np.random.default_rng(i).standard_normal((2, n, 3)) for i, n in enumerate((9, 9, 3)))

CALLS: dict[str, list[tuple[Any, ...]]] = {
    "add_gathered_row_pairs": [(FEW, ROWS, INDEX, SLOPES, INDEX[::-1].copy())],
    "segment_sum": [(ROWS, OFFSETS, None, MOST), (ROWS, OFFSETS, ORDER, MOST)],
    "segment_max": [(ROWS, OFFSETS, MOST)],
    "segment_softmax": [(ROWS, OFFSETS, SEGMENTS, MOST)],
    "segment_softmax_backward": [(np.abs(ROWS), SLOPES, OFFSETS, SEGMENTS, MOST)],
}
