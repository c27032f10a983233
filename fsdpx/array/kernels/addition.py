"""Sums of arrays: residuals, biases with what follows them, and column sums, each in one pass."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.activation import gelu
from fsdpx.array.kernels.dispatch import kernel

__all__ = ["add", "add_bias", "bias_gelu", "sum_rows"]


@kernel(halves=False, bits=True)
def add(xp: Any, a: Any, b: Any) -> Any:
    """a + b for two arrays of one shape."""
    return a + b


@kernel(halves=False, bits=True)
def add_bias(xp: Any, y: Any, bias: Any) -> None:
    """y += bias, for y (..., features) and bias (features,)."""
    y += bias


@kernel(halves=False, bits=True)
def bias_gelu(xp: Any, h: Any, bias: Any, approximate: str = "none") -> Any:
    """h += bias, in place, and returns gelu(h); bias (features,) or None."""
    if bias is not None:
        h += bias
    return gelu(xp, h, approximate)


@kernel(halves=False, bits=True, into=("out",))
def sum_rows(xp: Any, rows: Any, out: Any, accumulate: bool = True) -> None:
    """out += the sum of rows (n, features) over n, or out = it; 16-bit rows are added in float32, rounded once."""
    total = xp.sum(rows, axis=0, dtype=np.float32 if rows.dtype.itemsize == 2 else rows.dtype)
    if accumulate:
        out += total
    else:
        out[...] = total
