"""Calls of the kernels of fields, by which tests compare their forms."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.ext.fields import kernels
from fsdpx.ext.fields.kernels import WindowStrides
from fsdpx.ext.fields.kernels.neighborhood import make_neighborhood_masks

__all__ = ["CALLS", "DOUBLE"]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def window(
    groups: int, outputs: int, cells: tuple[int, ...], s: WindowStrides, samples: int = 2, bias: bool = True,
    width: int = 2,
) -> Any:  # fmt: skip
    """x, weight, bias, the window, cells of the result, and its gradient. width: channels per group."""
    sizes = tuple(  # those of a field with as much padding behind as before
        (n - 2 * first - d * (k - 1) - 1) // step + 1 for n, k, step, d, first in zip(cells, *s[:4], strict=True)
    )
    x, w = noise(samples, width * groups, *cells), noise(outputs, width, *s.kernel, seed=1)
    return x, w, noise(outputs, seed=2) if bias else None, s, sizes, noise(samples, outputs, *sizes, seed=3)


WINDOWS = [
    window(1, 5, (11,), WindowStrides((3,), (1,), (1,), (-1,), 1)),
    window(1, 3, (9, 7), WindowStrides((3, 2), (2, 1), (1, 3), (-2, 0), 1), bias=False),
    window(3, 6, (8, 5), WindowStrides((2, 3), (1, 2), (2, 1), (0, -1), 3), 1),
    window(1, 4, (5, 6, 4), WindowStrides((3, 3, 3), (1, 1, 1), (1, 1, 1), (-1, -1, -1), 1)),
    window(2, 6, (9, 3), WindowStrides((1, 1), (1, 1), (1, 1), (0, 0), 2)),
    window(1, 3, (8200,), WindowStrides((1,), (1,), (1,), (0,), 1)),
    window(2, 2, (7, 4, 5), WindowStrides((3, 2, 1), (3, 2, 1), (2, 1, 1), (-3, -1, 0), 2)),
    window(20, 20, (9, 7), WindowStrides((3, 5), (1, 1), (1, 1), (-1, -2), 20), width=1),
    window(16, 16, (4, 5, 6), WindowStrides((3, 3, 3), (1, 1, 1), (1, 1, 1), (-1, -1, -1), 16), width=1),
    window(24, 24, (40,), WindowStrides((11,), (1,), (2,), (-10,), 24), width=1, bias=False),
    window(8, 24, (8, 9), WindowStrides((2, 3), (2, 3), (1, 1), (-1, 0), 8), 1, width=1),
    window(4, 12, (6, 20), WindowStrides((3, 9), (1, 2), (1, 1), (-1, -4), 4), width=3),
    window(2, 18, (5, 6), WindowStrides((3, 3), (1, 1), (1, 1), (-1, -1), 2), width=4),
    window(8, 32, (5, 4, 9), WindowStrides((3, 3, 3), (1, 1, 1), (1, 1, 1), (-1, -1, -1), 8), width=4),
    window(8, 16, (9, 20), WindowStrides((2, 3), (2, 1), (1, 2), (-1, -2), 8)),
]
POOLS = [
    (noise(2, 3, *cells), WindowStrides(*s, 1), sizes, noise(2, 3, *sizes, seed=1))
    for cells, s, sizes in (
        ((9,), ((3,), (2,), (1,), (-1,)), (5,)), ((6, 7), ((2, 3), (2, 1), (1, 2), (0, -1)), (3, 5)),
        ((4, 6, 5), ((2, 2, 3), (2, 2, 3), (1, 1, 1), (-1, 0, -1)), (3, 3, 2)),
    )
]  # fmt: skip

FIELDS = [
    (noise(*shape, seed=4) + 3, noise(*shape, seed=5), *noise(4, *shape[:2], seed=6))
    for shape in ((2, 4, 70), (3, 6, 5, 7), (1, 32, 9, 11), (2, 20, 3, 2, 4), (2, 3, 1, 37))
]
"""Fields of 1 to 64 cells in a row, gradients, and values of each channel of each sample."""


def neighbors(starts: tuple[tuple[int, ...], ...], window: tuple[int, ...]) -> Any:
    """q, k, v, o, lse, the gradient of o, the first key of each query's window along each dim, its sizes, the masks of
    tiles, and scale."""
    box = tuple(first[-1] + k for first, k in zip(starts, window, strict=True))
    q, do = noise(2, 2, 2, *map(len, starts), 3, seed=7)
    given = q, *noise(2, 2, 2, *box, 3, seed=8)
    how = starts, window, make_neighborhood_masks(np, starts, window, np.float64), 0.5
    return (*given, *kernels.neighborhood_attention.__wrapped__(np, *given, *how), do, *how)  # type: ignore[attr-defined]


NEIGHBORS = [
    neighbors((tuple(range(70)),), (3,)),
    neighbors(((0, 0, 1, 2, 3, 3), (0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9)), (3, 5)),
    neighbors(((0, 0, 0), (0, 1, 2, 3, 3), (1, 2)), (3, 2, 1)),
]

MATRICES = [
    kernels.CellMatrix.from_entries(*map(np.array, entries), shape)
    for *entries, shape in (
        ((0, 0, 1, 1, 2, 2), (0, 1, 1, 2, 3, 4), (0.5, 0.5, 0.2, 0.8, 1.0, -0.5), (3, 5)),
        ((1, 1, 1, 3, 0), (4, 0, 2, 1, 3), (0.1, 0.2, 0.3, 2.0, 1.0), (4, 5)),
    )
]
"""Two cells of five for each output, and none to three for each."""

STENCIL = (
    kernels.ShiftedRange(0, 1, 5, -2.0, False), kernels.ShiftedRange(0, 0, 5, 1.0, True),
    kernels.ShiftedRange(1, 3, 4, 0.5, True), kernels.ShiftedRange(4, 6, 1, 3.0, False),
)  # fmt: skip
"""For fields of five cells, with a halo of one cell at each end."""

CALLS: dict[str, list[tuple[Any, ...]]] = {
    "neighborhood_attention": [(*case[:3], *case[6:]) for case in NEIGHBORS],
    "neighborhood_attention_backward": NEIGHBORS,
    "multiply_along_dim": [
        (noise(*shape), dim, matrix) for matrix in MATRICES
        for shape, dim in (((2, 3, 5), 2), ((2, 4, 5, 3), 2), ((1, 16, 2, 5), 3), ((2, 3, 2, 5, 4), 3))
    ],
    "fourier_along_dim": [
        (noise(2, 3, *cells, parts), 2, n, transform)
        for transform, parts in (("rfft", 1), ("fft", 2), ("ifft", 2), ("irfft", 2))
        for n, *others in ((12, 5), (7,), (16, 3, 2), (1, 4), (11, 3), (90,), (35, 20))
        for cells in ((n // 2 + 1 if transform == "irfft" else n, *others),)
    ],
    "apply_stencil": [
        (noise(2, 4, *cells), noise(2, 3, *(k + 2 * (d == dim) for d, k in enumerate(cells)), seed=1), given, taken,
         dim, STENCIL)
        for cells in ((5,), (5, 3), (2, 5), (2, 5, 3)) for dim, n in enumerate(cells) if n == 5
        for given, taken in ((slice(0, 3), slice(None)), (slice(1, None, 2), slice(0, 3, 2)))
    ],
    "sum_squares_by_index": [
        (noise(5, *modes, 2), np.arange(np.prod(modes)).reshape(modes) % 4, np.abs(noise(*modes)), 6)
        for modes in ((7,), (3, 4), (1, 1, 2))
    ],
    "group_norm": [
        case for x, _, a, b, *_ in FIELDS for case in ((x, a[0], b[0], 1, 1e-3), (x, None, None, x.shape[1], 1e-3))
    ],
    "group_norm_backward_input": [
        case for x, dy, a, b, c, _ in FIELDS for case in ((dy, x, a, b, c[0], 1), (dy, x, a, b, None, x.shape[1]))
    ],
    "channel_means_and_square_deviations": [(x,) for x, *_ in FIELDS],
    "group_norm_affine": [(x, a, b, c) for x, _, a, b, c, _ in FIELDS],
    "group_norm_gradient_sums_by_channel": [(dy, x, a, b) for x, dy, a, b, *_ in FIELDS],
    "group_norm_backward": [(dy, x, a, b, c, d) for x, dy, a, b, c, d in FIELDS],
    "max_pool": [(x, s, sizes) for x, s, sizes, _ in POOLS],
    "max_pool_backward": [(dy, kernels.max_pool(np, x, s, sizes)[1], s, x.shape) for x, s, sizes, dy in POOLS],
    "avg_pool": [(x, s, sizes, 5) for x, s, sizes, _ in POOLS],
    "avg_pool_backward": [(dy, s, x.shape, 5) for x, s, _, dy in POOLS],
    "correlate": [(x, w, bias, s, sizes) for x, w, bias, s, sizes, _ in WINDOWS]
    + [(x, w, None, s, sizes, dy) for x, w, _, s, sizes, dy in WINDOWS],
    "correlate_backward_input": [
        case for x, w, bias, s, _, dy in WINDOWS
        for case in ((w, dy, s, x.shape), (w, dy, s, x.shape, noise(x.shape[1])))
    ],
    "correlate_backward_params": [
        (x, dy, s, (w, add), None if bias is None else (bias, add)) for x, w, bias, s, _, dy in WINDOWS
        for add in (True, False)
    ],
}  # fmt: skip

DOUBLE = {
    "group_norm_backward_input": (2, 3), "group_norm_affine": (1, 2, 3), "group_norm_gradient_sums_by_channel": (2, 3),
    "group_norm_backward": (2, 3, 4, 5),
}  # fmt: skip
"""Arguments that are of the format of sums, as in `calls.py`."""
