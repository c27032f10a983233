"""Sums whose summands travel in 16 bits, by the collectives of a backend that has no better way.

Sent and received data lie in the place of the array that is summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fsdpx.array.kernels import add_widened, narrowed, store
from fsdpx.array.namespace import namespace_of
from fsdpx.comm.calls import Array, Call, Handle, address, even_pieces
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.steps import Finish

__all__ = ["ROUNDED"]

FIRST = 16
"""Elements that are cast by themselves where the result lies in the place of what it is made of."""


def reduce_scatter_rounded(comm: Communicator, call: Call) -> Handle:
    """Every piece goes to its owner, which adds. Scratch: none if all pieces are equal."""
    send, recv = call.arrays
    return _to_owners(comm, call, send, recv, call.cuts[0].counts)


def all_reduce_rounded(comm: Communicator, call: Call) -> Handle:
    """The same, and an all-gather of the sums, rounded once more: the first of them is waited for here."""
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
    """The same where they are larger."""
    for start, stop in reversed(list(_doubling(x.size))):
        store(xp, x[start:stop], out[start:stop])
    out[:FIRST] = narrowed(xp, x[:FIRST], out.dtype)


def _doubling(size: int) -> Iterator[tuple[int, int]]:
    """Runs of elements, each as long as all before it: in half the bytes, it ends where it begins."""
    start = FIRST
    while start < size:
        yield start, min(2 * start, size)
        start *= 2
