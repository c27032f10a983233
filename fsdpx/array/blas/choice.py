"""Which BLAS library computes the products of this process: one that was chosen before a job runs, or the default."""

import functools
import importlib.util

import numpy as np

from fsdpx.array.blas.libraries import NAMES, Library, library, preferred
from fsdpx.errors import ConfigError

__all__ = ["ADDRESSES", "FEW", "available", "choose", "chosen", "compiles", "pointer", "threads"]

NUMPY = "numpy"
"""`numpy.matmul`: always available, and the only choice without Numba."""
FEW = 4
"""Rows of x up to which no library multiplies `x @ weight.T`, but compiled code that reads the matrix once: a library
copies it first, as if there were many."""

asked: str | None = None  # by `choose`
cut = 1  # see `threads`


def available() -> dict[str, str]:
    """Name -> path and version of the libraries that `choose` accepts."""
    found = [(name, library(name)) for name in NAMES if compiles()]
    where = {name: f"{one.path} ({one.version})" for name, one in found if one is not None}
    return where | {NUMPY: f"numpy.matmul (NumPy {np.__version__})"}


def choose(name: str | None) -> None:
    """Compute products with library `name` from now on; None: the default. All ranks of a job must choose alike."""
    global asked
    if name not in (None, NUMPY) and _library(str(name)) is None:
        raise ConfigError(f"BLAS {name!r} is not here: choose one of {', '.join(available())}")
    asked = name
    ADDRESSES.clear()


def chosen() -> str:
    """The name of the library in use."""
    if asked is not None:
        return asked
    return (preferred() if compiles() else None) or NUMPY


def pointer(dtype: np.dtype) -> int:
    """The address of the chosen library's gemm for float32 or float64; 0 where `numpy.matmul` is to be called."""
    return ADDRESSES[dtype.char] if dtype.isnative else 0


def threads(n: int | None = None) -> int:
    """Among how many threads a product is cut (set to `n` if given); the library runs each piece on one thread."""
    global cut
    if n is not None:
        cut = n
        if (used := _library(chosen())) is not None:
            used.single()
    return cut


def _library(name: str) -> Library | None:
    return library(name) if name in NAMES and compiles() else None


class Addresses(dict[str, int]):
    """Character of a dtype -> address of its gemm, found when it is first used."""

    def __missing__(self, char: str) -> int:
        used = _library(chosen()) if char in "fd" else None
        if used is not None:
            used.single()
        self[char] = 0 if used is None else used.sgemm if char == "f" else used.dgemm
        return self[char]


ADDRESSES = Addresses()


@functools.cache
def compiles() -> bool:
    """Whether there is Numba."""
    return importlib.util.find_spec("numba") is not None
