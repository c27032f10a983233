"""The shape-only array: a shape and a dtype that behave like an array of them, and no data."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fsdpx.shapes.work import note, note_copy, note_product

__all__ = [
    "Meter", "ShapeArray", "ShapeUfunc", "as_one", "dtype_of_result", "elementwise", "metered", "reduced", "selected",
]  # fmt: skip

def selected(shape: tuple[int, ...], index: Any) -> tuple[int, ...]:
    """The shape of `a[index]` for an array of `shape`; arrays in `index` matter by shape only.

    Raises IndexError like NumPy, and TypeError for a mask, which selects a number of elements that depends on data."""
    parts = _spelled_out(index if isinstance(index, tuple) else (index,), len(shape))
    arrays = [n for n, part in enumerate(parts) if _is_array(part)]
    if arrays:  # beside an index array a whole number counts as one too
        arrays = [n for n, part in enumerate(parts) if _is_array(part) or _is_number(part)]
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
        elif _is_number(part):
            _check(int(part), shape[dim], dim)
        dim += 1
    if arrays:
        together = arrays[-1] - arrays[0] == len(arrays) - 1
        place = place if together else 0
        shapes = [() if _is_number(parts[n]) else tuple(parts[n].shape) for n in arrays]
        out[place:place] = np.broadcast_shapes(*shapes)
    return tuple(out)


def _spelled_out(index: tuple[Any, ...], ndim: int) -> list[Any]:
    """One part per dim, besides None: `...` and what is left out are full slices."""
    parts = [_as_array(part) for part in index]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    dots = [n for n, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if used > ndim:
        raise IndexError(f"too many indices for array: array is {ndim}-dimensional, but {used} were indexed")
    at = dots[0] if dots else len(parts)
    return [*parts[:at], *[slice(None)] * (ndim - used), *parts[at + len(dots) :]]


def _as_array(part: Any) -> Any:
    """Lists become arrays; TypeError or IndexError for what cannot be an index."""
    if isinstance(part, list):
        part = np.asarray(part)
    if part is None or part is Ellipsis or isinstance(part, slice) or _is_number(part):
        return part
    kind = getattr(getattr(part, "dtype", None), "kind", None)
    if kind == "b":
        raise TypeError("a mask selects a number of elements that depends on data: a shape-only array has none")
    if kind not in ("i", "u"):
        raise IndexError(f"only integers, slices, `...`, None and integer arrays are valid indices, not {part!r}")
    return part


def _is_number(part: Any) -> bool:
    return isinstance(part, int | np.integer) and not isinstance(part, bool | np.bool_)


def _is_array(part: Any) -> bool:
    return hasattr(part, "dtype") and not _is_number(part)


def _check(number: int, size: int, dim: int) -> None:
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of bounds for axis {dim} with size {size}")


class Meter:
    """Bytes that are alive, and the most there have been. inside: calls under way that count when they end."""

    __slots__ = ("inside", "live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = self.inside = 0

    def add(self, nbytes: int) -> None:
        self.live += nbytes
        if self.live > self.peak and not self.inside:
            self.peak = self.live


class _Meters(threading.local):
    """The meters of this thread: two ranks that are threads may make dry runs at once."""

    def __init__(self) -> None:
        self.open: list[Meter] = []


_meters = _Meters()


@contextmanager
def metered() -> Iterator[Meter]:
    """Count the memory of the arrays that are made inside the block, as long as they live."""
    _meters.open.append(Meter())
    try:
        yield _meters.open[-1]
    finally:
        _meters.open.pop()


def as_one(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`call` counted by what is there when it ends: what runs in its place on NumPy arrays is compiled, with
    temporaries in registers and caches."""
    meter = _meters.open[-1] if _meters.open else None
    if meter is None:
        return call(*arguments, **options)
    meter.inside += 1
    try:
        return call(*arguments, **options)
    finally:
        meter.inside -= 1
        meter.add(0)


class Root:
    """The memory that an array and its views would share."""

    __slots__ = ("meter", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.meter = _meters.open[-1] if _meters.open else None
        if self.meter is not None:
            self.meter.add(nbytes)

    def __del__(self) -> None:
        if self.meter is not None:
            self.meter.live -= self.nbytes


class ShapeArray:
    """An array of `shape` and `dtype` without elements; converted to a number it is 0, to a bool False.

    Results have the shape and dtype that NumPy gives, and errors are of the type that NumPy raises."""

    __slots__ = ("dtype", "root", "shape")
    holds_no_data = True
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # so that `ndarray + ShapeArray` asks this class

    def __init__(self, shape: int | Sequence[int], dtype: Any = np.float64, root: Root | None = None) -> None:
        dims = (shape,) if isinstance(shape, int | np.integer) else shape
        self.shape: tuple[int, ...] = tuple(map(operator.index, dims))
        if self.shape and min(self.shape) < 0:
            raise ValueError(f"negative dimensions are not allowed: {self.shape}")
        self.dtype = np.dtype(dtype)
        self.root = root or Root(self.nbytes)

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
        return ShapeArray(self.shape[::-1], self.dtype, self.root)

    def __repr__(self) -> str:
        return f"ShapeArray({self.shape}, {self.dtype.name})"

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError(f"{self!r} has no data for numpy")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    def __iter__(self) -> Iterator[ShapeArray]:
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape: Any) -> ShapeArray:
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
        return ShapeArray(_filled(self, tuple(wanted)), self.dtype, self.root)

    def ravel(self) -> ShapeArray:
        return ShapeArray((self.size,), self.dtype, self.root)

    flatten = ravel

    def transpose(self, *dims: Any) -> ShapeArray:
        if len(dims) == 1 and not isinstance(dims[0], int | np.integer):
            dims = tuple(dims[0])
        order = [_dim(d, self.ndim) for d in dims] if dims else list(range(self.ndim))[::-1]
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(f"axes {tuple(dims)} do not match an array of shape {self.shape}")
        return ShapeArray([self.shape[d] for d in order], self.dtype, self.root)

    def swapaxes(self, a: int, b: int) -> ShapeArray:
        order = list(range(self.ndim))
        a, b = _dim(a, self.ndim), _dim(b, self.ndim)
        order[a], order[b] = b, a
        return self.transpose(*order) if order else self

    def squeeze(self, axis: int | None = None) -> ShapeArray:
        gone = [d for d, n in enumerate(self.shape) if n == 1] if axis is None else [_dim(axis, self.ndim)]
        if any(self.shape[d] != 1 for d in gone):
            raise ValueError(f"cannot squeeze dim {axis} of shape {self.shape}: it is not 1")
        return ShapeArray([n for d, n in enumerate(self.shape) if d not in gone], self.dtype, self.root)

    def astype(self, dtype: Any, copy: bool = True) -> ShapeArray:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        made = ShapeArray(self.shape, dtype)
        note(self, made)
        return made

    def copy(self) -> ShapeArray:
        note_copy(self)
        return ShapeArray(self.shape, self.dtype)

    def view(self, dtype: Any) -> ShapeArray:
        """The same bytes as another dtype: the last dim changes."""
        nbytes, item = (self.shape[-1] if self.shape else 1) * self.itemsize, np.dtype(dtype).itemsize
        if nbytes % item or (not self.shape and item != self.itemsize):
            raise ValueError(f"{self!r} cannot be seen as {np.dtype(dtype).name}: its last dim does not divide")
        return ShapeArray((*self.shape[:-1], nbytes // item) if self.shape else (), dtype, self.root)

    def fill(self, value: Any) -> None:
        """There are no elements; it is work all the same."""
        note(self)

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
        return ShapeArray(selected(self.shape, index), self.dtype, self.root if _is_basic(index) else None)

    def __setitem__(self, index: Any, value: Any) -> None:
        if any(_is_mask(i) for i in (index if isinstance(index, tuple) else (index,))):
            return  # how many elements a mask selects depends on data
        want, got = selected(self.shape, index), np.shape(value) if not isinstance(value, ShapeArray) else value.shape
        more = max(0, len(got) - len(want))  # leading dims of 1 may be dropped
        if not _broadcasts(got[more:], want) or any(n != 1 for n in got[:more]):
            raise ValueError(f"could not broadcast input array from shape {got} into shape {want}")
        note(value, ShapeArray(want, self.dtype, self.root))

    def __matmul__(self, other: Any) -> ShapeArray:
        return product(self, other)

    def __rmatmul__(self, other: Any) -> ShapeArray:
        return product(other, self)


def dtype_of_result(function: Callable[..., Any], *operands: Any, **options: Any) -> np.dtype:
    """The dtype of `function` of the operands in NumPy, from a call with empty arrays; Python numbers stay numbers."""
    kinds = tuple(getattr(o, "dtype", o) for o in operands)
    try:
        return _dtype_of(function, *kinds, **options)
    except TypeError:  # of operands that are lists
        return _dtype_of.__wrapped__(function, *kinds, **options)


@functools.lru_cache(4096, typed=True)
def _dtype_of(function: Callable[..., Any], *kinds: Any, **options: Any) -> np.dtype:
    empty = [np.empty(0, kind) if isinstance(kind, np.dtype) else kind for kind in kinds]
    return np.asarray(function(*empty, **options)).dtype


class ShapeUfunc:
    """A NumPy ufunc on shapes: operands broadcast."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *operands: Any, out: Any = None, **options: Any) -> Any:
        shape = np.broadcast_shapes(*(np.shape(o) if not isinstance(o, ShapeArray) else o.shape for o in operands))
        result = ShapeArray(shape, dtype_of_result(self.function, *operands, **options))
        note(*operands, result)
        return result if out is None else stored(out, result)

    def at(self, array: ShapeArray, index: Any, values: Any = None) -> None:
        """Unbuffered in-place form: `values` must broadcast to the selection."""
        if values is not None:
            array[index] = values


def stored(out: ShapeArray, result: ShapeArray) -> ShapeArray:
    """`out`, if NumPy would let `result` be written into it."""
    if not np.can_cast(result.dtype, out.dtype, "same_kind"):
        raise TypeError(f"cannot cast output from {result.dtype} to {out.dtype} with casting rule 'same_kind'")
    if not _broadcasts(result.shape, out.shape):
        raise ValueError(f"non-broadcastable output operand with shape {out.shape} for shape {result.shape}")
    return out


def elementwise(name: str) -> ShapeUfunc:
    """The shape-only form of NumPy's `name`."""
    return ShapeUfunc(getattr(np, name))


def product(a: Any, b: Any) -> ShapeArray:
    """The matrix product, stacked over leading dims."""
    left, right = (x.shape if hasattr(x, "shape") else np.shape(x) for x in (a, b))
    if not left or not right:
        raise ValueError("matmul: an operand has no dims")
    m, n = left if len(left) > 1 else (1, *left), right if len(right) > 1 else (*right, 1)
    if m[-1] != n[-2]:
        raise ValueError(f"matmul: {left} @ {right}: {m[-1]} columns meet {n[-2]} rows")
    stack = np.broadcast_shapes(m[:-2], n[:-2])
    rows, columns = m[-2:-1] if len(left) > 1 else (), n[-1:] if len(right) > 1 else ()
    kinds = (x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype for x in (a, b))
    made = ShapeArray((*stack, *rows, *columns), _dtype_of_product(*kinds))
    note_product(m[-2], m[-1], n[-1], math.prod(stack), made.itemsize)
    return made


@functools.cache
def _dtype_of_product(left: np.dtype, right: np.dtype) -> np.dtype:
    return np.matmul(np.empty((0, 0), left), np.empty((0, 0), right)).dtype


def reduced(name: str) -> Callable[..., Any]:
    """The shape-only form of NumPy's reduction `name`: f(x, axis=None, dtype=None, keepdims=False)."""
    function = getattr(np, name)

    @functools.cache
    def kind(given: np.dtype, dtype: Any) -> np.dtype:
        return np.asarray(function(np.ones(1, given), **({} if dtype is None else {"dtype": dtype}))).dtype

    def reduction(x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ShapeArray:
        dims: Any = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int | np.integer) else axis
        gone = {_dim(d, x.ndim) for d in dims}
        if name in ("max", "min", "argmax", "argmin") and any(x.shape[d] == 0 for d in gone):
            raise ValueError(f"{name} over a dim of size 0 has no identity: shape {x.shape}")
        shape = [1 if d in gone else n for d, n in enumerate(x.shape) if keepdims or d not in gone]
        result = ShapeArray(shape, kind(x.dtype, dtype))
        note(x, result)
        return result if out is None else stored(out, result)

    reduction.__name__ = name
    return reduction


def _filled(x: ShapeArray, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """`wanted` with its -1 replaced by what is left."""
    known = math.prod(n for n in wanted if n != -1)
    free = wanted.count(-1)
    if free > 1 or (free and (known == 0 or x.size % known)) or (not free and known != x.size):
        raise ValueError(f"cannot reshape an array of shape {x.shape} (size {x.size}) into {wanted}")
    return tuple(x.size // known if n == -1 else n for n in wanted)


def _broadcasts(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Whether an array of `shape` can be broadcast to `into`."""
    pairs = zip(reversed(shape), reversed(into), strict=False)
    return len(shape) <= len(into) and all(n in (1, m) for n, m in pairs)


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise np.exceptions.AxisError(dim, ndim)
    return dim % ndim


def _is_basic(index: Any) -> bool:
    """Whether an index gives a view: slices, numbers, None and Ellipsis do, arrays copy."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, slice | int) for i in parts)


def _is_mask(index: Any) -> bool:
    return getattr(index, "dtype", None) == np.bool_ and getattr(index, "ndim", 0) > 0


def _binary(short: str) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The operator, its reflected form and its in-place form."""
    function = ShapeUfunc(getattr(operator, f"__{short}__"))

    def forward(self: ShapeArray, other: Any) -> Any:
        return function(self, other)

    def reflected(self: ShapeArray, other: Any) -> Any:
        return function(other, self)

    def in_place(self: ShapeArray, other: Any) -> Any:
        return stored(self, function(self, other))

    return forward, reflected, in_place


def _unary(short: str) -> Callable[..., Any]:
    function = ShapeUfunc(getattr(operator, f"__{short}__"))
    return lambda self: function(self)


for _short in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    for _prefix, _method in zip(("", "r", "i"), _binary(_short), strict=True):
        setattr(ShapeArray, f"__{_prefix}{_short}__", _method)
for _short in "eq ne lt le gt ge".split():
    setattr(ShapeArray, f"__{_short}__", _binary(_short)[0])
for _short in "neg pos abs invert".split():
    setattr(ShapeArray, f"__{_short}__", _unary(_short))
for _name in "sum mean max min prod any all argmax argmin var std".split():
    setattr(ShapeArray, _name, reduced(_name))
