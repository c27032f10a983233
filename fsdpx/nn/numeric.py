"""Products and sums that accumulate 16-bit arrays in float32."""

from typing import Any

import numpy as np

__all__ = ["add_product", "add_sum", "is_index", "product", "wide"]


def wide(dtype: Any) -> np.dtype:
    """The dtype in which values of `dtype` are added: float32 for 16-bit floats, else itself."""
    return np.dtype(np.float32) if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


def is_index(x: Any) -> bool:
    """Integers and booleans carry no gradient."""
    return np.dtype(x.dtype).kind in "iub"


def product(xp: Any, a: Any, b: Any) -> Any:
    """`a @ b` in the dtype of `a`."""
    if np.dtype(a.dtype).itemsize != 2:
        return xp.matmul(a, b)
    return xp.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)


def add_product(xp: Any, out: Any, a: Any, b: Any) -> None:
    """`out += a @ b` for 2-D arrays; the sum is rounded once."""
    dtype = wide(a.dtype)
    out += xp.matmul(a.astype(dtype, copy=False), b.astype(dtype, copy=False))


def add_sum(xp: Any, out: Any, a: Any, dim: int | tuple[int, ...]) -> None:
    """`out += a.sum(dim)`; the sum is rounded once."""
    out += xp.sum(a, axis=dim, dtype=wide(a.dtype))
