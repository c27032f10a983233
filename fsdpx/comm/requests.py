"""MPI requests as handles, and what MPI is given: operations and types it knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from mpi4py import MPI

from fsdpx.comm.communicator import Array, ReduceOp
from fsdpx.comm.reduction import is_half
from fsdpx.comm.steps import Progress, spin
from fsdpx.errors import CommError, CommTimeout

__all__ = ["Requests", "mpi_op", "wire"]

_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.AVG: MPI.SUM, ReduceOp.MAX: MPI.MAX, ReduceOp.MIN: MPI.MIN}
_OPS[ReduceOp.PROD] = MPI.PROD
_BOOL_OPS = {ReduceOp.SUM: MPI.LOR, ReduceOp.MAX: MPI.LOR, ReduceOp.PROD: MPI.LAND, ReduceOp.MIN: MPI.LAND}
_BOOL = np.dtype(bool)


class Waiting(Protocol):
    """A communicator, as far as a request looks: who waits, how long, and for what else."""

    rank: int
    size: int
    timeout: float
    progress: Progress


class Requests:
    """The handle of MPI requests that belong to one call."""

    __slots__ = ("_comm", "_requests", "_test", "_verb", "_what")

    def __init__(self, comm: Waiting, verb: str, what: str, requests: list[MPI.Request]) -> None:
        self._comm, self._verb, self._what = comm, verb, what
        self._requests = requests
        self._test: Callable[[], bool] = (
            requests[0].Test if len(requests) == 1 else partial(MPI.Request.Testall, requests)
        )

    def test(self) -> bool:
        try:
            return self._test()
        except MPI.Exception as error:
            raise CommError(f"{self}: {error}") from error

    def wait(self) -> None:
        if self.test():
            return
        comm = self._comm
        if not spin(self.test, comm.progress, comm.timeout):
            raise CommTimeout(f"{self} is not complete after {comm.timeout:g} s: a peer did not call or has ended")

    def __str__(self) -> str:
        what = f" of {self._what}" if self._what else ""
        return f"{self._verb}{what} on rank {self._comm.rank} of {self._comm.size}"


def wire(array: Array) -> Array:
    """What MPI is given: it knows no bfloat16, and not always float16, so those travel as uint16."""
    return array.view(np.uint16) if is_half(array.dtype) else array


def mpi_op(op: ReduceOp, dtype: np.dtype) -> MPI.Op:
    return _BOOL_OPS[op] if dtype == _BOOL else _OPS[op]
