"""Measure the speed of each BLAS library on this machine, so that a tuner can choose one."""

import math
from time import perf_counter

import numpy as np

from fsdpx.core.array.blas import libraries
from fsdpx.core.array.blas.pools import limit_threads
from fsdpx.core.array.blas.products import gemm
from fsdpx.core.base.messages import ProgressCallback

__all__ = ["measure_gflops_of_each_library"]

SHAPES = ((512, 1024, 256), (512, 256, 1024), (64, 256, 64), (64, 32, 32))
"""(rows, columns, inner) of the measured matrix products: two from a transformer, one from a tile of its attention, and
one from a small layer."""
BUDGET_SECONDS = 0.1  # approximate time in seconds that `measure_gflops_of_each_library` takes
ROUNDS = 5


def measure_gflops_of_each_library(count: ProgressCallback = lambda done, total: None) -> dict[str, float]:
    """Measure the speed of each BLAS library on one thread, in GFLOP/s. This takes a few tenths of a second.

    The libraries take turns. Only the fastest call for each product counts, since other processes may slow down some
    calls. The result is the harmonic mean over several matrix shapes, so that high speed on large products does not
    hide low speed on small ones. `count` is called with the number of completed measurements and the total number.
    """
    names, before = list(libraries.list_available_blas_libraries()), libraries.requested_library
    best = {(name, shape): float("inf") for name in names for shape in SHAPES}
    try:
        for turn in range(ROUNDS):
            for place, name in enumerate(names):
                count(turn * len(names) + place, ROUNDS * len(names))
                libraries.select_library(name)
                with limit_threads():
                    for shape in SHAPES:
                        best[name, shape] = min(
                            best[name, shape], _measure_product_seconds(*shape, BUDGET_SECONDS / len(best) / ROUNDS)
                        )
    finally:
        libraries.select_library(before)
    paces = {name: [best[name, shape] / (2 * math.prod(shape)) for shape in SHAPES] for name in names}
    return {name: len(SHAPES) / sum(pace) / 1e9 for name, pace in paces.items()}


def _measure_product_seconds(rows: int, columns: int, summed: int, budget: float) -> float:
    """Multiply matrices (rows, summed) and (summed, columns) as often as possible within `budget` seconds (at least
    once), and return the duration of the fastest call in seconds. An extra first call, which is not timed, initializes
    the library."""
    a, b = np.ones((rows, summed), np.float32), np.ones((columns, summed), np.float32)
    out = np.empty((rows, columns), np.float32)
    gemm(out, a, b.T)
    best, end = float("inf"), perf_counter() + budget
    while (begin := perf_counter()) < end or best == float("inf"):
        gemm(out, a, b.T)
        best = min(best, perf_counter() - begin)
    return best
