"""The namespace of shape-only arrays: NumPy's function names on arrays that hold no data.

Layers and plain kernels run on it unchanged: memory, traffic and shape errors of a model of any size, at no cost."""

from collections.abc import Sequence
from functools import partial
from math import inf, nan, pi
from typing import Any

import numpy as np

from fsdpx.shapes.array import ShapeArray, broadcasting, dtype_of_result, product, reduced, view

__all__ = ["ShapeArray", "holds_no_data", "inf", "nan", "newaxis", "pi"]

holds_no_data = True
newaxis, dtype, finfo, iinfo = None, np.dtype, np.finfo, np.iinfo
result_type, can_cast = np.result_type, np.can_cast
bool_, float16, float32, float64 = np.bool_, np.float16, np.float32, np.float64
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64

Array = Any

# NumPy's own: a ShapeArray says what they give
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
where, clip = partial(broadcasting, np.where), partial(broadcasting, np.clip)
sum, mean, max, min, prod = map(reduced, ("sum", "mean", "max", "min", "prod"))
any, all, argmax, argmin, var, std = map(reduced, ("any", "all", "argmax", "argmin", "var", "std"))
matmul = product


zeros = empty = ones = ShapeArray
reshape, ravel, transpose, swapaxes = map(view, (np.reshape, np.ravel, np.transpose, np.swapaxes))
squeeze, moveaxis, expand_dims = map(view, (np.squeeze, np.moveaxis, np.expand_dims))


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
    """The shape and dtype of `x`: an array of any library, a number or nested lists."""
    x = x if hasattr(x, "shape") and hasattr(x, "dtype") else np.asarray(x)
    return ShapeArray(x.shape, x.dtype if dtype is None else dtype)


array = ascontiguousarray = copy = asarray


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


def concatenate(arrays: Sequence[Array], axis: int = 0) -> ShapeArray:
    first = arrays[0]
    axis = axis % first.ndim
    rest = [(*a.shape[:axis], *a.shape[axis + 1 :]) for a in arrays]
    if len(set(rest)) != 1 or len({a.ndim for a in arrays}) != 1:
        raise ValueError(f"concatenate: {', '.join(str(a.shape) for a in arrays)} differ beside dim {axis}")
    total = np.sum([a.shape[axis] for a in arrays])
    dims = (*first.shape[:axis], int(total), *first.shape[axis + 1 :])
    return ShapeArray(dims, np.result_type(*(a.dtype for a in arrays)))


def stack(arrays: Sequence[Array], axis: int = 0) -> ShapeArray:
    if len({a.shape for a in arrays}) != 1:
        raise ValueError(f"stack: shapes differ: {', '.join(str(a.shape) for a in arrays)}")
    dims = list(arrays[0].shape)
    dims.insert(axis % (len(dims) + 1), len(arrays))
    return ShapeArray(dims, np.result_type(*(a.dtype for a in arrays)))


def split(x: Array, sections: int | Sequence[int], axis: int = 0) -> list[ShapeArray]:
    return [ShapeArray(part.shape, x.dtype) for part in np.split(np.empty(x.shape, "V0"), sections, axis=axis)]


def take(x: Array, indices: Array, axis: int | None = None) -> ShapeArray:
    if axis is None:
        return ShapeArray(shape(indices), x.dtype)
    axis = axis % x.ndim
    return ShapeArray((*x.shape[:axis], *shape(indices), *x.shape[axis + 1 :]), x.dtype)


def take_along_axis(x: Array, indices: Array, axis: int) -> ShapeArray:
    if x.ndim != indices.ndim:
        raise ValueError(f"take_along_axis: {indices.shape} has other dims than {x.shape}")
    axis = axis % x.ndim
    beside = [1 if d == axis else n for d, n in enumerate(x.shape)]
    return ShapeArray(np.broadcast_shapes(tuple(beside), indices.shape), x.dtype)


def put_along_axis(x: Array, indices: Array, values: Any, axis: int) -> None:
    np.broadcast_shapes(take_along_axis(x, indices, axis).shape, shape(values))


def tril(x: Array, k: int = 0) -> ShapeArray:
    return asarray(x)


triu = tril


def pad(x: Array, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> ShapeArray:
    widths = np.broadcast_to(np.asarray(pad_width, dtype=np.int64), (x.ndim, 2))
    return ShapeArray([int(n + a + b) for n, (a, b) in zip(x.shape, widths, strict=True)], x.dtype)


def sort(x: Array, axis: int = -1) -> ShapeArray:
    return asarray(x)


def argsort(x: Array, axis: int = -1, kind: str | None = None, stable: bool | None = None) -> ShapeArray:
    return ShapeArray(x.shape, np.int64)


def cumsum(x: Array, axis: int | None = None, dtype: Any = None) -> ShapeArray:
    kind = dtype_of_result(np.cumsum, x) if dtype is None else dtype
    return ShapeArray((x.size,) if axis is None else x.shape, kind)


def einsum(subscripts: str, *operands: Array) -> ShapeArray:
    """The explicit form only: "ij,jk->ik"."""
    left, arrow, result = subscripts.replace(" ", "").partition("->")
    terms, sizes = left.split(","), dict[str, int]()
    if not arrow or len(terms) != len(operands):
        raise ValueError(f"einsum {subscripts!r}: spell out one term per operand and the result behind '->'")
    for term, operand in zip(terms, operands, strict=True):
        if len(term) != operand.ndim:
            raise ValueError(f"einsum {subscripts!r}: {term!r} does not fit shape {operand.shape}")
        for letter, size in zip(term, operand.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"einsum {subscripts!r}: {letter!r} is both {sizes[letter]} and {size}")
    return ShapeArray([sizes[letter] for letter in result], np.result_type(*(o.dtype for o in operands)))


def array_equal(a: Array, b: Array) -> bool:
    return shape(a) == shape(b)
