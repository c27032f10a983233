"""Compares named arrays, and reports the element that differs most: the name of its tensor, its index, and its actual
and expected values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import to_host

__all__ = ["WorstElement", "assert_close", "find_difference"]


@dataclass(frozen=True)
class WorstElement:
    """The element with the largest relative difference among all tensors that were compared.

    Parameters
    ----------
    tensor : name of the tensor that contains the element
    index : index of the element in the tensor
    got, want : actual and expected values of the element
    relative : absolute difference of the two values, divided by the largest absolute value of the expected tensor
    beyond, elements : number of elements of this tensor that differ by more than the tolerance, and total number of its
        elements
    tensors : number of tensors with elements that differ by more than the tolerance
    """

    tensor: str
    index: tuple[int, ...]
    got: Any
    want: Any
    relative: float
    beyond: int
    elements: int
    tensors: int = 1

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        more = f", as in {self.tensors - 1} more tensors" if self.tensors > 1 else ""
        return (
            f"{self.tensor}{at} is {self.got!s} and should be {self.want!s}: {self.relative:.3g} of the tensor's "
            f"largest element ({self.beyond:,} of {self.elements:,} elements differ{more})"
        )


def assert_close(
    got: Any, want: Any, tolerance: float = 0.0, *, rank: int | None = None, step: int | None = None
) -> None:
    """Raise an AssertionError if two sets of arrays differ. The message names the element that differs most.

    Parameters
    ----------
    got, want : an array, a number, or a mapping or sequence of these; both must have the same structure
    tolerance : allowed difference relative to the largest element of the tensor; if 0, arrays must be bit-identical
    rank, step : rank and step that the arrays come from, for the error message
    """
    found = find_difference(got, want, tolerance)
    if found is not None:
        where = [f"{name} {number}" for name, number in (("rank", rank), ("step", step)) if number is not None]
        allowed = f"; allowed is {tolerance:g}" if tolerance else ""
        raise AssertionError(f"{', '.join([*where, str(found)])}{allowed}")


def find_difference(got: Any, want: Any, tolerance: float = 0.0) -> WorstElement | None:
    """Return the element that differs most between two sets of arrays, or None if the arrays agree.

    Parameters
    ----------
    got, want : an array, a number, or a mapping or sequence of these; both must have the same structure
    tolerance : allowed difference relative to the largest element of the tensor; if 0, arrays must be bit-identical

    Raises
    ------
    AssertionError : if structures, shapes or dtypes differ
    """
    found = [
        one
        for name, a, b in _iterate_tensor_pairs("", got, want)
        if (one := _find_worst_element(name, a, b, tolerance)) is not None
    ]
    if not found:
        return None
    worst = max(found, key=lambda one: one.relative)
    return WorstElement(**{**vars(worst), "tensors": len(found)})


def _iterate_tensor_pairs(name: str, got: Any, want: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, actual array, expected array) for each tensor of two structures. Raise AssertionError if the
    structures differ."""
    if isinstance(want, Mapping):
        assert list(got) == list(want), (
            f"{name or 'tensors'}: these are there: {list(got)}, these should be: {list(want)}"
        )
        for key in want:
            yield from _iterate_tensor_pairs(f"{name}/{key}" if name else str(key), got[key], want[key])
    elif isinstance(want, Sequence) and not isinstance(want, str):
        assert len(got) == len(want), f"{name or 'tensors'}: {len(got)} are there, {len(want)} should be"
        for at, pair in enumerate(zip(got, want, strict=True)):
            yield from _iterate_tensor_pairs(f"{name}/{at}" if name else str(at), *pair)
    else:
        yield name or "the array", np.asarray(to_host(got)), np.asarray(to_host(want))


def _find_worst_element(name: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> WorstElement | None:
    """Return the element of a tensor that differs most, or None if all elements are within the tolerance."""
    assert got.shape == want.shape, f"{name} has shape {got.shape} and should have {want.shape}"
    assert tolerance or got.dtype == want.dtype, f"{name} has dtype {got.dtype} and should have {want.dtype}"
    if got.dtype == want.dtype and got.tobytes() == want.tobytes():
        return None
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), want.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    # NaN here means that exactly one of the two values is NaN, or that the infinities differ
    apart = np.where(np.isnan(apart), inf, apart)
    largest = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))) or 1.0
    bits = _view_as_bits(got) != _view_as_bits(want) if not tolerance else np.zeros(got.shape, bool)
    beyond = bits | (apart > tolerance * largest)
    if not beyond.any():
        return None
    worst = np.unravel_index(int(np.argmax(np.where(beyond, apart, -1.0))), got.shape)
    relative = float(apart[worst]) / largest
    return WorstElement(name, tuple(map(int, worst)), got[worst], want[worst], relative, int(beyond.sum()), got.size)


def _view_as_bits(array: np.ndarray) -> np.ndarray:
    """Return a view of the array, or of a contiguous copy, with raw bytes as elements. The view can be used to compare
    elements bit by bit."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(f"V{array.dtype.itemsize}").reshape(array.shape)
