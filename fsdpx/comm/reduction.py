"""How values are combined: which operations fit which dtypes, and sums in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fsdpx.comm.communicator import Array, ReduceOp
from fsdpx.errors import ConfigError

__all__ = ["combine", "is_half", "kind_of", "objection", "reduce_in_order"]

_KINDS = {
    "float64": "float",
    "float32": "float",
    "float16": "half",
    "bfloat16": "half",
    "int32": "integer",
    "int64": "integer",
    "uint8": "integer",
    "uint64": "integer",
    "bool": "bool",
}
_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
}


@lru_cache(maxsize=64)
def kind_of(dtype: np.dtype) -> str:
    """ "float", "half", "integer" or "bool"; ConfigError for a dtype that communicators do not move."""
    kind = _KINDS.get(dtype.name)
    if kind is None or not dtype.isnative:
        raise ConfigError(f"dtype {dtype.str} ({dtype.name}) cannot be communicated: use one of {', '.join(_KINDS)}")
    return kind


def is_half(dtype: np.dtype) -> bool:
    """Whether arrays of `dtype` are added in float32."""
    return kind_of(dtype) == "half"


def combine(op: ReduceOp) -> np.ufunc:
    """The ufunc that combines two values; AVG combines like SUM and is divided at the end."""
    return _UFUNCS[op]


def objection(op: ReduceOp, dtype: np.dtype) -> str | None:
    """Why `op` has no meaning for `dtype`, or None."""
    if op is ReduceOp.AVG and kind_of(dtype) in ("integer", "bool"):
        return f"AVG of {dtype.name} would not be {dtype.name}: use SUM, or a float array"
    return None


def reduce_in_order(arrays: Sequence[Array], op: ReduceOp, out: Array) -> None:
    """`out` = arrays[0] op arrays[1] op ... in that order, 16-bit in float32. `out` may be one of them."""
    ufunc = combine(op)
    wide = np.dtype(np.float32) if is_half(out.dtype) else out.dtype
    with np.errstate(all="ignore"):
        total = arrays[0].astype(wide)
        for array in arrays[1:]:
            ufunc(total, array.astype(wide, copy=False), out=total)
        if op is ReduceOp.AVG:
            total /= len(arrays)
        out[...] = total
