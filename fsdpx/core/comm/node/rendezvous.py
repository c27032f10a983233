"""Collectives inside one host, and collectives over several hosts that combine shared memory with messages.

The collectives of a host are numbered, and ranks announce them in records on a shared board. A lane consists of one
rank per host: the ranks that have the same index on their hosts. Messages are exchanged only within lanes. All ranks of
a lane must start the messages of their calls in the same order. However, while a call waits for the ranks of its host,
a later call could overtake it on some ranks. Each call therefore gets a ticket when it is issued, and messages are
started in ticket order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from fsdpx.core.comm.calls import (
    COMPLETED,
    Array,
    Call,
    FlatPartition,
    GeneratorHandle,
    Handle,
    ReduceOp,
    copy_unless_same,
    format_call_label,
    make_balanced_partition,
    make_partition_from_counts,
    spin_until,
)
from fsdpx.core.comm.message_backend import MessageBackend
from fsdpx.core.comm.node.shared_windows import BOARD_SLOTS, CollectiveBoard, NodeMemory, WindowAddress
from fsdpx.core.comm.reduction import reduce_in_rank_order_into
from fsdpx.errors import CommTimeout

__all__ = ["HostLanes", "NodeCollective", "NodeGroup", "make_timeout_error"]

QUICK_POLLS = 32
"""A wait polls the board (shared records of the ranks) this many times before it also begins to advance other
transfers. Usually this is enough, because most ranks arrive together."""


def make_timeout_error(call: object, group: NodeGroup, missing: Sequence[int]) -> CommTimeout:
    """Return the error for a collective that has timed out. `missing` contains the ranks that have not arrived, as
    indices among the ranks of this host."""
    ranks = [group.ranks[index] for index in missing]
    reason = f"ranks {ranks} did not call it, called it with an array outside of windows, or have ended"
    return CommTimeout(f"{call} is not complete after {group.timeout:g} s: {reason}")


class ArrivalStage:
    """A handle that is complete when `seen(index, number)` is true for every other rank of the host. `index` is the
    index of the other rank on the host, and `number` is the number of the collective."""

    __slots__ = ("_group", "_missing", "_name", "_number", "_seen")

    def __init__(self, group: NodeGroup, number: int, name: str, seen: Callable[[int, int], bool]) -> None:
        self._group, self._number, self._name, self._seen = group, number, name, seen
        self._missing = list(group.others)

    def test(self) -> bool:
        missing, seen, number = self._missing, self._seen, self._number
        while missing and seen(missing[-1], number):
            missing.pop()
        return not missing

    def wait(self) -> None:
        group = self._group
        if any(self.test() for _ in range(QUICK_POLLS)) or spin_until(self.test, group.progress, group.timeout):
            return
        raise make_timeout_error(str(self), group, self._missing)

    def __str__(self) -> str:
        return f"{self._name} on rank {self._group.rank} of {self._group.size}"


class NodeCollective(GeneratorHandle):
    """The handle of a collective inside a host.

    Parameters
    ----------
    work : function that is called when the data of all ranks may be read; None if there is nothing to do
    held : whether other ranks read this rank's data; if so, the collective completes only when they have finished
        reading
    last : function that is called at the end of the collective"""

    __slots__ = ("_free",)

    def __init__(
        self, group: NodeGroup, number: int, call: Call, work: Callable[[], None] | None = None,
        *, held: bool = True, last: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        board, name = group.board, format_call_label(call.verb, call.what)
        read = ArrivalStage(group, number, name, board.has_finished)

        def run_stages() -> Iterator[Handle]:
            yield ArrivalStage(group, number, name, board.has_posted)
            if work is not None:
                work()
                board.mark_finished(number)
            if held:
                yield read
            if last is not None:
                last()

        self._free = read if work is not None else COMPLETED
        super().__init__(run_stages(), group.progress)

    def is_slot_free(self) -> bool:
        """Return True if all ranks have read this rank's record, which means that a later collective may overwrite
        it."""
        return self.test() and self._free.test()


class NodeGroup:
    """The ranks of a communicator that run on this host. Creating this object is collective over the communicator.

    Attributes
    ----------
    ranks : ranks on this host, as numbered in the communicator
    lane : index of this rank in `ranks`
    others : indices of the other ranks in `ranks`
    board : shared records that ranks use to announce collectives
    latest : for each slot of the board (space for one record per rank), the latest collective that has used the slot"""

    def __init__(self, comm: MessageBackend, memory: NodeMemory, ranks: list[int], number: int) -> None:
        self.rank, self.size, self.timeout, self.progress = comm.rank, comm.size, comm.timeout, comm.progress
        self.memory = memory
        self.ranks = ranks
        self.lane = ranks.index(comm.rank)
        self.others = [index for index in range(len(ranks)) if index != self.lane]
        local = comm if len(ranks) == comm.size else comm.split(number, comm.rank)
        assert local is not None
        self.board = CollectiveBoard(local)
        if local is not comm:
            local.close()
        self.latest: list[Any] = [None] * BOARD_SLOTS
        self._number = 0

    def reserve_collective_number(self, call: object = "a call") -> int:
        """Wait until the shared memory for the records of a new collective may be overwritten, and return the sequence
        number of the collective. The number is reserved as soon as a call is issued, so that all ranks use the same
        number even if they synchronize later."""
        self._number = number = self._number + 1
        slot, latest = number % BOARD_SLOTS, self.latest
        if latest[slot] is not None:
            self._wait_for_slot(slot)
        latest[slot] = call
        return number

    def _wait_for_slot(self, slot: int) -> None:
        free = partial(self._is_slot_free, slot)
        if not free() and not spin_until(free, self.progress, self.timeout):
            raise CommTimeout(f"{self.latest[slot]}: {BOARD_SLOTS} meetings later, not all ranks have taken part")

    def _is_slot_free(self, slot: int) -> bool:
        """Return True if the collective in a slot of the board (shared records) no longer needs its records, which
        means that a later collective may overwrite them."""
        latest = self.latest[slot]
        return latest is None or (not isinstance(latest, str) and latest.is_slot_free())

    def start_barrier(self, number: int, call: Call) -> Handle:
        """Start a barrier: a collective that completes when all ranks on this host have called it."""
        self.board.post_record(number)
        return self._create_collective(number, call, held=False)

    def start_collective(
        self, number: int, address: WindowAddress | None, call: Call, work: Callable[[], None], **terms: Any
    ) -> Handle:
        """Start a collective among the ranks of this host, and return its handle. The collective announces the
        `address` of this rank's array, and runs `work` when all ranks have announced their arrays. It is complete when
        all ranks have finished. If the data is small enough to be posted in the record itself, `address` is None."""
        self.board.post_record(number, None if address is None else address.word_view)
        return self._create_collective(number, call, work, **terms)

    def _create_collective(
        self, number: int, call: Call, work: Callable[[], None] | None = None, **terms: Any
    ) -> NodeCollective:
        meeting = NodeCollective(self, number, call, work, **terms)
        self.latest[number % BOARD_SLOTS] = meeting
        return meeting

    def view_peer_slice(self, index: int, number: int, start: int, size: int, dtype: np.dtype) -> Array:
        """Return a view of `size` elements of a peer's array, beginning at element `start`. The peer (the rank with
        index `index` on the host) has announced this array for collective number `number`."""
        return self.memory.view_elements(self.board.read_words(index, number, 3), start, size, dtype)

    def view_slices_of_host_ranks(self, number: int, own: Array, start: int) -> list[Array]:
        """Return one slice for each rank of this host, in rank order. Each slice is part of the array that its rank has
        announced for collective number `number`. It begins at element `start` and is as long as `own`, which is the
        slice of this rank."""
        count = range(len(self.ranks))
        return [own if i == self.lane else self.view_peer_slice(i, number, start, own.size, own.dtype) for i in count]

    def view_payload(self, index: int, number: int) -> Array:
        """Return the payload of a record as 64-bit words. The rank with index `index` on the host has posted this
        record for collective number `number`."""
        return self.board.view_payload(index, number).view(np.int64)

    def copy_array_pieces_from_host_peers(self, number: int, pieces: Sequence[tuple[int, Array, int]]) -> None:
        """For each (index, array, start) in `pieces`, fill `array` from the array that a peer has announced for
        collective number `number`. The peer is the rank with index `index` on the host. The copied elements begin at
        element `start` of the peer's array."""
        for index, array, start in pieces:
            array[...] = self.view_peer_slice(index, number, start, array.size, array.dtype)


class HostLanes:
    """Collectives over several hosts that all have the same number of ranks. Each rank of a host exchanges a different
    part of the data with other hosts.

    Attributes
    ----------
    host_group : ranks of this host
    across : communicator of this rank's lane (the ranks that have the same index on their hosts)
    ranks_by_host : ranks of each host
    turn : ticket number of the call that may start its messages next"""

    def __init__(self, group: NodeGroup, across: MessageBackend, ranks_by_host: list[list[int]]) -> None:
        self.host_group, self.across, self.ranks_by_host = group, across, ranks_by_host
        self.lane = [ranks[group.lane] for ranks in ranks_by_host]
        self.turn = self._tickets = 0

    def all_gather_over_hosts_then_in_host(self, call: Call, address: WindowAddress) -> Iterator[Handle]:
        """Gather the pieces of this rank's lane (the ranks with the same index on their hosts) from the other hosts.
        Then copy the pieces of the other lanes from the ranks of this host. The ranks of a host thus share the network
        traffic."""
        group, turn, number = self.host_group, self._reserve_lane_turn(), self.host_group.reserve_collective_number()
        recv, pieces = call.arrays[1], call.partitions[0]
        yield turn
        yield self._start_lane_all_gather(call)

        def read_pieces() -> None:
            ranks = [(index, on_host[index]) for index in group.others for on_host in self.ranks_by_host]
            group.copy_array_pieces_from_host_peers(
                number, [(index, pieces.get_piece(recv, rank), pieces.displs[rank]) for index, rank in ranks]
            )

        yield group.start_collective(number, address, call, read_pieces)

    def all_gather_lane_into_host_buffer(self, call: Call) -> Iterator[Handle]:
        """Gather into one buffer per host. Each rank of the host receives the pieces of its own lane (the ranks with
        the same index on their hosts)."""
        group, turn = self.host_group, self._reserve_lane_turn()
        first, second = group.reserve_collective_number(), group.reserve_collective_number()
        send, recv = call.arrays
        own_part = call.partitions[0].get_piece(recv, group.rank)
        copy_unless_same(own_part, send)
        yield group.start_barrier(first, call)  # wait until no rank of the host is still reading the old content
        yield turn
        yield self._start_lane_all_gather(call.with_arrays((own_part, recv)))
        yield group.start_barrier(second, call)

    def reduce_scatter_in_host_then_over_hosts(self, call: Call, address: WindowAddress) -> Iterator[Handle]:
        """Sum the pieces that belong to the ranks of this rank's lane (the ranks with the same index on their hosts):
        first over the ranks of this host, then over the hosts. With L ranks per host, an array of n bytes needs n/L
        bytes of scratch memory."""
        group, turn, number = self.host_group, self._reserve_lane_turn(), self.host_group.reserve_collective_number()
        (send, recv), (pieces,) = call.arrays, call.partitions
        sums = make_partition_from_counts(tuple(pieces.counts[rank] for rank in self.lane))
        partial = np.empty(sums.total, send.dtype)

        def add_pieces() -> None:
            for i, rank in enumerate(self.lane):
                sources = group.view_slices_of_host_ranks(number, pieces.get_piece(send, rank), pieces.displs[rank])
                reduce_in_rank_order_into(sources, _get_partial_op(call.op), [sums.get_piece(partial, i)])

        yield group.start_collective(number, address, call, add_pieces)
        yield turn
        yield self._start_lane_reduction(call, (partial, recv), (sums,))
        self._divide_if_average(call, recv)

    def all_reduce_in_host_then_over_hosts(self, call: Call, address: WindowAddress) -> Iterator[Handle]:
        """Let each rank of a host sum a different slice of the array, first inside the host and then over the hosts.
        Then copy the other slices from the other ranks of the host."""
        group, turn = self.host_group, self._reserve_lane_turn()
        first, second = group.reserve_collective_number(), group.reserve_collective_number()
        (buf,) = call.arrays
        pieces = make_balanced_partition(buf.size, len(group.ranks))
        own_part = pieces.get_piece(buf, group.lane)

        def add_pieces() -> None:
            reduce_in_rank_order_into(
                group.view_slices_of_host_ranks(first, own_part, pieces.displs[group.lane]),
                _get_partial_op(call.op),
                [own_part],
            )

        yield group.start_collective(first, address, call, add_pieces)
        yield turn
        yield self._start_lane_reduction(call, (own_part,), ())
        self._divide_if_average(call, own_part)

        def read_pieces() -> None:
            group.copy_array_pieces_from_host_peers(
                second, [(index, pieces.get_piece(buf, index), pieces.displs[index]) for index in group.others]
            )

        yield group.start_collective(second, address, call, read_pieces)

    def _reserve_lane_turn(self) -> LaneTurn:
        self._tickets += 1
        return LaneTurn(self, self._tickets - 1)

    def _start_lane_all_gather(self, call: Call) -> Handle:
        pieces = call.partitions[0]
        self.turn += 1
        counts, displs = [pieces.counts[rank] for rank in self.lane], [pieces.displs[rank] for rank in self.lane]
        return self.across.start_all_gather_with_gaps(call, counts, displs)

    def _start_lane_reduction(
        self, call: Call, arrays: tuple[Array, ...], partitions: tuple[FlatPartition, ...]
    ) -> Handle:
        """Start the reduction of the hosts' partial sums over this rank's lane (the ranks with the same index on their
        hosts)."""
        self.turn += 1
        return self.across.start_call(
            Call(call.verb, arrays, _get_partial_op(call.op), what=call.what, partitions=partitions)
        )

    def _divide_if_average(self, call: Call, total: Array) -> None:
        if call.op is ReduceOp.AVG:
            np.divide(total, self.host_group.size, total)


class LaneTurn:
    """A handle that is complete when all earlier calls have started their messages between hosts."""

    __slots__ = ("_lanes", "_ticket")

    def __init__(self, lanes: HostLanes, ticket: int) -> None:
        self._lanes, self._ticket = lanes, ticket

    def test(self) -> bool:
        # starting a call's messages increments `turn`; it exceeds the ticket if this call's messages have already been
        # started during another wait
        return self._lanes.turn >= self._ticket

    def wait(self) -> None:
        group = self._lanes.host_group
        if not spin_until(self.test, group.progress, group.timeout):
            raise CommTimeout(f"rank {group.rank} waited {group.timeout:g} s for a call that it issued before")


def _get_partial_op(op: ReduceOp) -> ReduceOp:
    """Return the operation that combines partial results. For an average, return SUM, because the sum is divided only
    at the end."""
    return ReduceOp.SUM if op is ReduceOp.AVG else op
