"""MPI requests as handles, and what MPI is given: operations and types it knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from mpi4py import MPI

from fsdpx.comm.calls import Array, Call, ReduceOp, named
from fsdpx.comm.deaths import DEATHS, lost
from fsdpx.comm.reduction import is_half
from fsdpx.comm.steps import Progress, spin
from fsdpx.comm.survivors import loss
from fsdpx.errors import CommError, CommTimeout

__all__ = ["Requests", "mpi_op", "translated", "wire"]

_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.AVG: MPI.SUM, ReduceOp.MAX: MPI.MAX, ReduceOp.MIN: MPI.MIN}
_OPS[ReduceOp.PROD] = MPI.PROD
_BOOL_OPS = {ReduceOp.SUM: MPI.LOR, ReduceOp.MAX: MPI.LOR, ReduceOp.PROD: MPI.LAND, ReduceOp.MIN: MPI.LAND}
_BOOL = np.dtype(bool)


class Waiting(Protocol):
    """The part of a communicator that a request needs: its rank, its timeout, and what to advance meanwhile."""

    rank: int
    size: int
    timeout: float
    progress: Progress
    raw: MPI.Intracomm


class Requests:
    """The handle of MPI requests that belong to one call. It keeps the buffers until all are complete, which mpi4py
    does for some only. After an error each `test` raises it, and pokes the requests that are left."""

    __slots__ = ("_buffers", "_comm", "_error", "_requests", "_test", "_verb", "_what")

    def __init__(self, comm: Waiting, call: Call, requests: list[MPI.Request], buffers: object) -> None:
        self._comm, self._verb, self._what = comm, call.verb, call.what
        self._requests = requests
        self._buffers = buffers
        self._error: CommError | None = None
        self._test: Callable[[], bool] = (
            requests[0].Test if len(requests) == 1 else partial(MPI.Request.Testall, requests)
        )

    def test(self) -> bool:
        try:
            done = self._test()
        except MPI.Exception as error:
            if self._error is None:
                self._error = translated(error, str(self), self._comm.raw)
                self._error.__cause__ = error
            done = not self.active
        if done:
            self._buffers = None
        if self._error is not None:
            raise self._error
        return done

    @property
    def active(self) -> bool:
        """Whether MPI may still touch some buffer: one of several requests that fails leaves the others under way."""
        return any(request != MPI.REQUEST_NULL for request in self._requests)

    def wait(self) -> None:
        if self.test():
            return
        comm = self._comm
        if not spin(self.test, comm.progress, comm.timeout):
            raise CommTimeout(f"{self} is not complete after {comm.timeout:g} s: a peer did not call or has ended")

    def __str__(self) -> str:
        return f"{named(self._verb, self._what)} on rank {self._comm.rank} of {self._comm.size}"


def translated(error: MPI.Exception, where: str, comm: MPI.Intracomm) -> CommError:
    """An error of MPI in our words: RankLost if `comm` has lost a rank or was revoked, CommError else. Its class alone
    does not say it: of several requests only "an error in a status" is known, a connection may break before MPI knows
    why."""
    dead = lost(comm)
    if error.Get_error_class() in DEATHS or (DEATHS and (dead or comm.Is_revoked())):
        return loss(where, dead)
    return CommError(f"{where}: {error}")


def wire(array: Array) -> Array:
    """The buffer that MPI is given: it knows no bfloat16, and not always float16, so those travel as uint16."""
    return array.view(np.uint16) if is_half(array.dtype) else array


def mpi_op(op: ReduceOp, dtype: np.dtype) -> MPI.Op:
    return _BOOL_OPS[op] if dtype == _BOOL else _OPS[op]
