"""How fast each BLAS library multiplies on this machine: what a tuner chooses by."""

import math
from collections.abc import Callable
from time import perf_counter
from types import ModuleType

import numpy as np

from fsdpx.array.blas import halves, libraries
from fsdpx.array.blas.products import gemm
from fsdpx.array.namespace import dtype

__all__ = ["measure", "measure_halves"]

SHAPES = ((512, 1024, 256), (512, 256, 1024), (64, 256, 64), (64, 32, 32))
"""(rows, columns, summed) of a transformer's products, of a tile of its attention, and of a small layer."""
BUDGET = 0.1  # seconds of `measure`, about
TURNS = 5


def measure() -> dict[str, float]:
    """GFLOP/s of each library on one thread in some tenths of a second: what a tuner chooses by.

    The libraries take turns, and the fastest call of each product counts: what else runs here slows some of them.
    The figure is the harmonic mean over the shapes: small products must not be lost among large ones."""
    return _rates(libraries, list(libraries.available()), gemm, np.dtype(np.float32))


def measure_halves() -> dict[str, float]:
    """The same of bfloat16, where there is more than one library to choose from."""
    names = halves.candidates()
    return _rates(halves, names, halves.product, dtype("bf16")) if len(names) > 1 else {}


def _rates(of: ModuleType, names: list[str], multiply: Callable[..., None], kind: np.dtype) -> dict[str, float]:
    before = of.asked
    best = {(name, shape): float("inf") for name in names for shape in SHAPES}
    try:
        for _ in range(TURNS):
            for name in names:
                of.choose(name)
                for shape in SHAPES:
                    seconds = _seconds(*shape, multiply, kind, BUDGET / len(best) / TURNS)
                    best[name, shape] = min(best[name, shape], seconds)
    finally:
        of.choose(before)
    paces = {name: [best[name, shape] / (2 * math.prod(shape)) for shape in SHAPES] for name in names}
    return {name: len(SHAPES) / sum(pace) / 1e9 for name, pace in paces.items()}


def _seconds(
    rows: int, columns: int, summed: int, multiply: Callable[..., None], kind: np.dtype, budget: float
) -> float:
    """Seconds of the fastest product. As many are timed as fit into the budget, at least two: the first one starts the
    library."""
    a, b = np.ones((rows, summed), kind), np.ones((columns, summed), kind)
    out = np.empty((rows, columns), kind)
    multiply(out, a, b.T)
    best, end = float("inf"), perf_counter() + budget
    while (begin := perf_counter()) < end or best == float("inf"):
        multiply(out, a, b.T)
        best = min(best, perf_counter() - begin)
    return best
