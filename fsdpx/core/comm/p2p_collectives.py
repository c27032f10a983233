"""Collectives by messages alone, where a backend has no better way: to owners and back, around a ring, in 16 bits.

Values are added in rank order. 16-bit floats are moved as 16 bits, added in float32 by the owner of a piece and rounded
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from fsdpx.core.array.kernels import add_widened, narrowed, store
from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.comm.calls import (
    Array,
    Call,
    Finish,
    Handle,
    Pieces,
    Progress,
    ReduceOp,
    Steps,
    address,
    copy,
    even_pieces,
)
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.reduction import combine, fold

__all__ = ["COLLECTIVES", "ROUNDED", "Pairs", "ring_steps"]

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


def ring_steps(issue: Callable[[Call], Handle], rank: int, size: int, call: Call) -> Iterator[Handle]:
    """Reduce-scatter around the ring, then all-gather around the ring; yields the handle of each message. Scratch: n/N.
    Every element is combined once per rank around the ring and on one rank only, so all ranks end with the same bits.
    """
    buf, op = call.arrays[0], call.op
    cut = even_pieces(buf.size, size)
    right, left = (rank + 1) % size, (rank - 1) % size

    def send(piece: int) -> Handle:
        part = cut.part(buf, piece % size)
        return issue(Call("send", (part,), root=right, what=call.what, tag=call.tag))

    def recv(part: Array) -> Handle:
        return issue(Call("recv", (part,), root=left, what=call.what, tag=call.tag))

    scratch = np.empty_like(buf[: max(cut.counts)])
    for step in range(size - 1):
        own = cut.part(buf, (rank - step - 1) % size)
        incoming, sent = scratch[: own.size], send(rank - step)
        yield recv(incoming)
        combine(op)(own, incoming, out=own)
        yield sent
    if op is ReduceOp.AVG:
        own = cut.part(buf, (rank + 1) % size)
        own /= size
    for step in range(size - 1):
        sent = send(rank + 1 - step)
        yield recv(cut.part(buf, (rank - step) % size))
        yield sent


FIRST = 16
"""Elements that are cast by themselves where the result lies in the place of what it is made of."""


def reduce_scatter_rounded(comm: Communicator, call: Call) -> Handle:
    """Every piece goes to its owner, which adds. Scratch: none if all pieces are equal."""
    send, recv = call.arrays
    return _to_owners(comm, call, send, recv, call.cuts[0].counts)


def all_reduce_rounded(comm: Communicator, call: Call) -> Handle:
    """Sums at their owners, then an all-gather of the sums, rounded once more. The sums are waited for here."""
    (buf,) = call.arrays
    xp, cut = namespace_of(buf), even_pieces(buf.size, comm.size)
    own, wire = cut.counts[comm.rank], buf.view(call.wire)[: buf.size]
    total, mine = buf[:own], cut.part(wire, comm.rank)
    _to_owners(comm, call, buf, total, cut.counts).wait()
    _narrow(xp, total, wire[:own])
    mine[...] = wire[:own]
    return Finish(comm.all_gather(mine, wire, cut.counts, what=call.what), partial(_widen, xp, wire, buf))


ROUNDED: dict[str, Callable[[Communicator, Call], Handle]] = {
    "reduce_scatter": reduce_scatter_rounded,
    "all_reduce": all_reduce_rounded,
}


def _to_owners(comm: Communicator, call: Call, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
    n, own, width = send.size, counts[comm.rank], comm.size
    xp, scratch, arriving = namespace_of(send), send.view(call.wire), own * width
    if arriving <= scratch.size - max(n, own * send.itemsize // 2):  # beside what is sent, and the sum afterwards
        parts = scratch[scratch.size - arriving :]
    else:
        parts = xp.empty(arriving, dtype=call.wire)
    wire = scratch[:n]
    _narrow(xp, send, wire)  # an overflow becomes Inf, which the loss scaler detects
    handle = comm.all_to_all(wire, parts, counts, [own] * width, what=call.what)
    within = 0 <= address(recv) - address(send) < send.nbytes

    def add() -> None:
        total = send[:own] if within else recv  # where nothing is left that others read, and no part lies
        store(xp, parts[:own], total)
        for r in range(1, width):
            add_widened(xp, parts[r * own : (r + 1) * own], total)
        if total is not recv:
            recv[...] = total

    return Finish(handle, add)


def _narrow(xp: Any, x: Array, out: Array) -> None:
    """out = x, where `out` begins at the same byte and its elements are smaller."""
    out[:FIRST] = narrowed(xp, x[:FIRST], out.dtype)
    for start, stop in _doubling(x.size):
        store(xp, x[start:stop], out[start:stop])


def _widen(xp: Any, x: Array, out: Array) -> None:
    """out = x, where `out` begins at the same byte and its elements are larger."""
    for start, stop in reversed(list(_doubling(x.size))):
        store(xp, x[start:stop], out[start:stop])
    out[:FIRST] = narrowed(xp, x[:FIRST], out.dtype)


def _doubling(size: int) -> Iterator[tuple[int, int]]:
    """Runs of elements, each as long as all before it: in half the bytes, it ends where it begins."""
    start = FIRST
    while start < size:
        yield start, min(2 * start, size)
        start *= 2
