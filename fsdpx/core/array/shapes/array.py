"""The shape-only array: it has a shape and a dtype and behaves like an array, but has no data."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fsdpx.core.array.shapes.flop_counter import record_copy, record_product, record_traffic

__all__ = [
    "MemoryMeter", "ShapeArray", "call_without_metering_temporaries", "find_result_dtype", "get_indexed_shape",
    "make_shape_only_broadcast_result", "make_shape_only_reduction", "make_shape_only_view_function",
    "matmul_shape_only", "measuring_shape_only_memory",
]  # fmt: skip


def get_indexed_shape(shape: tuple[int, ...], index: Any) -> tuple[int, ...]:
    """Return the shape of `a[index]` for an array a of `shape`. Only the shapes of arrays in `index` matter.

    Raises IndexError as NumPy does, and TypeError for a mask, because the number of elements that a mask selects
    depends on data.
    """
    if type(index) is tuple and len(index) <= len(shape) and all(type(part) is slice for part in index):
        sizes = [len(range(*part.indices(n))) for part, n in zip(index, shape, strict=False)]
        return (*sizes, *shape[len(index) :])
    parts = _expand_index(index if isinstance(index, tuple) else (index,), len(shape))
    arrays = [n for n, part in enumerate(parts) if _is_array_index(part)]
    if arrays:  # if an index contains an array, NumPy also treats the index's integers as arrays
        arrays = [n for n, part in enumerate(parts) if _is_array_index(part) or _is_number_index(part)]
    out: list[int] = []
    place, dim = 0, 0
    for n, part in enumerate(parts):
        if n in arrays and n == arrays[0]:
            place = len(out)
        if part is None:
            out.append(1)
            continue
        if isinstance(part, slice):
            out.append(len(range(*part.indices(shape[dim]))))
        elif _is_number_index(part):
            _require_index_in_bounds(int(part), shape[dim], dim)
        dim += 1
    if arrays:
        together = arrays[-1] - arrays[0] == len(arrays) - 1
        place = place if together else 0
        shapes = [() if _is_number_index(parts[n]) else tuple(parts[n].shape) for n in arrays]
        out[place:place] = np.broadcast_shapes(*shapes)
    return tuple(out)


def _expand_index(index: tuple[Any, ...], ndim: int) -> list[Any]:
    """Expand an index: replace `...` and missing dims with full slices. The result has one entry for each dim of the
    array, and one for each None."""
    parts = [_to_valid_index_entry(part) for part in index]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    dots = [n for n, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if used > ndim:
        raise IndexError(f"too many indices for array: array is {ndim}-dimensional, but {used} were indexed")
    ellipsis_index = dots[0] if dots else len(parts)
    return [*parts[:ellipsis_index], *[slice(None)] * (ndim - used), *parts[ellipsis_index + len(dots) :]]


def _to_valid_index_entry(part: Any) -> Any:
    """Validate one entry of an index, and convert a list to an array. Raise TypeError or IndexError for an invalid
    entry."""
    if isinstance(part, list):
        part = np.asarray(part)
    if part is None or part is Ellipsis or isinstance(part, slice) or _is_number_index(part):
        return part
    kind = getattr(getattr(part, "dtype", None), "kind", None)
    if kind == "b":
        raise TypeError("a mask selects a number of elements that depends on data: a shape-only array has none")
    if kind not in ("i", "u"):
        raise IndexError(f"only integers, slices, `...`, None and integer arrays are valid indices, not {part!r}")
    return part


def _is_number_index(part: Any) -> bool:
    return isinstance(part, int | np.integer) and not isinstance(part, bool | np.bool_)


def _is_array_index(part: Any) -> bool:
    return hasattr(part, "dtype") and not _is_number_index(part)


def _require_index_in_bounds(number: int, size: int, dim: int) -> None:
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of bounds for axis {dim} with size {size}")


class MemoryMeter:
    """Counts the bytes of the shape-only arrays that are currently alive, and tracks the peak. `inside` is the number
    of calls in progress whose temporaries do not count toward the peak."""

    __slots__ = ("inside", "live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = self.inside = 0

    def add_bytes(self, nbytes: int) -> None:
        self.live += nbytes
        if self.live > self.peak and not self.inside:
            self.peak = self.live


class _Meters(threading.local):
    """The active memory meters of this thread. They are per thread, since ranks that run as threads may perform dry
    runs at the same time."""

    def __init__(self) -> None:
        self.open: list[MemoryMeter] = []


_meters = _Meters()


@contextmanager
def measuring_shape_only_memory() -> Iterator[MemoryMeter]:
    """Return a context manager that measures the memory of all shape-only arrays created inside it. An array counts
    until it is freed."""
    _meters.open.append(MemoryMeter())
    try:
        yield _meters.open[-1]
    finally:
        _meters.open.pop()


def call_without_metering_temporaries(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run `call`, and count only the memory that is still in use when it returns. Temporaries are left out, because
    compiled code for NumPy arrays keeps them in registers and caches."""
    meter = _meters.open[-1] if _meters.open else None
    if meter is None:
        return call(*arguments, **options)
    meter.inside += 1
    try:
        return call(*arguments, **options)
    finally:
        meter.inside -= 1
        meter.add_bytes(0)


class Storage:
    """The memory that a shape-only array and its views would share if they had data."""

    __slots__ = ("meter", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.meter = _meters.open[-1] if _meters.open else None
        if self.meter is not None:
            self.meter.add_bytes(nbytes)

    def __del__(self) -> None:
        if self.meter is not None:
            self.meter.live -= self.nbytes


def make_shape_only_view_function(function: Any) -> Callable[..., ShapeArray]:
    """Return the shape-only version of a NumPy function that returns a view. The shape of the result is found by
    calling NumPy's function on an array of zero-byte elements."""

    def view_shape(self: ShapeArray, *arguments: Any, **options: Any) -> ShapeArray:
        return ShapeArray(function(np.empty(self.shape, "V0"), *arguments, **options).shape, self.dtype, self.root)

    return view_shape


class ShapeArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array with a `shape` and a `dtype`, but without elements. When converted to a number it is 0, and when
    converted to a bool it is False.

    Operations return the shape and dtype that NumPy would return, and raise errors of the type that NumPy would raise.
    """

    __slots__ = ("dtype", "root", "shape")
    holds_no_data = True
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: int | Sequence[int], dtype: Any = np.float64, root: Storage | None = None) -> None:
        dims = (shape,) if isinstance(shape, int | np.integer) else shape
        self.shape: tuple[int, ...] = tuple(map(operator.index, dims))
        if self.shape and min(self.shape) < 0:
            raise ValueError(f"negative dimensions are not allowed: {self.shape}")
        self.dtype = np.dtype(dtype)
        self.root = root or Storage(self.nbytes)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def T(self) -> ShapeArray:
        return self.transpose()

    def __repr__(self) -> str:
        return f"ShapeArray({self.shape}, {self.dtype.name})"

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError(f"{self!r} has no data for numpy")

    def __getattr__(self, name: str) -> Any:
        known = "shape-only arrays do not support"
        why = known if hasattr(np.ndarray, name) else "no array has"
        raise AttributeError(f"{name} of an array, which {why}", name=name, obj=self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    def __iter__(self) -> Iterator[ShapeArray]:
        return (self[i] for i in range(len(self)))

    reshape, ravel = make_shape_only_view_function(np.ndarray.reshape), make_shape_only_view_function(np.ndarray.ravel)
    transpose, swapaxes = (
        make_shape_only_view_function(np.ndarray.transpose),
        make_shape_only_view_function(np.ndarray.swapaxes),
    )
    squeeze = make_shape_only_view_function(np.ndarray.squeeze)
    flatten = ravel

    def astype(self, dtype: Any, copy: bool = True) -> ShapeArray:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        result = ShapeArray(self.shape, dtype)
        record_traffic(self, result, kernel="copy")
        return result

    def copy(self) -> ShapeArray:
        record_copy(self)
        return ShapeArray(self.shape, self.dtype)

    def view(self, dtype: Any) -> ShapeArray:
        """Return a view of the same bytes with another dtype. If the item size differs, the size of the last dim
        changes."""
        nbytes, item = (self.shape[-1] if self.shape else 1) * self.itemsize, np.dtype(dtype).itemsize
        if nbytes % item or (not self.shape and item != self.itemsize):
            raise ValueError(f"{self!r} cannot be viewed as {np.dtype(dtype).name}: its last dim does not divide")
        return ShapeArray((*self.shape[:-1], nbytes // item) if self.shape else (), dtype, self.root)

    def fill(self, value: Any) -> None:
        """Count the memory traffic of writing all elements, without storing `value`."""
        record_traffic(self, kernel="copy")

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError(f"only an array of one element is a number, not shape {self.shape}")
        return self.dtype.type(0).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __getitem__(self, index: Any) -> ShapeArray:
        if _is_basic_index(index):
            return ShapeArray(get_indexed_shape(self.shape, index), self.dtype, self.root)
        result = ShapeArray(get_indexed_shape(self.shape, index), self.dtype)
        record_traffic(result, result, *(index if isinstance(index, tuple) else (index,)), kernel="copy")
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        if any(_is_boolean_mask(i) for i in parts):
            # count all elements, because the number of elements that a mask selects depends on the data
            record_traffic(self, *parts, kernel="copy")
            return
        want, got = (
            get_indexed_shape(self.shape, index),
            np.shape(value) if not isinstance(value, ShapeArray) else value.shape,
        )
        more = max(0, len(got) - len(want))  # NumPy drops leading dims of size 1 in an assignment
        if not _can_broadcast(got[more:], want) or any(n != 1 for n in got[:more]):
            raise ValueError(f"could not broadcast input array from shape {got} into shape {want}")
        picks = () if _is_basic_index(index) else parts
        record_traffic(value, ShapeArray(want, self.dtype, self.root), *picks, kernel="copy")

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, out: Any = (None,), **options: Any) -> Any:
        """Return the result of an operator or of a NumPy ufunc. Only plain calls and the method `at` of a ufunc are
        supported."""
        if method == "at":
            array, index, values = operands
            array[index] = values
            return None
        if method != "__call__" or ufunc.nout > 1:
            return NotImplemented
        if ufunc is np.matmul:
            return matmul_shape_only(operands[0], operands[1], out[0])
        return make_shape_only_broadcast_result(ufunc, *operands, out=out[0], **options)

    def __pow__(self, power: Any) -> Any:
        # operator.pow, not np.power: for small exponents, `**` calls np.square and other functions
        return make_shape_only_broadcast_result(operator.pow, self, power)


def find_result_dtype(function: Callable[..., Any], *operands: Any, **options: Any) -> np.dtype:
    """Return the dtype of the result of NumPy's `function` for these operands. It is found by calling `function` with
    empty arrays. Python numbers are passed unchanged.

    For a 0-d array, another 0-d array is passed, because dtype promotion in NumPy 1 treats 0-d arrays as numbers.
    """
    kinds = tuple((o.dtype, o.ndim > 0) if hasattr(o, "dtype") else o for o in operands)
    try:
        return _find_dtype(function, *kinds, **options)
    except TypeError:  # raised if an operand is a list, which has no dtype and cannot be hashed
        return _find_dtype.__wrapped__(function, *kinds, **options)


@functools.lru_cache(4096, typed=True)
def _find_dtype(function: Callable[..., Any], *kinds: Any, **options: Any) -> np.dtype:
    empty = [np.ones((0,) * kind[1], kind[0]) if isinstance(kind, tuple) else kind for kind in kinds]
    return np.asarray(function(*empty, **options)).dtype


def make_shape_only_broadcast_result(
    function: Callable[..., Any], *operands: Any, out: Any = None, **options: Any
) -> ShapeArray:
    """Return the shape-only result of a NumPy function that broadcasts its operands, and count its memory traffic."""
    shape = np.broadcast_shapes(*(o.shape if isinstance(o, ShapeArray) else np.shape(o) for o in operands))
    result = ShapeArray(shape, find_result_dtype(function, *operands, **options))
    record_traffic(*operands, result, kernel="functions" if function in FUNCTIONS else "elements")
    return result if out is None else require_valid_output(out, result)


FUNCTIONS = {
    np.exp, np.exp2, np.expm1, np.log, np.log2, np.log10, np.log1p, np.sin, np.cos, np.tan, np.tanh, np.sinh, np.cosh,
    np.power, np.hypot, operator.pow,
}  # fmt: skip
"""Functions that take several times as long per element as additions or multiplications."""


def require_valid_output(out: ShapeArray, result: ShapeArray) -> ShapeArray:
    """Return `out` if NumPy could write `result` to it; otherwise raise TypeError or ValueError."""
    if not np.can_cast(result.dtype, out.dtype, "same_kind"):
        raise TypeError(f"cannot cast output from {result.dtype} to {out.dtype} with casting rule 'same_kind'")
    if not _can_broadcast(result.shape, out.shape):
        raise ValueError(f"non-broadcastable output operand with shape {out.shape} for shape {result.shape}")
    return out


def matmul_shape_only(a: Any, b: Any, out: Any = None) -> ShapeArray:
    """Return the shape-only matrix product of two matrices or stacks of matrices, and count its FLOPs and traffic."""
    left, right = (x.shape if hasattr(x, "shape") else np.shape(x) for x in (a, b))
    if not left or not right:
        raise ValueError("matmul: an operand has no dims")
    m, n = left if len(left) > 1 else (1, *left), right if len(right) > 1 else (*right, 1)
    if m[-1] != n[-2]:
        raise ValueError(f"matmul: {left} @ {right}: {m[-1]} columns do not match {n[-2]} rows")
    stack = np.broadcast_shapes(m[:-2], n[:-2])
    rows, columns = m[-2:-1] if len(left) > 1 else (), n[-1:] if len(right) > 1 else ()
    kinds = (x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype for x in (a, b))
    result = ShapeArray((*stack, *rows, *columns), _find_product_dtype(*kinds))
    record_product(m[-2], m[-1], n[-1], math.prod(stack), result.itemsize)
    return result if out is None else require_valid_output(out, result)


@functools.cache
def _find_product_dtype(left: np.dtype, right: np.dtype) -> np.dtype:
    return np.matmul(np.empty((0, 0), left), np.empty((0, 0), right)).dtype


def make_shape_only_reduction(name: str) -> Callable[..., Any]:
    """Return the shape-only version of NumPy's reduction `name`, with the signature f(x, axis=None, dtype=None,
    keepdims=False)."""
    function = getattr(np, name)

    @functools.cache
    def find_dtype(given: np.dtype, dtype: Any) -> np.dtype:
        return np.asarray(function(np.ones(1, given), **({} if dtype is None else {"dtype": dtype}))).dtype

    def reduce_shape(
        x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ShapeArray:
        dims: Any = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int | np.integer) else axis
        gone = {_normalize_dim(d, x.ndim) for d in dims}
        if name in ("max", "min", "argmax", "argmin") and any(x.shape[d] == 0 for d in gone):
            raise ValueError(f"{name} over a dim of size 0 has no identity: shape {x.shape}")
        shape = [1 if d in gone else n for d, n in enumerate(x.shape) if keepdims or d not in gone]
        result = ShapeArray(shape, find_dtype(x.dtype, dtype))
        record_traffic(x, result, kernel="sums")
        return result if out is None else require_valid_output(out, result)

    reduce_shape.__name__ = name
    return reduce_shape


def _can_broadcast(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Return whether an array of `shape` can be broadcast to `into`."""
    pairs = zip(reversed(shape), reversed(into), strict=False)
    return len(shape) <= len(into) and all(n in (1, m) for n, m in pairs)


def _normalize_dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise getattr(np, "exceptions", np).AxisError(dim, ndim)  # NumPy before 1.25 has no np.exceptions
    return dim % ndim


def _is_basic_index(index: Any) -> bool:
    """Return whether indexing with `index` returns a view. Slices, numbers, None and Ellipsis return a view, whereas
    indexing with an array returns a copy."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, slice | int) for i in parts)


def _is_boolean_mask(index: Any) -> bool:
    return getattr(index, "dtype", None) == np.bool_ and getattr(index, "ndim", 0) > 0


for _name in "sum mean max min prod any all argmax argmin var std".split():
    setattr(ShapeArray, _name, make_shape_only_reduction(_name))


def find_storage(array: Any) -> Any:
    """Return the object that owns the memory of `array`: its base array, or the `Storage` of a shape-only array. Return
    None if `array` is not an array."""
    if isinstance(array, ShapeArray):
        return array.root
    if not isinstance(array, np.ndarray):
        return None
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
