"""Collectives over several machines: shared memory inside each, and between them every rank moves its own lane.

A lane is one rank of each machine, those with the same place there. The stages of a call wait for the machine, so
calls in flight could reach the network in different orders on different ranks; tickets keep them in the order of issue,
and the numbers of all meetings of a call are taken when it is issued.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fsdpx.comm.checks import overlay
from fsdpx.comm.communicator import Array, Handle, Pieces, ReduceOp, even_pieces, pieces
from fsdpx.comm.host import Place
from fsdpx.comm.mpi import MpiCommunicator
from fsdpx.comm.reduction import fold
from fsdpx.comm.steps import spin
from fsdpx.errors import CommTimeout

if TYPE_CHECKING:
    from fsdpx.comm.node import NodeCommunicator

__all__ = ["all_gather", "all_gather_common", "all_reduce", "reduce_scatter"]


class Turn:
    """Complete when all calls that were issued before have reached the network."""

    __slots__ = ("_node", "_ticket")

    def __init__(self, node: NodeCommunicator, ticket: int) -> None:
        self._node, self._ticket = node, ticket

    def test(self) -> bool:
        return self._node.turn >= self._ticket  # later: while somebody waits here, a poke may take the step

    def wait(self) -> None:
        node = self._node
        if not spin(self.test, node.progress, node.timeout):
            raise CommTimeout(f"rank {node.rank} waited {node.timeout:g} s for a call that it issued before")


def all_gather(
    node: NodeCommunicator, place: Place, send: Array, recv: Array, cut: Pieces, ticket: int, what: str
) -> Iterator[Handle]:
    """The own lane from the other machines, the other lanes from the neighbours' buffers; L ranks share the network."""
    number = node.reserve()
    yield Turn(node, ticket)
    yield _lane_gather(node, send, recv, cut, what)

    def copy() -> None:
        for index in node.others:
            for machine in node.machines:
                part, start = cut.part(recv, machine[index]), cut.displs[machine[index]]
                part[...] = node.peer(index, number, start, part.size, part.dtype)

    yield node.meet(number, place, "all_gather", what, copy)


def all_gather_common(
    node: NodeCommunicator, send: Array, recv: Array, cut: Pieces, ticket: int, what: str
) -> Iterator[Handle]:
    """Into one buffer per machine: each lane arrives there once."""
    first, second = node.reserve(), node.reserve()
    own = cut.part(recv, node.rank)
    if not overlay(send, own):
        own[...] = send
    yield node.sync(first, "all_gather", what)  # nobody here reads what lay there before
    yield Turn(node, ticket)
    yield _lane_gather(node, own, recv, cut, what)
    yield node.sync(second, "all_gather", what)


def _lane_gather(node: NodeCommunicator, send: Array, recv: Array, cut: Pieces, what: str) -> Handle:
    lane = [machine[node.lane] for machine in node.machines]
    node.turn += 1
    return _across(node).all_gather_at(send, recv, [cut.counts[r] for r in lane], [cut.displs[r] for r in lane], what)


def reduce_scatter(
    node: NodeCommunicator, place: Place, send: Array, recv: Array, op: ReduceOp, cut: Pieces, ticket: int, what: str
) -> Iterator[Handle]:
    """Pieces of the own lane are added inside the machine, then over the lane. Scratch: n/L for L ranks a machine."""
    lane = [machine[node.lane] for machine in node.machines]
    sums = pieces(tuple(cut.counts[r] for r in lane))
    partial = np.empty(sums.total, send.dtype)
    number, inner = node.reserve(), ReduceOp.SUM if op is ReduceOp.AVG else op

    def add() -> None:
        for i, r in enumerate(lane):
            fold(node.sources(number, cut.part(send, r), cut.displs[r]), inner, [sums.part(partial, i)])

    yield node.meet(number, place, "reduce_scatter", what, add)
    yield Turn(node, ticket)
    node.turn += 1
    yield _across(node)._reduce_scatter(partial, recv, inner, sums, what)
    if op is ReduceOp.AVG:
        np.divide(recv, node.size, recv)


def all_reduce(
    node: NodeCommunicator, place: Place, buf: Array, op: ReduceOp, ticket: int, what: str
) -> Iterator[Handle]:
    """A slice per rank of the machine: added inside, then over the lane, then copied by the neighbours."""
    cut = even_pieces(buf.size, len(node.machine))
    own = cut.part(buf, node.lane)
    first, second = node.reserve(), node.reserve()
    inner = ReduceOp.SUM if op is ReduceOp.AVG else op

    def add() -> None:
        fold(node.sources(first, own, cut.displs[node.lane]), inner, [own])

    yield node.meet(first, place, "all_reduce", what, add)
    yield Turn(node, ticket)
    node.turn += 1
    yield _across(node)._all_reduce(own, inner, what)
    if op is ReduceOp.AVG:
        np.divide(own, node.size, own)

    def copy() -> None:
        for index in node.others:
            part = cut.part(buf, index)
            part[...] = node.peer(index, second, cut.displs[index], part.size, part.dtype)

    yield node.meet(second, place, "all_reduce", what, copy)


def _across(node: NodeCommunicator) -> MpiCommunicator:
    assert isinstance(node.across, MpiCommunicator)
    return node.across
