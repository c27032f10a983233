"""Shape-only arrays: an array module with NumPy's function names, for arrays that have a shape and a dtype but no
data.

Layers and plain kernels run unchanged with this module. A dry run with this module finds the memory use, memory traffic
and shape errors of a model of any size, at almost no cost.
"""

import sys
from collections.abc import Sequence
from functools import partial
from math import inf, nan, pi
from typing import Any

import numpy as np

from fsdpx.core.array.shapes.array import (
    ShapeArray,
    make_shape_only_broadcast_result,
    matmul_shape_only,
    make_shape_only_reduction,
    make_shape_only_view_function,
)
from fsdpx.core.array.shapes.shape_functions import (
    argsort,
    concatenate,
    make_kernel_result,
    cumprod,
    cumsum,
    diff,
    dot,
    einsum,
    fft,
    linalg,
    pad,
    put_along_axis,
    raise_unknown_name,
    repeat,
    roll,
    sort,
    stack,
    take,
    take_along_axis,
    tensordot,
    tile,
    tril,
)
from fsdpx.core.array.shapes.flop_counter import record_traffic, record_copy

__all__ = [
    "ShapeArray", "argsort", "concatenate", "cumprod", "cumsum", "diff", "dot", "einsum", "fft", "holds_no_data", "inf",
    "linalg", "nan", "newaxis", "pad", "pi", "put_along_axis", "repeat", "roll", "sort", "stack", "take",
    "take_along_axis", "tensordot", "tile", "tril",
]  # fmt: skip

holds_no_data = True
newaxis, dtype, finfo, iinfo = None, np.dtype, np.finfo, np.iinfo
result_type, can_cast = np.result_type, np.can_cast
bool_, float16, float32, float64 = np.bool_, np.float16, np.float32, np.float64
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64

Array = Any

# NumPy's ufuncs need no shape-only version, because ShapeArray implements __array_ufunc__
exp, exp2, expm1, log, log2, log10, log1p = np.exp, np.exp2, np.expm1, np.log, np.log2, np.log10, np.log1p
sqrt, square, reciprocal, sign, negative = np.sqrt, np.square, np.reciprocal, np.sign, np.negative
absolute, sin, cos, tan, tanh, sinh, cosh = np.absolute, np.sin, np.cos, np.tan, np.tanh, np.sinh, np.cosh
floor, ceil, trunc, rint, isfinite, isnan = np.floor, np.ceil, np.trunc, np.rint, np.isfinite, np.isnan
isinf, signbit, add, subtract, multiply, divide = np.isinf, np.signbit, np.add, np.subtract, np.multiply, np.divide
power, true_divide, floor_divide, remainder = np.power, np.true_divide, np.floor_divide, np.remainder
maximum, minimum, copysign, hypot, equal = np.maximum, np.minimum, np.copysign, np.hypot, np.equal
not_equal, less, less_equal, greater = np.not_equal, np.less, np.less_equal, np.greater
greater_equal, logical_and, logical_or = np.greater_equal, np.logical_and, np.logical_or
logical_not, bitwise_and, bitwise_or, bitwise_xor = np.logical_not, np.bitwise_and, np.bitwise_or, np.bitwise_xor
abs = absolute
clip = partial(make_shape_only_broadcast_result, np.clip)
sum, mean, max, min, prod = map(make_shape_only_reduction, ("sum", "mean", "max", "min", "prod"))
any, all, argmax, argmin, var, std = map(make_shape_only_reduction, ("any", "all", "argmax", "argmin", "var", "std"))
matmul = matmul_shape_only


zeros = empty = ones = ShapeArray
reshape, ravel, transpose, swapaxes = map(
    make_shape_only_view_function, (np.reshape, np.ravel, np.transpose, np.swapaxes)
)
squeeze, moveaxis, expand_dims = map(make_shape_only_view_function, (np.squeeze, np.moveaxis, np.expand_dims))
flip, rot90, diagonal = map(make_shape_only_view_function, (np.flip, np.rot90, np.diagonal))
triu = tril


def where(condition: Any, *values: Any) -> ShapeArray:
    """Return an array with the broadcast shape of the condition and the values. Raise TypeError if no values are
    passed, because the size of the result would then depend on data."""
    if len(values) != 2:
        raise TypeError("where(condition) has a result whose size depends on data: pass both values")
    return make_shape_only_broadcast_result(np.where, condition, *values)


def full(shape: int | Sequence[int], fill_value: Any, dtype: Any = None) -> ShapeArray:
    return ShapeArray(shape, np.asarray(fill_value).dtype if dtype is None else dtype)


def zeros_like(x: Array, dtype: Any = None) -> ShapeArray:
    return ShapeArray(x.shape, x.dtype if dtype is None else dtype)


empty_like = ones_like = zeros_like


def full_like(x: Array, fill_value: Any, dtype: Any = None) -> ShapeArray:
    return zeros_like(x, dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ShapeArray:
    first, last = (0, start) if stop is None else (start, stop)
    kind = np.result_type(*(np.asarray(v).dtype for v in (first, last, step))) if dtype is None else dtype
    count = int(np.ceil((last - first) / step))
    return ShapeArray((count if count > 0 else 0,), kind)


def asarray(x: Any, dtype: Any = None, copy: bool | None = None) -> ShapeArray:
    """Return a ShapeArray with the shape and dtype of `x`, which may be an array of any library, a number or nested
    lists."""
    x = x if hasattr(x, "shape") and hasattr(x, "dtype") else np.asarray(x)
    if not isinstance(x, ShapeArray):
        return ShapeArray(x.shape, x.dtype if dtype is None else dtype)
    if not copy and dtype in (None, x.dtype):
        return ShapeArray(x.shape, x.dtype, x.root)
    record_copy(x)
    return ShapeArray(x.shape, x.dtype if dtype is None else dtype)


array = ascontiguousarray = copy = partial(asarray, copy=True)


def copyto(dst: ShapeArray, src: Any) -> None:
    dst[...] = src


def eye(n: int, m: int | None = None, dtype: Any = np.float64) -> ShapeArray:
    return ShapeArray((n, n if m is None else m), dtype)


def shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def broadcast_to(x: Array, shape: Sequence[int]) -> ShapeArray:
    if np.broadcast_shapes(x.shape, tuple(shape)) != tuple(shape):
        raise ValueError(f"operands could not be broadcast together: {x.shape} to {tuple(shape)}")
    return ShapeArray(shape, x.dtype)


def split(x: Array, sections: int | Sequence[int], axis: int = 0) -> list[ShapeArray]:
    return [ShapeArray(part.shape, x.dtype, x.root) for part in np.split(np.empty(x.shape, "V0"), sections, axis=axis)]


def searchsorted(x: Array, values: Any, side: str = "left", sorter: Any = None) -> ShapeArray:
    return make_kernel_result(shape(values), np.int64, values)


def linspace(start: float, stop: float, num: int = 50, endpoint: bool = True, dtype: Any = None) -> ShapeArray:
    return ShapeArray(num, np.float64 if dtype is None else dtype)


def hstack(arrays: Sequence[Array]) -> ShapeArray:
    return concatenate(arrays, axis=0 if arrays[0].ndim == 1 else 1)


def vstack(arrays: Sequence[Array]) -> ShapeArray:
    return concatenate([a[None] if a.ndim == 1 else a for a in arrays])


def nan_to_num(x: Array, copy: bool = True, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> ShapeArray:
    return make_kernel_result(x.shape, x.dtype, x)


def round(x: Array, decimals: int = 0) -> ShapeArray:
    return make_kernel_result(x.shape, x.dtype, x)


def real(x: Array) -> ShapeArray:
    return ShapeArray(x.shape, np.empty(0, x.dtype).real.dtype, x.root)


imag = real


def __getattr__(name: str) -> Any:
    """Return NumPy's ufunc, dtype or constant with this name; raise AttributeError for any other name."""
    attribute = getattr(np, name, None)
    if isinstance(attribute, type | float) or (isinstance(attribute, np.ufunc) and attribute.nout == 1):
        return attribute
    raise_unknown_name(sys.modules[__name__], name, np)


def array_equal(a: Array, b: Array) -> bool:
    record_traffic(a, b)
    return shape(a) == shape(b)
