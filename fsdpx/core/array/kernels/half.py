"""Conversion between float32 and 16-bit floats, and sums of 16-bit floats in float32."""

from typing import Any

import numpy as np

from fsdpx.core.array.kernels.choice import find_compiled_kernel, find_device_kernel, register_plain_kernel
from fsdpx.core.array.random import NumberRange
from fsdpx.core.array.shapes.flop_counter import record_traffic

__all__ = ["add_widened", "cast_float_to_dtype", "round_randomly", "store", "to_float32"]

HALF_FORMATS = ("float16", "bfloat16")


def store(xp: Any, x: Any, out: Any) -> None:
    """Convert x to the dtype of `out` and write it to `out`, which has the same shape. Numbers that are too large for
    this dtype become Inf, without a warning."""
    fits = xp is np and x.shape == out.shape and (_can_use_compiled(x, out) or _can_use_compiled(out, x))
    if fits and (body := find_compiled_kernel("store")):
        body(x, out)
        return
    if x.shape == out.shape and (form := find_device_kernel("store", xp, (x, out))):
        form(xp, x, out)
        return
    if getattr(xp, "holds_no_data", False):
        # memory traffic is counted with the itemsize of the narrower dtype
        record_traffic(*sorted((x, out), key=lambda a: int(a.itemsize)), kernel="store")
        return
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = x.astype(out.dtype)


def add_widened(xp: Any, x: Any, out: Any) -> None:
    """Add the 16-bit array x to the float32 array `out` in place. Both have the same shape."""
    fits = xp is np and x.shape == out.shape and _can_use_compiled(x, out)
    if fits and (body := find_compiled_kernel("add_widened")):
        body(x, out)
        return
    if x.shape == out.shape and (form := find_device_kernel("add_widened", xp, (x, out))):
        form(xp, x, out)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        out += x.astype(out.dtype)


def round_randomly(xp: Any, x: Any, out: Any, numbers: NumberRange) -> None:
    """Round a float32 array x stochastically to the bfloat16 array `out`. Each element is rounded to one of the two
    nearest bfloat16 numbers, with probabilities that make the rounding unbiased (Gupta et al. 2015).

    Both arrays are 1-D and of equal size. Element i uses random number i of `numbers.make_16bit_numbers()`. Inf and NaN
    stay unchanged.
    """
    if xp is np and _can_use_compiled(out, x) and (body := find_compiled_kernel("round_randomly")):
        body(x, out, numbers)
        return
    chance = xp.asarray(numbers.make_16bit_numbers())
    bits, nearest = x.view(np.uint32), cast_float_to_dtype(xp, x, out.dtype).view(np.uint16)
    special = (bits & 0x7F800000) == 0x7F800000
    out.view(np.uint16)[...] = xp.where(special, nearest, ((bits + chance) >> 16).astype(np.uint16))


def to_float32(xp: Any, x: Any) -> Any:
    """Convert an array of 16-bit floats to float32. Return anything else unchanged."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or dtype.itemsize != 2 or dtype.kind not in "fV":
        return x
    return cast_float_to_dtype(xp, x, np.float32)


def cast_float_to_dtype(xp: Any, x: Any, dtype: Any) -> Any:
    """Return x rounded to `dtype` (16-bit or float32), in the memory order of x. If x already has this dtype, return x
    itself."""
    if x.dtype == dtype:
        return x
    if xp is np and not x.flags.c_contiguous:
        out = np.empty_like(x, dtype)
        order = sorted(range(x.ndim), key=out.strides.__getitem__, reverse=True)
        store(xp, x.transpose(order), out.transpose(order))
        return out
    out = xp.empty(x.shape, dtype=dtype)
    store(xp, x, out)
    return out


def _can_use_compiled(half: Any, wide: Any) -> bool:
    """Return whether the compiled code supports `half` (a 16-bit array) and `wide` (a float32 array)."""
    formats = wide.dtype == np.float32 and half.dtype.name in HALF_FORMATS
    return formats and all(x.flags.c_contiguous and x.flags.aligned for x in (half, wide))


for function in (store, add_widened, round_randomly):
    register_plain_kernel(function.__name__, function)
