"""MPI ranks that may die: user-level failure mitigation (Bland et al. 2013), as Open MPI 5 has it."""

from __future__ import annotations

from contextlib import suppress
from typing import cast

import numpy as np
from mpi4py import MPI

from fsdpx.comm.calls import Call, Handle, Progress, spin
from fsdpx.comm.communicator import Communicator, Survivor, settle
from fsdpx.comm.mpi.mpi import MpiCommunicator, Requests, finalize_without_the_dead, lost, ulfm_active
from fsdpx.errors import CommTimeout, RankLost

__all__ = ["UlfmCommunicator"]

_KEPT = 64
_SECONDS_TO_SETTLE = 0.02


class UlfmCommunicator(MpiCommunicator, Survivor):
    """An MPI communicator (duplicated) as a `Survivor`: messages only, no shared memory.

    Where ULFM is not active it works as long as no rank dies: `agree` is an all-reduce, `shrink` a duplicate, `revoke`
    nothing. Deaths on this machine are found within milliseconds, those of whole machines when the launcher finds
    out: by a heartbeat, where it has one (10 s, `--prtemca errmgr_detector_heartbeat_timeout`), else by its sockets."""

    def _start(self, comm: MPI.Intracomm, timeout: float, limit: int, progress: Progress) -> None:
        super()._start(comm, timeout, limit, progress)
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # the caller's error handler is inherited
        self.survives = ulfm_active()
        self._parts: list[UlfmCommunicator] = []
        self._under_way: list[Requests] = []

    def __repr__(self) -> str:
        return f"UlfmCommunicator(rank={self.rank}, size={self.size}, survives={self.survives})"

    def _begun(self, call: Call, requests: list[MPI.Request], *buffers: object) -> Handle:
        """Keeps the handle, and with it the buffers: when a rank is lost, the caller may drop the handle while others
        still send."""
        handle = Requests(self, call, requests, buffers)
        if len(self._under_way) >= _KEPT:
            self._under_way = [kept for kept in self._under_way if kept.active]
        self._under_way.append(handle)
        return handle

    def _left(self) -> list[Requests]:
        """The transfers under way here and in groups."""
        return [*self._under_way, *(handle for part in self._parts for handle in part._left())]

    def lost(self) -> tuple[int, ...]:
        return lost(self.raw)

    def revoke(self) -> None:
        """Groups too, even those that this rank no longer uses: others may wait in them for it."""
        if self.survives and self.raw != MPI.COMM_NULL and not self.raw.Is_revoked():
            self.raw.Revoke()
        for part in self._parts:
            part.revoke()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Goes on only when all ranks have their groups: a rank without could not revoke it, and others would wait."""
        self._parts = [part for part in self._parts if part.raw != MPI.COMM_NULL]
        part = super().split(color, key)
        if isinstance(part, UlfmCommunicator):
            self._parts.append(part)
        if self.survives:
            self.barrier(what="groups made").wait()
        return part

    def agree(self, flags: int) -> int:
        """No failure is ever acknowledged to MPI, so each agreement after a death fails, on all ranks alike."""
        given = np.array([flags], np.intc)
        request = self.raw.Iagree(given) if self.survives else self.raw.Iallreduce(MPI.IN_PLACE, given, MPI.BAND)

        def decided() -> bool:
            with suppress(RankLost):  # the wait for that transfer raises it
                self.progress.poke()
            return request.Test()

        try:
            if not spin(decided, Progress(self.progress.patience), self.timeout):
                raise CommTimeout(f"agree on rank {self.rank} of {self.size} is not complete after {self.timeout:g} s")
        except MPI.Exception as error:
            failure = self._translated(error, Call("agree"))
            if not isinstance(failure, RankLost):
                raise failure from error
            return 0
        return int(given[0])

    def shrink(self) -> UlfmCommunicator:
        """Shrinks until the new communicator agrees that it is whole."""
        before = self
        while True:
            try:
                comm = before.raw.Shrink() if self.survives else before.raw.Dup()
            except MPI.Exception as error:
                raise self._translated(error, Call("shrink")) from error
            made = object.__new__(UlfmCommunicator)
            made._start(cast(MPI.Intracomm, comm), self.timeout, self.limit, Progress(self.progress.patience))
            if made.agree(1):
                made._under_way = cast(list[Requests], settle(self._left(), _SECONDS_TO_SETTLE))
                if made.size < self.size:
                    finalize_without_the_dead()
                return made
            before = made

    def close(self) -> None:
        """Free it, unless a rank is missing: then it stays as it is until the process ends. A rank may die between this
        and its end, so the others no longer wait for it there."""
        if self.survives:
            finalize_without_the_dead()
        if self.raw != MPI.COMM_NULL and not (self.survives and (self.raw.Is_revoked() or self.lost())):
            super().close()
