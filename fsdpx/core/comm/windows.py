"""One-sided memory: a part of each rank that all others read and write by themselves, without its help."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from fsdpx.core.base.messages import format_ranks
from fsdpx.core.comm.calls import Array
from fsdpx.errors import CommTimeout

__all__ = ["CACHE_LINE_BYTES", "SharedWindow", "ThreadWindow", "Window", "allocate_aligned"]

CACHE_LINE_BYTES = 64
"""Bytes of a cache line."""
FIRST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3
"""Seconds between two looks of a rank that waits."""


class Window(ABC):
    """A part of each of `size` ranks. own: that of this rank, as bytes, zero at first. timeout: seconds of a wait.

    No call is collective but `close`, and none waits for the owner of a part to do anything."""

    def __init__(self, rank: int, size: int, own: Array, timeout: float) -> None:
        self.rank, self.size, self.own, self.timeout = rank, size, own, timeout

    @abstractmethod
    def open(self, rank: int, start: int, stop: int, write: bool = True) -> AbstractContextManager[Array]:
        """Bytes [start, stop) of the part of `rank`, which no other rank has open meanwhile. write: changes count; else
        others may be reading as well. A rank that opens two parts opens that of the lower rank first."""

    @abstractmethod
    def read_word(self, rank: int, at: int) -> int:
        """The 64-bit word number `at` of the part of `rank`, at once, whichever rank has it open."""

    @abstractmethod
    def write_word(self, at: int, value: int) -> None:
        """Set such a word of this rank's part, which no other rank writes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory. Collective; no view of it may be used any more."""

    def has_died(self, rank: int) -> bool:
        """Whether that rank is known here to have died."""
        return False

    def check(self, missing: Sequence[int] = (), what: str = "") -> None:  # noqa: B027 - most have nothing to look at
        """Between two looks of a rank that waits: raise if it waits in vain for `missing` ranks, and serve the others
        where the library serves them inside its calls alone."""

    def access_epoch(self, kind: str) -> AbstractContextManager[None]:
        """Around a rank's accesses to the parts of all. kind: "pull", "push" or "mix"."""
        return nullcontext()

    def stop_accessing(self) -> None:  # noqa: B027 - nothing where time is real
        """This rank goes to a meeting of all ranks, and touches nothing until it is over."""

    def wait(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Return when `missing()`, ranks that have yet to do something, are none, which stays so; else CommTimeout,
        with `what` this rank waits for."""
        self.wait_for_missing(missing, what)

    def wait_for_all_ranks(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Return when all living ranks are here, those that `missing()` names last; none needs this one any more."""
        self.wait_for_missing(missing, what)

    def wait_for_missing(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Look now and then until no rank is missing; else CommTimeout."""
        end, pause = time.monotonic() + self.timeout, FIRST_PAUSE
        while late := missing():
            self.check(late, what)
            if time.monotonic() > end:
                raise CommTimeout(f"rank {self.rank} waited {self.timeout:g} s for {format_ranks(late)}: {what}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def allocate_aligned(nbytes: int) -> Array:
    """Zeroed bytes from a cache line on."""
    buffer = np.zeros(nbytes + CACHE_LINE_BYTES, np.uint8)
    start = -buffer.__array_interface__["data"][0] % CACHE_LINE_BYTES
    return buffer[start : start + nbytes]


class SharedWindow(Window):
    """Parts that all ranks can address: what is opened is the memory itself."""

    parts: list[Array]

    @abstractmethod
    def lock_part(self, rank: int, write: bool) -> AbstractContextManager[Any]:
        """Keeps others away from the part of a rank; free again when its holder dies."""

    @contextmanager
    def open(self, rank: int, start: int, stop: int, write: bool = True) -> Iterator[Array]:
        with self.lock_part(rank, write):
            yield self.parts[rank][start:stop]

    def read_word(self, rank: int, at: int) -> int:
        return int(self.parts[rank][8 * at : 8 * at + 8].view(np.int64)[0])

    def write_word(self, at: int, value: int) -> None:
        self.own[8 * at : 8 * at + 8].view(np.int64)[0] = value


class ThreadWindow(SharedWindow):
    """Parts of thread ranks. check: raises if another rank has failed, or one that is waited for has returned.
    dead: whether a rank has died."""

    def __init__(
        self, rank: int, parts: list[Array], locks: list[threading.Lock], timeout: float,
        check: Callable[[Sequence[int], str], None], dead: Callable[[int], bool],
    ) -> None:  # fmt: skip
        super().__init__(rank, len(parts), parts[rank], timeout)
        self.parts, self._locks = parts, locks
        self._check, self._dead = check, dead

    def lock_part(self, rank: int, write: bool) -> AbstractContextManager[Any]:
        return self._locks[rank]

    def has_died(self, rank: int) -> bool:
        return self._dead(rank)

    def check(self, missing: Sequence[int] = (), what: str = "") -> None:
        self._check(missing, what)

    def close(self) -> None:
        self.parts = []
