"""Dropout in one pass: random numbers are generated in cache, just before they are used."""

from typing import Any

import numpy as np

from fsdpx.array import parallel
from fsdpx.array.kernels.compiled.bits import put, real, wide, zero
from fsdpx.array.kernels.compiled.philox import raws
from fsdpx.array.kernels.compiled.scalar import widest
from fsdpx.array.kernels.dropout import scale, threshold
from fsdpx.array.random import Stretch
from fsdpx.native.compiled import jit

__all__ = ["drop", "drop_backward"]

TOP = np.uint64(40)  # shifted by it, 24 bits are left
PIECE = 1024  # elements whose numbers are made and then used: they stay in the nearest cache


@jit
def _apply(x, keep, y, factor):
    nothing = zero(x)
    for i in range(x.size):
        y[i] = put(y, real(x[i]) * (factor if keep[i] != 0 else nothing))


@jit
def _compare(numbers, keep, least):
    widest()
    for i in range(keep.size):
        keep[i] = numbers[i] >> TOP >= least


@jit
def _drop(x, keep, y, start, key0, key1, least, factor):
    numbers = np.empty(PIECE, np.uint64)
    for a in range(0, x.size, PIECE):
        b = min(a + PIECE, x.size)
        raws(numbers[: b - a], start + a, key0, key1)
        _compare(numbers, keep[a:b], least)
        _apply(x[a:b], keep[a:b], y[a:b], factor)


def drop(xp: Any, x: np.ndarray, numbers: Stretch, p: float) -> tuple[np.ndarray, np.ndarray]:
    flat = np.ascontiguousarray(x).reshape(-1)
    keep, y = np.empty(flat.size, np.uint8), np.empty_like(flat)
    rest = (*numbers.keys, np.uint64(threshold(p)), wide(x.dtype).type(scale(p)))
    cut = parallel.cuts(flat.size, parallel.GRAIN // 4)  # a random number costs as much as a few passes
    parallel.run(_drop, [(flat[a:b], keep[a:b], y[a:b], numbers.start + a, *rest) for a, b in cut])
    return y.reshape(x.shape), keep.view(np.bool_).reshape(x.shape)


def drop_backward(xp: Any, dy: np.ndarray, keep: np.ndarray, p: float) -> np.ndarray:
    flat = np.ascontiguousarray(dy).reshape(-1)
    dx = np.empty_like(flat)
    parallel.over(
        _apply, (flat, np.ascontiguousarray(keep).reshape(-1).view(np.uint8), dx), wide(dy.dtype).type(scale(p))
    )
    return dx.reshape(dy.shape)
