"""Transfers of several steps: how the next step is taken while the rank waits for something else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from threading import get_ident

from fsdpx.comm.calls import DONE, Handle

__all__ = ["NOT_ALONE", "PATIENT", "Finish", "Progress", "Steps", "Wait", "progress_of", "spin", "waits"]

PATIENT = 2048  # about a millisecond
_SPINS_BEFORE_SLEEP = 4096  # some milliseconds: a rank that waits that long may sleep
NOT_ALONE = -_SPINS_BEFORE_SLEEP  # for threads of one interpreter: polling keeps it from the others for 5 ms at a time
_SPINS_PER_CLOCK = 256
_NAP = 50e-6

give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Progress:
    """The pending steps of one rank's transfers under way. Every wait pokes them: no peer waits for a step not taken.

    patience: how often a wait looks before it gives the core away: at once where ranks outnumber cores, much later
    where each rank has its own and another process would keep it for milliseconds."""

    __slots__ = ("patience", "pending")

    def __init__(self, patience: int = 64) -> None:
        self.patience = patience
        self.pending: list[Handle] = []

    def poke(self) -> None:
        """Take the next step of every transfer that can take one."""
        for handle in tuple(self.pending):
            handle.test()


def progress_of(comm: object) -> Progress:
    """The steps that waits on `comm` poke; a communicator without any gets its own, which is never poked."""
    found = getattr(comm, "progress", None)
    return found if isinstance(found, Progress) else Progress()


class Steps:
    """The handle of a generator that issues a transfer, yields its handle, and goes on after that."""

    __slots__ = ("_current", "_done", "_error", "_generator", "_progress", "_running")

    def __init__(self, generator: Iterator[Handle], progress: Progress) -> None:
        self._generator = generator
        self._progress = progress
        self._current: Handle = DONE
        self._done = self._running = False
        self._error: BaseException | None = None
        progress.pending.append(self)
        self.test()

    def test(self) -> bool:
        if self._error is not None:
            raise self._error
        if self._running:  # a step that itself waits pokes all that is pending
            return False
        self._running = True
        try:
            while not self._done and self._current.test():
                self._current = next(self._generator)
        except StopIteration:
            self._done = True
            self._progress.pending.remove(self)
        except BaseException as error:
            self._error = error
            self._progress.pending.remove(self)
            raise
        finally:
            self._running = False
        return self._done

    def wait(self) -> None:
        while not self.test():
            self._current.wait()


class Finish:
    """The handle of a transfer that is complete when `last` has run after it, once, on this rank only."""

    __slots__ = ("_handle", "_last")

    def __init__(self, handle: Handle, last: Callable[[], None]) -> None:
        self._handle = handle
        self._last: Callable[[], None] | None = last

    def test(self) -> bool:
        if not self._handle.test():
            return False
        self._end()
        return True

    def wait(self) -> None:
        self._handle.wait()
        self._end()

    def _end(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last()


class Wait:
    """A wait of `spin` that is no short one, for a watchdog to look at; as text, what it is for."""

    __slots__ = ("_ready",)

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    def __str__(self) -> str:
        owner = getattr(self._ready, "__self__", None)
        if type(owner).__str__ is not object.__str__ and owner is not None:
            return str(owner)
        inner = getattr(self._ready, "func", self._ready)  # of a `partial`
        return str(inner.__qualname__).partition(".<locals>")[0]


waits: dict[int, Wait] = {}
"""The wait that each thread is in at this moment, by the number of the thread."""


def spin(ready: Callable[[], bool], progress: Progress, timeout: float, patience: int | None = None) -> bool:
    """Poll `ready` until it is true; False after `timeout` seconds. Yields the core when it takes long: after
    `patience` looks, by default those of `progress`."""
    spins, deadline, patience = 0, None, progress.patience if patience is None else patience
    thread, outer = 0, None
    try:
        while not ready():
            spins += 1
            if progress.pending:
                progress.poke()
            if spins > patience + _SPINS_BEFORE_SLEEP:
                time.sleep(_NAP)
            elif spins > patience:
                give_way()
            if spins % _SPINS_PER_CLOCK == 0:
                now = time.monotonic()
                if deadline is None:
                    deadline, thread = now + timeout, get_ident()
                    outer, waits[thread] = waits.get(thread), Wait(ready)
                elif now > deadline:
                    return False
        return True
    finally:
        if deadline is not None:
            _leave(thread, outer)


def _leave(thread: int, outer: Wait | None) -> None:
    """The wait of a thread is over; `outer` is the one inside of which it took place."""
    if outer is None:
        waits.pop(thread, None)
    else:
        waits[thread] = outer
