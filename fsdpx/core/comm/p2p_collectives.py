"""Collectives built from point-to-point messages, for backends that have no better algorithm. The module contains
direct algorithms, a ring algorithm, and sums that send values as 16-bit floats.

Values are added in rank order. Arrays of 16-bit floats are sent unchanged. The rank that owns a piece of the result
adds the received values in float32 and rounds the sum once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.array.kernels import add_widened, cast_float_to_dtype, store
from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.comm.calls import (
    Array,
    Call,
    FlatPartition,
    GeneratorHandle,
    Handle,
    HandleWithCallback,
    Progress,
    ReduceOp,
    copy_unless_same,
    make_balanced_partition,
)
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.reduction import get_ufunc, reduce_in_rank_order_into

__all__ = ["COLLECTIVES", "ROUNDED_COLLECTIVES", "Pairs", "iterate_ring_all_reduce"]

Pairs = Sequence[tuple[int, Array]]
"""Pairs (rank, array): the array to send to a rank, or to receive from it."""


class Messenger(Protocol):
    """The attributes and methods that a backend needs for collectives built from point-to-point messages."""

    rank: int
    size: int
    progress: Progress

    def start_messages(self, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
        """Start sending and receiving arrays, given as (rank, array) pairs, with the tag of `call`. Return one handle
        for all messages."""


Collective = Callable[[Messenger, Call], Handle]


def start_all_gather(comm: Messenger, call: Call) -> Handle:
    """Start an all-gather in which each rank sends its piece directly to all other ranks. For n bytes on N ranks, each
    rank sends n(N-1)/N bytes."""
    (_, recv), (pieces,) = call.arrays, call.partitions
    own_part = pieces.get_piece(recv, comm.rank)
    copy_unless_same(own_part, call.arrays[0])
    return comm.start_messages(
        call, _pair_array_with_others(comm, own_part), _pair_pieces_with_others(comm, recv, pieces)
    )


def start_reduce_scatter(comm: Messenger, call: Call) -> Handle:
    """Start a reduce-scatter in which each rank sends the pieces of its array directly to their owners, and each owner
    adds up the pieces that it receives. For n bytes on N ranks, each rank sends n(N-1)/N bytes and uses n bytes of
    scratch memory."""
    send, recv = call.arrays
    return GeneratorHandle(_reduce_to_owners(comm, call, send, recv, call.partitions[0]), comm.progress)


def start_all_reduce(comm: Messenger, call: Call) -> Handle:
    """Start an all-reduce as a reduce-scatter followed by an all-gather. For n bytes on N ranks, each rank sends
    2n(N-1)/N bytes and uses n bytes of scratch memory."""
    (buf,) = call.arrays
    pieces = make_balanced_partition(buf.size, comm.size)
    own_part = pieces.get_piece(buf, comm.rank)
    spread = partial(start_all_gather, comm, call.with_arrays((own_part, buf), (pieces,)))
    return GeneratorHandle(_reduce_to_owners(comm, call, buf, own_part, pieces, spread), comm.progress)


def start_broadcast(comm: Messenger, call: Call) -> Handle:
    """Start a broadcast in which the root sends the array directly to all other ranks. For n bytes on N ranks, the
    root sends n(N-1) bytes."""
    (buf,) = call.arrays
    if comm.rank == call.root:
        return comm.start_messages(call, _pair_array_with_others(comm, buf), [])
    return comm.start_messages(call, [], [(call.root, buf)])


def start_reduce(comm: Messenger, call: Call) -> Handle:
    """Start a reduce as a reduce-scatter followed by a gather. For n bytes on N ranks, the root receives 2n(N-1)/N
    bytes, and each other rank sends n bytes. Each rank uses n + n/N bytes of scratch memory."""
    send, recv = call.arrays
    pieces = make_balanced_partition(send.size, comm.size)
    own_part = namespace_of(send).empty(pieces.counts[comm.rank], dtype=send.dtype)
    collect = partial(start_gather, comm, call.with_arrays((own_part, recv), (pieces,)))
    return GeneratorHandle(_reduce_to_owners(comm, call, send, own_part, pieces, collect), comm.progress)


def start_gather(comm: Messenger, call: Call) -> Handle:
    """Start a gather in which each rank sends its piece directly to the root. For n bytes on N ranks, the root
    receives n(N-1)/N bytes."""
    send, recv = call.arrays
    if comm.rank != call.root:
        return comm.start_messages(call, [(call.root, send)], [])
    copy_unless_same(call.partitions[0].get_piece(recv, call.root), send)
    return comm.start_messages(call, [], _pair_pieces_with_others(comm, recv, call.partitions[0]))


def start_scatter(comm: Messenger, call: Call) -> Handle:
    """Start a scatter in which the root sends each rank its piece. For n bytes on N ranks, the root sends n(N-1)/N
    bytes."""
    send, recv = call.arrays
    if comm.rank != call.root:
        return comm.start_messages(call, [], [(call.root, recv)])
    copy_unless_same(recv, call.partitions[0].get_piece(send, call.root))
    return comm.start_messages(call, _pair_pieces_with_others(comm, send, call.partitions[0]), [])


def start_all_to_all(comm: Messenger, call: Call) -> Handle:
    """Start an all-to-all in which each rank sends each piece directly to its destination."""
    (send, recv), (sent, received) = call.arrays, call.partitions
    copy_unless_same(received.get_piece(recv, comm.rank), sent.get_piece(send, comm.rank))
    return comm.start_messages(
        call, _pair_pieces_with_others(comm, send, sent), _pair_pieces_with_others(comm, recv, received)
    )


def start_barrier(comm: Messenger, call: Call) -> Handle:
    """Start a barrier in which each rank sends one byte to every other rank."""
    here, there = np.zeros(1, np.uint8), np.empty(comm.size, np.uint8)
    return comm.start_messages(
        call,
        _pair_array_with_others(comm, here),
        _pair_pieces_with_others(comm, there, make_balanced_partition(comm.size, comm.size)),
    )


COLLECTIVES: dict[str, Collective] = {
    f.__name__.removeprefix("start_"): f
    for f in (
        start_all_gather, start_reduce_scatter, start_all_reduce, start_broadcast, start_reduce, start_gather,
        start_scatter, start_all_to_all, start_barrier
    )
}  # fmt: skip


def _reduce_to_owners(
    comm: Messenger, call: Call, send: Array, recv: Array, pieces: FlatPartition,
    then: Callable[[], Handle] | None = None,
) -> Iterator[Handle]:  # fmt: skip
    own_part = pieces.get_piece(send, comm.rank)
    rows = namespace_of(send).empty((comm.size, own_part.size), dtype=send.dtype)
    yield comm.start_messages(
        call, _pair_pieces_with_others(comm, send, pieces), [(rank, rows[rank]) for rank in _list_other_ranks(comm)]
    )
    reduce_in_rank_order_into(
        [own_part if rank == comm.rank else rows[rank] for rank in range(comm.size)], call.op, [recv]
    )
    if then is not None:
        yield then()


def _list_other_ranks(comm: Messenger) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]


def _pair_array_with_others(comm: Messenger, array: Array) -> Pairs:
    """Return a list with one pair (rank, array) for every rank except this one. All pairs contain the same array."""
    return [(rank, array) for rank in _list_other_ranks(comm)]


def _pair_pieces_with_others(comm: Messenger, array: Array, pieces: FlatPartition) -> Pairs:
    """Return a list with one pair (rank, piece) for every rank except this one, where `piece` is that rank's piece of
    `array`."""
    return [(rank, pieces.get_piece(array, rank)) for rank in _list_other_ranks(comm)]


def iterate_ring_all_reduce(issue: Callable[[Call], Handle], rank: int, size: int, call: Call) -> Iterator[Handle]:
    """Run a ring all-reduce, that is, a reduce-scatter and then an all-gather around the ring. Start each message with
    `issue`, and yield its handle. For n bytes on N ranks, each rank uses n/N bytes of scratch memory.

    The sum of each element is passed along the ring from rank to rank. It is therefore computed only once, and all
    ranks get bitwise equal results."""
    buf, op = call.arrays[0], call.op
    pieces = make_balanced_partition(buf.size, size)
    right, left = (rank + 1) % size, (rank - 1) % size

    def send_piece(piece: int) -> Handle:
        part = pieces.get_piece(buf, piece % size)
        return issue(Call("send", (part,), root=right, what=call.what, tag=call.tag))

    def receive_piece(part: Array) -> Handle:
        return issue(Call("recv", (part,), root=left, what=call.what, tag=call.tag))

    scratch = np.empty_like(buf[: max(pieces.counts)])
    for step in range(size - 1):
        own_part = pieces.get_piece(buf, (rank - step - 1) % size)
        incoming, sent = scratch[: own_part.size], send_piece(rank - step)
        yield receive_piece(incoming)
        get_ufunc(op)(own_part, incoming, out=own_part)
        yield sent
    if op is ReduceOp.AVG:
        own_part = pieces.get_piece(buf, (rank + 1) % size)
        own_part /= size
    for step in range(size - 1):
        sent = send_piece(rank + 1 - step)
        yield receive_piece(pieces.get_piece(buf, (rank - step) % size))
        yield sent


FIRST_RUN_ELEMENTS = 16
"""An in-place cast converts this many elements at the start of an array through a temporary copy. For these elements, a
direct cast could overwrite values before it reads them."""


def start_rounded_reduce_scatter(comm: Communicator, call: Call) -> Handle:
    """Start a reduce-scatter in which pieces are sent in the 16-bit dtype `call.wire` and added by their owners.

    If all pieces have the same size, no scratch memory is needed. Otherwise, the scratch memory is about the size of
    the full array in the dtype `call.wire`."""
    send, recv = call.arrays
    return _start_rounded_reduce_to_owners(comm, call, send, recv, call.partitions[0].counts)


def start_rounded_all_reduce(comm: Communicator, call: Call) -> Handle:
    """Start an all-reduce that sends values in the 16-bit dtype `call.wire`. The function waits until the
    reduce-scatter is complete, and then starts an all-gather of the rounded sums."""
    (buf,) = call.arrays
    xp, pieces = namespace_of(buf), make_balanced_partition(buf.size, comm.size)
    own_count, wire = pieces.counts[comm.rank], buf.view(call.wire)[: buf.size]
    total, own_part = buf[:own_count], pieces.get_piece(wire, comm.rank)
    _start_rounded_reduce_to_owners(comm, call, buf, total, pieces.counts).wait()
    _narrow_in_place(xp, total, wire[:own_count])
    own_part[...] = wire[:own_count]
    return HandleWithCallback(
        comm.all_gather(own_part, wire, pieces.counts, what=call.what), partial(_widen_in_place, xp, wire, buf)
    )


ROUNDED_COLLECTIVES: dict[str, Callable[[Communicator, Call], Handle]] = {
    "reduce_scatter": start_rounded_reduce_scatter,
    "all_reduce": start_rounded_all_reduce,
}


def _start_rounded_reduce_to_owners(
    comm: Communicator, call: Call, send: Array, recv: Array, counts: Sequence[int]
) -> Handle:
    n, own_count, width = send.size, counts[comm.rank], comm.size
    xp, scratch, arriving = namespace_of(send), send.view(call.wire), own_count * width
    # store received pieces at the end of `send` if they fit there without overlapping the data to send or the sum
    if arriving <= scratch.size - max(n, own_count * send.itemsize // 2):
        parts = scratch[scratch.size - arriving :]
    else:
        parts = xp.empty(arriving, dtype=call.wire)
    wire = scratch[:n]
    _narrow_in_place(xp, send, wire)  # values that overflow become Inf, which the loss scaler detects
    handle = comm.all_to_all(wire, parts, counts, [own_count] * width, what=call.what)
    within = 0 <= get_data_pointer(recv) - get_data_pointer(send) < send.nbytes

    def add_pieces() -> None:
        # overwriting `total` is safe: its old values have already been sent, and the received pieces are stored
        # elsewhere
        total = send[:own_count] if within else recv
        store(xp, parts[:own_count], total)
        for r in range(1, width):
            add_widened(xp, parts[r * own_count : (r + 1) * own_count], total)
        if total is not recv:
            recv[...] = total

    return HandleWithCallback(handle, add_pieces)


def _narrow_in_place(xp: Any, x: Array, out: Array) -> None:
    """Cast x to the dtype of `out`, which is smaller. Both arrays begin at the same memory address."""
    out[:FIRST_RUN_ELEMENTS] = cast_float_to_dtype(xp, x[:FIRST_RUN_ELEMENTS], out.dtype)
    for start, stop in _iterate_ranges_of_doubling_size(x.size):
        store(xp, x[start:stop], out[start:stop])


def _widen_in_place(xp: Any, x: Array, out: Array) -> None:
    """Cast x to the dtype of `out`, which is larger. Both arrays begin at the same memory address."""
    for start, stop in reversed(list(_iterate_ranges_of_doubling_size(x.size))):
        store(xp, x[start:stop], out[start:stop])
    out[:FIRST_RUN_ELEMENTS] = cast_float_to_dtype(xp, x[:FIRST_RUN_ELEMENTS], out.dtype)


def _iterate_ranges_of_doubling_size(size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) for consecutive ranges of elements. Each range is as long as all preceding elements together.

    Suppose that two arrays begin at the same address, and that one array's elements are half as large as the other's.
    In memory, a range of the smaller elements then ends where the same range of the larger elements begins. A cast of
    one range therefore never overwrites its own input."""
    start = FIRST_RUN_ELEMENTS
    while start < size:
        yield start, min(2 * start, size)
        start *= 2
