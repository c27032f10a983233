"""What every backend shares: arguments are checked, width one stays local, the rest is the backend's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from fsdpx.comm import checks, ring
from fsdpx.comm.communicator import DONE, Array, Communicator, Handle, Pieces, ReduceOp
from fsdpx.comm.reduction import is_half
from fsdpx.comm.steps import Progress, Steps
from fsdpx.errors import ConfigError, ShapeError

__all__ = ["Backend"]

ALGORITHMS = ("library", "ring")


class Backend(ABC):
    """A `Communicator` whose subclass only moves bytes.

    The arguments of its `_verbs` are valid, and there are at least two ranks.
    """

    def __init__(self, rank: int, size: int, progress: Progress) -> None:
        self.rank = rank
        self.size = size
        self.progress = progress
        self._internal = 0

    # -- what a backend adds -------------------------------------------------------------------

    @abstractmethod
    def _all_gather(self, send: Array, recv: Array, cut: Pieces, what: str) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, cut: Pieces, what: str) -> Handle: ...

    @abstractmethod
    def _all_reduce(self, buf: Array, op: ReduceOp, what: str) -> Handle: ...

    @abstractmethod
    def _broadcast(self, buf: Array, root: int, what: str) -> Handle: ...

    @abstractmethod
    def _reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, what: str) -> Handle: ...

    @abstractmethod
    def _gather(self, send: Array, recv: Array | None, root: int, cut: Pieces | None, what: str) -> Handle: ...

    @abstractmethod
    def _scatter(self, send: Array | None, recv: Array, root: int, cut: Pieces | None, what: str) -> Handle: ...

    @abstractmethod
    def _all_to_all(self, send: Array, recv: Array, sent: Pieces, received: Pieces, what: str) -> Handle: ...

    @abstractmethod
    def _send(self, buf: Array, dest: int, tag: int, what: str) -> Handle: ...

    @abstractmethod
    def _recv(self, buf: Array, source: int, tag: int, what: str) -> Handle: ...

    @abstractmethod
    def _barrier(self, what: str) -> Handle: ...

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None: ...

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def abort(self, code: int = 1) -> None: ...

    # -- the protocol --------------------------------------------------------------------------

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        cut = checks.cut("all_gather", self, what, "recv", recv, "send", send, counts)
        if self.size == 1:
            return _copy(send, recv)
        return self._all_gather(send, recv, cut, what)

    def reduce_scatter(
        self,
        send: Array,
        recv: Array,
        op: ReduceOp = ReduceOp.SUM,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        cut = checks.cut("reduce_scatter", self, what, "send", send, "recv", recv, counts)
        op = checks.operation("reduce_scatter", self.rank, what, op, send.dtype)
        if self.size == 1:
            return _copy(send, recv)
        return self._reduce_scatter(send, recv, op, cut, what)

    def all_reduce(
        self, buf: Array, op: ReduceOp = ReduceOp.SUM, algorithm: str = "library", *, what: str = ""
    ) -> Handle:
        verb, rank = "all_reduce", self.rank
        checks.flat(verb, rank, what, "buf", buf)
        op = checks.operation(verb, rank, what, op, buf.dtype)
        if algorithm not in ALGORITHMS:
            message = f"unknown algorithm {algorithm!r}: use one of {', '.join(ALGORITHMS)}"
            checks.complain(ConfigError, verb, rank, what, message)
        if algorithm == "library":
            return DONE if self.size == 1 else self._all_reduce(buf, op, what)
        if is_half(buf.dtype):
            message = f"a ring does not add {buf.dtype} in rank order: use algorithm='library'"
            checks.complain(ConfigError, verb, rank, what, message)
        return DONE if self.size == 1 else self._ring(buf, op, what)

    def broadcast(self, buf: Array, root: int, *, what: str = "") -> Handle:
        checks.flat("broadcast", self.rank, what, "buf", buf)
        checks.peer("broadcast", self.rank, self.size, what, "root", root)
        return DONE if self.size == 1 else self._broadcast(buf, root, what)

    def reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, what: str = "") -> Handle:
        verb, rank = "reduce", self.rank
        checks.flat(verb, rank, what, "send", send)
        op = checks.operation(verb, rank, what, op, send.dtype)
        checks.peer(verb, rank, self.size, what, "root", root)
        if rank == root:
            recv = checks.at_root(verb, rank, what, "recv", recv)
            checks.same_dtype(verb, rank, what, send, recv)
            checks.piece(verb, rank, what, "recv", recv, send.size)
        if self.size == 1:
            return _copy(send, recv)
        return self._reduce(send, recv, op, root, what)

    def gather(
        self,
        send: Array,
        recv: Array | None,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        cut = checks.rooted("gather", self, what, "recv", recv, "send", send, root, counts)
        if self.size == 1:
            return _copy(send, recv)
        return self._gather(send, recv, root, cut, what)

    def scatter(
        self,
        send: Array | None,
        recv: Array,
        root: int,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        cut = checks.rooted("scatter", self, what, "send", send, "recv", recv, root, counts)
        if self.size == 1:
            return _copy(send, recv)
        return self._scatter(send, recv, root, cut, what)

    def all_to_all(
        self,
        send: Array,
        recv: Array,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        verb, rank, size = "all_to_all", self.rank, self.size
        checks.flat(verb, rank, what, "send", send)
        checks.flat(verb, rank, what, "recv", recv)
        checks.same_dtype(verb, rank, what, send, recv)
        sent = checks.pieces_of(verb, rank, size, what, "send", send, send_counts)
        received = checks.pieces_of(verb, rank, size, what, "recv", recv, recv_counts)
        if sent.counts[rank] != received.counts[rank]:
            message = f"it sends {sent.counts[rank]} elements to itself, but receives {received.counts[rank]}"
            checks.complain(ShapeError, verb, rank, what, message)
        if size == 1:
            return _copy(send, recv)
        return self._all_to_all(send, recv, sent, received, what)

    def send(self, buf: Array, dest: int, tag: int = 0, *, what: str = "") -> Handle:
        checks.flat("send", self.rank, what, "buf", buf)
        checks.peer("send", self.rank, self.size, what, "dest", dest)
        checks.tag_in_range("send", self.rank, what, tag)
        return self._send(buf, dest, tag, what)

    def recv(self, buf: Array, source: int, tag: int = 0, *, what: str = "") -> Handle:
        checks.flat("recv", self.rank, what, "buf", buf)
        checks.peer("recv", self.rank, self.size, what, "source", source)
        checks.tag_in_range("recv", self.rank, what, tag)
        return self._recv(buf, source, tag, what)

    def barrier(self, *, what: str = "") -> Handle:
        return DONE if self.size == 1 else self._barrier(what)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        checks.group(self, ranks)
        group = self.split(min(ranks), list(ranks).index(self.rank))
        assert group is not None
        return group

    # -- shared by the verbs -------------------------------------------------------------------

    def _ring(self, buf: Array, op: ReduceOp, what: str) -> Handle:
        return Steps(
            ring.steps(self._send, self._recv, self.rank, self.size, buf, op, self._tag(), what),
            self.progress,
        )

    def _tag(self) -> int:
        """A tag of the library's own; the same on every rank, as all issue the same collectives in order."""
        self._internal = (self._internal + 1) % (32767 - checks.TAGS)
        return checks.TAGS + self._internal


def _copy(send: Array, recv: Array | None) -> Handle:
    """All communication there is among one rank; nothing at all when the shard is the full buffer."""
    assert recv is not None
    if not checks.overlay(send, recv):
        recv[...] = send
    return DONE
