"""Global batches, whole: which part of one a rank trains on, and those of the last steps, which may have to be made
again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fsdpx.state.accumulation import Accumulation

__all__ = ["Batch", "Recent", "arrays_of", "part_of"]


class Batch(NamedTuple):
    x: Any
    y: Any


class Recent:
    """Copies of the batches of the last steps, by number from 1: a caller may use its arrays again."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self._first = 1

    def __getitem__(self, number: int) -> Batch:
        assert number >= self._first, f"the batch of step {number} is forgotten"
        return self._batches[number - self._first]

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> int:
        """The number of the newest one."""
        return self._first + len(self._batches) - 1

    def add(self, x: Any, y: Any) -> None:
        """Keep the batch of the next step."""
        self._batches.append(Batch(_each(x, _copy), _each(y, _copy)))

    def drop(self) -> None:
        """Drop the newest one: its step failed."""
        self._batches.pop()

    def forget(self, number: int) -> None:
        """Steps up to this one will not be made again."""
        while self._batches and self._first <= number:
            self._batches.popleft()
            self._first += 1

    def restart(self, number: int) -> None:
        """The next step is the one after `number`, and none before is made again."""
        self._batches.clear()
        self._first = number + 1


def part_of(value: Any, rank: int, accumulation: Accumulation) -> Any:
    """The samples of a data rank, in the order of ranks: an even part, or whole chunks.

    value: an array, or a tuple or dict of them; dim 0 is samples."""

    def take(array: Any) -> Any:
        if np.ndim(array) == 0:
            return array  # refused where all batches are
        mine = accumulation.share(len(array), rank)
        return array[mine.start : mine.stop]

    return _each(value, take)


def _copy(array: Any) -> Any:
    return array.copy() if hasattr(array, "copy") and hasattr(array, "dtype") else np.array(array)


def arrays_of(value: Any) -> Iterator[Any]:
    """The arrays of a batch, in order."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from arrays_of(value[name])
    elif isinstance(value, tuple):
        for one in value:
            yield from arrays_of(one)
    else:
        yield value


def _each(value: Any, do: Callable[[Any], Any]) -> Any:
    if isinstance(value, list) and value and hasattr(value[0], "dtype"):
        value = tuple(value)  # inputs, not numbers
    if isinstance(value, Mapping):
        return {name: do(array) for name, array in value.items()}
    return tuple(map(do, value)) if isinstance(value, tuple) else do(value)
