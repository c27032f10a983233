"""Calls of the kernels of fields, by which tests compare their forms."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.ext.fields import kernels
from fsdpx.ext.fields.kernels import WindowStrides

__all__ = ["CALLS"]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def window(
    groups: int, outputs: int, cells: tuple[int, ...], s: WindowStrides, samples: int = 2, bias: bool = True
) -> Any:
    """x, weight, bias, the window, cells of the result, and its gradient."""
    sizes = tuple(  # those of a field with as much padding behind as before
        (n - 2 * first - d * (k - 1) - 1) // step + 1 for n, k, step, d, first in zip(cells, *s[:4], strict=True)
    )
    x, w = noise(samples, 2 * groups, *cells), noise(outputs, 2, *s.kernel, seed=1)
    return x, w, noise(outputs, seed=2) if bias else None, s, sizes, noise(samples, outputs, *sizes, seed=3)


WINDOWS = [
    window(1, 5, (11,), WindowStrides((3,), (1,), (1,), (-1,), 1)),
    window(1, 3, (9, 7), WindowStrides((3, 2), (2, 1), (1, 3), (-2, 0), 1), bias=False),
    window(3, 6, (8, 5), WindowStrides((2, 3), (1, 2), (2, 1), (0, -1), 3), 1),
    window(1, 4, (5, 6, 4), WindowStrides((3, 3, 3), (1, 1, 1), (1, 1, 1), (-1, -1, -1), 1)),
    window(2, 6, (9, 3), WindowStrides((1, 1), (1, 1), (1, 1), (0, 0), 2)),
    window(1, 3, (8200,), WindowStrides((1,), (1,), (1,), (0,), 1)),
    window(2, 2, (7, 4, 5), WindowStrides((3, 2, 1), (3, 2, 1), (2, 1, 1), (-3, -1, 0), 2)),
]
POOLS = [
    (noise(2, 3, *cells), WindowStrides(*s, 1), sizes, noise(2, 3, *sizes, seed=1))
    for cells, s, sizes in (
        ((9,), ((3,), (2,), (1,), (-1,)), (5,)), ((6, 7), ((2, 3), (2, 1), (1, 2), (0, -1)), (3, 5)),
        ((4, 6, 5), ((2, 2, 3), (2, 2, 3), (1, 1, 1), (-1, 0, -1)), (3, 3, 2)),
    )
]  # fmt: skip

CALLS: dict[str, list[tuple[Any, ...]]] = {
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
