"""16-bit floats to and from float32, and sums of them in float32."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.choice import compiled

__all__ = ["add_widened", "narrowed", "store", "widened"]

FORMATS = ("float16", "bfloat16")


def store(xp: Any, x: Any, out: Any) -> None:
    """out = x for arrays of one shape, in the dtype of out; too large for it becomes Inf, without a warning."""
    if xp is np and x.shape == out.shape and (_fit(x, out) or _fit(out, x)):
        body = compiled("store")
        if body is not None:
            body(x, out)
            return
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = x.astype(out.dtype)


def add_widened(xp: Any, x: Any, out: Any) -> None:
    """out += x for arrays of one shape, x of 16 bits and out of float32."""
    if xp is np and x.shape == out.shape and _fit(x, out):
        body = compiled("add_widened")
        if body is not None:
            body(x, out)
            return
    with np.errstate(over="ignore", invalid="ignore"):
        out += x.astype(out.dtype)


def widened(xp: Any, x: Any) -> Any:
    """16-bit floats (bf16 has kind "V") as float32, all else as it is."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or dtype.itemsize != 2 or dtype.kind not in "fV":
        return x
    return _cast(xp, x, np.float32)


def narrowed(xp: Any, x: Any, dtype: Any) -> Any:
    """x rounded to the 16-bit `dtype`."""
    return _cast(xp, x, dtype)


def _cast(xp: Any, x: Any, dtype: Any) -> Any:
    out = xp.empty(x.shape, dtype=dtype)
    store(xp, x, out)
    return out


def _fit(half: Any, wide: Any) -> bool:
    """Whether the compiled code takes this pair of arrays."""
    return (
        wide.dtype == np.float32
        and half.dtype.name in FORMATS
        and half.flags.c_contiguous
        and wide.flags.c_contiguous
        and half.flags.aligned
        and wide.flags.aligned
    )
