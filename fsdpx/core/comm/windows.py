"""One-sided memory: each rank has a part that all other ranks read and write without its participation (as in MPI
RMA)."""

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
"""Size of a cache line in bytes."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 20e-6, 1e-3
"""First and longest pause between two polls of a waiting rank."""


class Window(ABC):
    """Memory with one part on each of `size` ranks. own: the part of this rank as bytes, initially zero. timeout: limit
    of a wait in seconds.

    Only `close` is collective, and no call requires the owner of a part to take any action.
    """

    def __init__(self, rank: int, size: int, own: Array, timeout: float) -> None:
        self.rank, self.size, self.own, self.timeout = rank, size, own, timeout

    @abstractmethod
    def open_part(self, rank: int, start: int, stop: int, write: bool = True) -> AbstractContextManager[Array]:
        """Return a context manager that yields bytes [start, stop) of the part of `rank`; no other rank has the part
        open meanwhile.

        write: changes are stored; if False, other ranks may read at the same time. A rank that opens two parts must
        open the part of the lower rank first.
        """

    @abstractmethod
    def read_word(self, rank: int, word_index: int) -> int:
        """Return the 64-bit word number `word_index` of the part of `rank` at once, even while another rank has the
        part open."""

    @abstractmethod
    def write_word(self, word_index: int, value: int) -> None:
        """Set 64-bit word number `word_index` of this rank's part, which no other rank writes."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory; no view of it may be used afterwards. Collective."""

    def has_rank_died(self, rank: int) -> bool:
        """Return whether this rank knows that `rank` has died."""
        return False

    def check_ranks_and_make_progress(self, missing: Callable[[], Sequence[int]] = list, what: str = "") -> None:  # noqa: B027 - most check nothing
        """Raise if the ranks for which this rank waits, which `missing` returns, can never arrive; called between two
        polls of a wait. Also make progress for other ranks if the library makes progress only inside its calls."""

    def access_epoch(self, kind: str) -> AbstractContextManager[None]:
        """Return the context manager for a rank's accesses to the parts of all ranks. kind: "pull", "push" or "mix"."""
        return nullcontext()

    def stop_accessing(self) -> None:  # noqa: B027 - does nothing where time is real
        """Announce that this rank enters a synchronization of all ranks and will not access the window until it is
        over."""

    def wait_until_none_missing(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Wait until `missing()`, which returns the ranks that have yet to act, is empty. The result must stay empty
        from then on. Raise CommTimeout after `timeout` seconds. what: what this rank waits for, as text."""
        self.poll_until_none_missing(missing, what)

    def wait_for_all_ranks(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Wait until all living ranks have arrived and none of them needs this rank anymore. missing: returns the ranks
        that are still absent."""
        self.poll_until_none_missing(missing, what)

    def poll_until_none_missing(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Poll until `missing()` is empty, with growing pauses; raise CommTimeout after `timeout` seconds."""
        end, pause = time.monotonic() + self.timeout, FIRST_PAUSE_SECONDS
        while late := missing():
            self.check_ranks_and_make_progress(missing, what)
            if time.monotonic() > end:
                raise CommTimeout(f"rank {self.rank} waited {self.timeout:g} s for {format_ranks(late)}: {what}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def allocate_aligned(nbytes: int) -> Array:
    """Return an array of `nbytes` zero bytes that starts on a cache line."""
    buffer = np.zeros(nbytes + CACHE_LINE_BYTES, np.uint8)
    start = -buffer.__array_interface__["data"][0] % CACHE_LINE_BYTES
    return buffer[start : start + nbytes]


class SharedWindow(Window):
    """A window whose parts all ranks can address directly: `open_part` yields a view of the memory itself."""

    parts: list[Array]

    @abstractmethod
    def lock_part(self, rank: int, write: bool) -> AbstractContextManager[Any]:
        """Return a context manager that locks the part of a rank; the lock is released if its holder dies."""

    @contextmanager
    def open_part(self, rank: int, start: int, stop: int, write: bool = True) -> Iterator[Array]:
        with self.lock_part(rank, write):
            yield self.parts[rank][start:stop]

    def read_word(self, rank: int, word_index: int) -> int:
        return int(self.parts[rank][8 * word_index : 8 * word_index + 8].view(np.int64)[0])

    def write_word(self, word_index: int, value: int) -> None:
        self.own[8 * word_index : 8 * word_index + 8].view(np.int64)[0] = value


class ThreadWindow(SharedWindow):
    """A window of thread ranks. check: raises an error if another rank has failed, or if one of the missing ranks has
    returned. dead: returns whether a rank has died."""

    def __init__(
        self, rank: int, parts: list[Array], locks: list[threading.Lock], timeout: float,
        check: Callable[[Callable[[], Sequence[int]], str], None], dead: Callable[[int], bool],
    ) -> None:  # fmt: skip
        super().__init__(rank, len(parts), parts[rank], timeout)
        self.parts, self._locks = parts, locks
        self._check, self._dead = check, dead

    def lock_part(self, rank: int, write: bool) -> AbstractContextManager[Any]:
        return self._locks[rank]

    def has_rank_died(self, rank: int) -> bool:
        return self._dead(rank)

    def check_ranks_and_make_progress(self, missing: Callable[[], Sequence[int]] = list, what: str = "") -> None:
        self._check(missing, what)

    def close(self) -> None:
        self.parts = []
