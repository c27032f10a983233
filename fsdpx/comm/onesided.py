"""One-sided memory over MPI, between machines as well: windows with passive targets (MPI-4.1, chapter 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from fsdpx.comm.calls import Array
from fsdpx.comm.window import Window

__all__ = ["MpiWindow"]

PROBES = 8
"""Open MPI looks at its sockets once in so many calls."""


class MpiWindow(Window):
    """A part of each rank of `comm`. Collective. What is opened is a copy, which is put back when it was to be written.

    Where the network has no remote memory access, MPI libraries serve a part when its owner is inside some MPI call
    that looks at the network. Calls about parts of the same machine may not: ranks that wait for each other's words
    alone would keep those of other machines waiting. So a rank that waits looks at the network itself, and none leaves
    a meeting before all have come, after which no rank looks at its words."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int, timeout: float) -> None:
        self._win = MPI.Win.Allocate(max(nbytes, 8), 1, comm=comm)
        own = np.frombuffer(cast(Any, self._win.tomemory()), np.uint8)
        self._win.Lock(comm.Get_rank())
        own[...] = 0
        self._win.Unlock(comm.Get_rank())
        comm.Barrier()
        super().__init__(comm.Get_rank(), comm.Get_size(), own, timeout)
        self._comm = comm

    @contextmanager
    def open(self, rank: int, start: int, stop: int, write: bool = True) -> Iterator[Array]:
        self._win.Lock(rank, MPI.LOCK_EXCLUSIVE if write else MPI.LOCK_SHARED)
        try:
            block = np.empty(stop - start, np.uint8)
            where = (start, block.size, MPI.BYTE)
            self._win.Get([block, MPI.BYTE], rank, where)
            self._win.Flush(rank)  # the lock is ours from here on: libraries may ask for it with the first access
            yield block
            if write:
                self._win.Put([block, MPI.BYTE], rank, where)
        finally:
            self._win.Unlock(rank)

    def word(self, rank: int, at: int) -> int:
        found = np.empty(1, np.int64)
        self._win.Lock(rank, MPI.LOCK_SHARED)
        self._win.Fetch_and_op([found, MPI.INT64_T], [found, MPI.INT64_T], rank, 8 * at, MPI.NO_OP)
        self._win.Unlock(rank)
        return int(found[0])

    def say(self, at: int, value: int) -> None:
        given, before = np.array([value], np.int64), np.empty(1, np.int64)
        self._win.Lock(self.rank, MPI.LOCK_SHARED)
        self._win.Fetch_and_op([given, MPI.INT64_T], [before, MPI.INT64_T], self.rank, 8 * at, MPI.REPLACE)
        self._win.Unlock(self.rank)

    def check(self, missing: Sequence[int] = (), what: str = "") -> None:
        for _ in range(PROBES):
            self._comm.Iprobe()

    def meet(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        super().meet(missing, what)
        others, barrier = [rank for rank in range(self.size) if rank != self.rank], self._comm.Ibarrier()
        self.poll(lambda: [] if barrier.Test() else others, what)

    def close(self) -> None:
        self.own = np.empty(0, np.uint8)
        self._win.Free()
