"""8-bit quantization of gradients, with one scale per block of 256 elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.random import NumberRange
from fsdpx.core.comm.calls import Array
from fsdpx.ext.compression.compressed import MAX_REDUCES, SIZE_MULTIPLE_BYTES, CompressedCodec
from fsdpx.ext.compression.implementations import BLOCK_ELEMENTS, LARGEST, LEVELS, TINY, can_run_compiled_kernels

__all__ = ["Int8", "dequantize_into", "quantize"]


def quantize(xp: Any, x: Any, q: Any, scales: Any, residual: Any | None, numbers: NumberRange | None) -> None:
    """Quantize a flat float array to int8 in blocks of 256 elements: q = x / scale, where scale is max |x| / 127 of
    the block.

    `scales` receives one float32 per block. The scale is 0 if all elements of the block are zero or tiny. If any
    element of the block is Inf or NaN, the scale is NaN, and q is 0 in the whole block. `residual`, which may be x
    itself, receives the error x - q * scale, or 0 where the error is not finite. `numbers` are random numbers for
    stochastic rounding: element i is rounded up with a probability equal to its fractional part. If `numbers` is None,
    elements are rounded to nearest."""
    if can_run_compiled_kernels(xp):
        from fsdpx.ext.compression.compiled import quantize as body

        body(x, q, scales, residual, numbers)
        return
    blocks = _split_into_blocks(xp, x)
    largest = xp.max(xp.abs(blocks), axis=1)
    fits = largest <= LARGEST
    scale = xp.where(fits, xp.where(fits, largest, 0) / LEVELS, xp.nan).astype(np.float32)
    scale = xp.where(scale < TINY, np.float32(0), scale)
    chance: Any = x.dtype.type(0.5)
    if numbers is not None:
        chance = _split_into_blocks(xp, (xp.asarray(numbers.make_16bit_numbers()) * 2.0**-16).astype(x.dtype))
    with np.errstate(divide="ignore", invalid="ignore"):
        level = xp.clip(xp.floor(blocks / scale[:, None] + chance), -LEVELS, LEVELS)
    level = xp.where(scale[:, None] > 0, level, x.dtype.type(0))
    if residual is not None:
        with np.errstate(invalid="ignore"):
            rest = xp.where(fits[:, None], blocks - level * scale[:, None], x.dtype.type(0))
        residual[...] = rest.reshape(-1)[: x.size]
    q[...] = level.reshape(-1)[: x.size].astype(np.int8)
    scales[...] = scale


def dequantize_into(xp: Any, q: Any, scales: Any, out: Any, add: bool) -> None:
    """Write q * scale to `out`, or add it to `out` if `add` is true. `q` and `scales` are results of `quantize`."""
    if can_run_compiled_kernels(xp):
        from fsdpx.ext.compression.compiled import dequantize_into as body

        body(q, scales, out, add)
        return
    found = (_split_into_blocks(xp, q).astype(out.dtype) * scales[:, None]).reshape(-1)[: q.size]
    out[...] = out + found if add else found


def _split_into_blocks(xp: Any, x: Any) -> Any:
    """Return a copy of `x` as a matrix (blocks, 256), padded with zeros."""
    full = xp.zeros((-(-x.size // BLOCK_ELEMENTS), BLOCK_ELEMENTS), dtype=x.dtype)
    full.reshape(-1)[: x.size] = x
    return full


class Int8(CompressedCodec):
    """Codec that sends gradients as 8-bit integers with one float32 scale per 256 elements. The result takes about a
    quarter as many bytes as float32.

    A part of n elements takes n + 4 ceil(n/256) bytes, padded to a multiple of 8.

    Parameters
    ----------
    unbiased : if True, round up or down at random so that the expected value is exact (QSGD, Alistarh et al. 2017), and
        keep no error; if False (default), round to nearest, and add the error to the next gradient
    """

    def __init__(self, unbiased: bool = False) -> None:
        self.random, self.feedback = bool(unbiased), not unbiased

    def packed_bytes(self, size: int, step: int = MAX_REDUCES) -> int:
        return -(-(size + 4 * -(-size // BLOCK_ELEMENTS)) // SIZE_MULTIPLE_BYTES) * SIZE_MULTIPLE_BYTES

    def pack_part(
        self, xp: Any, x: Array, wire: Array, residual: Array | None, step: int, numbers: NumberRange
    ) -> None:
        quantize(xp, x, *self._split_packed_part(wire, x.size), residual, numbers if self.random else None)

    def unpack_part(self, xp: Any, wire: Array, out: Array, add: bool, step: int) -> None:
        dequantize_into(xp, *self._split_packed_part(wire, out.size), out, add)

    def _split_packed_part(self, wire: Array, size: int) -> tuple[Array, Array]:
        """Return views of the int8 numbers and of the scales in a packed part. The scales come first in the part."""
        scales = 4 * -(-size // BLOCK_ELEMENTS)
        wire[scales + size :] = 0
        return wire[scales : scales + size].view(np.int8), wire[:scales].view(np.float32)
