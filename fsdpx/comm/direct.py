"""Collectives among ranks of one process: the last rank to arrive moves the data of all, from array to array.

Each takes the checked calls of all ranks, by rank. Reductions are in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdpx.comm.calls import Array, Call, copy
from fsdpx.comm.reduction import fold
from fsdpx.errors import DesyncError

__all__ = ["COLLECTIVES"]


def all_gather(calls: Sequence[Call]) -> None:
    for rank, call in enumerate(calls):
        for other in calls:
            copy(call.cuts[0].part(other.arrays[1], rank), call.arrays[0])


def reduce_scatter(calls: Sequence[Call]) -> None:
    for rank, call in enumerate(calls):  # in place, what is written is the start of a send: pieces read by now
        parts = [call.cuts[0].part(other.arrays[0], rank) for other in calls]
        fold(parts, call.op, [call.arrays[1]])


def all_reduce(calls: Sequence[Call]) -> None:
    first = calls[0].arrays[0]
    fold([call.arrays[0] for call in calls], calls[0].op, [first])
    for call in calls[1:]:
        call.arrays[0][...] = first


def broadcast(calls: Sequence[Call]) -> None:
    source = calls[calls[0].root].arrays[0]
    for call in calls:
        copy(call.arrays[0], source)


def reduce(calls: Sequence[Call]) -> None:
    fold([call.arrays[0] for call in calls], calls[0].op, [calls[calls[0].root].arrays[1]])


def gather(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    for rank, call in enumerate(calls):
        part = call.arrays[0]
        _same_size(call, rank, part, call.root, root.cuts[0].counts[rank])
        copy(root.cuts[0].part(root.arrays[1], rank), part)


def scatter(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    for rank, call in enumerate(calls):
        part = call.arrays[1]
        _same_size(call, rank, part, call.root, root.cuts[0].counts[rank])
        copy(part, root.cuts[0].part(root.arrays[0], rank))


def all_to_all(calls: Sequence[Call]) -> None:
    for source, call in enumerate(calls):
        for dest, other in enumerate(calls):
            part, received = call.cuts[0].part(call.arrays[0], dest), other.cuts[1]
            _same_size(call, source, part, dest, received.counts[source])
            received.part(other.arrays[1], source)[...] = part


def barrier(calls: Sequence[Call]) -> None:
    """Nothing to move."""


COLLECTIVES: dict[str, Callable[[Sequence[Call]], None]] = {
    f.__name__: f
    for f in (all_gather, reduce_scatter, all_reduce, broadcast, reduce, gather, scatter, all_to_all, barrier)
}


def _same_size(call: Call, source: int, part: Array, dest: int, count: int) -> None:
    if part.size != count:
        raise DesyncError(f"{call.name}: rank {source} has a piece of {part.size}, rank {dest} counts {count}")
