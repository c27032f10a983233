"""Images with the channels of a pixel next to each other in memory: (samples, height, width, channels)."""

import math
from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.arrays import owned
from fsdpx.array.parallel import over
from fsdpx.native.compiled import jit

__all__ = ["channels_first", "channels_last", "put_channels_first", "rows_first", "rows_of"]

BLOCK = 64  # pixels of a block that is turned inside the cache


@jit
def _turn(x, out, add):
    """out[n, p, c] (+)= x[n, c, p]."""
    for n in range(x.shape[0]):
        for start in range(0, x.shape[2], BLOCK):
            stop = min(start + BLOCK, x.shape[2])
            for p in range(start, stop):
                for c in range(x.shape[1]):
                    if add:
                        out[n, p, c] += x[n, c, p]
                    else:
                        out[n, p, c] = x[n, c, p]


def channels_last(x: np.ndarray) -> np.ndarray:
    """(samples, channels, height, width) as (samples, height, width, channels), contiguous; copied where needed."""
    turned = x.transpose(0, 2, 3, 1)
    if turned.flags.c_contiguous:
        return owned(turned)
    x = owned(x)
    n, channels, height, width = x.shape
    out = np.empty((n, height, width, channels), x.dtype)
    pixels = height * width
    over(_turn, (x.reshape(n, channels, pixels), out.reshape(n, pixels, channels)), False)
    return out


def channels_first(rows: np.ndarray) -> np.ndarray:
    """(samples, height, width, channels) as (samples, channels, height, width): a view."""
    return rows.transpose(0, 3, 1, 2)


def put_channels_first(into: Any, rows: np.ndarray) -> None:
    """Write or add an array with channels last to where a gradient with channels first goes."""
    out, add = into
    n, height, width, channels = rows.shape
    if out.dtype == rows.dtype and out.flags.c_contiguous and out.flags.aligned:
        over(_turn, (rows.reshape(n, height * width, channels), out.reshape(n, channels, height * width)), add)
    elif add:
        out += channels_first(rows).astype(out.dtype)
    else:
        out[...] = channels_first(rows)


def rows_of(x: np.ndarray) -> np.ndarray:
    """(samples, channels, ...) as rows of channels, one per sample and place, contiguous."""
    if x.ndim == 2:
        return owned(x)
    flat = x if x.ndim == 4 else x.reshape(*x.shape[:2], math.prod(x.shape[2:]), 1)
    return channels_last(flat).reshape(x.shape[0] * math.prod(x.shape[2:]), x.shape[1])


def rows_first(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of channels as (samples, channels, ...): a view."""
    return np.moveaxis(rows.reshape(shape[0], *shape[2:], shape[1]), -1, 1)
