"""How ranks speak: the one protocol that every backend keeps, and the values it speaks in."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fsdpx.errors import ConfigError

__all__ = ["DONE", "Array", "Communicator", "Done", "Handle", "Pieces", "ReduceOp", "pieces", "split_evenly"]

Array = Any
"""A flat array: one-dimensional, C-contiguous, of numpy, cupy or `fsdpx.array.shapes`."""


class ReduceOp(enum.Enum):
    """How the values of all ranks become one. bool: SUM and MAX are `or`, PROD and MIN are `and`."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PROD = "prod"

    __hash__ = object.__hash__

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """`op` itself, or the operation of that name ("sum", "AVG"); ConfigError for anything else."""
        if isinstance(op, ReduceOp):
            return op
        if isinstance(op, str) and op.lower() in cls._value2member_map_:
            return cls(op.lower())
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


@runtime_checkable
class Handle(Protocol):
    """A transfer that was issued. The buffers belong to it until `test` is true or `wait` returns."""

    def test(self) -> bool:
        """True when the transfer is complete; pokes it forward if not. Never blocks."""
        ...

    def wait(self) -> None:
        """Return when the transfer is complete; CommTimeout or CommError when it will not be."""
        ...


class Done:
    """The handle of what is already complete."""

    __slots__ = ()

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE = Done()


class Communicator(Protocol):
    """An ordered group of ranks that move flat arrays between them.

    Every verb is issued at once, returns a `Handle` and allocates nothing but the scratch it states. All
    ranks of the communicator issue the same collectives in the same order, with the same dtype and element
    counts. Arrays are one-dimensional and contiguous, of float64/32/16, bfloat16, int32/64, uint8/64 or bool.
    `what` names the action and the tensor in errors. Arrays that only `root` needs are None elsewhere.
    `counts` say how many elements belong to each rank; the default is the balanced cut of `split_evenly`.
    float16 and bfloat16 are added in float32 in rank order and rounded once.

    A wrong size, dtype, layout or rank number raises ShapeError or ConfigError before anything is sent. Bytes
    given below are those that one rank sends (or receives) with an optimal algorithm, n = bytes of the full
    array, N = `size` (Patarasu and Yuan 2009; Chan et al. 2007).
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        """Put every rank's `send` into every rank's `recv`, in rank order: n(N-1)/N bytes.

        In place when `send` is this rank's own piece of `recv`.
        """
        ...

    def reduce_scatter(
        self,
        send: Array,
        recv: Array,
        op: ReduceOp = ReduceOp.SUM,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        """Reduce `send` over the ranks and leave each rank its own piece in `recv`: n(N-1)/N bytes.

        In place when `recv` is the start of `send` (`send[:count]`) or its own piece there; the rest of `send` is
        then undefined.
        Scratch: n for 16-bit arrays, none else.
        """
        ...

    def all_reduce(
        self, buf: Array, op: ReduceOp = ReduceOp.SUM, algorithm: str = "library", *, what: str = ""
    ) -> Handle:
        """Reduce `buf` over the ranks into every rank's `buf`: 2n(N-1)/N bytes.

        `algorithm` is "library" (the backend's own) or "ring" (`fsdpx.comm.ring`; scratch n/N; not for 16-bit
        arrays). Scratch: n for 16-bit arrays.
        """
        ...

    def broadcast(self, buf: Array, root: int, *, what: str = "") -> Handle:
        """Copy `buf` of rank `root` into `buf` of all others: n bytes."""
        ...

    def reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, what: str = "") -> Handle:
        """Reduce `send` over the ranks into `recv` of `root`, which may be `send` itself: n bytes."""
        ...

    def gather(
        self,
        send: Array,
        recv: Array | None,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        """Put every rank's `send` into `recv` of `root`: n(N-1)/N bytes there, n/N elsewhere."""
        ...

    def scatter(
        self,
        send: Array | None,
        recv: Array,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        """Cut `send` of `root` into every rank's `recv`: n(N-1)/N bytes there, n/N elsewhere."""
        ...

    def all_to_all(
        self,
        send: Array,
        recv: Array,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        """Send piece r of `send` to rank r; receive into piece r of `recv` what rank r sent here."""
        ...

    def send(self, buf: Array, dest: int, tag: int = 0, *, what: str = "") -> Handle:
        """Send `buf` to `dest`; messages of one (source, dest, tag) arrive in order. 0 <= tag < 16384."""
        ...

    def recv(self, buf: Array, source: int, tag: int = 0, *, what: str = "") -> Handle:
        """Receive from rank `source` a message of exactly `buf.size` elements."""
        ...

    def barrier(self, *, what: str = "") -> Handle:
        """Complete when every rank has issued it."""
        ...

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """The communicator of one `color`, ordered by (key, rank); None for color None. Blocking."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of `ranks`, in that order. All call it, each with its own group. Blocking."""
        ...

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's `obj` on every rank. Blocking, pickled: for small control messages, not for data."""
        ...

    def close(self) -> None:
        """Free what the backend holds. Collective; the communicator is unusable afterwards."""
        ...

    def abort(self, code: int = 1) -> None:
        """End all ranks of the job now, with exit status `code`."""
        ...
