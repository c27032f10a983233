"""Data types for communication: calls, reduction operations, partitions of flat arrays, and handles of transfers.

An operation returns a `Handle`, because its transfer may not be complete yet. A `TimedTransfer` also returns a value, a
`GeneratorHandle` runs a sequence of transfers, and a `HandleWithCallback` calls a function when its transfer is
complete. Every wait advances all pending transfers of the rank.
"""

from __future__ import annotations

import enum
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.errors import ConfigError

__all__ = [
    "COMPLETED", "POLLS_BEFORE_YIELD", "THREAD_POLLS", "AllCounts", "Array", "Arrays", "Call", "CompletedHandle",
    "Counts", "FlatPartition", "GeneratorHandle", "Handle", "HandleWithCallback", "LongWait", "Progress", "RankGroup",
    "ReduceOp", "TimedTransfer", "copy_unless_same", "format_call_label", "get_progress", "get_thread_stack_frames",
    "is_in_place", "long_waits", "make_balanced_partition", "make_partition_from_counts", "spin_until",
    "split_evenly",
]  # fmt: skip

Array = Any
"""A flat array: one-dimensional and C-contiguous. It may belong to any supported array module, such as numpy."""
Arrays = tuple[Array, ...]
Counts = tuple[int, ...] | None
"""Number of elements that belong to each rank. None means the balanced partition of `split_evenly`."""
AllCounts = tuple[Counts, ...]


class ReduceOp(enum.Enum):
    """The operation that combines the values of all ranks. For bool arrays, SUM and MAX mean logical or, and PROD and
    MIN mean logical and."""

    SUM = "sum"
    AVG = "avg"
    AVERAGE = AVG
    MAX = "max"
    MIN = "min"
    PROD = "prod"

    __hash__ = object.__hash__

    @classmethod
    def from_name(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the operation with this name, or `op` itself if it is a `ReduceOp`.

        Parameters
        ----------
        op : a `ReduceOp`, or its name in upper or lower case ("sum", "AVG"); "mean" and "average" stand for AVG

        Returns
        -------
        ReduceOp
            the operation

        Raises
        ------
        ConfigError
            if `op` has any other value
        """
        if isinstance(op, ReduceOp):
            return op
        name = op.lower() if isinstance(op, str) else ""
        name = cls.AVG.value if name in ("mean", "average") else name
        if name in cls._value2member_map_:
            return cls(name)
        names = ", ".join(member.name for member in cls)
        # `op` is an array if the user passes a second array, as in mpi4py's `comm.Allreduce(send, recv)`
        if hasattr(op, "shape"):
            raise ConfigError(
                f"the reduce operation is an array of {op.shape}: reductions work in place, so copy the values to the "
                f"array of the result first, and pass that array and one of ReduceOp.{{{names}}}"
            )
        raise ConfigError(f"unknown reduce operation {op!r}: use one of ReduceOp.{{{names}}}")


def to_wire_dtype(wire: Any) -> np.dtype[Any]:
    """Convert the argument `wire` to the dtype in which a call sends its arrays. Raise ConfigError if `wire` does not
    denote a dtype."""
    try:
        return np.dtype(wire)
    except (TypeError, ValueError):
        raise ConfigError(f"wire={wire!r} is not a dtype: use 'float16' or 'bfloat16'") from None


class FlatPartition(NamedTuple):
    """The division of a flat array into one contiguous piece per rank. Piece r is `array[displs[r] : displs[r] +
    counts[r]]`.

    Attributes
    ----------
    counts : number of elements in each piece
    displs : index of the first element of each piece
    total : number of elements in the array
    even : whether all counts are equal
    """

    counts: tuple[int, ...]
    displs: tuple[int, ...]
    total: int
    even: bool

    def get_piece(self, array: Array, rank: int) -> Array:
        """Return the piece that belongs to `rank`, as a view of `array`."""
        start = self.displs[rank]
        return array[start : start + self.counts[rank]]


@lru_cache(maxsize=512)
def make_partition_from_counts(counts: tuple[int, ...]) -> FlatPartition:
    """Return the partition whose piece r has `counts[r]` elements and begins where piece r - 1 ends."""
    displs, total = [], 0
    for count in counts:
        displs.append(total)
        total += count
    return FlatPartition(counts, tuple(displs), total, len(set(counts)) == 1)


@lru_cache(maxsize=512)
def make_balanced_partition(n: int, parts: int) -> FlatPartition:
    """Divide n elements into pieces of nearly equal size: piece r starts at element floor(n r / parts)."""
    edges = [n * r // parts for r in range(parts + 1)]
    return make_partition_from_counts(tuple(stop - start for start, stop in pairwise(edges)))


def split_evenly(n: int, parts: int) -> list[int]:
    """Divide n elements into pieces of nearly equal size, and return the number of elements in each piece. Piece r has
    floor(n (r+1) / parts) - floor(n r / parts) elements."""
    return list(make_balanced_partition(n, parts).counts)


@dataclass(slots=True, eq=False)
class Call:
    """The arguments of one communication call on one rank.

    Attributes
    ----------
    verb : name of the method, such as "all_reduce"
    arrays : arrays in the order of the method's signature, with None for an array that only another rank passes
    op : operation of a reduction
    root : rank that has or gets the full array, or the other rank in a send or receive
    counts : for each array that is divided among ranks, the number of elements for each rank
    what : name of the action and the tensor, for error messages
    tag : tag of the message, or of all messages that make up the collective
    algorithm : algorithm of an all-reduce
    partitions : `counts` as `FlatPartition` objects; set when a backend checks the call
    wire : 16-bit dtype in which the arrays of a sum are sent; if None, their own dtype
    shape : shape of the array that the user passed, if this shape must be the same on all ranks"""

    verb: str
    arrays: Arrays = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    counts: AllCounts = ()
    what: str = ""
    tag: int = 0
    algorithm: str = "library"
    partitions: tuple[FlatPartition, ...] = ()
    wire: Any = None
    shape: tuple[int, ...] | None = None

    def with_arrays(self, arrays: Arrays, partitions: tuple[FlatPartition, ...] | None = None) -> Call:
        """Return a copy of this call with other arrays and, unless `partitions` is None, other partitions."""
        partitions = self.partitions if partitions is None else partitions
        return replace(self, arrays=arrays, partitions=partitions)

    @property
    def name(self) -> str:
        """The name of the call for error messages, such as "all_reduce of the loss"."""
        return format_call_label(self.verb, self.what)


def format_call_label(verb: str, what: str) -> str:
    """Return the name of a call for error messages: `verb` and `what`, as in "all_reduce of the loss"."""
    return f"{verb} of {what}" if what else verb


@runtime_checkable
class Handle(Protocol):
    """A transfer that has been started. Its buffers must not be used until `test` returns True or `wait` returns."""

    def test(self) -> bool:
        """Advance the transfer if it is not complete yet, and return whether it is complete. Never blocks."""

    def wait(self) -> None:
        """Wait until the transfer is complete. Raise CommTimeout or CommError if it cannot be completed."""


class CompletedHandle:
    """The handle of a transfer that is already complete."""

    __slots__ = ()

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return None


COMPLETED = CompletedHandle()


class RankGroup(Protocol):
    """The attributes of a communicator that are needed to check a call."""

    rank: int
    size: int


def is_in_place(a: Array, b: Array) -> bool:
    """Return whether both arrays start at the same address, so that a call with these arrays works in place."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.size and b.size:
        # call may_share_memory first, because it is cheap and returns False for most pairs of arrays
        return a is b or (np.may_share_memory(a, b) and get_data_pointer(a) == get_data_pointer(b))
    return a is b or get_data_pointer(a) == get_data_pointer(b) != 0


def copy_unless_same(target: Array, source: Array) -> None:
    """Copy `source` to `target`, unless both start at the same address."""
    if not is_in_place(target, source):
        target[...] = source


POLLS_BEFORE_YIELD = 2048
"""Number of polls (about a millisecond) after which a waiting rank yields its CPU core if each rank has its own
core."""
_SPINS_BEFORE_SLEEP = 4096  # number of polls (a few milliseconds) between the first yield of a wait and its first sleep
THREAD_POLLS = -_SPINS_BEFORE_SLEEP
"""`polls_before_yield` for ranks that run as threads. It is negative, so that a waiting rank sleeps between polls from
the beginning. Otherwise, its polling would keep the other ranks from running Python code for 5 ms at a time."""
_SPINS_PER_CLOCK = 256
_NAP_SECONDS = 50e-6

yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Progress:
    """The pending transfers of one rank. Every wait advances all of them, so that this rank does not hold up others
    while it waits for something else.

    Attributes
    ----------
    pending : handles of the transfers
    polls_before_yield : number of polls after which a wait yields its CPU core. It is small if there are more ranks
        than cores. It is large if each rank has its own core, because another process that got the core would keep it
        for milliseconds"""

    __slots__ = ("pending", "polls_before_yield")

    def __init__(self, polls_before_yield: int = 64) -> None:
        self.polls_before_yield = polls_before_yield
        self.pending: list[Handle] = []

    def advance_transfers(self) -> None:
        """Advance all pending transfers."""
        for handle in tuple(self.pending):
            handle.test()


def get_progress(comm: object) -> Progress:
    """Return the `Progress` of the communicator `comm`. It lists the transfers that `comm` advances during each wait.
    If `comm` has no `Progress`, return a new one without transfers."""
    progress = getattr(comm, "progress", None)
    return progress if isinstance(progress, Progress) else Progress()


class GeneratorHandle:
    """A handle of several transfers that a generator starts one after another. The generator yields the handle of each
    transfer, and is resumed when that transfer is complete."""

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
        # `test` was called again by a wait inside the generator, because a wait advances all pending transfers
        if self._running:
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
    """A handle that wraps another one. When the wrapped handle is complete, `on_complete` is called once; then this
    handle is complete too."""

    __slots__ = ("_handle", "_on_complete")

    def __init__(self, handle: Handle, on_complete: Callable[[], None]) -> None:
        self._handle = handle
        self._on_complete: Callable[[], None] | None = on_complete

    def test(self) -> bool:
        if not self._handle.test():
            return False
        self._run_callback_once()
        return True

    def wait(self) -> None:
        self._handle.wait()
        self._run_callback_once()

    def _run_callback_once(self) -> None:
        on_complete, self._on_complete = self._on_complete, None
        if on_complete is not None:
            on_complete()


class LongWait:
    """A call to `spin_until` that has lasted long enough to be reported to the watchdog. `str()` of this object names
    what the call waits for."""

    __slots__ = ("_ready",)

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    def __str__(self) -> str:
        owner = getattr(self._ready, "__self__", None)
        if type(owner).__str__ is not object.__str__ and owner is not None:
            return str(owner)
        inner = getattr(self._ready, "func", self._ready)  # a `partial` has no name of its own
        return str(inner.__qualname__).partition(".<locals>")[0]


long_waits: dict[int, LongWait] = {}
"""Maps each thread identifier to the long wait that the thread is currently in."""


def get_thread_stack_frames(thread: int) -> list[tuple[FrameType, int]]:
    """Return the stack frames of a thread and their current line numbers, innermost first. If the thread has ended,
    return an empty list.

    Garbage collection is disabled during the call, because it may switch to the other thread, and CPython 3.11 crashes
    if that thread returns from a frame that is being read.
    """
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


def spin_until(
    ready: Callable[[], bool], progress: Progress, timeout: float, polls_before_yield: int | None = None
) -> bool:
    """Poll `ready` until it returns True, and return True. If this takes more than `timeout` seconds, return False.

    Between polls, the transfers of `progress` are advanced. After `polls_before_yield` polls (default:
    `progress.polls_before_yield`), the thread also yields its CPU core. After several thousand more polls, the thread
    also sleeps.
    """
    spins, deadline, polls_before_yield = (
        0,
        None,
        progress.polls_before_yield if polls_before_yield is None else polls_before_yield,
    )
    thread, outer = 0, None
    try:
        while not ready():
            spins += 1
            if progress.pending:
                progress.advance_transfers()
            if spins > polls_before_yield + _SPINS_BEFORE_SLEEP:
                time.sleep(_NAP_SECONDS)
            elif spins > polls_before_yield:
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
        # this wait was nested in another wait, so restore the record of the outer wait
        if deadline is not None and outer is not None:
            long_waits[thread] = outer
        elif deadline is not None:
            long_waits.pop(thread, None)


class TimedTransfer:
    """A transfer with a result: `wait` waits until it is complete, and returns the result of `finish()`.

    Attributes
    ----------
    issued_at, completed_at : times when the transfer began and when this rank noticed its end
    busy_seconds : how long this rank was busy with the transfer (advancing it or waiting for it) between `issued_at`
        and `completed_at`. During the rest of that time, the transfer overlapped with computation"""

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
        """Advance the transfer and return whether it is complete."""
        begin = perf_counter()
        done = self.handle.test()
        if self._record_end(begin) and not done:
            self.completed_at = 0.0
        return done

    def _record_end(self, begin: float) -> bool:
        """Record that the transfer ends now, and count the time since `begin` as busy time. Return False if its end has
        already been recorded."""
        under_way = self.completed_at == 0.0
        if under_way:
            self.completed_at = perf_counter()
            self.busy_seconds += self.completed_at - begin
        return under_way
