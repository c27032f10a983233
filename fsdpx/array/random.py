"""Counter-based random numbers: element i of the stream (seed, name) is a function of the three and nothing else.

Any rank can make any range of any stream alone, so initialisation and dropout do not see how work is cut.
Generator: Philox 4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Moment", "Random", "block", "normal", "permutation", "uniform"]

PIECE = 1 << 16  # elements made at a time: temporaries stay in cache and do not grow with the range
WORDS = 4  # raw numbers per step of Philox's counter


def block(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Raw numbers [start, stop) of the stream, uint64."""
    if not 0 <= start <= stop:
        raise ValueError(f"random numbers [{start}, {stop}) of {name!r}: a range must be 0 <= start <= stop")
    first = start // WORDS
    raws = np.random.Philox(key=_key(seed, name), counter=first).random_raw(stop - first * WORDS)
    return raws[start - first * WORDS :]


def uniform(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop), float64 in [0, 1): element i is the top 53 bits of raw number i."""
    return _in_pieces(start, stop, np.float64, lambda a, b: _fraction(block(seed, name, a, b)))


def normal(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop), float64, mean 0, variance 1: element i is made of raw numbers 2i and 2i + 1.

    sqrt(-2 log u) cos(2 pi v) (Box and Muller, 1958).
    """

    def piece(a: int, b: int) -> np.ndarray:
        pairs = _fraction(block(seed, name, 2 * a, 2 * b)).reshape(-1, 2)
        radius = np.sqrt(-2.0 * np.log(1.0 - pairs[:, 0]))  # 1 - u lies in (0, 1]
        return radius * np.cos(2.0 * np.pi * pairs[:, 1])

    return _in_pieces(start, stop, np.float64, piece)


def permutation(seed: int, name: str, n: int) -> np.ndarray:
    """The numbers 0 to n - 1 in random order, int64: the order of the first n raw numbers of the stream."""
    return np.argsort(block(seed, name, 0, n), kind="stable")


@dataclass
class Moment:
    """Where a run is: the step, and the global index of sample 0 of the microbatch. Moves on for all that share it."""

    step: int = 0
    row: int = 0


@dataclass(frozen=True, init=False)
class Random:
    """The random numbers a layer sees: of one seed, layer path and moment."""

    seed: int
    path: str
    moment: Moment

    def __init__(self, seed: int, path: str = "", step: int = 0, row: int = 0, moment: Moment | None = None) -> None:
        """step and row begin a moment of their own; moment is one that is shared."""
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "moment", moment or Moment(step, row))

    def at(self, name: str) -> Random:
        """The numbers of child `name`; the root's path is empty."""
        path = f"{self.path}.{name}" if self.path and name else self.path or name
        return Random(self.seed, path, moment=self.moment)

    def uniform(self, xp: Any, shape: tuple[int, ...]) -> Any:
        """float32 in [0, 1) on the device of `xp`; dim 0 of `shape` is samples.

        Element (i, j) is number `(moment.row + i) * prod(shape[1:]) + j` of the stream, its top 24 bits.
        """
        if getattr(xp, "holds_no_data", False):
            return xp.empty(shape, dtype=np.float32)
        width = math.prod(shape[1:])
        name, start = f"{self.path}@{self.moment.step}", self.moment.row * width

        def piece(a: int, b: int) -> np.ndarray:
            return (block(self.seed, name, a, b) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)

        return xp.asarray(_in_pieces(start, start + shape[0] * width, np.float32, piece).reshape(shape))


def _key(seed: int, name: str) -> int:
    """128 bits; seed and name are told apart by a byte that neither holds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest(), "little")


def _fraction(raws: np.ndarray) -> np.ndarray:
    return (raws >> np.uint64(11)) * 2.0**-53


def _in_pieces(start: int, stop: int, dtype: Any, piece: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """`piece(start, stop)`, made PIECE elements at a time."""
    if not 0 <= start <= stop:
        raise ValueError(f"random numbers [{start}, {stop}): a range must be 0 <= start <= stop")
    out = np.empty(stop - start, dtype)
    for a in range(start, stop, PIECE):
        b = min(a + PIECE, stop)
        out[a - start : b - start] = piece(a, b)
    return out
