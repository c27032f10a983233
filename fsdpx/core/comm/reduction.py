"""The local part of reductions: the operations that are defined for each dtype, and reductions of several arrays in
rank order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fsdpx.core.array.kernels import add_widened, cast_float_to_dtype, store
from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.comm.calls import Array, ReduceOp
from fsdpx.errors import ConfigError

__all__ = [
    "explain_undefined_reduction",
    "get_dtype_kind",
    "get_ufunc",
    "is_half",
    "is_reduction_compilable",
    "needs_rank_order_reduction",
    "reduce_in_rank_order_into",
]  # fmt: skip

_KINDS = {
    "float64": "float", "float32": "float", "float16": "half", "bfloat16": "half", "complex64": "complex",
    "complex128": "complex", "bool": "bool",
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), "integer"),
}  # fmt: skip
_UFUNCS = {
    ReduceOp.SUM: np.add, ReduceOp.AVG: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
}  # fmt: skip


@lru_cache(maxsize=64)
def get_dtype_kind(dtype: np.dtype) -> str:
    """Return the kind of a dtype: "float", "half", "complex", "integer" or "bool". Raise ConfigError if communicators
    cannot transfer arrays of this dtype."""
    kind = _KINDS.get(dtype.name)
    if kind is not None and not dtype.isnative:
        remedy = "array.astype(array.dtype.newbyteorder('='))"
        raise ConfigError(f"dtype {dtype.str} ({dtype.name}) has the byte order of other machines: use {remedy}")
    if kind is None:
        raise ConfigError(f"dtype {dtype.str} ({dtype.name}) cannot be communicated: use one of {', '.join(_KINDS)}")
    return kind


def is_half(dtype: np.dtype) -> bool:
    """Return whether `dtype` is float16 or bfloat16. Sums of such arrays are computed in float32."""
    return get_dtype_kind(dtype) == "half"


def needs_rank_order_reduction(op: ReduceOp, dtype: np.dtype) -> bool:
    """Return whether fsdpx itself must combine the values of all ranks in rank order, because a communication library
    might compute a different result.

    The result is True for all reductions of 16-bit floats, and for MAX and MIN of other floats, where a NaN on any rank
    must reach all ranks."""
    return is_half(dtype) or (op in (ReduceOp.MAX, ReduceOp.MIN) and get_dtype_kind(dtype) == "float")


def is_reduction_compilable(dtype: np.dtype, op: ReduceOp) -> bool:
    """Return whether compiled code can apply `op` to arrays of this dtype. Compiled code supports sums and averages of
    float32 and float64 arrays, which make up most of the traffic in training."""
    return dtype.char in "fd" and op in (ReduceOp.SUM, ReduceOp.AVG)


def get_ufunc(op: ReduceOp) -> np.ufunc:
    """Return the NumPy ufunc that combines two values. For AVG it is `add`, and the sum is divided at the end."""
    return _UFUNCS[op]


@lru_cache(maxsize=64)
def explain_undefined_reduction(op: ReduceOp, dtype: np.dtype) -> str | None:
    """Return a message that explains why `op` is not defined for `dtype`, or None if it is defined."""
    if op is ReduceOp.AVG and get_dtype_kind(dtype) in ("integer", "bool"):
        return f"AVG of {dtype.name} would not be {dtype.name}: use SUM, or a float array"
    if op in (ReduceOp.MAX, ReduceOp.MIN) and get_dtype_kind(dtype) == "complex":
        return f"{op.name} of {dtype.name}: complex numbers have no order; reduce their absolute values, or parts"
    return None


BLOCK_ELEMENTS = 1 << 15
"""Number of elements that `reduce_in_rank_order_into` reduces at a time on the host. It is small enough for a block of
results to stay in the cache until the block has been written to all outputs."""


def reduce_in_rank_order_into(arrays: Sequence[Array], op: ReduceOp, outs: Sequence[Array], wire: Any = None) -> None:
    """Reduce `arrays` elementwise in the given order, and write the result to all arrays in `outs`. 16-bit floats are
    reduced in float32. Each array is read only once.

    The same array may be in both `arrays` and `outs`. If `wire` is not None, values are rounded to this dtype before
    they are combined. The result is rounded to this dtype too, but only if `outs` contains several arrays."""
    ufunc, first = get_ufunc(op), outs[0]
    xp = np if type(first) is np.ndarray else namespace_of(first)
    block_size = BLOCK_ELEMENTS if xp is np else max(first.size, 1)
    half = is_half(first.dtype)
    pair = len(arrays) == 2 and not half and op is not ReduceOp.AVG and wire is None
    if pair and (len(outs) == 1 or first.size <= block_size):
        _combine_pair_into(ufunc, arrays, outs)
        return
    total = xp.empty(0 if pair else min(block_size, first.size), dtype=np.float32 if half else first.dtype)
    with np.errstate(all="ignore"):
        for start in range(0, first.size, block_size):
            block = slice(start, min(start + block_size, first.size))
            if pair:
                sums = ufunc(arrays[0][block], arrays[1][block], out=first[block])
            else:
                sums = total[: block.stop - start]
                _copy_converted_into(xp, _round_to_wire(arrays[0][block], wire), sums)
                for array in arrays[1:]:
                    _combine_elementwise_into(xp, ufunc, _round_to_wire(array[block], wire), sums)
                if op is ReduceOp.AVG:
                    sums /= len(arrays)
                _copy_converted_into(xp, _round_to_wire(sums, wire if len(outs) > 1 else None), first[block])
            for out in outs[1:]:
                out[block] = first[block]


def _combine_pair_into(ufunc: np.ufunc, arrays: Sequence[Array], outs: Sequence[Array]) -> None:
    """Combine two arrays in one pass, without temporary arrays. This case has its own function because it is the most
    frequent one, often with small arrays."""
    with np.errstate(all="ignore"):
        ufunc(arrays[0], arrays[1], out=outs[0])
    for out in outs[1:]:
        out[...] = outs[0]


def _round_to_wire(x: Array, wire: Any) -> Array:
    return x if wire is None else cast_float_to_dtype(np, x, wire)


def _copy_converted_into(xp: Any, x: Array, out: Array) -> None:
    """Copy x to `out`, and convert from or to 16-bit floats if the dtypes differ."""
    if x.dtype == out.dtype:
        out[...] = x
    else:
        store(xp, x, out)


def _combine_elementwise_into(xp: Any, ufunc: np.ufunc, x: Array, total: Array) -> None:
    """Combine x into `total` in place. x may have a 16-bit dtype."""
    if ufunc is np.add and x.dtype != total.dtype:
        add_widened(xp, x, total)
    else:
        ufunc(total, x.astype(total.dtype, copy=False), out=total)
