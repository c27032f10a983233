"""Elements of arrays that are float32, float64, or bfloat16 seen as its bits (uint16): one loop for all of them.

Numba knows no bfloat16. The dispatcher passes views of the bits; loops read elements by `real` and write by `put`,
which for float32 and float64 are nothing at all."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.half import from_bfloat16, to_bfloat16
from fsdpx.array.namespace import dtype as bfloat16
from fsdpx.native.late import overload, types

__all__ = ["fallback", "number", "put", "real", "wide", "zero"]


def real(x: Any) -> Any:
    """An element as a number to compute with: float32 for bfloat16."""
    raise NotImplementedError("for compiled code")


def put(array: Any, x: Any) -> Any:
    """x as an element of `array`, rounded once."""
    raise NotImplementedError("for compiled code")


def zero(array: Any) -> Any:
    """0 in the format in which elements of `array` are added up."""
    raise NotImplementedError("for compiled code")


@overload(zero, inline="always")
def _zero(array):
    return (lambda array: np.float32(0)) if array.dtype == types.uint16 else (lambda array: array.dtype.type(0))


@overload(real, inline="always")
def _real(x):
    return (lambda x: from_bfloat16(x)) if x == types.uint16 else (lambda x: x)


@overload(put, inline="always")
def _put(array, x):
    return (lambda array, x: to_bfloat16(x)) if array.dtype == types.uint16 else (lambda array, x: x)


def number(array: Any) -> Any:
    """bfloat16 for an array of its bits, all else as it is."""
    return array.view(bfloat16("bf16")) if isinstance(array, np.ndarray) and array.dtype == np.uint16 else array


def fallback(kernel: Any, xp: Any, *arguments: Any) -> Any:
    """A kernel without the compiled code for this format, for what that does not take."""
    result = kernel.fallback(xp, *map(number, arguments))
    return tuple(map(_bits, result)) if isinstance(result, tuple) else _bits(result)


def _bits(a: Any) -> Any:
    return a.view(np.uint16) if a is not None and a.dtype.name == "bfloat16" else a


def wide(dtype: np.dtype) -> np.dtype:
    """The format in which elements of `dtype` are added up."""
    return np.dtype(np.float32) if dtype == np.uint16 else dtype
