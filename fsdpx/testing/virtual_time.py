"""Virtual time for ranks that run as threads. The threads access shared memory in the same order as ranks of the given
speeds, so that asynchronous training is reproducible."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from fsdpx.core.comm import Communicator, CommunicatorWrapper
from fsdpx.core.comm.calls import Array
from fsdpx.core.comm.windows import Window
from fsdpx.errors import CommTimeout

__all__ = ["VirtualTime"]


class VirtualTime:
    """A virtual clock for ranks that run as threads: `distribute(..., comm=virtual.wrap_communicator(comm))`.

    Reading and updating parameters takes no time. The step between reading and updating takes the time given by
    `seconds` for this rank. If two ranks are at the same virtual time, the one with the lower number continues first.
    Ranks compute one at a time.

    Parameters
    ----------
    seconds : virtual duration of a step in seconds, for each rank
    seed : seed of the random jitter
    jitter : maximum relative deviation of a step's duration from `seconds`, or 0 for no jitter

    Attributes
    ----------
    events : tuples (time in seconds, rank, kind) in order of time. Kind is "pull" (read parameters), "push" (update
        them) or "mix" (average them with another rank)
    """

    def __init__(self, seconds: Sequence[float], seed: int = 0, jitter: float = 0.1) -> None:
        self.seconds, self.jitter = tuple(seconds), jitter
        self.events: list[tuple[float, int, str]] = []
        self._drawn = [random.Random(f"{seed} {rank}") for rank in range(len(self.seconds))]
        self._times = [0.0] * len(self.seconds)
        self._away = [False] * len(self.seconds)
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._changed = threading.Condition(threading.RLock())

    def wrap_communicator(self, comm: Communicator) -> Communicator:
        """Return a communicator for one rank whose windows (shared memory) are accessed in virtual time.

        Parameters
        ----------
        comm : communicator of a rank that runs as a thread, as passed by `spawn`
        """
        return _TimedCommunicator(comm, self)

    def get_time_of_rank(self, rank: int) -> float:
        """Return the virtual time of a rank in seconds.

        Parameters
        ----------
        rank : number of the rank
        """
        return self._times[rank]

    def advance_by_step(self, rank: int) -> None:
        """Advance the virtual time of a rank by the duration of one step, with jitter.

        Parameters
        ----------
        rank : rank that has computed a step
        """
        with self._changed:
            share = 1 + self.jitter * self._drawn[rank].uniform(-1, 1)
            self._times[rank] += self.seconds[rank] * share
            self._changed.notify_all()

    def wait_for_turn(self, rank: int, window: Window) -> None:
        """Block this rank until no other rank can still access a window (shared memory) at an earlier virtual time than
        this rank.

        Parameters
        ----------
        rank : rank that waits
        window : this rank's window; its timeout limits the wait

        Raises
        ------
        CommTimeout : after `window.timeout` seconds of real time
        """
        self._wait_until_ready(lambda: self._find_next_rank() == rank, window, "its turn")

    def record_event_and_wake_ranks(self, rank: int, kind: str) -> None:
        """Append an event at the current virtual time of a rank, and wake each rank that waits in `wait_until` for a
        condition that is now true.

        Parameters
        ----------
        rank : rank that pulls, pushes or mixes
        kind : "pull", "push" or "mix"
        """
        with self._changed:
            self.events.append((self._times[rank], rank, kind))
            self.wake_ready_ranks(rank)

    def wake_ready_ranks(self, rank: int) -> None:
        """Wake each rank that waits in `wait_until` for a condition that is now true. If a woken rank has an earlier
        virtual time than `rank`, the woken rank gets the virtual time of `rank`.

        Parameters
        ----------
        rank : rank that has just changed something
        """
        with self._changed:
            for other in [other for other, ready in self._waiting.items() if _is_ready_or_failed(ready)]:
                del self._waiting[other]
                self._times[other] = max(self._times[other], self._times[rank])
            self._changed.notify_all()

    def wait_until(self, rank: int, ready: Callable[[], bool], window: Window, what: str) -> None:
        """Block this rank until `ready()` is true.

        Parameters
        ----------
        rank : rank that waits
        ready : condition, evaluated when it is this rank's turn and after each access by another rank
        window : this rank's window; its timeout limits each wait
        what : description of the condition, for the error message

        Raises
        ------
        CommTimeout : after `window.timeout` seconds of real time
        """
        while not ready():
            self.wait_for_turn(rank, window)
            with self._changed:
                if ready():
                    return
                self._waiting[rank] = ready
                self._changed.notify_all()
            self._wait_until_ready(lambda: rank not in self._waiting, window, what)

    def arrive_at_barrier(self, rank: int) -> None:
        """Record that a rank has arrived at a barrier. When all ranks have arrived, the virtual times of all ranks are
        set to the latest one.

        Parameters
        ----------
        rank : rank that has arrived
        """
        with self._changed:
            self._away[rank] = True
            self.wake_ready_ranks(rank)
            if all(self._away):
                self._times = [max(self._times)] * len(self._times)
                self._away = [False] * len(self._away)
            self._changed.notify_all()

    def _find_next_rank(self) -> int | None:
        rest = [r for r in range(len(self._times)) if not self._away[r] and r not in self._waiting]
        return min(rest, key=lambda r: (self._times[r], r), default=None)

    def _wait_until_ready(self, ready: Callable[[], bool], window: Window, what: str) -> None:
        end = time.monotonic() + window.timeout
        with self._changed:
            while not ready():
                window.check_ranks_and_make_progress()
                if time.monotonic() > end:
                    raise CommTimeout(f"rank {window.rank} waited {window.timeout:g} s for {what}, in virtual time")
                self._changed.wait(0.05)


class _TimedCommunicator(CommunicatorWrapper):
    """Wraps a communicator so that its windows (shared memory) are accessed in virtual time."""

    def __init__(self, comm: Communicator, virtual: VirtualTime) -> None:
        super().__init__(comm)
        self.virtual = virtual

    def wrap_group(self, group: Communicator) -> Communicator:
        return group

    def window(self, nbytes: int) -> Window:
        return _TimedWindow(self.comm.window(nbytes), self.virtual)


class _TimedWindow(Window):
    """A window (shared memory) where each access waits for its turn in virtual time."""

    def __init__(self, window: Window, virtual: VirtualTime) -> None:
        super().__init__(window.rank, window.size, window.own, window.timeout)
        self.window, self.virtual = window, virtual
        self._reads = False  # True while this rank computes a step, between a pull and the next update

    def open_locked_part(
        self, rank: int, start_byte: int, stop_byte: int, write: bool = True
    ) -> AbstractContextManager[Array]:
        return self.window.open_locked_part(rank, start_byte, stop_byte, write)

    def read_word(self, rank: int, at: int) -> int:
        return self.window.read_word(rank, at)

    def write_word(self, at: int, value: int) -> None:
        self.window.write_word(at, value)
        self.virtual.wake_ready_ranks(self.rank)

    def has_rank_died(self, rank: int) -> bool:
        return self.window.has_rank_died(rank)

    def check_ranks_and_make_progress(self, missing: Callable[[], Sequence[int]] = list, what: str = "") -> None:
        self.window.check_ranks_and_make_progress(missing, what)

    @contextmanager
    def access_epoch(self, kind: str) -> Iterator[None]:
        if kind != "pull" and self._reads:
            self.virtual.advance_by_step(self.rank)
        self._reads = kind == "pull"
        self.virtual.wait_for_turn(self.rank, self)
        yield
        self.virtual.record_event_and_wake_ranks(self.rank, kind)

    def stop_accessing(self) -> None:
        self.virtual.arrive_at_barrier(self.rank)

    def wait_until_none_missing(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        self.virtual.wait_until(self.rank, lambda: not missing(), self, what)

    def close(self) -> None:
        self.window.close()


def _is_ready_or_failed(ready: Callable[[], bool]) -> bool:
    """Return whether `ready()` is true or raises an error. If it raises an error, the waiting rank is woken, calls
    `ready` itself, and gets the error."""
    try:
        return ready()
    except Exception:
        return True
