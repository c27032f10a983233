"""MPI between machines, shared memory inside one: collectives on arrays that lie in windows copy nothing twice.

Inside a machine a reduce reads each rank's array once, where it lies, and a gather into memory that all ranks share
is a synchronisation. Between machines each rank moves its own slice, so all links work at once. Everything else, and
arrays outside of windows, goes through `MpiCommunicator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from mpi4py import MPI

from fsdpx.array.kernels.choice import installed
from fsdpx.comm import lanes
from fsdpx.comm.backend import Backend
from fsdpx.comm.board import SLOTS, Board
from fsdpx.comm.checks import overlay
from fsdpx.comm.communicator import Array, Communicator, Handle, Pieces, ReduceOp, even_pieces
from fsdpx.comm.host import Host, Place
from fsdpx.comm.meeting import Meeting
from fsdpx.comm.mpi import LIMIT, TIMEOUT, MpiCommunicator
from fsdpx.comm.reduction import compilable, fold, is_half
from fsdpx.comm.steps import Steps, spin
from fsdpx.errors import CommTimeout

if TYPE_CHECKING:
    from fsdpx.comm.planned import Plan

__all__ = ["SMALL", "NodeCommunicator"]

SMALL = 8 << 10
"""Bytes up to which sums travel as messages, unless they are compiled."""
PLANS = 4096
"""Plans that are kept."""


class NodeCommunicator(Backend):
    """The ranks of `comm` (duplicated), those of one machine speaking through shared memory.

    An array lies in a window if it is a view of what `share` or `share_one` gave; all ranks of a call must pass such
    arrays, or none. Complete means what it means in MPI: the buffers may be used again. machines: number of the
    machine of each rank, instead of what MPI says (for tests). Groups whose machines hold different numbers of ranks
    use MPI throughout.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        timeout: float = TIMEOUT,
        limit: int = LIMIT,
        machines: Sequence[int] | None = None,
    ) -> None:
        mpi = MpiCommunicator(comm, timeout, limit)
        rank = mpi.rank
        here = mpi.raw.Split_type(MPI.COMM_TYPE_SHARED) if machines is None else mpi.raw.Split(machines[rank], rank)
        self._start(mpi, Host(mpi.raw, cast(MPI.Intracomm, here)), owns=True)

    def _start(self, mpi: MpiCommunicator, host: Host, owns: bool) -> None:
        super().__init__(mpi.rank, mpi.size, mpi.progress)
        self.mpi, self.host, self.timeout = mpi, host, mpi.timeout
        self._owns = owns
        everyone = mpi.all_gather_object((host.leader, host.rank, installed()))
        names = list(dict.fromkeys(leader for leader, _, _ in everyone))
        self.machines = [[r for r, (leader, _, _) in enumerate(everyone) if leader == name] for name in names]
        self.machine = self.machines[names.index(host.leader)]
        self.lane = self.machine.index(self.rank)
        self.others = [index for index in range(len(self.machine)) if index != self.lane]
        self._homes = [everyone[r][1] for r in self.machine]
        even = len({len(m) for m in self.machines}) == 1 and len(self.machine) > 1
        self.inside = even and len(self.machines) == 1
        self.compiles = self.inside and all(able for _, _, able in everyone)
        self.across = mpi.split(self.lane, self.rank) if even and not self.inside else None
        if even:
            local = mpi.raw.Split(names.index(host.leader), self.rank)
            self.board = Board(cast(MPI.Intracomm, local))
            local.Free()
        self._number = 0
        self.latest: list[Any] = [None] * SLOTS
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._waits: Plan | None = None
        self.turn, self._tickets = 0, 0

    def __repr__(self) -> str:
        return f"NodeCommunicator(rank={self.rank}, size={self.size}, machines={len(self.machines)})"

    @property
    def planned(self) -> ModuleType | None:
        """The code of planned calls, where it is loaded."""
        return self.host.planned if self.compiles else None

    # -- memory ----------------------------------------------------------------------------------

    @property
    def shares(self) -> bool:
        """Whether arrays in windows are worth it: several ranks of this group on each machine, equally many."""
        return self.inside or self.across is not None

    def share(self, nbytes: int) -> Array | None:
        """Memory of this rank that its machine can reach, as bytes; ranks may ask for different amounts.

        None, on all ranks, if a machine has no room. Collective over the communicator that was opened first.
        """
        self._prepare()
        return self.host.allocate(nbytes)

    def share_one(self, nbytes: int) -> Array | None:
        """The same, but one piece of memory for all ranks of this group on a machine."""
        self._prepare()
        number = self.host.window(nbytes if self.lane == 0 else 0)
        if number is None:
            return None
        self.host.common.add(number)
        return self.host.part(number, self._homes[0])

    def release(self, array: Array) -> None:
        """Give back what `share` or `share_one` gave. Collective like they are."""
        self.host.release(array)

    # -- collectives -----------------------------------------------------------------------------

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        plan = self._plans.get((id(send), id(recv), counts if counts is None else tuple(counts)))
        if plan is None or not plan.fits(send, recv):
            return super().all_gather(send, recv, counts, what=what)
        if plan.own is not None:
            plan.own[...] = send
        return plan.issue(self.reserve(), what)

    def reduce_scatter(
        self,
        send: Array,
        recv: Array,
        op: ReduceOp = ReduceOp.SUM,
        counts: Sequence[int] | None = None,
        *,
        what: str = "",
    ) -> Handle:
        plan = self._plans.get((id(send), id(recv), op, counts if counts is None else tuple(counts)))
        if plan is None or not plan.fits(send, recv):
            return super().reduce_scatter(send, recv, op, counts, what=what)
        return plan.issue(self.reserve(), what)

    def all_reduce(
        self, buf: Array, op: ReduceOp = ReduceOp.SUM, algorithm: str = "library", *, what: str = ""
    ) -> Handle:
        plan = self._plans.get((id(buf), op)) if algorithm == "library" else None
        if plan is None or not plan.fits(buf, buf):
            return super().all_reduce(buf, op, algorithm, what=what)
        return plan.issue(self.reserve(), what)

    def _all_gather(self, send: Array, recv: Array, cut: Pieces, what: str) -> Handle:
        into, source = self._find(recv), self._find(send)
        if into is not None and into.window in self.host.common:
            return self._gather_common(into, source, send, recv, cut, what)
        if self.inside and source is not None:
            return self._gather_from(source, send, recv, cut, what)
        if self.across is not None and into is not None:
            return self._steps(lanes.all_gather(self, into, send, recv, cut, self._ticket(), what))
        return self.mpi._all_gather(send, recv, cut, what)

    def _gather_common(
        self, into: Place, source: Place | None, send: Array, recv: Array, cut: Pieces, what: str
    ) -> Handle:
        """Into memory that all share: this rank's piece lies there, all there is to do is to say so."""
        if self.across is not None:
            return self._steps(lanes.all_gather_common(self, send, recv, cut, self._ticket(), what))
        own, start = cut.part(recv, self.rank), cut.displs[self.rank] * recv.dtype.itemsize
        there = source == (into.window, into.owner, into.offset + start)
        if not there:
            own[...] = send
        if self.planned is None:
            return self.sync(self.reserve(), "all_gather", what)
        plan = self.planned.gathered(self, [send, recv], None if there else own)
        return self._first(plan, [(id(send), id(recv), counts) for counts in self._sayings(cut)], what)

    def _gather_from(self, place: Place, send: Array, recv: Array, cut: Pieces, what: str) -> Handle:
        """Everybody copies the others' pieces from where they lie: n - n/N read and written."""
        number, own = self.reserve(), cut.part(recv, self.rank)
        if not overlay(send, own):
            own[...] = send

        def copy() -> None:
            for other in self.others:
                part = cut.part(recv, other)
                part[...] = self.peer(other, number, 0, part.size, part.dtype)

        return self.meet(number, place, "all_gather", what, copy)

    def _reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, cut: Pieces, what: str) -> Handle:
        place = self._find_sum(send, op)
        if place is None:
            return self.mpi._reduce_scatter(send, recv, op, cut, what)
        if self.across is not None:
            return self._steps(lanes.reduce_scatter(self, place, send, recv, op, cut, self._ticket(), what))
        # The start of `send` is others' to read until all have finished; its own piece is not.
        aside = overlay(send, recv) and self.lane > 0
        if self.planned is not None and compilable(send.dtype, op) and not aside and isinstance(recv, np.ndarray):
            plan = self.planned.added(self, "reduce_scatter", [send, recv], place, op, cut)
            return self._first(plan, [(id(send), id(recv), op, counts) for counts in self._sayings(cut)], what)
        number, own = self.reserve(), cut.part(send, self.rank)
        target = own if aside else recv

        def add() -> None:
            fold(self.sources(number, own, cut.displs[self.rank]), op, [target])

        last = partial(np.copyto, recv, own) if aside else None
        return self.meet(number, place, "reduce_scatter", what, add, last=last)

    def _all_reduce(self, buf: Array, op: ReduceOp, what: str) -> Handle:
        place = self._find_sum(buf, op)
        if place is None:
            return self.mpi._all_reduce(buf, op, what)
        if self.across is not None:
            return self._steps(lanes.all_reduce(self, place, buf, op, self._ticket(), what))
        cut = even_pieces(buf.size, self.size)
        if self.planned is not None and compilable(buf.dtype, op):
            return self._first(self.planned.added(self, "all_reduce", [buf], place, op, cut), [(id(buf), op)], what)
        number = self.reserve()

        def add() -> None:
            """Each rank adds one slice and writes the sum into everybody's buffer: nobody else touches that slice."""
            slices = self.sources(number, cut.part(buf, self.rank), cut.displs[self.rank])
            fold(slices, op, slices)

        return self.meet(number, place, "all_reduce", what, add)

    def _broadcast(self, buf: Array, root: int, what: str) -> Handle:
        place = self._find(buf) if self.inside else None
        if place is None:
            return self.mpi._broadcast(buf, root, what)
        number = self.reserve()

        def copy() -> None:
            if self.rank != root:
                buf[...] = self.peer(root, number, 0, buf.size, buf.dtype)

        return self.meet(number, place, "broadcast", what, copy, held=self.rank == root)

    def _all_to_all(self, send: Array, recv: Array, sent: Pieces, received: Pieces, what: str) -> Handle:
        place = self._find(send) if self.inside else None
        if place is None:
            return self.mpi._all_to_all(send, recv, sent, received, what)
        number, board = self.reserve(), self.board
        board.payload(self.lane, number).view(np.int64)[: self.size] = sent.displs

        def copy() -> None:
            received.part(recv, self.rank)[...] = sent.part(send, self.rank)
            for other in self.others:
                part, starts = received.part(recv, other), board.payload(other, number).view(np.int64)
                part[...] = self.peer(other, number, int(starts[self.rank]), part.size, part.dtype)

        return self.meet(number, place, "all_to_all", what, copy)

    def _barrier(self, what: str) -> Handle:
        if self.planned is None:
            return self.sync(self.reserve(), "barrier", what) if self.inside else self.mpi._barrier(what)
        if self._waits is None:
            self._waits = self.planned.barrier(self)
        return self._waits.issue(self.reserve(), what)

    def _first(self, plan: Plan, keys: Sequence[tuple[Any, ...]], what: str) -> Handle:
        """A call that was planned just now; from the next one on it is found by its key."""
        if len(self._plans) >= PLANS:
            self._plans.clear()
        self._plans.update(dict.fromkeys(keys, plan))
        return plan.issue(self.reserve(), what)

    def _sayings(self, cut: Pieces) -> Sequence[tuple[int, ...] | None]:
        """The `counts` that mean this cut."""
        return (None, cut.counts) if cut == even_pieces(cut.total, self.size) else (cut.counts,)

    # -- left to MPI -----------------------------------------------------------------------------

    def _reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, what: str) -> Handle:
        return self.mpi._reduce(send, recv, op, root, what)

    def _gather(self, send: Array, recv: Array | None, root: int, cut: Pieces | None, what: str) -> Handle:
        return self.mpi._gather(send, recv, root, cut, what)

    def _scatter(self, send: Array | None, recv: Array, root: int, cut: Pieces | None, what: str) -> Handle:
        return self.mpi._scatter(send, recv, root, cut, what)

    def _send(self, buf: Array, dest: int, tag: int, what: str) -> Handle:
        return self.mpi._send(buf, dest, tag, what)

    def _recv(self, buf: Array, source: int, tag: int, what: str) -> Handle:
        return self.mpi._recv(buf, source, tag, what)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.mpi.all_gather_object(obj)

    def abort(self, code: int = 1) -> None:
        self.mpi.abort(code)

    # -- meetings --------------------------------------------------------------------------------

    def reserve(self) -> int:
        """The number of a meeting: taken when a call is issued, in one order on all ranks, however late it meets."""
        self._number += 1
        slot = self._number % SLOTS
        taken = self.latest[slot] is not None and not self._free(slot)
        if taken and not spin(partial(self._free, slot), self.progress, self.timeout):
            raise CommTimeout(f"{self.latest[slot]}: {SLOTS} meetings later, not all ranks have taken part")
        self.latest[slot] = "a call"
        return self._number

    def _free(self, slot: int) -> bool:
        """Whether the place on the board can be used anew: all have read what was there."""
        latest = self.latest[slot]
        return latest is None or (not isinstance(latest, str) and latest.free())

    def sync(self, number: int, verb: str, what: str) -> Handle:
        """A meeting without work: complete when all have come."""
        self.board.post(number)
        return self._meet(number, verb, what, held=False)

    def meet(self, number: int, place: Place, verb: str, what: str, work: Callable[[], None], **terms: Any) -> Handle:
        """Post where an array lies; `work` when all have done so, complete when all have finished theirs."""
        self.board.post(number, place)
        return self._meet(number, verb, what, work, **terms)

    def peer(self, index: int, number: int, start: int, size: int, dtype: np.dtype) -> Array:
        """A slice of the array that rank `index` of the machine posted."""
        return self.host.view(self.board.words(index, number, 3), start, size, dtype)

    def sources(self, number: int, own: Array, start: int) -> list[Array]:
        """Everybody's slice that begins at `start` and is as long as `own`, in rank order."""
        count = range(len(self.machine))
        return [own if i == self.lane else self.peer(i, number, start, own.size, own.dtype) for i in count]

    def _meet(self, number: int, verb: str, what: str, work: Callable[[], None] | None = None, **terms: Any) -> Meeting:
        meeting = Meeting(self, number, verb, what, work, **terms)
        self.latest[number % SLOTS] = meeting
        return meeting

    def _prepare(self) -> None:
        """Who has memory to share wants collectives to be fast: from now on those that repeat run as compiled code."""
        if self.compiles and self.planned is None:
            from fsdpx.comm import planned

            self.host.planned = planned

    def _find(self, array: Array) -> Place | None:
        return self.host.find(array) if self.shares else None

    def _find_sum(self, array: Array, op: ReduceOp) -> Place | None:
        """Few bytes are faster as messages where the sum is not compiled: MPI libraries need no Python. 16-bit sums are
        rounded once, in rank order: partial sums of a machine would be rounded before."""
        small = array.nbytes <= SMALL and not (self.compiles and compilable(array.dtype, op))
        if small or not (self.inside or not is_half(array.dtype)):
            return None
        return self._find(array)

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets - 1

    def _steps(self, generator: Iterator[Handle]) -> Handle:
        return Steps(generator, self.progress)

    # -- groups ----------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        part = self.mpi.split(color, key)
        if part is None:
            return None
        assert isinstance(part, MpiCommunicator)
        group = object.__new__(NodeCommunicator)
        group._start(part, self.host, owns=False)
        return group

    def close(self) -> None:
        if self.shares:
            self.board.close()
        if self.across is not None:
            self.across.close()
        if self._owns:
            self.host.close()
        self.mpi.close()
