"""The gradient of looking up rows of a table."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.dispatch import kernel

__all__ = ["embedding_backward"]


@kernel(narrow=0, into=("gw",))
def embedding_backward(xp: Any, gw: Any, index: Any, dy: Any) -> None:
    """Adds row i of dy (n, d) into row index[i] of gw (rows, d), always in the same order.

    16-bit gw: the sum is made in float32 and rounded once."""
    wide = xp.zeros(gw.shape, dtype=np.float32) if gw.dtype.itemsize == 2 else gw
    if xp.__name__ == "cupy":
        _add_sorted(xp, wide, index, dy)  # its `add.at` adds in the order in which threads arrive
    else:
        xp.add.at(wide, index, _as(dy, wide.dtype))
    if wide is not gw:
        gw += wide


def _add_sorted(xp: Any, gw: Any, index: Any, dy: Any) -> None:
    """Sort by row, sum runs of equal rows by doubling steps (Hillis and Steele 1986), add each run's last row."""
    order = xp.argsort(index, kind="stable")
    rows, sums = index[order], _as(dy[order], gw.dtype)
    step = 1
    while step < rows.shape[0]:
        same = (rows[step:] == rows[:-step])[:, None]
        sums = xp.concatenate([sums[:step], sums[step:] + xp.where(same, sums[:-step], 0)])
        step *= 2
    last = xp.concatenate([rows[1:] != rows[:-1], xp.ones(min(1, rows.shape[0]), dtype=bool)])
    gw[rows[last]] += sums[last]


def _as(array: Any, dtype: Any) -> Any:
    return array.astype(dtype, copy=False)
