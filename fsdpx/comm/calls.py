"""Communication as values: a call, the operation it reduces by, how its arrays are cut, its handle."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fsdpx.errors import ConfigError

__all__ = [
    "DONE", "AllCounts", "Array", "Arrays", "Call", "Counts", "Done", "Handle", "Pieces", "Ranks", "ReduceOp",
    "address", "copy", "even_pieces", "named", "overlay", "pieces", "split_evenly",
]  # fmt: skip

Array = Any
"""A flat array: one-dimensional, C-contiguous, of numpy, cupy or `fsdpx.shapes`."""
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
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """`op` itself, or the operation of that name ("sum", "AVG", "mean"); ConfigError for anything else."""
        if isinstance(op, ReduceOp):
            return op
        name = op.lower() if isinstance(op, str) else ""
        name = cls.AVG.value if name in ("mean", "average") else name
        if name in cls._value2member_map_:
            return cls(name)
        names = ", ".join(member.name for member in cls)
        raise ConfigError(f"unknown reduce operation {op!r}: use one of ReduceOp.{{{names}}}")


class Pieces(NamedTuple):
    """How a flat array of `total` elements is cut: piece r is `[displs[r], displs[r] + counts[r])`."""

    counts: tuple[int, ...]
    displs: tuple[int, ...]
    total: int
    even: bool

    def part(self, array: Array, rank: int) -> Array:
        """The view of `array` that is the piece of `rank`."""
        start = self.displs[rank]
        return array[start : start + self.counts[rank]]


@lru_cache(maxsize=512)
def pieces(counts: tuple[int, ...]) -> Pieces:
    """The cut with these counts, one piece right after the other."""
    displs, total = [], 0
    for count in counts:
        displs.append(total)
        total += count
    return Pieces(counts, tuple(displs), total, len(set(counts)) == 1)


@lru_cache(maxsize=512)
def even_pieces(n: int, parts: int) -> Pieces:
    """The balanced cut of n elements: piece r starts at floor(n r / parts)."""
    edges = [n * r // parts for r in range(parts + 1)]
    return pieces(tuple(stop - start for start, stop in pairwise(edges)))


def split_evenly(n: int, parts: int) -> list[int]:
    """Counts of the balanced cut of n elements: floor(n (r+1) / parts) - floor(n r / parts) for piece r."""
    return list(even_pieces(n, parts).counts)


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
    cuts: tuple[Pieces, ...] = ()
    wire: Any = None
    shape: tuple[int, ...] | None = None

    def on(self, arrays: Arrays, cuts: tuple[Pieces, ...] | None = None) -> Call:
        """The same call on other arrays, of the same cuts or of others."""
        cuts = self.cuts if cuts is None else cuts
        return replace(self, arrays=arrays, cuts=cuts)

    @property
    def name(self) -> str:
        """Its name in errors: "all_reduce of the loss"."""
        return named(self.verb, self.what)


def named(verb: str, what: str) -> str:
    """The name of a call in errors."""
    return f"{verb} of {what}" if what else verb


@runtime_checkable
class Handle(Protocol):
    """A transfer that was issued. The buffers belong to it until `test` is true or `wait` returns."""

    def test(self) -> bool:
        """True when the transfer is complete; pokes it forward if not. Never blocks."""

    def wait(self) -> None:
        """Return when the transfer is complete; CommTimeout or CommError when it will not be."""


class Done:
    """The handle of a transfer that is already complete."""

    __slots__ = ()

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE = Done()


class Ranks(Protocol):
    """The part of a communicator that a check of its calls needs."""

    rank: int
    size: int


def address(array: Array) -> int:
    """Where the first element lies in memory; for arrays without memory, which object it is."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    interface = getattr(array, "__cuda_array_interface__", None)
    return interface["data"][0] if interface else id(array)


def overlay(a: Array, b: Array) -> bool:
    """Whether both are views that start at the same element: how in-place calls are recognised."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.size and b.size:
        return a is b or (np.may_share_memory(a, b) and address(a) == address(b))  # the first is fast
    return a is b or address(a) == address(b)


def copy(target: Array, source: Array) -> None:
    """target = source, unless they are the same memory already."""
    if not overlay(target, source):
        target[...] = source
