"""Philox 4x64 (Salmon et al., SC'11) as compiled code, with the bits of `array.random`."""

import numpy as np

from fsdpx.array.kernels.compiled.scalar import product_high
from fsdpx.native.compiled import jit
from fsdpx.native.late import register_jitable

__all__ = ["raws"]

ROUNDS, WORDS = 10, 4
FACTOR0, FACTOR1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
WEYL0, WEYL1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


@register_jitable
def _philox(counter, key0, key1):
    """The four numbers of one step of the counter."""
    a, b, c, d = counter, np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(ROUNDS):
        high0, low0 = product_high(FACTOR0, a), FACTOR0 * a
        high1, low1 = product_high(FACTOR1, c), FACTOR1 * c
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0 += WEYL0
        key1 += WEYL1
    return a, b, c, d


@jit
def raws(out, start, key0, key1):
    """out[i] = number start + i of the stream, uint64."""
    at = np.uint64(start)
    counter, ahead = (at >> np.uint64(2)) + np.uint64(1), np.int64(at & np.uint64(3))
    done = 0
    if ahead > 0:
        numbers = _philox(counter, key0, key1)
        done = min(WORDS - ahead, out.size)
        for n in range(done):
            out[n] = numbers[ahead + n]
        counter += np.uint64(1)
    steps = (out.size - done) // WORDS
    for n in range(steps):
        a, b, c, d = _philox(counter + np.uint64(n), key0, key1)
        i = done + WORDS * n
        out[i], out[i + 1], out[i + 2], out[i + 3] = a, b, c, d
    done += WORDS * steps
    if done < out.size:
        numbers = _philox(counter + np.uint64(steps), key0, key1)
        for n in range(out.size - done):
            out[done + n] = numbers[n]
