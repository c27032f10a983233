"""Shape-only versions of NumPy functions that copy, sort, multiply and transform arrays. They also count the cost of
NumPy's functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np

from fsdpx.core.array.shapes.array import (
    ShapeArray,
    find_result_dtype,
    make_shape_only_broadcast_result,
    make_shape_only_reduction,
    matmul_shape_only,
)
from fsdpx.core.array.shapes.flop_counter import record_flops, record_product, record_traffic

__all__ = [
    "NestedNamespace", "argsort", "concatenate", "cumprod", "cumsum", "diff", "dot", "einsum", "fft", "linalg",
    "make_kernel_result", "pad", "put_along_axis", "raise_unknown_name", "repeat", "roll", "sort", "stack", "take",
    "take_along_axis", "tensordot", "tile", "tril",
]  # fmt: skip

Array = Any


def make_kernel_result(shape: Any, dtype: Any, *read: Any, kernel: str = "copy") -> ShapeArray:
    """Return a new array, and count one kernel call that reads the arrays `read` and writes the new array."""
    result = ShapeArray(shape, dtype)
    record_traffic(*read, result, kernel=kernel)
    return result


def raise_unknown_name(namespace: Any, name: str, numpy_namespace: Any) -> NoReturn:
    """Raise AttributeError for a name that the shape-only module `namespace` does not have. The message states whether
    `numpy_namespace` has this name."""
    known = hasattr(numpy_namespace, name) and not name.startswith("_")
    path = f"{numpy_namespace.__name__.removeprefix('numpy').removeprefix('.')}.{name}".removeprefix(".")
    why = "which shape-only arrays do not support" if known else "which NumPy does not have"
    raise AttributeError(f"env.xp.{path}, {why}", name=name, obj=namespace)


class NestedNamespace:
    """A submodule of the shape-only array module, such as `fft`. Accessing an unknown name raises AttributeError."""

    holds_no_data = True

    def __init__(self, numpys: Any, **functions: Any) -> None:
        self._numpys = numpys
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        raise_unknown_name(self, name, vars(self).get("_numpys", np))


def _get_shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def concatenate(arrays: Sequence[Array], axis: int | None = 0) -> ShapeArray:
    if axis is None:
        arrays, axis = [a.reshape(-1) for a in arrays], 0
    first = arrays[0]
    axis = axis % first.ndim
    rest = [(*a.shape[:axis], *a.shape[axis + 1 :]) for a in arrays]
    if len(set(rest)) != 1 or len({a.ndim for a in arrays}) != 1:
        raise ValueError(f"concatenate: {', '.join(str(a.shape) for a in arrays)} differ in dims other than {axis}")
    total = sum(int(a.shape[axis]) for a in arrays)
    dims = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    return make_kernel_result(dims, np.result_type(*(a.dtype for a in arrays)), *arrays)


def stack(arrays: Sequence[Array], axis: int = 0) -> ShapeArray:
    arrays = [*arrays]
    if len({a.shape for a in arrays}) != 1:
        raise ValueError(f"stack: shapes differ: {', '.join(str(a.shape) for a in arrays)}")
    dims = list(arrays[0].shape)
    dims.insert(axis % (len(dims) + 1), len(arrays))
    return make_kernel_result(dims, np.result_type(*(a.dtype for a in arrays)), *arrays)


def take(x: Array, indices: Array, axis: int | None = None) -> ShapeArray:
    dims = _get_shape(indices)
    if axis is not None:
        axis = axis % x.ndim
        dims = (*x.shape[:axis], *dims, *x.shape[axis + 1 :])
    return _make_indexed_shape_array(dims, x, indices)


def take_along_axis(x: Array, indices: Array, axis: int) -> ShapeArray:
    return _make_indexed_shape_array(_broadcast_shapes_for_take_along_axis(x, indices, axis), x, indices)


def _make_indexed_shape_array(dims: tuple[int, ...], x: Array, indices: Array) -> ShapeArray:
    """Return an array of shape `dims`, which stands for elements selected from x by `indices`. Count it as a copy that
    reads all indices, and reads one element of x for each element that it writes."""
    result = ShapeArray(dims, x.dtype)
    record_traffic(result, result, indices, kernel="copy")
    return result


def _broadcast_shapes_for_take_along_axis(x: Array, indices: Array, axis: int) -> tuple[int, ...]:
    if x.ndim != indices.ndim:
        raise ValueError(f"take_along_axis: {indices.shape} has other dims than {x.shape}")
    axis = axis % x.ndim
    beside = [1 if d == axis else n for d, n in enumerate(x.shape)]
    return np.broadcast_shapes(tuple(beside), indices.shape)


def put_along_axis(x: Array, indices: Array, values: Any, axis: int) -> None:
    dims = np.broadcast_shapes(_broadcast_shapes_for_take_along_axis(x, indices, axis), _get_shape(values))
    record_traffic(ShapeArray(dims, x.dtype, x.root), values, indices, kernel="copy")


def tril(x: Array, k: int = 0) -> ShapeArray:
    return make_kernel_result(x.shape, x.dtype, x)


def pad(x: Array, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> ShapeArray:
    widths = np.broadcast_to(np.asarray(pad_width, dtype=np.int64), (x.ndim, 2))
    return make_kernel_result([int(n + a + b) for n, (a, b) in zip(x.shape, widths, strict=True)], x.dtype, x)


def roll(x: Array, shift: Any, axis: Any = None) -> ShapeArray:
    return make_kernel_result(x.shape, x.dtype, x)


def repeat(x: Array, repeats: Any, axis: int | None = None) -> ShapeArray:
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis % x.ndim)
    each = np.asarray(repeats)
    count = int(np.broadcast_to(each, (x.shape[axis],)).sum()) if each.ndim else int(each) * x.shape[axis]
    return make_kernel_result((*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype, x)


def tile(x: Array, reps: Any) -> ShapeArray:
    times = (reps,) if isinstance(reps, int | np.integer) else tuple(reps)
    ndim = max(len(times), x.ndim)
    dims = (1,) * (ndim - x.ndim) + x.shape
    return make_kernel_result(
        [n * t for n, t in zip(dims, (1,) * (ndim - len(times)) + times, strict=True)], x.dtype, x
    )


def diff(x: Array, n: int = 1, axis: int = -1) -> Any:
    for _ in range(n):
        whole = [slice(None)] * x.ndim
        later, before = list(whole), list(whole)
        later[axis], before[axis] = slice(1, None), slice(None, -1)
        x = x[tuple(later)] - x[tuple(before)]
    return x


def _count_sort_work(x: Array, axis: int | None, result: ShapeArray) -> ShapeArray:
    """Return `result`, and count one kernel call that reads and writes all elements once for each level of a merge sort
    along `axis`."""
    row = x.size if axis is None else x.shape[axis]
    record_traffic(*[x, result] * math.ceil(math.log2(max(row, 2))), kernel="sort")
    return result


def sort(x: Array, axis: int | None = -1, kind: str | None = None, stable: bool | None = None) -> ShapeArray:
    return _count_sort_work(x, axis, ShapeArray(x.shape if axis is not None else (x.size,), x.dtype))


def argsort(x: Array, axis: int | None = -1, kind: str | None = None, stable: bool | None = None) -> ShapeArray:
    return _count_sort_work(x, axis, ShapeArray(x.shape if axis is not None else (x.size,), np.int64))


def _make_cumulative_function(function: Callable[..., Any]) -> Callable[..., ShapeArray]:
    def run_shape(x: Array, axis: int | None = None, dtype: Any = None) -> ShapeArray:
        kind = find_result_dtype(function, x) if dtype is None else dtype
        return make_kernel_result((x.size,) if axis is None else x.shape, kind, x, kernel="sums")

    return run_shape


cumsum, cumprod = _make_cumulative_function(np.cumsum), _make_cumulative_function(np.cumprod)


def einsum(subscripts: str, *operands: Array, optimize: Any = False) -> ShapeArray:
    """Return the shape-only result of an Einstein summation.

    A summation of two operands is counted as a matrix product. A summation of more operands is counted as one loop over
    all indices, because NumPy computes it that way.
    """
    terms, result = _parse_einsum_subscripts(subscripts, operands)
    sizes = dict[str, int]()
    for term, operand in zip(terms, operands, strict=True):
        if len(term) != operand.ndim:
            raise ValueError(f"einsum {subscripts!r}: {term!r} does not fit shape {operand.shape}")
        for letter, size in zip(term, operand.shape, strict=True):
            known = sizes.get(letter, 1)
            if 1 not in (known, size) and known != size:
                raise ValueError(f"einsum {subscripts!r}: {letter!r} is both {known} and {size}")
            sizes[letter] = max(known, size) if known and size else 0
    if unknown := set(result) - sizes.keys():
        raise ValueError(f"einsum {subscripts!r}: no term has {', '.join(sorted(unknown))}")
    dims, gone = [sizes[letter] for letter in result], sizes.keys() - set(result)
    if len(operands) == 1 and not gone:
        # the result shares the memory of its operand, because NumPy returns a view
        return ShapeArray(dims, operands[0].dtype, operands[0].root)
    contracted = ShapeArray(dims, np.result_type(*(o.dtype for o in operands)))
    if len(operands) == 1 or not gone:
        record_traffic(*operands, contracted, kernel="sums" if gone else "elements")
        return contracted
    left, right = set(terms[0]), set(terms[1])
    apart = (left - right, right - left) if len(operands) == 2 else (set(result), set[str]())
    rows, columns = (math.prod(sizes[letter] for letter in own - gone) for own in apart)
    inner = math.prod(sizes[letter] for letter in gone)
    for _ in range(len(operands) - 1):
        record_product(rows, inner, columns, contracted.size // max(rows * columns, 1), contracted.itemsize)
    return contracted


def _parse_einsum_subscripts(subscripts: Any, operands: Sequence[Array]) -> tuple[list[str], str]:
    """Parse the subscripts of `einsum`: return the letters of each operand and of the result. The dims that `...`
    stands for get new letters."""
    if not isinstance(subscripts, str):
        raise TypeError('einsum: write the letters first, as in einsum("ij,jk->ik", a, b)')
    left, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise ValueError(f"einsum {subscripts!r}: {len(terms)} terms for {len(operands)} operands")
    hidden = [max(o.ndim - len(term) + 3, 0) if "..." in term else 0 for term, o in zip(terms, operands, strict=True)]
    letters = [chr(0x3B1 + n) for n in range(max(hidden))]
    terms = [t.replace("...", "".join(letters[len(letters) - n :])) for t, n in zip(terms, hidden, strict=True)]
    if not arrow:
        all_of_them = "".join(terms)
        single = sorted(c for c in {*all_of_them} - {*letters} if all_of_them.count(c) == 1)
        return terms, "".join([*letters, *single])
    return terms, result.replace("...", "".join(letters))


def tensordot(a: Array, b: Array, axes: Any = 2) -> ShapeArray:
    left, right = (range(a.ndim - axes, a.ndim), range(axes)) if isinstance(axes, int) else axes
    first, second = ([left] if isinstance(left, int) else left), ([right] if isinstance(right, int) else right)
    gone, met = [d % a.ndim for d in first], [d % b.ndim for d in second]
    if [a.shape[d] for d in gone] != [b.shape[d] for d in met]:
        raise ValueError(f"tensordot: shapes {a.shape} and {b.shape} do not match along {axes}")
    rows = [n for d, n in enumerate(a.shape) if d not in gone]
    columns = [n for d, n in enumerate(b.shape) if d not in met]
    result = ShapeArray([*rows, *columns], np.result_type(a.dtype, b.dtype))
    record_product(math.prod(rows), math.prod(a.shape[d] for d in gone), math.prod(columns), 1, result.itemsize)
    return result


def dot(a: Array, b: Array) -> Any:
    if min(len(_get_shape(a)), len(_get_shape(b))) == 0:
        return make_shape_only_broadcast_result(np.multiply, a, b)
    return matmul_shape_only(a, b) if max(a.ndim, b.ndim) <= 2 else tensordot(a, b, ([-1], [max(b.ndim - 2, 0)]))


def _iterate_fft_functions() -> Iterator[tuple[str, Callable[..., ShapeArray]]]:
    for name in ("fft", "ifft", "rfft", "irfft"):
        yield name, _make_fft_function(name)
        yield f"{name}n", _make_nd_fft_function(name, None)
        yield f"{name}2", _make_nd_fft_function(name, (-2, -1))


def _make_fft_function(name: str) -> Callable[..., ShapeArray]:
    def transform_shape(x: Array, n: int | None = None, axis: int = -1, norm: str | None = None) -> ShapeArray:
        return _make_shape_only_fft_result(name, x, None if n is None else (n,), (axis,))

    return transform_shape


def _make_nd_fft_function(name: str, usual: tuple[int, ...] | None) -> Callable[..., ShapeArray]:
    def transform_shape(x: Array, s: Any = None, axes: Any = usual, norm: str | None = None) -> ShapeArray:
        dims = axes if axes is not None else range(-len(s), 0) if s is not None else range(x.ndim)
        return _make_shape_only_fft_result(name, x, s, tuple(dims))

    return transform_shape


def _make_shape_only_fft_result(name: str, x: Array, sizes: Sequence[int] | None, axes: tuple[int, ...]) -> ShapeArray:
    """Return the shape-only result of the fast Fourier transform `name`, and count its FLOPs: `5 * N * log2(N)` for N
    complex numbers (Cooley and Tukey 1965), and half as many for real numbers.

    `sizes` are the lengths of the transform along `axes`. If `sizes` is None, use the sizes of x."""
    given = [x.shape[axis] for axis in axes] if sizes is None else [*sizes]
    if name == "irfft" and sizes is None:
        given[-1] = 2 * (given[-1] - 1)
    if min(given) < 1:
        raise ValueError(f"Invalid number of FFT data points ({min(given)}) specified.")
    dims = list(x.shape)
    for axis, n in zip(axes, given, strict=True):
        dims[axis] = n
    whole = math.prod(dims)
    if name == "rfft":
        dims[axes[-1]] = given[-1] // 2 + 1
    result = make_kernel_result(dims, _find_fft_dtype(name, x.dtype), x, kernel="fft")
    flops = 5 * whole * math.log2(max(math.prod(given), 1)) / (2 if "r" in name else 1)
    record_flops(int(flops), max(result.itemsize // (1 if name == "irfft" else 2), 4), "fft")
    return result


@cache
def _find_fft_dtype(name: str, given: np.dtype) -> np.dtype:
    return getattr(np.fft, name)(np.ones(2, given)).dtype


def _fftshift_shape(x: Array, axes: Any = None) -> ShapeArray:
    return make_kernel_result(x.shape, x.dtype, x)


def _make_fftfreq_function(name: str) -> Callable[..., ShapeArray]:
    def frequency_shape(n: int, d: float = 1.0) -> ShapeArray:
        return ShapeArray(n if name == "fftfreq" else n // 2 + 1, np.float64)

    return frequency_shape


fft = NestedNamespace(
    np.fft, **dict(_iterate_fft_functions()), fftshift=_fftshift_shape, ifftshift=_fftshift_shape,
    **{name: _make_fftfreq_function(name) for name in ("fftfreq", "rfftfreq")},
)  # fmt: skip


def _make_shape_only_matrix_function(
    name: str, flops: Callable[[int], float], drops: bool = False
) -> Callable[..., ShapeArray]:
    """Return the shape-only version of a function of square matrices (..., n, n).

    `flops` returns the number of floating-point operations for a matrix of size n. If `drops` is true, the result is
    one number per matrix.
    """

    def run_shape(a: Array) -> ShapeArray:
        _require_square(name, a)
        dims = a.shape[:-2] if drops else a.shape
        result = make_kernel_result(dims, _find_inverse_dtype(a.dtype), a, kernel=name)
        record_flops(int(flops(a.shape[-1])) * math.prod(a.shape[:-2]), result.itemsize, name)
        return result

    return run_shape


def _require_square(name: str, a: Array) -> None:
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise np.linalg.LinAlgError(f"{name}: square matrices are needed, got shape {a.shape}")


@cache
def _find_inverse_dtype(given: np.dtype) -> np.dtype:
    return np.linalg.inv(np.eye(1, dtype=given)).dtype


def _linalg_solve_shape_only(a: Array, b: Array) -> ShapeArray:
    _require_square("solve", a)
    n, single = a.shape[-1], b.ndim == 1
    columns = 1 if single else b.shape[-1]
    if b.shape[-1 if single else -2] != n:
        raise ValueError(f"solve: {n} equations, and the right side has shape {b.shape}")
    beside = np.broadcast_shapes(a.shape[:-2], () if single else b.shape[:-2])
    kind = _find_inverse_dtype(np.result_type(a.dtype, b.dtype))
    result = make_kernel_result((*beside, n) if single else (*beside, n, columns), kind, a, b, kernel="solve")
    record_flops((2 * n**3 // 3 + 2 * n * n * columns) * math.prod(beside), result.itemsize, "solve")
    return result


def _norm_shape(x: Array, ord: Any = None, axis: Any = None, keepdims: bool = False) -> ShapeArray:
    if ord not in (None, 2, "fro") or (ord == 2 and axis is None and x.ndim > 1):
        raise ValueError(f"norm: ord={ord!r} is not supported for arrays without data: use None")
    return make_shape_only_reduction("sum")(x, axis=axis, keepdims=keepdims)


linalg = NestedNamespace(
    np.linalg, inv=_make_shape_only_matrix_function("inv", lambda n: 2 * n**3),
    det=_make_shape_only_matrix_function("det", lambda n: 2 * n**3 / 3, drops=True),
    cholesky=_make_shape_only_matrix_function("cholesky", lambda n: n**3 / 3), solve=_linalg_solve_shape_only,
    norm=_norm_shape, LinAlgError=np.linalg.LinAlgError,
)  # fmt: skip
