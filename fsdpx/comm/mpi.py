"""Ranks as MPI processes, through mpi4py: nonblocking collectives, and waits that can end."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from fsdpx.comm import halves
from fsdpx.comm.backend import Backend
from fsdpx.comm.checks import overlay
from fsdpx.comm.communicator import Array, Communicator, Handle, Pieces, ReduceOp, pieces
from fsdpx.comm.reduction import is_half
from fsdpx.comm.requests import Requests, lost, mpi_op, told, wire
from fsdpx.comm.staging import staged
from fsdpx.comm.steps import Finish, Progress, Steps
from fsdpx.errors import CommError

__all__ = ["LIMIT", "TIMEOUT", "MpiCommunicator"]

LIMIT = 2**31 - 1
"""Elements of one MPI message: counts and displacements are C ints before MPI 4."""
TIMEOUT = 1800.0
"""Seconds a wait lasts before it raises CommTimeout."""


def issues(primitive: Callable[..., Handle]) -> Callable[..., Handle]:
    """Errors that MPI raises where a call is issued are told like those of its requests."""
    verb = primitive.__name__.removeprefix("_")

    @wraps(primitive)
    def call(self: MpiCommunicator, *args: Any) -> Handle:
        try:
            return primitive(self, *args)
        except MPI.Exception as error:
            raise self._told(error, verb, args[-1]) from error

    return call


class MpiCommunicator(Backend):
    """An MPI communicator, duplicated: messages of the solver that owns the original never meet ours.

    timeout: seconds a wait lasts before CommTimeout. limit: elements of one MPI message; longer transfers are
    cut into several. A transfer makes progress while some handle of the process is tested or waited for; one
    thread at a time may do that. Arrays on a GPU are copied to the host and back; the handle is complete when
    the copy back is issued.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, timeout: float = TIMEOUT, limit: int = LIMIT) -> None:
        self._start((MPI.COMM_WORLD if comm is None else comm).Dup(), timeout, limit, Progress())

    def _start(self, comm: MPI.Intracomm, timeout: float, limit: int, progress: Progress) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), progress)
        self._comm = comm
        self.timeout = timeout
        self.limit = limit

    def __repr__(self) -> str:
        return f"MpiCommunicator(rank={self.rank}, size={self.size})"

    @property
    def raw(self) -> MPI.Intracomm:
        """The mpi4py communicator, our duplicate."""
        return self._comm

    # -- collectives -----------------------------------------------------------------------------

    @issues
    @staged(reads=(0,), writes=(1,))
    def _all_gather(self, send: Array, recv: Array, cut: Pieces, what: str) -> Handle:
        source, target = wire(send), wire(recv)
        own = cut.part(target, self.rank)
        in_place = overlay(source, own)
        if target.size > self.limit:
            if not in_place:
                own[...] = source
            parts = [(root, cut.part(target, root)) for root in range(self.size)]
            requests = [self._comm.Ibcast(chunk, root) for root, part in parts for chunk in self._chunks(part)]
            return self._issue("all_gather", what, requests, target)
        if not cut.even:
            return self.all_gather_at(send, recv, cut.counts, cut.displs, what)
        request = self._comm.Iallgather(MPI.IN_PLACE if in_place else source, target)
        return self._issue("all_gather", what, [request], source, target)

    def all_gather_at(
        self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int], what: str
    ) -> Handle:
        """An all-gather of pieces that need not follow each other in `recv`, nor fill it; up to 2^31 elements."""
        source, target = wire(send), wire(recv)
        start = displs[self.rank]
        in_place = overlay(source, target[start : start + counts[self.rank]])
        request = self._comm.Iallgatherv(MPI.IN_PLACE if in_place else source, (target, (counts, displs)))
        return self._issue("all_gather", what, [request], source, target)

    @issues
    @staged(reads=(0,), writes=(1,))
    def _reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, cut: Pieces, what: str) -> Handle:
        if is_half(send.dtype):
            exchange = self._exchange("reduce_scatter", what)
            return self._steps(halves.reduce_scatter(exchange, self.rank, send, recv, op, cut))
        if send.size > self.limit:
            handle = self._long_reduce_scatter(send, recv, op, cut, what)
        else:
            in_place, at_home = overlay(send, recv), overlay(recv, cut.part(send, self.rank))
            source, target = (MPI.IN_PLACE, send) if in_place or at_home else (send, recv)
            if cut.even:
                request = self._comm.Ireduce_scatter_block(source, target, mpi_op(op, send.dtype))
            else:
                request = self._comm.Ireduce_scatter(source, target, cut.counts, mpi_op(op, send.dtype))
            handle = self._issue("reduce_scatter", what, [request], source, target)
            if at_home:
                handle = Finish(handle, partial(np.copyto, recv, send[: recv.size]))
        return self._averaged(handle, recv, op)

    def _long_reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, cut: Pieces, what: str) -> Handle:
        """A reduce to each owner; in place, the own piece is reduced where it lies: others read the start."""
        own, handles = cut.part(send, self.rank), []
        target = own if overlay(send, recv) else recv
        for root in range(self.size):
            handles += self._reduces(cut.part(send, root), target if root == self.rank else None, op, root)
        handle = self._issue("reduce_scatter", what, handles, send, target)
        return handle if target is recv else Finish(handle, partial(np.copyto, recv, own))

    @issues
    @staged(reads=(0,), writes=(0,))
    def _all_reduce(self, buf: Array, op: ReduceOp, what: str) -> Handle:
        if is_half(buf.dtype):
            exchange = self._exchange("all_reduce", what)
            return self._steps(halves.all_reduce(exchange, self.rank, self.size, buf, op))
        kind = mpi_op(op, buf.dtype)
        requests = [self._comm.Iallreduce(MPI.IN_PLACE, chunk, kind) for chunk in self._chunks(buf)]
        return self._averaged(self._issue("all_reduce", what, requests, buf), buf, op)

    @issues
    @staged(reads=(0,), writes=(0,))
    def _broadcast(self, buf: Array, root: int, what: str) -> Handle:
        requests = [self._comm.Ibcast(chunk, root) for chunk in self._chunks(wire(buf))]
        return self._issue("broadcast", what, requests, buf)

    @issues
    @staged(reads=(0,), writes=(1,))
    def _reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, what: str) -> Handle:
        if is_half(send.dtype):
            exchange = self._exchange("reduce", what)
            return self._steps(halves.reduce(exchange, self.rank, self.size, send, recv, op, root))
        requests = self._reduces(send, recv if self.rank == root else None, op, root)
        handle = self._issue("reduce", what, requests, send, recv)
        return self._averaged(handle, recv, op) if self.rank == root else handle

    def _reduces(self, send: Array, recv: Array | None, op: ReduceOp, root: int) -> list[MPI.Request]:
        kind = mpi_op(op, send.dtype)
        if recv is None:
            return [self._comm.Ireduce(chunk, None, kind, root) for chunk in self._chunks(send)]
        sources = self._chunks(send)
        if overlay(send, recv):
            sources = [MPI.IN_PLACE] * len(sources)
        pairs = zip(sources, self._chunks(recv), strict=True)
        return [self._comm.Ireduce(source, chunk, kind, root) for source, chunk in pairs]

    @issues
    @staged(reads=(0,), writes=(1,))
    def _gather(self, send: Array, recv: Array | None, root: int, cut: Pieces | None, what: str) -> Handle:
        exchange = self._exchange("gather", what)
        if self.rank != root:
            return exchange([(root, send)], [])
        assert cut is not None
        _copy(cut.part(recv, root), send)
        return exchange([], [(other, cut.part(recv, other)) for other in range(self.size) if other != root])

    @issues
    @staged(reads=(0,), writes=(1,))
    def _scatter(self, send: Array | None, recv: Array, root: int, cut: Pieces | None, what: str) -> Handle:
        exchange = self._exchange("scatter", what)
        if self.rank != root:
            return exchange([], [(root, recv)])
        assert cut is not None
        _copy(recv, cut.part(send, root))
        return exchange([(other, cut.part(send, other)) for other in range(self.size) if other != root], [])

    @issues
    @staged(reads=(0,), writes=(1,))
    def _all_to_all(self, send: Array, recv: Array, sent: Pieces, received: Pieces, what: str) -> Handle:
        _copy(received.part(recv, self.rank), sent.part(send, self.rank))
        others = [other for other in range(self.size) if other != self.rank]
        outgoing = [(other, sent.part(send, other)) for other in others]
        incoming = [(other, received.part(recv, other)) for other in others]
        return self._exchange("all_to_all", what)(outgoing, incoming)

    @issues
    def _barrier(self, what: str) -> Handle:
        return self._issue("barrier", what, [self._comm.Ibarrier()])

    # -- messages --------------------------------------------------------------------------------

    @issues
    @staged(reads=(0,))
    def _send(self, buf: Array, dest: int, tag: int, what: str) -> Handle:
        requests = [self._comm.Isend(chunk, dest, tag) for chunk in self._chunks(wire(buf))]
        return self._issue("send", what, requests, buf)

    @issues
    @staged(writes=(0,))
    def _recv(self, buf: Array, source: int, tag: int, what: str) -> Handle:
        requests = [self._comm.Irecv(chunk, source, tag) for chunk in self._chunks(wire(buf))]
        return self._issue("recv", what, requests, buf)

    def _exchange(self, verb: str, what: str) -> halves.Exchange:
        """Messages with the peers of one collective, under a tag of its own."""
        tag = self._tag()

        def exchange(outgoing: Sequence[tuple[int, Array]], incoming: Sequence[tuple[int, Array]]) -> Handle:
            comm, chunks = self._comm, self._chunks
            try:
                requests = [comm.Irecv(c, rank, tag) for rank, part in incoming for c in chunks(wire(part))]
                requests += [comm.Isend(c, rank, tag) for rank, part in outgoing for c in chunks(wire(part))]
            except MPI.Exception as error:
                raise self._told(error, verb, what) from error
            return self._issue(verb, what, requests, outgoing, incoming)

        return exchange

    def _chunks(self, array: Array) -> list[Any]:
        """`array` in parts that one message can hold; both sides cut alike."""
        if array.size <= self.limit:
            return [array]
        return [array[start : start + self.limit] for start in range(0, array.size, self.limit)]

    def _issue(self, verb: str, what: str, requests: list[MPI.Request], *buffers: object) -> Handle:
        return Requests(self, verb, what, requests, buffers)

    def _told(self, error: MPI.Exception, verb: str, what: str = "") -> CommError:
        return told(error, f"{verb}{f' of {what}' if what else ''} on rank {self.rank} of {self.size}", self._comm)

    def _steps(self, generator: Iterator[Handle]) -> Handle:
        return Steps(generator, self.progress)

    def _averaged(self, handle: Handle, total: Array, op: ReduceOp) -> Handle:
        return Finish(handle, partial(np.divide, total, self.size, total)) if op is ReduceOp.AVG else handle

    # -- groups ----------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        try:
            part = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        except MPI.Exception as error:
            raise self._told(error, "split") from error
        if color is None:
            return None
        group = object.__new__(type(self))
        group._start(cast(MPI.Intracomm, part), self.timeout, self.limit, self.progress)
        return group

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Pickled, in two all-gathers, sizes and bytes: so the wait for a missing rank ends here, too."""
        mine = np.frombuffer(pickle.dumps(obj), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self.all_gather(np.array([mine.size]), sizes, what="sizes of objects").wait()
        cut = pieces(tuple(int(n) for n in sizes))
        data = np.empty(cut.total, np.uint8)
        self.all_gather(mine, data, cut.counts, what="objects").wait()
        return [pickle.loads(cut.part(data, rank)) for rank in range(self.size)]

    def close(self) -> None:
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()

    def abort(self, code: int = 1) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE and threading.current_thread() is not threading.main_thread():
            os._exit(code)  # this thread may not call MPI; the launcher ends the job when a rank exits like this
        from fsdpx import environment

        if environment.read().ulfm and MPI.COMM_WORLD.Get_size() - len(lost(MPI.COMM_WORLD)) == 1:
            os._exit(code)  # Open MPI 5.0 takes the abort of the last rank that lives for success
        MPI.COMM_WORLD.Abort(code)


def _copy(target: Array, source: Array) -> None:
    if not overlay(target, source):
        target[...] = source
