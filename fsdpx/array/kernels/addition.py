"""Sums of arrays: residuals, biases with what follows them, and column sums, each in one pass."""

from typing import Any

from fsdpx.array.kernels.activation import gelu
from fsdpx.array.kernels.dispatch import kernel

__all__ = ["add", "add_bias", "bias_gelu", "sum_rows"]


@kernel()
def add(xp: Any, a: Any, b: Any) -> Any:
    """a + b for two arrays of one shape."""
    return a + b


@kernel(narrow=0, into=("y",))
def add_bias(xp: Any, y: Any, bias: Any) -> None:
    """y += bias, for bias of the shape of y's last dims."""
    y += bias


@kernel(into=("h",))
def bias_gelu(xp: Any, h: Any, bias: Any, approximate: str = "none") -> Any:
    """h += bias, in place, and returns gelu(h); bias (features,) or None."""
    if bias is not None:
        h += bias
    return gelu(xp, h, approximate)


@kernel(narrow=0, into=("out",))
def sum_rows(xp: Any, rows: Any, out: Any, accumulate: bool = True) -> None:
    """out += the sum of rows (n, ...) over n, or out = it; 16-bit rows are added in float32, rounded once."""
    total = xp.sum(rows, axis=0)
    if accumulate:
        out += total
    else:
        out[...] = total
