"""The ring all-reduce, on send and recv alone: 2n(N-1)/N bytes in 2(N-1) steps (Patarasu and Yuan 2009)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fsdpx.comm.calls import Array, Call, Handle, ReduceOp, even_pieces
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.reduction import combine
from fsdpx.comm.steps import Steps, progress_of

__all__ = ["ring", "ring_steps"]


def ring(comm: Communicator, buf: Array, op: ReduceOp = ReduceOp.SUM, *, tag: int = 0, what: str = "") -> Handle:
    """All-reduce `buf` in place with the sends and receives of any communicator. Scratch: n/N.

    Every element is combined once per rank around the ring and on one rank only, so all ranks end with the same bits.
    `tag` must differ between rings that are under way at once. The handle takes its steps when it is tested or waited
    for, and with the communicators of fsdpx in any other wait, too."""
    call = Call("all_reduce", (buf,), ReduceOp.of(op), what=what, tag=tag)
    return Steps(ring_steps(comm.issue, comm.rank, comm.size, call), progress_of(comm))


def ring_steps(issue: Callable[[Call], Handle], rank: int, size: int, call: Call) -> Iterator[Handle]:
    """Reduce-scatter around the ring, then all-gather around the ring; yields the handle of each message."""
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
