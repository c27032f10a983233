"""Loops over matrices in 8 bits: products with a few rows, and rows widened to a float format.

Each loop runs over slices, which is what LLVM turns into vectors of numbers that are widened as they are read."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.bits import put
from fsdpx.array.kernels.compiled.jit import REORDER, jit

__all__ = ["dots", "widen"]


@jit(fastmath=REORDER)
def dots(out: Any, stored: Any, scales: Any, x: Any, block: int) -> None:
    """out[j, i] = row j of the matrix times x[i]; blocks of `block` elements share a scale."""
    numbers = stored.view(np.int8)
    columns = x.shape[1]
    for j in range(scales.shape[0]):
        for i in range(x.shape[0]):
            total = np.float32(0)
            for b in range(scales.shape[1]):
                some = x[i, b * block : min(b * block + block, columns)]
                row = numbers[j, b * block : min(b * block + block, columns)]
                part = np.float32(0)
                for n in range(some.size):
                    part += some[n] * np.float32(row[n])
                total += part * scales[j, b]
            out[j, i] = total


@jit
def widen(out: Any, stored: Any, scales: Any, block: int) -> None:
    """out = the matrix, in float32 or, as its bits, in bfloat16."""
    numbers = stored.view(np.int8)
    columns = out.shape[1]
    for j in range(out.shape[0]):
        for b in range(scales.shape[1]):
            scale = scales[j, b]
            into = out[j, b * block : min(b * block + block, columns)]
            row = numbers[j, b * block : min(b * block + block, columns)]
            for n in range(into.size):
                into[n] = put(out, np.float32(row[n]) * scale)
