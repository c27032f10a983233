"""Every collective by messages alone, where a backend has no better way: values are added in rank order.

16-bit floats are moved as 16 bits, added in float32 by the owner of a piece and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from fsdpx.array.namespace import namespace_of
from fsdpx.comm.calls import Array, Call, Handle, Pieces, copy, even_pieces
from fsdpx.comm.reduction import fold
from fsdpx.comm.steps import Progress, Steps

__all__ = ["COLLECTIVES", "Pairs"]

Pairs = Sequence[tuple[int, Array]]
"""(rank, array): the rank to send it to, or to receive it from."""


class Messenger(Protocol):
    """The part of a backend that a collective made of messages needs."""

    rank: int
    size: int
    progress: Progress

    def exchange(self, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
        """Send and receive these, under the tag of the call."""


Collective = Callable[[Messenger, Call], Handle]


def all_gather(comm: Messenger, call: Call) -> Handle:
    """Every piece goes to all others: n(N-1)/N bytes."""
    (_, recv), (cut,) = call.arrays, call.cuts
    own = cut.part(recv, comm.rank)
    copy(own, call.arrays[0])
    return comm.exchange(call, _each(comm, own), _cut(comm, recv, cut))


def reduce_scatter(comm: Messenger, call: Call) -> Handle:
    """Every piece goes to its owner, which adds: n(N-1)/N bytes; scratch n."""
    send, recv = call.arrays
    return Steps(_reduce_to_owners(comm, call, send, recv, call.cuts[0]), comm.progress)


def all_reduce(comm: Messenger, call: Call) -> Handle:
    """A reduce-scatter and an all-gather of the sums: 2n(N-1)/N bytes; scratch n."""
    (buf,) = call.arrays
    cut = even_pieces(buf.size, comm.size)
    own = cut.part(buf, comm.rank)
    spread = partial(all_gather, comm, call.on((own, buf), (cut,)))
    return Steps(_reduce_to_owners(comm, call, buf, own, cut, spread), comm.progress)


def broadcast(comm: Messenger, call: Call) -> Handle:
    """Root sends to all others: n(N-1) bytes there, n elsewhere."""
    (buf,) = call.arrays
    if comm.rank == call.root:
        return comm.exchange(call, _each(comm, buf), [])
    return comm.exchange(call, [], [(call.root, buf)])


def reduce(comm: Messenger, call: Call) -> Handle:
    """A reduce-scatter and a gather at `root`: 2n(N-1)/N bytes there, n elsewhere; scratch n + n/N."""
    send, recv = call.arrays
    cut = even_pieces(send.size, comm.size)
    own = namespace_of(send).empty(cut.counts[comm.rank], dtype=send.dtype)
    collect = partial(gather, comm, call.on((own, recv), (cut,)))
    return Steps(_reduce_to_owners(comm, call, send, own, cut, collect), comm.progress)


def gather(comm: Messenger, call: Call) -> Handle:
    """Root receives every piece: n(N-1)/N bytes there, n/N elsewhere."""
    send, recv = call.arrays
    if comm.rank != call.root:
        return comm.exchange(call, [(call.root, send)], [])
    copy(call.cuts[0].part(recv, call.root), send)
    return comm.exchange(call, [], _cut(comm, recv, call.cuts[0]))


def scatter(comm: Messenger, call: Call) -> Handle:
    """Root sends every piece: n(N-1)/N bytes there, n/N elsewhere."""
    send, recv = call.arrays
    if comm.rank != call.root:
        return comm.exchange(call, [], [(call.root, recv)])
    copy(recv, call.cuts[0].part(send, call.root))
    return comm.exchange(call, _cut(comm, send, call.cuts[0]), [])


def all_to_all(comm: Messenger, call: Call) -> Handle:
    """Every piece goes where it belongs."""
    (send, recv), (sent, received) = call.arrays, call.cuts
    copy(received.part(recv, comm.rank), sent.part(send, comm.rank))
    return comm.exchange(call, _cut(comm, send, sent), _cut(comm, recv, received))


def barrier(comm: Messenger, call: Call) -> Handle:
    """A byte from each to each."""
    here, there = np.zeros(1, np.uint8), np.empty(comm.size, np.uint8)
    return comm.exchange(call, _each(comm, here), _cut(comm, there, even_pieces(comm.size, comm.size)))


COLLECTIVES: dict[str, Collective] = {
    f.__name__: f
    for f in (all_gather, reduce_scatter, all_reduce, broadcast, reduce, gather, scatter, all_to_all, barrier)
}


def _reduce_to_owners(
    comm: Messenger, call: Call, send: Array, recv: Array, cut: Pieces, then: Callable[[], Handle] | None = None
) -> Iterator[Handle]:
    own = cut.part(send, comm.rank)
    rows = namespace_of(send).empty((comm.size, own.size), dtype=send.dtype)
    yield comm.exchange(call, _cut(comm, send, cut), [(rank, rows[rank]) for rank in _others(comm)])
    fold([own if rank == comm.rank else rows[rank] for rank in range(comm.size)], call.op, [recv])
    if then is not None:
        yield then()


def _others(comm: Messenger) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]


def _each(comm: Messenger, array: Array) -> Pairs:
    """The same array for every other rank."""
    return [(rank, array) for rank in _others(comm)]


def _cut(comm: Messenger, array: Array, cut: Pieces) -> Pairs:
    """A piece of the array for every other rank."""
    return [(rank, cut.part(array, rank)) for rank in _others(comm)]
