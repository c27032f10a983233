"""The largest elements of each block of an array, see `codecs.blocks`: the same bits."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.scalar import widest
from fsdpx.array.parallel import GRAIN, cuts, run
from fsdpx.native.tools import jit

__all__ = ["add_largest", "take_largest"]

NEAR = 32
"""Elements that are passed over together where none is large."""
HIGHEST = 30
"""The highest bit of a size."""
MANY = 1 << 12
"""Elements of a block from which on a library finds the least of its largest sooner."""


@jit
def _least(sizes, count, k):
    """The largest number such that k sizes or more are no smaller, bit by bit; fewer bits where those are just k."""
    least = np.int32(0)
    for step in range(HIGHEST + 1):
        trial = least | np.int32(1 << (HIGHEST - step))
        reach = np.int32(0)
        for i in range(count):
            reach += np.int32(sizes[i] >= trial)
        if reach >= k:
            least = trial
            if reach == k:
                break
    return least


@jit
def _take(first, last, all_x, block, each, rest, known, values, places, keep):
    widest()
    sizes = np.empty(block, np.int32)
    small = np.empty(block, np.float32)
    mask = np.int32(0x7FFFFFFF)
    for b in range(first, last):
        x = all_x[b * block : (b + 1) * block]  # places from 0 on: LLVM sees that they follow each other
        count = x.size
        k = each if count == block else rest
        if k == 0:
            continue
        for i in range(count):
            small[i] = np.float32(x[i])
        bits = small.view(np.int32)
        for i in range(count):
            sizes[i] = bits[i] & mask
        least = known if known >= 0 else _least(sizes, count, k)
        equals = k
        for i in range(count):
            equals -= sizes[i] > least
        at = b * each
        odd = False
        for begin in range(0, count, NEAR):
            end = min(begin + NEAR, count)
            some = np.int32(0)
            for i in range(begin, end):
                some += np.int32(sizes[i] >= least)
            if some == 0:
                continue
            for i in range(begin, end):
                if sizes[i] < least:
                    continue
                if sizes[i] == least:
                    if equals == 0:
                        continue
                    equals -= 1
                value = small[i]
                values[at] = value
                places[at] = i
                at += 1
                odd |= not np.isfinite(value)
                if keep:
                    x[i] -= value
        if keep and odd:
            for i in range(count):
                if not np.isfinite(x[i]):
                    x[i] = 0


@jit
def _add(first, last, values, places, block, each, rest, out):
    for b in range(first, last):
        start = b * block
        k = each if start + block <= out.size else rest
        for j in range(b * each, b * each + k):
            out[start + places[j]] += values[j]


def take_largest(
    x: np.ndarray, block: int, each: int, rest: int, values: np.ndarray, places: np.ndarray, lost: np.ndarray | None
) -> None:
    """each, rest: how many are taken of a whole block, and of what is left."""
    if lost is not None and lost is not x:
        lost[...] = x
    left = x if lost is None else lost
    known = _least_of_all(left, each) if x.size == block > MANY else np.int32(-1)
    _in_blocks(_take, x.size, block, left, block, each, rest, known, values, places, lost is not None)


def _least_of_all(x: np.ndarray, k: int) -> np.int32:
    """The same of all elements. Most of them may be zeros, as in sums of what was chosen before: those are left out,
    since equals are what takes long."""
    with np.errstate(over="ignore", under="ignore"):
        sizes = x.astype(np.float32, copy=False).view(np.int32) & np.int32(0x7FFFFFFF)
    if np.count_nonzero(sizes) < x.size // 2:
        sizes = sizes[sizes > 0]
    return np.partition(sizes, sizes.size - k)[sizes.size - k] if k <= sizes.size else np.int32(0)


def add_largest(values: np.ndarray, places: np.ndarray, block: int, each: int, rest: int, out: np.ndarray) -> None:
    _in_blocks(_add, out.size, block, values, places, block, each, rest, out)


def _in_blocks(body: Any, size: int, block: int, *arguments: Any) -> None:
    """`body(first, last, *arguments)` for all blocks, cut among threads."""
    run(body, [(first, last, *arguments) for first, last in cuts(-(-size // block), max(GRAIN // block, 1), 1)])
