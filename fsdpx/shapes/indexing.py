"""The shape that an index selects: NumPy's rules for basic and integer-array indexing, without arrays."""

from typing import Any

import numpy as np

__all__ = ["selected"]


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
