"""Communication as values: a call, the operation it reduces by, how its arrays are cut; and how one waits for it.

Whatever is not ready yet is a `Handle`, and a `TimedTransfer` is a value on its way to this rank. Transfers of several
steps are `GeneratorHandle`, those with something to do at the end `HandleWithCallback`. Every wait pokes all that are
under way."""

from __future__ import annotations

import enum
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fsdpx.errors import ConfigError

__all__ = [
    "COMPLETED",
    "NOT_ALONE",
    "PATIENT",
    "AllCounts",
    "Array",
    "Arrays",
    "Call",
    "CompletedHandle",
    "Counts",
    "FlatPartition",
    "GeneratorHandle",
    "Handle",
    "HandleWithCallback",
    "LongWait",
    "Progress",
    "RankGroup",
    "ReduceOp",
    "TimedTransfer",
    "call_label",
    "copy_unless_same",
    "data_pointer",
    "even_partition",
    "get_progress",
    "get_stack_frames",
    "is_in_place",
    "long_waits",
    "partition_from_counts",
    "spin_until",
    "split_evenly",
]  # fmt: skip

Array = Any
"""A flat array: one-dimensional, C-contiguous, of numpy, cupy or `fsdpx.core.array.shapes`."""
Arrays = tuple[Array, ...]
Counts = tuple[int, ...] | None
"""Elements that belong to each rank; None: the balanced cut of `split_evenly`."""
AllCounts = tuple[Counts, ...]


class ReduceOp(enum.Enum):
    """How the values of all ranks become one. bool: SUM and MAX are `or`, PROD and MIN are `and`."""

    SUM = "sum"
    AVG = "avg"
    AVERAGE = AVG
    MAX = "max"
    MIN = "min"
    PROD = "prod"

    __hash__ = object.__hash__

    @classmethod
    def from_name(cls, op: ReduceOp | str) -> ReduceOp:
        """`op` itself, or the operation of that name ("sum", "AVG", "mean"); ConfigError for anything else."""
        if isinstance(op, ReduceOp):
            return op
        name = op.lower() if isinstance(op, str) else ""
        name = cls.AVG.value if name in ("mean", "average") else name
        if name in cls._value2member_map_:
            return cls(name)
        names = ", ".join(member.name for member in cls)
        raise ConfigError(f"unknown reduce operation {op!r}: use one of ReduceOp.{{{names}}}")


class FlatPartition(NamedTuple):
    """How a flat array of `total` elements is cut: piece r is `[displs[r], displs[r] + counts[r])`."""

    counts: tuple[int, ...]
    displs: tuple[int, ...]
    total: int
    even: bool

    def piece_of(self, array: Array, rank: int) -> Array:
        """The view of `array` that is the piece of `rank`."""
        start = self.displs[rank]
        return array[start : start + self.counts[rank]]


@lru_cache(maxsize=512)
def partition_from_counts(counts: tuple[int, ...]) -> FlatPartition:
    """The cut with these counts, one piece right after the other."""
    displs, total = [], 0
    for count in counts:
        displs.append(total)
        total += count
    return FlatPartition(counts, tuple(displs), total, len(set(counts)) == 1)


@lru_cache(maxsize=512)
def even_partition(n: int, parts: int) -> FlatPartition:
    """The balanced cut of n elements: piece r starts at floor(n r / parts)."""
    edges = [n * r // parts for r in range(parts + 1)]
    return partition_from_counts(tuple(stop - start for start, stop in pairwise(edges)))


def split_evenly(n: int, parts: int) -> list[int]:
    """Counts of the balanced cut of n elements: floor(n (r+1) / parts) - floor(n r / parts) for piece r."""
    return list(even_partition(n, parts).counts)


@dataclass(slots=True, eq=False)
class Call:
    """One call of one rank: all that a backend has to know of it, and all that a wrapper may want to see.

    verb: the method. arrays: in the order of its signature; None where only another rank has one. op: of reductions.
    root: the rank that has or gets the whole, or the other side of a message. counts: one entry for each array that is
    cut. what: names the action and the tensor in errors. tag: of the message, or of those that a collective is made of.
    algorithm: of an all-reduce. cuts: `counts` resolved, once a backend has checked the call. wire: the 16-bit dtype in
    which summands travel, None if as they are. shape: of the array that the user has given, the same on all ranks."""

    verb: str
    arrays: Arrays = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    counts: AllCounts = ()
    what: str = ""
    tag: int = 0
    algorithm: str = "library"
    cuts: tuple[FlatPartition, ...] = ()
    wire: Any = None
    shape: tuple[int, ...] | None = None

    def with_arrays(self, arrays: Arrays, cuts: tuple[FlatPartition, ...] | None = None) -> Call:
        """The same call on other arrays, of the same cuts or of others."""
        cuts = self.cuts if cuts is None else cuts
        return replace(self, arrays=arrays, cuts=cuts)

    @property
    def name(self) -> str:
        """The name of the call in errors: "all_reduce of the loss"."""
        return call_label(self.verb, self.what)


def call_label(verb: str, what: str) -> str:
    """The name of a call in errors."""
    return f"{verb} of {what}" if what else verb


@runtime_checkable
class Handle(Protocol):
    """A transfer that was issued. The buffers belong to it until `test` is true or `wait` returns."""

    def test(self) -> bool:
        """True when the transfer is complete; pokes it forward if not. Never blocks."""

    def wait(self) -> None:
        """Return when the transfer is complete; CommTimeout or CommError when it will not be."""


class CompletedHandle:
    """The handle of a transfer that is already complete."""

    __slots__ = ()

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return None


COMPLETED = CompletedHandle()


class RankGroup(Protocol):
    """The part of a communicator that a check of its calls needs."""

    rank: int
    size: int


def data_pointer(array: Array) -> int:
    """Where the first element lies in memory; for arrays without memory, which object it is."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    interface = getattr(array, "__cuda_array_interface__", None)
    return interface["data"][0] if interface else id(array)


def is_in_place(a: Array, b: Array) -> bool:
    """Whether both are views that start at the same element: how in-place calls are recognised."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.size and b.size:
        return a is b or (np.may_share_memory(a, b) and data_pointer(a) == data_pointer(b))  # the first is fast
    return a is b or data_pointer(a) == data_pointer(b)


def copy_unless_same(target: Array, source: Array) -> None:
    """target = source, unless they are the same memory already."""
    if not is_in_place(target, source):
        target[...] = source


PATIENT = 2048  # about a millisecond
_SPINS_BEFORE_SLEEP = 4096  # some milliseconds: a rank that waits that long may sleep
NOT_ALONE = -_SPINS_BEFORE_SLEEP  # for threads of one interpreter: polling keeps it from the others for 5 ms at a time
_SPINS_PER_CLOCK = 256
_NAP_SECONDS = 50e-6

yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Progress:
    """The pending steps of one rank's transfers under way. Every wait pokes them: no peer waits for a step not taken.

    patience: how often a wait looks before it gives the core away: at once where ranks outnumber cores, much later
    where each rank has its own and another process would keep it for milliseconds."""

    __slots__ = ("patience", "pending")

    def __init__(self, patience: int = 64) -> None:
        self.patience = patience
        self.pending: list[Handle] = []

    def advance(self) -> None:
        """Take the next step of every transfer that can take one."""
        for handle in tuple(self.pending):
            handle.test()


def get_progress(comm: object) -> Progress:
    """The steps that waits on `comm` poke; a communicator without any gets its own, which is never poked."""
    progress = getattr(comm, "progress", None)
    return progress if isinstance(progress, Progress) else Progress()


class GeneratorHandle:
    """The handle of a generator that issues a transfer, yields its handle, and goes on after that."""

    __slots__ = ("_current", "_done", "_error", "_generator", "_progress", "_running")

    def __init__(self, generator: Iterator[Handle], progress: Progress) -> None:
        self._generator = generator
        self._progress = progress
        self._current: Handle = COMPLETED
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


class HandleWithCallback:
    """The handle of a transfer that is complete when `last` has run after it, once, on this rank only."""

    __slots__ = ("_handle", "_last")

    def __init__(self, handle: Handle, last: Callable[[], None]) -> None:
        self._handle = handle
        self._last: Callable[[], None] | None = last

    def test(self) -> bool:
        if not self._handle.test():
            return False
        self._run_callback()
        return True

    def wait(self) -> None:
        self._handle.wait()
        self._run_callback()

    def _run_callback(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last()


class LongWait:
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


long_waits: dict[int, LongWait] = {}
"""The wait that each thread is in at this moment, by the number of the thread."""


def get_stack_frames(thread: int) -> list[tuple[FrameType, int]]:
    """Where a thread is: its frames with their lines, the innermost first; none if it has ended.

    Nothing is collected meanwhile: a collection may let the thread go on, and CPython 3.11 crashes where it then
    returns from the frame that is being followed."""
    collects = gc.isenabled()
    gc.disable()
    try:
        frames: list[tuple[FrameType, int]] = []
        frame = sys._current_frames().get(thread)
        while frame is not None:
            frames.append((frame, frame.f_lineno))
            frame = frame.f_back
    finally:
        if collects:
            gc.enable()
    return frames


def spin_until(ready: Callable[[], bool], progress: Progress, timeout: float, patience: int | None = None) -> bool:
    """Poll `ready` until it is true; False after `timeout` seconds. Yields the core when it takes long: after
    `patience` looks, by default those of `progress`."""
    spins, deadline, patience = 0, None, progress.patience if patience is None else patience
    thread, outer = 0, None
    try:
        while not ready():
            spins += 1
            if progress.pending:
                progress.advance()
            if spins > patience + _SPINS_BEFORE_SLEEP:
                time.sleep(_NAP_SECONDS)
            elif spins > patience:
                yield_core()
            if spins % _SPINS_PER_CLOCK == 0:
                now = time.monotonic()
                if deadline is None:
                    deadline, thread = now + timeout, get_ident()
                    outer, long_waits[thread] = long_waits.get(thread), LongWait(ready)
                elif now > deadline:
                    return False
        return True
    finally:
        if deadline is not None and outer is not None:  # the wait that encloses this one goes on
            long_waits[thread] = outer
        elif deadline is not None:
            long_waits.pop(thread, None)


class TimedTransfer:
    """`wait` ends the transfer and gives the value.

    issued_at, landed: when the transfer began, and when this rank saw its end. busy_seconds: seconds of the time
    between in which this rank moved it on or waited for it; the rest was computed over."""

    __slots__ = ("busy_seconds", "completed_at", "finish", "handle", "issued_at")

    def __init__(self, handle: Handle, finish: Callable[[], Any]) -> None:
        self.handle = handle
        self.finish = finish
        self.issued_at = perf_counter()
        self.completed_at = 0.0
        self.busy_seconds = 0.0

    def wait(self) -> Any:
        begin = perf_counter()
        self.handle.wait()
        self._record_end(begin)
        return self.finish()

    def test(self) -> bool:
        """Move the transfer on; whether it is complete."""
        begin = perf_counter()
        done = self.handle.test()
        if self._record_end(begin) and not done:
            self.completed_at = 0.0
        return done

    def _record_end(self, begin: float) -> bool:
        """Whether the transfer was still under way at `begin`."""
        under_way = self.completed_at == 0.0
        if under_way:
            self.completed_at = perf_counter()
            self.busy_seconds += self.completed_at - begin
        return under_way
