"""Products of bfloat16 matrices by MKL, which adds them in float32; it uses the instructions of Intel's processors."""

import functools
from ctypes import CFUNCTYPE, c_float, c_int, c_int64, c_void_p

import numpy as np

from fsdpx.array.blas import libraries
from fsdpx.array.blas.libraries import Library
from fsdpx.array.blas.products import round_off

__all__ = ["MKL", "found"]

ROWS, PLAIN, TRANSPOSED = 101, 111, 112  # values of mkl_cblas.h
MATRIX = (c_void_p, c_int64)
GEMM = CFUNCTYPE(
    None, c_int, c_int, c_int, c_int64, c_int64, c_int64, c_float, *MATRIX, *MATRIX, c_float, *MATRIX
)  # fmt: skip


class MKL:
    """What `library` computes with."""

    name = "MKL"

    def __init__(self, library: Library) -> None:
        self.path, self.version, self._gemm = library.path, library.version, GEMM(library.bgemm)

    def product(self, out: np.ndarray, a: np.ndarray, b: np.ndarray, accumulate: bool, bias: np.ndarray | None) -> None:
        """out = a @ b + bias, or out += a @ b: bfloat16 `(m, k)` and `(k, n)`, with unit stride in one of their dims,
        into rows of their format or float32; bias `(n,)`."""
        (m, k), n = a.shape, b.shape[1]
        whole = out.dtype == np.float32 and bias is None
        total = out if whole else np.empty(out.shape, np.float32)
        (turn_a, at_a), (turn_b, at_b) = _operand(a), _operand(b)
        add = 1.0 if accumulate and whole else 0.0
        to = (total.ctypes.data, total.strides[0] // total.itemsize)
        self._gemm(ROWS, turn_a, turn_b, m, n, k, 1.0, *at_a, *at_b, add, *to)
        if not whole:
            round_off(out, total, accumulate, bias)


def _operand(a: np.ndarray) -> tuple[int, tuple[int, int]]:
    """Whether a matrix lies transposed, its address, and the elements from one row or column to the next."""
    (m, n), (down, across), size = a.shape, a.strides, a.itemsize
    plain = across == size and (down >= n * size or m == 1)
    step = (down if plain else across) // size
    return PLAIN if plain else TRANSPOSED, (a.ctypes.data, max(step, n if plain else m))


@functools.cache
def found() -> MKL | None:
    """MKL as `fsdpx[mkl]` installs it, if it has these products."""
    library = libraries.library("mkl")
    return MKL(library) if library is not None and library.bgemm else None
