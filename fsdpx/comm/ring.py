"""The ring all-reduce, on send and recv alone: 2n(N-1)/N bytes in 2(N-1) steps (Patarasu and Yuan 2009)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fsdpx.comm.communicator import Array, Communicator, Handle, ReduceOp, even_pieces
from fsdpx.comm.reduction import combine
from fsdpx.comm.steps import Steps, progress_of

__all__ = ["all_reduce", "steps"]

Transfer = Callable[[Array, int, int, str], Handle]


def all_reduce(
    comm: Communicator,
    buf: Array,
    op: ReduceOp = ReduceOp.SUM,
    *,
    tag: int = 0,
    what: str = "",
) -> Handle:
    """All-reduce `buf` in place with the sends and receives of any communicator.

    Every element is combined once per rank around the ring and on one rank only, so all ranks end with the
    same bits. `tag` must differ between rings that are under way at once. The handle takes its steps when it is
    tested or waited for, and with the communicators of fsdpx in any other wait, too. Scratch: n/N.
    """

    def send(array: Array, dest: int, number: int, label: str) -> Handle:
        return comm.send(array, dest, number, what=label)

    def recv(array: Array, source: int, number: int, label: str) -> Handle:
        return comm.recv(array, source, number, what=label)

    generator = steps(send, recv, comm.rank, comm.size, buf, ReduceOp.of(op), tag, what)
    return Steps(generator, progress_of(comm))


def steps(
    send: Transfer, recv: Transfer, rank: int, size: int, buf: Array, op: ReduceOp, tag: int, what: str
) -> Iterator[Handle]:
    """Reduce-scatter around the ring, then all-gather around the ring; yields the handle of each transfer."""
    cut = even_pieces(buf.size, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    scratch = np.empty_like(buf[: max(cut.counts)])
    for step in range(size - 1):
        outgoing, own = cut.part(buf, (rank - step) % size), cut.part(buf, (rank - step - 1) % size)
        incoming = scratch[: own.size]
        sent = send(outgoing, right, tag, what)
        yield recv(incoming, left, tag, what)
        combine(op)(own, incoming, out=own)
        yield sent
    if op is ReduceOp.AVG:
        own = cut.part(buf, (rank + 1) % size)
        own /= size
    for step in range(size - 1):
        sent = send(cut.part(buf, (rank + 1 - step) % size), right, tag, what)
        yield recv(cut.part(buf, (rank - step) % size), left, tag, what)
        yield sent
