"""Counter-based random numbers: element i of the stream (seed, name) depends only on seed, name and i.

Any rank can generate any range of any stream independently, so initialization and dropout do not depend on how work is
sharded. The generator is Philox 4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from fsdpx.core.base.dataclass import dataclass, field

__all__ = [
    "NumberRange", "NumberRows", "NumberSubarray", "Random", "TrainingMoment", "generate_raw_numbers", "normal",
    "random_permutation", "uniform",
]  # fmt: skip

PIECE_ELEMENTS = 1 << 16  # number of elements generated at a time, so that temporaries stay in cache
MIN_RUN_ELEMENTS = 1024  # minimum number of consecutive elements for which a separate call of the generator pays off
WORD_MASK = 0xFFFFFFFF
MIX = (0x7FEB352D, 0x846CA68B)
WORDS_PER_STEP = 4  # number of 64-bit numbers that Philox generates from one counter value


def generate_raw_numbers(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Return the 64-bit random numbers with indices [start, stop) in the stream (seed, name), as uint64."""
    if not 0 <= start <= stop:
        raise ValueError(f"random numbers [{start}, {stop}) of {name!r}: a range must be 0 <= start <= stop")
    first = start // WORDS_PER_STEP
    raws = np.random.Philox(key=_make_key(seed, name), counter=first).random_raw(stop - first * WORDS_PER_STEP)
    return raws[start - first * WORDS_PER_STEP :]


def uniform(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Return the random numbers with indices [start, stop) in the stream (seed, name), as float64 in [0, 1). Each
    number is made from the top 53 bits of a 64-bit random number."""
    return _make_in_pieces(start, stop, np.float64, lambda a, b: _to_fractions(generate_raw_numbers(seed, name, a, b)))


def normal(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Return normal random numbers with indices [start, stop) in the stream (seed, name), as float64 with mean 0 and
    variance 1. Number i is computed from the 64-bit numbers 2i and 2i + 1.

    The formula is `sqrt(-2 * log(u)) * cos(2 * pi * v)` (Box and Muller, 1958), where u and v are made from the two
    64-bit numbers. For some elements, NumPy and the compiled code compute different last bits. NumPy's last bits also
    differ between processors.
    """
    from fsdpx.core.array.kernels.choice import find_compiled_kernel

    body = find_compiled_kernel("normal")
    if body is not None:
        return body(_require_valid_range(NumberRange(seed, name, start, stop)))

    def make_piece(a: int, b: int) -> np.ndarray:
        pairs = _to_fractions(generate_raw_numbers(seed, name, 2 * a, 2 * b)).reshape(-1, 2)
        radius = np.sqrt(-2.0 * np.log(1.0 - pairs[:, 0]))  # 1 - u is in (0, 1], so its logarithm is finite
        return radius * np.cos(2.0 * np.pi * pairs[:, 1])

    return _make_in_pieces(start, stop, np.float64, make_piece)


def random_permutation(seed: int, name: str, n: int) -> np.ndarray:
    """Return the numbers 0 to n - 1 in random order, as int64. They are the indices that sort the first n 64-bit
    numbers of the stream (seed, name)."""
    return np.argsort(generate_raw_numbers(seed, name, 0, n), kind="stable")


@dataclass
class TrainingMoment:
    """The current step (`step`), and the position of the microbatch's first sample in the global batch (`row`). All
    layers share one instance, which is updated in place, so they all see the current values.

    Attributes
    ----------
    on_numbers : function (numbers, repeat) that is called whenever a layer requests random numbers, or None. `numbers`
        are the requested random numbers. `repeat()` makes the same request again in a later step, and returns the
        random numbers for that step
    """

    step: int = 0
    row: int = 0
    on_numbers: Callable[[Any, Callable[[], Any]], None] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, init=False)
class Random:
    """Random numbers of one layer, determined by a seed, the layer's path, the step and the sample."""

    seed: int
    path: str
    moment: TrainingMoment

    def __init__(
        self, seed: int, path: str = "", step: int = 0, row: int = 0, moment: TrainingMoment | None = None
    ) -> None:
        """Use the given `moment` (current step and index of the first sample), which may be shared with other layers.
        If it is None, create a new one from `step` and `row` (the index of the first sample)."""
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "moment", moment or TrainingMoment(step, row))

    def child(self, name: str) -> Random:
        """Return the random numbers of the child layer `name`. Its path is the path of this layer followed by `name`.
        The path of the root layer is empty."""
        path = f"{self.path}.{name}" if self.path and name else self.path or name
        return Random(self.seed, path, moment=self.moment)

    def get_number_range(self, shape: tuple[int, ...]) -> NumberRange:
        """Return the range of random numbers for an array of `shape` whose dim 0 is the sample dim. Element (i, j) uses
        number `(moment.row + i) * prod(shape[1:]) + j` of the stream."""
        width = math.prod(shape[1:])
        start = self.moment.row * width
        numbers = NumberRange(self.seed, f"{self.path}@{self.moment.step}", start, start + shape[0] * width)
        return self._report_numbers(numbers, self.get_number_range, shape)

    def get_number_subarray(self, shape: tuple[int, ...], slices: Mapping[int, tuple[int, int]]) -> NumberSubarray:
        """Return the random numbers for an array of `shape` that is a part of a larger array. They are the numbers that
        `get_number_range` returns for the same elements of the larger array.

        `slices` maps each dim in which the part is smaller to a pair: the index at which the part begins, and the size
        of the larger array in this dim. Dim 0 must not be among them. Indices outside the larger array wrap around.
        """
        starts, whole = [0] * len(shape), list(shape)
        for dim, (start, total) in slices.items():
            starts[dim], whole[dim] = start, total
        starts[0] = self.moment.row
        name = f"{self.path}@{self.moment.step}"
        numbers = NumberSubarray(self.seed, name, tuple(shape), tuple(starts), tuple(whole))
        return self._report_numbers(numbers, self.get_number_subarray, shape, slices)

    def get_numbers_for_rows_of_array(self, shape: tuple[int, ...], rows: np.ndarray, total: int) -> NumberRows:
        """Return the random numbers for an array of `shape` whose dim 1 consists of some rows of a larger array. `rows`
        holds the indices of these rows, in any order. Each element gets the random number that `get_number_range`
        returns for the same element of the larger array.

        `total` is the number of rows of the larger array.
        """
        numbers = NumberRows(self.seed, f"{self.path}@{self.moment.step}", tuple(shape), self.moment.row, rows, total)
        return self._report_numbers(numbers, self.get_numbers_for_rows_of_array, shape, rows, total)

    def _report_numbers(self, numbers: Any, make_again: Callable[..., Any], *given: Any) -> Any:
        if self.moment.on_numbers is not None:
            self.moment.on_numbers(numbers, partial(make_again, *given))
        return numbers

    def uniform(self, xp: Any, shape: tuple[int, ...]) -> Any:
        """Return an array of this shape with random float32 numbers in [0, 1), on the device of `xp`. Dim 0 is the
        sample dim."""
        return self.get_number_range(shape).make_fractions(xp).reshape(shape)


@dataclass(frozen=True)
class NumberRange:
    """The random numbers with indices [start, stop) in the counter-based stream that (seed, name) identifies."""

    seed: int
    name: str
    start: int
    stop: int

    @property
    def keys(self) -> tuple[np.uint64, np.uint64]:
        """The two 64-bit words of the Philox generator's key."""
        key = _make_key(self.seed, self.name)
        return np.uint64(key & 0xFFFFFFFFFFFFFFFF), np.uint64(key >> 64)

    def iterate_runs_of_equal_upper_word(self) -> Iterator[tuple[slice, int, int, int]]:
        """Split the range into runs of consecutive positions with the same upper 32 bits. For each run, yield a slice
        (the run's place in this range), the lower 32 bits of the run's first position, and two 32-bit keys. The random
        number of a position depends on the keys and on the lower 32 bits of the position."""
        key0, key1 = (int(key) & WORD_MASK for key in self.keys)
        position = self.start
        while position < self.stop:
            end = min(self.stop, (position | WORD_MASK) + 1)
            yield slice(position - self.start, end - self.start), position & WORD_MASK, key0, key1 ^ (position >> 32)
            position = end

    def make_16bit_numbers(self) -> np.ndarray:
        """Return random 16-bit numbers, one per position, as uint32.

        Each number consists of the upper bits of `mix(mix(position ^ key0) ^ key1)`, where mix is the 32-bit mixing
        function from C. Wellons' "hash prospector". The mixing function is faster than Philox, and random enough for
        stochastic rounding.
        """
        numbers = np.empty(self.stop - self.start, np.uint32)
        for offset, start, key0, key1 in self.iterate_runs_of_equal_upper_word():
            places = np.arange(start, start + (offset.stop - offset.start), dtype=np.uint64).astype(np.uint32)
            numbers[offset] = _mix_words(_mix_words(places ^ np.uint32(key0)) ^ np.uint32(key1)) >> np.uint32(16)
        return numbers

    def make_fractions(self, xp: Any) -> Any:
        """Return the random numbers as a 1-D float32 array in [0, 1) on the device of `xp`. Each number is made from
        the top 24 bits of a 64-bit random number."""
        if getattr(xp, "holds_no_data", False):
            return xp.empty((self.stop - self.start,), dtype=np.float32)

        def make_piece(a: int, b: int) -> np.ndarray:
            return (generate_raw_numbers(self.seed, self.name, a, b) >> np.uint64(40)).astype(np.float32) * np.float32(
                2.0**-24
            )

        return xp.asarray(_make_in_pieces(self.start, self.stop, np.float32, make_piece))


@dataclass(frozen=True)
class NumberSubarray:
    """Random numbers of the counter-based stream (seed, name) for an array of shape `shape`, which is a part of a
    larger array of shape `whole`.

    Element (i, j, ...) of the part has the random number of element (starts[0] + i, starts[1] + j, ...) of the larger
    array, whose elements are numbered in C order. Indices outside the larger array wrap around. The size of the larger
    array in the sample dim, `whole[0]`, does not affect the random numbers.
    """

    seed: int
    name: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    whole: tuple[int, ...]

    def make_fractions(self, xp: Any) -> Any:
        """Return the numbers as a float32 array in [0, 1) of shape `shape`, on the device of `xp`."""
        if getattr(xp, "holds_no_data", False):
            return xp.empty(self.shape, dtype=np.float32)
        for dim, (start, size, total) in enumerate(zip(self.starts, self.shape, self.whole, strict=True)):
            if dim and not 0 <= start <= start + size <= total:
                starts, shape = list(self.starts), list(self.shape)
                starts[dim], shape[dim] = 0, total
                full = NumberSubarray(self.seed, self.name, tuple(shape), tuple(starts), self.whole)
                return xp.asarray(full.make_fractions(np).take(np.arange(start, start + size) % total, dim))
        out, lead = np.empty(self.shape, np.float32), self._find_first_dim_generated_per_call()
        size = math.prod(self.whole[lead + 1 :])
        beyond = tuple(slice(a, a + n) for a, n in zip(self.starts[lead + 1 :], self.shape[lead + 1 :], strict=True))
        for place in np.ndindex(*self.shape[:lead]):
            row = 0
            for dim, index in enumerate((*place, 0)):
                row = row * self.whole[dim] + self.starts[dim] + index
            numbers = NumberRange(self.seed, self.name, row * size, (row + self.shape[lead]) * size).make_fractions(np)
            out[place] = numbers.reshape(self.shape[lead], *self.whole[lead + 1 :])[(slice(None), *beyond)]
        return xp.asarray(out)

    def _find_first_dim_generated_per_call(self) -> int:
        """Return the first of the dims whose numbers are generated in a single call. A loop runs over the dims before
        it. In each iteration, one call generates all numbers along this dim and the dims after it; numbers outside the
        part are dropped."""
        cut = [d for d in range(1, len(self.shape)) if self.shape[d] != self.whole[d]]
        if not cut:
            return 0
        if math.prod(self.shape[cut[-1] :]) >= MIN_RUN_ELEMENTS:
            return cut[-1]
        return cut[0] if len(cut) > 1 else cut[0] - 1


@dataclass(frozen=True)
class NumberRows:
    """Random numbers of the counter-based stream (seed, name), for some rows of a larger array.

    Element (i, j, ...) has the random number of element (first_sample + i, rows[j], ...) of the larger array, whose
    elements are numbered in C order. Dim 1 of the larger array has `total` rows.
    """

    seed: int
    name: str
    shape: tuple[int, ...]
    first_sample: int
    rows: np.ndarray
    total: int

    def make_fractions(self, xp: Any) -> Any:
        """Return the numbers as a float32 array in [0, 1) of shape `shape`, on the device of `xp`.

        If several rows are close to each other, a single call generates the random numbers for all of them, and also
        those for the rows in between, which are discarded."""
        if getattr(xp, "holds_no_data", False):
            return xp.empty(self.shape, dtype=np.float32)
        out, width = np.empty(self.shape, np.float32), max(math.prod(self.shape[2:]), 1)
        order = np.argsort(self.rows, kind="stable")
        rows = self.rows[order]
        is_apart = np.diff(rows) > max(MIN_RUN_ELEMENTS // width, 1)
        is_apart |= np.diff(rows // max(PIECE_ELEMENTS // width, 1)) > 0
        ends = [0, *(np.flatnonzero(is_apart) + 1).tolist(), rows.size] if rows.size else [0]
        for sample in range(self.shape[0]):
            first = (self.first_sample + sample) * self.total
            for a, b in itertools.pairwise(ends):
                start, stop = first + int(rows[a]), first + int(rows[b - 1]) + 1
                numbers = NumberRange(self.seed, self.name, start * width, stop * width).make_fractions(np)
                out[sample, order[a:b]] = numbers.reshape(-1, *self.shape[2:])[rows[a:b] - rows[a]]
        return xp.asarray(out)


def _make_key(seed: int, name: str) -> int:
    """Return the 128-bit key of the stream (seed, name). In the hashed text, the seed and the name are separated by a
    zero byte, which neither of them contains."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest(), "little")


def _mix_words(words: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, MIX[0]), (15, MIX[1])):
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return words ^ (words >> np.uint32(16))


def _to_fractions(raws: np.ndarray) -> np.ndarray:
    return (raws >> np.uint64(11)) * 2.0**-53


def _require_valid_range(numbers: NumberRange) -> NumberRange:
    if not 0 <= numbers.start <= numbers.stop:
        raise ValueError(f"random numbers [{numbers.start}, {numbers.stop}): a range must be 0 <= start <= stop")
    return numbers


def _make_in_pieces(start: int, stop: int, dtype: Any, piece: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Return `piece(start, stop)`, computed in parts of at most `PIECE_ELEMENTS` elements so that temporaries stay in
    cache."""
    _require_valid_range(NumberRange(0, "", start, stop))
    out = np.empty(stop - start, dtype)
    for a in range(start, stop, PIECE_ELEMENTS):
        b = min(a + PIECE_ELEMENTS, stop)
        out[a - start : b - start] = piece(a, b)
    return out
