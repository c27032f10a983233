"""Which library computes the products of this process: a choice that is made before a job runs, or the default."""

from __future__ import annotations

import functools
import importlib.util
import math
from time import perf_counter

import numpy as np

from fsdpx.array.blas.libraries import Library, found, preferred
from fsdpx.errors import ConfigError

__all__ = ["ADDRESSES", "available", "choose", "chosen", "measure", "pointer", "threads"]

NUMPY = "numpy"
"""`numpy.matmul`: always here, and all there is without Numba."""
SHAPES = ((512, 1024, 256), (512, 256, 1024), (64, 256, 64), (64, 32, 32))
"""(rows, columns, summed) of a transformer's products, of a tile of its attention, and of a small layer."""
BUDGET = 0.1  # seconds of `measure`, about
TURNS = 5

_choice: str | None = None
cut = 1  # see `threads`


def available() -> dict[str, str]:
    """Name -> path and version of all that `choose` takes."""
    libraries = {name: f"{one.path} ({one.version})" for name, one in (found() if _numba() else {}).items()}
    return {**libraries, NUMPY: f"numpy.matmul (NumPy {np.__version__})"}


def choose(name: str | None) -> None:
    """From now on library `name` computes; None: the default. All ranks of a job must choose alike."""
    global _choice
    if name is not None and name not in available():
        raise ConfigError(f"BLAS {name!r} is not here: choose one of {', '.join(available())}")
    _choice = name
    ADDRESSES.clear()


def chosen() -> str:
    """The name of the library that computes."""
    if _choice is not None:
        return _choice
    return (preferred() if _numba() else None) or NUMPY


def pointer(dtype: np.dtype) -> int:
    """The address of the chosen library's gemm for float32 or float64; 0 where `numpy.matmul` is to be called."""
    return ADDRESSES[dtype.char] if dtype.isnative else 0


def threads(n: int | None = None) -> int:
    """On how many threads a product is cut (now set to `n`); the library itself computes on one."""
    global cut
    if n is not None:
        cut = n
        if (library := _library()) is not None:
            library.single()
    return cut


def measure() -> dict[str, float]:
    """GFLOP/s of each library on one thread in some tenths of a second: what a tuner chooses by.

    The libraries take turns, and the fastest call of each product counts: what else runs here slows some of them.
    The figure is the harmonic mean over the shapes: small products must not be lost among large ones.
    """
    before, names = _choice, list(available())
    best = {(name, shape): float("inf") for name in names for shape in SHAPES}
    try:
        for _ in range(TURNS):
            for name in names:
                choose(name)
                for shape in SHAPES:
                    best[name, shape] = min(best[name, shape], _seconds(*shape, BUDGET / len(best) / TURNS))
    finally:
        choose(before)
    paces = {name: [best[name, shape] / (2 * math.prod(shape)) for shape in SHAPES] for name in names}
    return {name: len(SHAPES) / sum(pace) / 1e9 for name, pace in paces.items()}


def _seconds(rows: int, columns: int, summed: int, budget: float) -> float:
    """Of the fastest of the products that fit into the budget, two at least: the first makes the library ready."""
    from fsdpx.array.blas.products import gemm

    a, b = np.ones((rows, summed), np.float32), np.ones((columns, summed), np.float32)
    out = np.empty((rows, columns), np.float32)
    gemm(out, a, b.T)
    best, end = float("inf"), perf_counter() + budget
    while (begin := perf_counter()) < end or best == float("inf"):
        gemm(out, a, b.T)
        best = min(best, perf_counter() - begin)
    return best


def _library() -> Library | None:
    return found().get(chosen()) if _numba() else None


class Addresses(dict[str, int]):
    """Character of a dtype -> address of its gemm, looked up when it is first asked for."""

    def __missing__(self, char: str) -> int:
        library = _library() if char in "fd" else None
        if library is not None:
            library.single()
        self[char] = 0 if library is None else library.sgemm if char == "f" else library.dgemm
        return self[char]


ADDRESSES = Addresses()


@functools.cache
def _numba() -> bool:
    return importlib.util.find_spec("numba") is not None
