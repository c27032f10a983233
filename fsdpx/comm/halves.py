"""16-bit floats: moved as 16 bits, added in float32 in rank order by the owner of a piece, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fsdpx.comm.communicator import Array, Handle, Pieces, ReduceOp, even_pieces
from fsdpx.comm.reduction import reduce_in_order

__all__ = ["all_reduce", "reduce", "reduce_scatter"]

Exchange = Callable[[Sequence[tuple[int, Array]], Sequence[tuple[int, Array]]], Handle]
"""Sends (rank, array) pairs and receives into (rank, array) pairs, all for one call."""


def reduce_scatter(
    exchange: Exchange, rank: int, send: Array, recv: Array, op: ReduceOp, cut: Pieces
) -> Iterator[Handle]:
    """Every piece goes to its owner, who adds: n(N-1)/N bytes; scratch n."""
    others = [other for other in range(len(cut.counts)) if other != rank]
    own = cut.part(send, rank)
    rows = np.empty((len(cut.counts), own.size), send.dtype)
    yield exchange([(other, cut.part(send, other)) for other in others], [(other, rows[other]) for other in others])
    reduce_in_order([own if other == rank else rows[other] for other in range(len(rows))], op, recv)


def all_reduce(exchange: Exchange, rank: int, size: int, buf: Array, op: ReduceOp) -> Iterator[Handle]:
    """A reduce-scatter and an all-gather of the sums: 2n(N-1)/N bytes; scratch n."""
    cut = even_pieces(buf.size, size)
    own = cut.part(buf, rank)
    yield from reduce_scatter(exchange, rank, buf, own, op, cut)
    others = [other for other in range(size) if other != rank]
    yield exchange([(other, own) for other in others], [(other, cut.part(buf, other)) for other in others])


def reduce(
    exchange: Exchange, rank: int, size: int, send: Array, recv: Array | None, op: ReduceOp, root: int
) -> Iterator[Handle]:
    """A reduce-scatter and a gather at `root`: 2n(N-1)/N bytes there, n elsewhere; scratch n + n/N."""
    cut = even_pieces(send.size, size)
    own = np.empty(cut.counts[rank], send.dtype)
    yield from reduce_scatter(exchange, rank, send, own, op, cut)
    if rank != root:
        yield exchange([(root, own)], [])
        return
    assert recv is not None
    cut.part(recv, root)[...] = own
    yield exchange([], [(other, cut.part(recv, other)) for other in range(size) if other != root])
