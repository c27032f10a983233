"""How many calls and bytes went over which axis: counters, and the communicator that counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpx.comm.communicator import Array, Communicator, Handle, ReduceOp, even_pieces
from fsdpx.comm.steps import progress_of

__all__ = ["Count", "Counted", "Counters"]


@dataclass(slots=True)
class Count:
    """Calls, and the bytes that this rank must send or receive with an optimal algorithm."""

    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Counters:
    """Counts by (axis, verb), for one rank."""

    table: dict[tuple[str, str], Count] = field(default_factory=dict)

    def add(self, axis: str, verb: str, nbytes: int, calls: int = 1) -> None:
        """Note `calls` calls of `verb` on `axis` that moved `nbytes` in all."""
        count = self.table.get((axis, verb))
        if count is None:
            count = self.table[axis, verb] = Count()
        count.calls += calls
        count.bytes += nbytes

    def of(self, axis: str | None = None, verb: str | None = None) -> Count:
        """The sum over what matches; None matches everything."""
        found = [count for key, count in self.table.items() if axis in (None, key[0]) and verb in (None, key[1])]
        return Count(sum(count.calls for count in found), sum(count.bytes for count in found))

    def copy(self) -> Counters:
        """These counts as they are now."""
        return Counters({key: Count(count.calls, count.bytes) for key, count in self.table.items()})

    def since(self, earlier: Counters) -> Counters:
        """What was added after `earlier` was copied; entries without new calls are left out."""
        later = Counters()
        for (axis, verb), count in self.table.items():
            before = earlier.table.get((axis, verb), Count())
            if count.calls > before.calls:
                later.add(axis, verb, count.bytes - before.bytes, count.calls - before.calls)
        return later

    def clear(self) -> None:
        """Forget all."""
        self.table.clear()

    def __iter__(self) -> Iterator[tuple[str, str, int, int]]:
        """(axis, verb, calls, bytes), sorted by axis and verb."""
        for (axis, verb), count in sorted(self.table.items()):
            yield axis, verb, count.calls, count.bytes


class Counted:
    """A communicator that notes each call under its axis and passes it on. One rank alone counts nothing.

    Bytes are those of an optimal algorithm, so that they do not depend on the backend: n = bytes of the full
    array, own = this rank's piece. all_gather, reduce_scatter: n - own. all_reduce: 2 (n - own) of the
    balanced cut. broadcast, reduce: n. gather, scatter: n - own at root, own elsewhere. all_to_all: what goes
    to others. send, recv: n. barrier: 0.
    """

    def __init__(self, comm: Communicator, axis: str, counters: Counters) -> None:
        self.comm, self.axis, self.counters = comm, axis, counters
        self.rank, self.size = comm.rank, comm.size
        self.progress = progress_of(comm)

    def __repr__(self) -> str:
        return f"Counted({self.comm!r}, {self.axis!r})"

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        handle = self.comm.all_gather(send, recv, counts, what=what)
        return self._note(handle, "all_gather", (recv.size - send.size) * recv.dtype.itemsize)

    def reduce_scatter(
        self,
        send: Array,
        recv: Array,
        op: ReduceOp = ReduceOp.SUM,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        handle = self.comm.reduce_scatter(send, recv, op, counts, what=what)
        return self._note(handle, "reduce_scatter", (send.size - recv.size) * send.dtype.itemsize)

    def all_reduce(
        self, buf: Array, op: ReduceOp = ReduceOp.SUM, algorithm: str = "library", *, what: str = ""
    ) -> Handle:
        handle = self.comm.all_reduce(buf, op, algorithm, what=what)
        others = buf.size - even_pieces(buf.size, self.size).counts[self.rank]
        return self._note(handle, "all_reduce", 2 * others * buf.dtype.itemsize)

    def broadcast(self, buf: Array, root: int, *, what: str = "") -> Handle:
        return self._note(self.comm.broadcast(buf, root, what=what), "broadcast", _nbytes(buf))

    def reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, what: str = "") -> Handle:
        return self._note(self.comm.reduce(send, recv, op, root, what=what), "reduce", _nbytes(send))

    def gather(
        self,
        send: Array,
        recv: Array | None,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        handle = self.comm.gather(send, recv, root, counts, what=what)
        return self._note(handle, "gather", self._rooted(root, recv, send))

    def scatter(
        self,
        send: Array | None,
        recv: Array,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        handle = self.comm.scatter(send, recv, root, counts, what=what)
        return self._note(handle, "scatter", self._rooted(root, send, recv))

    def all_to_all(
        self,
        send: Array,
        recv: Array,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        handle = self.comm.all_to_all(send, recv, send_counts, recv_counts, what=what)
        counts = even_pieces(send.size, self.size).counts if send_counts is None else send_counts
        return self._note(handle, "all_to_all", (send.size - counts[self.rank]) * send.dtype.itemsize)

    def send(self, buf: Array, dest: int, tag: int = 0, *, what: str = "") -> Handle:
        return self._note(self.comm.send(buf, dest, tag, what=what), "send", _nbytes(buf))

    def recv(self, buf: Array, source: int, tag: int = 0, *, what: str = "") -> Handle:
        return self._note(self.comm.recv(buf, source, tag, what=what), "recv", _nbytes(buf))

    def barrier(self, *, what: str = "") -> Handle:
        return self._note(self.comm.barrier(what=what), "barrier", 0)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        part = self.comm.split(color, key)
        return None if part is None else Counted(part, self.axis, self.counters)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        return Counted(self.comm.subgroup(ranks), self.axis, self.counters)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Not counted: control messages, not data."""
        return self.comm.all_gather_object(obj)

    def close(self) -> None:
        self.comm.close()

    def abort(self, code: int = 1) -> None:
        self.comm.abort(code)

    def _note(self, handle: Handle, verb: str, nbytes: int) -> Handle:
        if self.size > 1:
            self.counters.add(self.axis, verb, nbytes)
        return handle

    def _rooted(self, root: int, whole: Array | None, part: Array) -> int:
        others = _nbytes(whole) - _nbytes(part) if self.rank == root else _nbytes(part)
        return others


def _nbytes(array: Array) -> int:
    return array.size * array.dtype.itemsize
