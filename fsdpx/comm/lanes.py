"""Collectives over several machines: shared memory inside each, and between them every rank moves its own lane.

A lane is one rank of each machine, those with the same place there. The stages of a call wait for the machine, so
calls in flight could reach the network in different orders on different ranks; tickets keep them in the order of issue,
and the numbers of all meetings of a call are taken when it is issued."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fsdpx.comm.calls import Array, Call, Handle, Pieces, ReduceOp, copy, even_pieces, pieces
from fsdpx.comm.carrier import Carrier
from fsdpx.comm.host import WindowAddress
from fsdpx.comm.neighbours import Neighbours
from fsdpx.comm.reduction import fold
from fsdpx.comm.steps import spin
from fsdpx.errors import CommTimeout

__all__ = ["Lanes"]


class Lanes:
    """near: the ranks of this machine. across: those of this rank's lane. machines: ranks by machine, equally many.
    turn: the ticket that may reach the network next."""

    def __init__(self, near: Neighbours, across: Carrier, machines: list[list[int]]) -> None:
        self.near, self.across, self.machines = near, across, machines
        self.lane = [machine[near.lane] for machine in machines]
        self.turn = self._tickets = 0

    def all_gather(self, call: Call, place: WindowAddress) -> Iterator[Handle]:
        """The own lane from other machines, the other lanes from neighbours' buffers; L ranks share the network."""
        near, turn, number = self.near, self._ticket(), self.near.reserve()
        recv, cut = call.arrays[1], call.cuts[0]
        yield turn
        yield self._gather(call)

        def read() -> None:
            ranks = [(index, machine[index]) for index in near.others for machine in self.machines]
            near.copy_pieces(number, [(index, cut.part(recv, rank), cut.displs[rank]) for index, rank in ranks])

        yield near.meet(number, place, call, read)

    def all_gather_common(self, call: Call) -> Iterator[Handle]:
        """Into one buffer per machine: each lane arrives there once."""
        near, turn = self.near, self._ticket()
        first, second = near.reserve(), near.reserve()
        send, recv = call.arrays
        own = call.cuts[0].part(recv, near.rank)
        copy(own, send)
        yield near.sync(first, call)  # from here on no rank of the machine reads what lay there before
        yield turn
        yield self._gather(call.on((own, recv)))
        yield near.sync(second, call)

    def reduce_scatter(self, call: Call, place: WindowAddress) -> Iterator[Handle]:
        """Pieces of the own lane are added in the machine, then over the lane. Scratch: n/L for L ranks there."""
        near, turn, number = self.near, self._ticket(), self.near.reserve()
        (send, recv), (cut,) = call.arrays, call.cuts
        sums = pieces(tuple(cut.counts[rank] for rank in self.lane))
        partial = np.empty(sums.total, send.dtype)

        def add() -> None:
            for i, rank in enumerate(self.lane):
                sources = near.sources(number, cut.part(send, rank), cut.displs[rank])
                fold(sources, _inner(call.op), [sums.part(partial, i)])

        yield near.meet(number, place, call, add)
        yield turn
        yield self._move(call, (partial, recv), (sums,))
        self._average(call, recv)

    def all_reduce(self, call: Call, place: WindowAddress) -> Iterator[Handle]:
        """A slice per rank of the machine: added inside, then over the lane, then copied by the neighbours."""
        near, turn = self.near, self._ticket()
        first, second = near.reserve(), near.reserve()
        (buf,) = call.arrays
        cut = even_pieces(buf.size, len(near.ranks))
        own = cut.part(buf, near.lane)

        def add() -> None:
            fold(near.sources(first, own, cut.displs[near.lane]), _inner(call.op), [own])

        yield near.meet(first, place, call, add)
        yield turn
        yield self._move(call, (own,), ())
        self._average(call, own)

        def read() -> None:
            near.copy_pieces(second, [(index, cut.part(buf, index), cut.displs[index]) for index in near.others])

        yield near.meet(second, place, call, read)

    def _ticket(self) -> LaneTurn:
        self._tickets += 1
        return LaneTurn(self, self._tickets - 1)

    def _gather(self, call: Call) -> Handle:
        cut = call.cuts[0]
        self.turn += 1
        counts, displs = [cut.counts[rank] for rank in self.lane], [cut.displs[rank] for rank in self.lane]
        return self.across.all_gather_at(call, counts, displs)

    def _move(self, call: Call, arrays: tuple[Array, ...], cuts: tuple[Pieces, ...]) -> Handle:
        """Reduce partial sums over the lane."""
        self.turn += 1
        return self.across.move(Call(call.verb, arrays, _inner(call.op), what=call.what, cuts=cuts))

    def _average(self, call: Call, total: Array) -> None:
        if call.op is ReduceOp.AVG:
            np.divide(total, self.near.size, total)


class LaneTurn:
    """Complete when all calls that were issued before have reached the network."""

    __slots__ = ("_lanes", "_ticket")

    def __init__(self, lanes: Lanes, ticket: int) -> None:
        self._lanes, self._ticket = lanes, ticket

    def test(self) -> bool:
        return self._lanes.turn >= self._ticket  # later: while a wait for this lasts, a poke may take the step

    def wait(self) -> None:
        near = self._lanes.near
        if not spin(self.test, near.progress, near.timeout):
            raise CommTimeout(f"rank {near.rank} waited {near.timeout:g} s for a call that it issued before")


def _inner(op: ReduceOp) -> ReduceOp:
    """How partial results are reduced: an average is divided at the very end."""
    return ReduceOp.SUM if op is ReduceOp.AVG else op
