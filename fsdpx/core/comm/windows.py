"""One-sided communication, as in MPI RMA: each rank owns a part of a window, and all other ranks can read and write
this part without any action by its owner."""

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
"""The first and the longest pause between two polls while a rank waits."""


class Window(ABC):
    """Memory with one part on each of `size` ranks. All ranks can access all parts.

    Only `close` is collective. The owner of a part need not take any action when other ranks access the part.

    Attributes
    ----------
    own : the bytes of this rank's part, initially zero
    timeout : maximum duration of a wait, in seconds"""

    def __init__(self, rank: int, size: int, own: Array, timeout: float) -> None:
        self.rank, self.size, self.own, self.timeout = rank, size, own, timeout

    @abstractmethod
    def open_locked_part(
        self, rank: int, start_byte: int, stop_byte: int, write: bool = True
    ) -> AbstractContextManager[Array]:
        """Return a context manager that locks the part of rank `rank`, and yields bytes [start_byte, stop_byte) of it.

        If `write` is true, changes are stored, and no other rank can have the part open at the same time. Otherwise,
        other ranks may also read it at the same time. To avoid deadlocks, a rank that opens two parts must open the
        part of the lower rank first."""

    @abstractmethod
    def read_word(self, rank: int, word_index: int) -> int:
        """Return the 64-bit word with index `word_index` in the part of rank `rank`, without waiting for ranks that
        have the part open."""

    @abstractmethod
    def write_word(self, word_index: int, value: int) -> None:
        """Set the 64-bit word with index `word_index` in this rank's part. No other rank may write this word."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory of the window. Views of it must not be used afterwards. Collective."""

    def has_rank_died(self, rank: int) -> bool:
        """Return whether rank `rank` is known to have died."""
        return False

    def check_ranks_and_make_progress(self, missing: Callable[[], Sequence[int]] = list, what: str = "") -> None:  # noqa: B027 - most windows need no check
        """Raise an error if this rank is waiting for a rank that can never arrive. This method is called between the
        polls of a wait. `missing()` returns the ranks that have not arrived.

        If the communication library makes progress only while this rank is inside one of its functions, this method
        also calls such a function, so that other ranks can access this rank's part."""

    def access_epoch(self, kind: str) -> AbstractContextManager[None]:
        """Return a context manager in which this rank accesses the memory of other ranks. `kind` is "pull" (read),
        "push" (update) or "mix" (average this rank's values with another rank's values)."""
        return nullcontext()

    def stop_accessing(self) -> None:  # noqa: B027 - only needed in simulated time
        """Announce that this rank will not access the window until all ranks have synchronized again."""

    def wait_until_none_missing(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Wait until `missing()`, the list of ranks that have not acted yet, is empty. Raise CommTimeout if this takes
        more than `timeout` seconds.

        Once the list is empty, it must stay empty. `what` describes what this rank is waiting for."""
        self.poll_until_none_missing(missing, what)

    def wait_for_all_ranks(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Wait until all living ranks have arrived, and until no other rank still needs this rank to make progress.
        `missing()` returns the ranks that have not arrived."""
        self.poll_until_none_missing(missing, what)

    def poll_until_none_missing(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        """Poll `missing()`, with increasing pauses, until it returns an empty list. Raise CommTimeout if this takes
        more than `timeout` seconds."""
        end, pause = time.monotonic() + self.timeout, FIRST_PAUSE_SECONDS
        while late := missing():
            self.check_ranks_and_make_progress(missing, what)
            if time.monotonic() > end:
                raise CommTimeout(f"rank {self.rank} waited {self.timeout:g} s for {format_ranks(late)}: {what}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def allocate_aligned(nbytes: int) -> Array:
    """Return an array of `nbytes` zero bytes whose address is a multiple of the cache line size."""
    buffer = np.zeros(nbytes + CACHE_LINE_BYTES, np.uint8)
    start = -buffer.__array_interface__["data"][0] % CACHE_LINE_BYTES
    return buffer[start : start + nbytes]


class SharedWindow(Window):
    """A window in memory that this process can access directly, including the parts of other ranks. `open_locked_part`
    yields a view of the memory itself, not a copy."""

    parts: list[Array]

    @abstractmethod
    def lock_part(self, rank: int, write: bool) -> AbstractContextManager[Any]:
        """Return a context manager that locks the part of rank `rank`, either for writing or only for reading. If the
        rank that holds the lock dies, the lock is released."""

    @contextmanager
    def open_locked_part(self, rank: int, start_byte: int, stop_byte: int, write: bool = True) -> Iterator[Array]:
        with self.lock_part(rank, write):
            yield self.parts[rank][start_byte:stop_byte]

    def read_word(self, rank: int, word_index: int) -> int:
        return int(self.parts[rank][8 * word_index : 8 * word_index + 8].view(np.int64)[0])

    def write_word(self, word_index: int, value: int) -> None:
        self.own[8 * word_index : 8 * word_index + 8].view(np.int64)[0] = value


class ThreadWindow(SharedWindow):
    """A window for ranks that run as threads.

    Parameters
    ----------
    check : function that is called during waits; it raises an error if another rank has failed, or if this rank is
        waiting for a rank whose function has already returned
    dead : function that returns whether a given rank has died"""

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
