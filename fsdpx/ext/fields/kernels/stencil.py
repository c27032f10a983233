"""Finite-difference stencils along one dim of a field, in plain array code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fsdpx.core.array.kernels.dispatch import kernel

__all__ = ["ShiftedRange", "apply_stencil"]


class ShiftedRange(NamedTuple):
    """One term of a stencil. For the cells i from 0 to `length` - 1 along a dim, it sets y[to + i] to
    `weight * x[start + i]`, or adds this product to y[to + i] if `add` is true."""

    to: int
    start: int
    length: int
    weight: float
    add: bool


@kernel(narrow=0, into=("y",), bits=False)
def apply_stencil(
    xp: Any, y: Any, x: Any, given: slice, taken: slice, dim: int, ranges: Sequence[ShiftedRange]
) -> None:
    """Apply the terms of a stencil along cell dim `dim`, in order. It reads the channels `taken` of x, and writes the
    channels `given` of y. Both are (samples, channels, *cells)."""
    cells, before = x[:, taken], (slice(None),) * (dim + 2)
    sums = y[:, given].astype(x.dtype, copy=False)
    for to, start, length, weight, add in ranges:
        into, value = sums[(*before, slice(to, to + length))], cells[(*before, slice(start, start + length))] * weight
        into[...] = into + value if add else value
    if sums.dtype != y.dtype:  # 16-bit y are rounded once
        y[:, given] = sums.astype(y.dtype)
