"""Collectives that use shared memory inside hosts and messages between hosts. Arrays in shared memory (windows) are not
copied.

Inside a host, a reduction reads each rank's array only once. In an all-gather into one buffer that all ranks share, the
ranks only have to synchronize. Between hosts, each rank of a host transfers a different slice, so that all network
links are used at the same time. All other calls are passed to a message backend (MPI or Gloo), which is called the
carrier. Calls with arrays outside of windows are also passed to the carrier, unless the arrays have only a few
bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdpx.core.array.kernels.choice import has_numba
from fsdpx.core.comm.backend import Backend
from fsdpx.core.comm.calls import (
    AllCounts,
    Array,
    Arrays,
    Call,
    FlatPartition,
    GeneratorHandle,
    Handle,
    ReduceOp,
    copy_unless_same,
    is_in_place,
    make_balanced_partition,
)
from fsdpx.core.comm.communicator import EVEN_COUNTS, Communicator
from fsdpx.core.comm.message_backend import MessageBackend, has_gpu_array
from fsdpx.core.comm.node.rendezvous import HostLanes, NodeGroup
from fsdpx.core.comm.node.shared_windows import (
    HAS_FILE_LOCKS,
    MAX_PAYLOAD_BYTES,
    MappedWindow,
    NodeMemory,
    WindowAddress,
    get_shared_memory_id,
)
from fsdpx.core.comm.reduction import is_half, is_reduction_compilable, reduce_in_rank_order_into
from fsdpx.core.comm.windows import Window

if TYPE_CHECKING:
    from fsdpx.core.comm.node.persistent import PersistentCollective

__all__ = ["SMALL_SUM_BYTES", "NodeCommunicator"]

SMALL_SUM_BYTES = 8 << 10
"""Arrays of at most this many bytes are summed with messages instead of shared memory, unless a compiled sum is
available."""
MAX_PERSISTENT_CALLS = 4096
"""Maximum number of persistent collectives in the cache."""


class NodeCommunicator(Backend):
    """A communicator that uses shared memory between the ranks of each host, in addition to the message backend
    `carrier`. The carrier is closed together with this communicator.

    An array is in a window if it is a view of an array that `allocate_shared` or `allocate_node_buffer` has returned.
    In each call, either all ranks or no ranks must pass arrays in windows. As in MPI, the buffers may be reused once a
    call is complete. If hosts have different numbers of ranks, all calls use messages. By default, fsdpx detects which
    ranks run on the same host. Tests can pass `hosts` instead, a list with the index of each rank's host."""

    xp = np

    def __init__(self, carrier: MessageBackend, hosts: Sequence[int] | None = None) -> None:
        names = carrier.all_gather_value(get_shared_memory_id()) if hosts is None else hosts
        ranks = [rank for rank, name in enumerate(names) if name == names[carrier.rank]]
        here = carrier if len(ranks) == carrier.size else carrier.split(ranks[0], carrier.rank)
        assert here is not None
        self._initialize(carrier, NodeMemory(carrier, here, ranks[0]), owns=True)

    def _initialize(self, carrier: MessageBackend, memory: NodeMemory, owns: bool) -> None:
        super().__init__(carrier.rank, carrier.size, carrier.progress)
        self.carrier, self.memory = carrier, memory
        self._owns_memory = owns
        everyone = carrier.all_gather_value((memory.leader, memory.rank, has_numba()))
        names = list(dict.fromkeys(leader for leader, _, _ in everyone))
        number = names.index(memory.leader)
        self.ranks_by_host = [[r for r, (leader, _, _) in enumerate(everyone) if leader == name] for name in names]
        self.ranks_on_host = self.ranks_by_host[number]
        self._buffer_owner = everyone[self.ranks_on_host[0]][1]
        even = len({len(m) for m in self.ranks_by_host}) == 1 and len(self.ranks_on_host) > 1
        self.is_single_host = even and len(self.ranks_by_host) == 1
        self.compiles = self.is_single_host and all(able for _, _, able in everyone)
        across = (
            carrier.split(self.ranks_on_host.index(self.rank), self.rank) if even and not self.is_single_host else None
        )
        self.host_group = NodeGroup(carrier, memory, self.ranks_on_host, number) if even else None
        self.lanes: HostLanes | None = None
        if self.host_group is not None and isinstance(across, MessageBackend):
            self.lanes = HostLanes(self.host_group, across, self.ranks_by_host)
        self._persistent_calls: dict[Any, PersistentCollective] = {}

    def __repr__(self) -> str:
        over = type(self.carrier).__name__
        return f"NodeCommunicator(rank={self.rank}, size={self.size}, hosts={len(self.ranks_by_host)}) over {over}"

    @property
    def library(self) -> str:
        """The name of the library that transfers messages between hosts, such as "mpi"."""
        return self.carrier.library

    @property
    def timeout(self) -> float:
        """Maximum duration of a single wait, in seconds."""
        return self.carrier.timeout

    def set_timeout(self, seconds: float) -> None:
        """Set the maximum duration of a single wait, in seconds."""
        self.carrier.set_timeout(seconds)
        if self.host_group is not None:
            self.host_group.timeout = seconds
        if self.lanes is not None:
            self.lanes.across.set_timeout(seconds)

    @property
    def is_sharing_useful(self) -> bool:
        """True if it is useful to allocate arrays in shared memory: each host has several ranks of this communicator,
        and all hosts have the same number of ranks."""
        return self.host_group is not None

    def allocate_shared(self, nbytes: int) -> Array | None:
        """Allocate `nbytes` bytes for this rank in memory that all ranks of its host can read. Ranks may request
        different sizes. If any host has too little shared memory, return None on all ranks. Collective over the world
        communicator."""
        self._free_arrays_and_load_persistent_code()
        number = self.memory.allocate_window(nbytes)
        return None if number is None else self.memory.windows[number].parts[self.memory.rank]

    def allocate_node_buffer(self, nbytes: int) -> Array | None:
        """On each host, allocate one buffer of `nbytes` bytes that all ranks of this communicator on the host share. If
        any host has too little shared memory, return None on all ranks. Collective over the world communicator."""
        self._free_arrays_and_load_persistent_code()
        number = self.memory.allocate_window(nbytes if self.rank == self.ranks_on_host[0] else 0)
        if number is None:
            return None
        self.memory.common.add(number)
        return self.memory.windows[number].parts[self._buffer_owner]

    def free_shared(self, array: Array) -> None:
        """Free an array that `allocate_shared` or `allocate_node_buffer` has returned. Collective over the world
        communicator."""
        self.memory.unmap_window(array)

    def free_shared_locally(self, arrays: list[Array]) -> None:
        """Free `arrays`, the shared arrays of an owner that has been garbage-collected. This needs no communication.
        The arrays are freed immediately or, if a pending transfer may still be using them, at the next allocation. Any
        thread may call this method at any time."""
        self.memory.abandoned += arrays
        self._free_abandoned_arrays()

    def _free_abandoned_arrays(self) -> None:
        if not self.progress.pending:
            self.memory.free_windows_of_collected_arrays()

    def issue(self, call: Call) -> Handle:
        known = self._find_persistent_collective(
            call.verb, call.arrays, call.op, call.counts, call.algorithm, call.wire
        )
        return super().issue(call) if known is None else known.begin(call.arrays, call.what)

    def _issue_call(
        self, verb: str, arrays: Arrays, op: ReduceOp, root: int, counts: AllCounts, what: str,
        tag: int = 0, algorithm: str = "library", wire: Any = None,
    ) -> Handle:  # fmt: skip
        """Start a collective. If the same arrays have been passed before, no `Call` object is created, which saves a
        tenth of the time of a small collective."""
        known = self._find_persistent_collective(verb, arrays, op, counts, algorithm, wire)
        if known is None:
            return super()._issue_call(verb, arrays, op, root, counts, what, tag, algorithm, wire)
        return known.begin(arrays, what)

    def _find_persistent_collective(
        self, verb: str, arrays: Arrays, op: ReduceOp, counts: AllCounts, algorithm: str, wire: Any
    ) -> PersistentCollective | None:
        """Return the cached collective of an earlier call with the same arrays and arguments, or None if there is none.
        A cached collective does not check its arguments again.

        The cache key contains the ids of arrays. Other arrays may get the same ids later, so the arrays themselves are
        compared too. In-place changes of an array's shape or dtype are not detected."""
        if not arrays:
            return self._persistent_calls.get(verb)
        first, last = arrays[0], arrays[-1]
        try:
            known = self._persistent_calls.get((verb, id(first), id(last), op, counts, algorithm, wire))
        # an argument, such as an array, cannot be hashed; the checks of the new `Call` will reject it
        except TypeError:
            return None
        return known if known is not None and known.first() is first and known.last() is last else None

    def start_call(self, call: Call) -> Handle:
        """Start a call, in shared memory if possible and otherwise with messages."""
        begin = _SHARED_MEMORY_CALLS.get(call.verb)
        handle = begin(self, call, self.host_group) if begin is not None and self.host_group is not None else None
        return self.carrier.start_call(call) if handle is None else handle

    def _take_next_tag(self) -> int:
        """Reserve and return the next message tag of the carrier (the message backend), so that the carrier's own
        collectives cannot use the same tag."""
        return self.carrier._take_next_tag()

    def start_rounded_sum(self, call: Call) -> Handle:
        """Start a sum over ranks that rounds its inputs to the 16-bit dtype `call.wire`. In shared memory, nothing is
        sent; the inputs are rounded when they are read."""
        group = self.host_group if self.is_single_host else None
        handle = None if group is None else _SHARED_MEMORY_CALLS[call.verb](self, call, group)
        return super().start_rounded_sum(call) if handle is None else handle

    def _try_start_all_gather(self, call: Call, group: NodeGroup) -> Handle | None:
        send, recv = call.arrays
        into, source = self.memory.find_window_address_of_array(recv), self.memory.find_window_address_of_array(send)
        if into is not None and into.window in self.memory.common:
            if self.lanes is not None:
                return GeneratorHandle(self.lanes.all_gather_lane_into_host_buffer(call), self.progress)
            return self._start_all_gather_into_host_buffer(call, group, into, source)
        if self.is_single_host and source is not None:
            return self._start_all_gather_by_copying(call, group, source)
        if self.lanes is not None and into is not None:
            return GeneratorHandle(self.lanes.all_gather_over_hosts_then_in_host(call, into), self.progress)
        few = max(call.partitions[0].counts) * recv.dtype.itemsize <= MAX_PAYLOAD_BYTES
        if few and self.is_single_host and not has_gpu_array(call.arrays):
            return self._start_small_all_gather(call, group)
        return None

    def _start_small_all_gather(self, call: Call, group: NodeGroup) -> Handle:
        """Start an all-gather of a few bytes per rank through the board (records in shared memory with which ranks
        announce collectives). The arrays may be in any memory.

        A trainer begins each of its calls with this gather. If another rank makes a different call at that time, that
        rank waits in MPI while this rank waits in shared memory, so the library never matches the two calls. This is
        intended: if both calls used MPI, the library could mix up their data, corrupt its own memory (as happens with
        Open MPI's nonblocking collectives), and hang."""
        (send, recv), (pieces,) = call.arrays, call.partitions
        number = group.reserve_collective_number()
        group.board.view_payload(group.lane, number)[: send.nbytes] = send.view(np.uint8)

        def read_payloads() -> None:
            for index in range(group.size):
                piece = pieces.get_piece(recv, index)
                piece[...] = group.board.view_payload(index, number)[: piece.nbytes].view(piece.dtype)

        return group.start_collective(number, None, call, read_payloads, held=False)

    def _start_all_gather_into_host_buffer(
        self, call: Call, group: NodeGroup, into: WindowAddress, source: WindowAddress | None
    ) -> Handle:
        """Start an all-gather into a buffer that all ranks share. Each rank writes its piece; then the ranks only have
        to synchronize. `into` is the address of the buffer. `source` is the address of this rank's piece, or None if
        the piece is not in a window (shared memory)."""
        (send, recv), (pieces,) = call.arrays, call.partitions
        own_part, start = pieces.get_piece(recv, self.rank), pieces.displs[self.rank] * recv.dtype.itemsize
        there = source == (into.window, into.owner, into.offset + start)
        if self.persistent_code is not None:
            return self._start_and_cache_persistent(
                call,
                self.persistent_code.make_persistent_gather_or_barrier(group, call, None if there else own_part),
                pieces,
            )
        if not there:
            own_part[...] = send
        return group.start_barrier(group.reserve_collective_number(), call)

    def _start_all_gather_by_copying(self, call: Call, group: NodeGroup, address: WindowAddress) -> Handle:
        """Start an all-gather in which each of N ranks copies the other ranks' pieces, (N-1)/N of the full array, from
        shared memory."""
        (send, recv), (pieces,) = call.arrays, call.partitions
        number = group.reserve_collective_number()
        copy_unless_same(pieces.get_piece(recv, self.rank), send)

        def read_pieces() -> None:
            group.copy_array_pieces_from_host_peers(
                number, [(other, pieces.get_piece(recv, other), 0) for other in group.others]
            )

        return group.start_collective(number, address, call, read_pieces)

    def _try_start_reduce_scatter(self, call: Call, group: NodeGroup) -> Handle | None:
        (send, recv), (pieces,) = call.arrays, call.partitions
        address = self._find_address_if_summed_in_shared(send, call.op)
        if address is None:
            return None
        if self.lanes is not None:
            return GeneratorHandle(self.lanes.reduce_scatter_in_host_then_over_hosts(call, address), self.progress)
        # if `recv` is the start of `send`, other ranks may still be reading the elements there; therefore first write
        # the result to this rank's own piece of `send`, which no other rank reads
        aside = is_in_place(send, recv) and group.lane > 0
        if self.persistent_code is not None and _has_compiled_sum(call) and not aside and isinstance(recv, np.ndarray):
            return self._start_and_cache_persistent(
                call, self.persistent_code.make_persistent_shared_memory_sum(group, call, address, pieces), pieces
            )
        number, own_part = group.reserve_collective_number(), pieces.get_piece(send, self.rank)
        target = own_part if aside else recv

        def add_pieces() -> None:
            reduce_in_rank_order_into(
                group.view_slices_of_host_ranks(number, own_part, pieces.displs[self.rank]),
                call.op,
                [target],
                call.wire,
            )

        return group.start_collective(
            number, address, call, add_pieces, last=partial(np.copyto, recv, own_part) if aside else None
        )

    def _try_start_all_reduce(self, call: Call, group: NodeGroup) -> Handle | None:
        (buf,) = call.arrays
        address = self._find_address_if_summed_in_shared(buf, call.op)
        if address is None:
            return None
        if self.lanes is not None:
            return GeneratorHandle(self.lanes.all_reduce_in_host_then_over_hosts(call, address), self.progress)
        pieces = make_balanced_partition(buf.size, self.size)
        if self.persistent_code is not None and _has_compiled_sum(call):
            return self._start_and_cache_persistent(
                call, self.persistent_code.make_persistent_shared_memory_sum(group, call, address, pieces)
            )
        number = group.reserve_collective_number()

        def add_pieces() -> None:
            """Sum this rank's slice over all ranks, and write the sum to the buffers of all ranks. No lock is needed,
            because slices do not overlap."""
            slices = group.view_slices_of_host_ranks(number, pieces.get_piece(buf, self.rank), pieces.displs[self.rank])
            reduce_in_rank_order_into(slices, call.op, slices, call.wire)

        return group.start_collective(number, address, call, add_pieces)

    def _try_start_broadcast(self, call: Call, group: NodeGroup) -> Handle | None:
        (buf,) = call.arrays
        address = self.memory.find_window_address_of_array(buf) if self.is_single_host else None
        if address is None:
            return None
        number, root = group.reserve_collective_number(), call.root

        def read_root() -> None:
            if self.rank != root:
                group.copy_array_pieces_from_host_peers(number, [(root, buf, 0)])

        return group.start_collective(number, address, call, read_root, held=self.rank == root)

    def _try_start_all_to_all(self, call: Call, group: NodeGroup) -> Handle | None:
        (send, recv), (sent, received) = call.arrays, call.partitions
        address = self.memory.find_window_address_of_array(send) if self.is_single_host else None
        if address is None:
            return None
        number = group.reserve_collective_number()
        group.view_payload(group.lane, number)[: self.size] = sent.displs

        def read_pieces() -> None:
            received.get_piece(recv, self.rank)[...] = sent.get_piece(send, self.rank)
            starts = {other: int(group.view_payload(other, number)[self.rank]) for other in group.others}
            group.copy_array_pieces_from_host_peers(
                number, [(other, received.get_piece(recv, other), starts[other]) for other in group.others]
            )

        return group.start_collective(number, address, call, read_pieces)

    def _try_start_barrier(self, call: Call, group: NodeGroup) -> Handle | None:
        if self.persistent_code is not None:
            persistent_call = self._persistent_calls["barrier"] = (
                self.persistent_code.make_persistent_gather_or_barrier(group, call)
            )
            return persistent_call.begin((), call.what)
        return group.start_barrier(group.reserve_collective_number(), call) if self.is_single_host else None

    def _start_and_cache_persistent(
        self, call: Call, made: PersistentCollective, pieces: FlatPartition | None = None
    ) -> Handle:
        """Start the new compiled collective `made`, and cache it for later calls with the same arrays. If the partition
        `pieces` is balanced, calls with explicit counts and calls without counts are equivalent, so cache the
        collective for both."""
        if len(self._persistent_calls) >= MAX_PERSISTENT_CALLS:
            self._persistent_calls.clear()
        counts: list[AllCounts] = [call.counts]
        if pieces is not None:
            counts = [(pieces.counts,)] + (
                [EVEN_COUNTS] if pieces == make_balanced_partition(pieces.total, self.size) else []
            )
        for each in counts:
            first, last = call.arrays[0], call.arrays[-1]
            self._persistent_calls[call.verb, id(first), id(last), call.op, each, call.algorithm, call.wire] = made
        return made.begin(call.arrays, call.what)

    @property
    def persistent_code(self) -> ModuleType | None:
        """The module `persistent`, which contains compiled collectives for fixed arrays. None if the module is not
        loaded or cannot be used."""
        return self.memory.persistent if self.compiles else None

    def _free_arrays_and_load_persistent_code(self) -> None:
        """Free shared arrays whose owner has been garbage-collected, and load the module with compiled collectives, so
        that repeated collectives run compiled code."""
        self._free_abandoned_arrays()
        if self.compiles and self.persistent_code is None:
            from fsdpx.core.comm.node import persistent

            self.memory.persistent = persistent

    def _find_address_if_summed_in_shared(self, array: Array, op: ReduceOp) -> WindowAddress | None:
        """Return the address of an array that should be summed in shared memory, or None if it should be summed with
        messages.

        Small arrays are summed with messages unless the sum in shared memory is compiled, because a message library has
        no Python overhead. 16-bit arrays on several hosts are also summed with messages: they must be added in rank
        order and rounded only once, but each host's partial sum would already be rounded."""
        small = array.nbytes <= SMALL_SUM_BYTES and not (self.compiles and is_reduction_compilable(array.dtype, op))
        if small or not (self.is_single_host or not is_half(array.dtype)):
            return None
        return self.memory.find_window_address_of_array(array)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.carrier.all_gather_bytes(data)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.carrier.all_gather_object(obj)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        part = self.carrier.split(color, key)
        if part is None:
            return None
        assert isinstance(part, MessageBackend)
        group = object.__new__(NodeCommunicator)
        group._initialize(part, self.memory, owns=False)
        return group

    def window(self, nbytes: int) -> Window:
        """Return a window for one-sided access: a window in shared memory if all ranks are on one host, and otherwise a
        window of the message backend."""
        if HAS_FILE_LOCKS and len(self.ranks_by_host) == 1:
            return MappedWindow(self.carrier, nbytes, self.timeout)
        return self.carrier.window(nbytes)

    def close(self) -> None:
        if self.host_group is not None:
            self.host_group.board.close()
        if self.lanes is not None:
            self.lanes.across.close()
        if self._owns_memory:
            self.memory.close()
        self.carrier.close()

    def abort(self, code: int = 1) -> None:
        self.carrier.abort(code)


def _has_compiled_sum(call: Call) -> bool:
    dtype = call.arrays[0].dtype
    return is_reduction_compilable(dtype, call.op) and (call.wire is None or dtype.char == "f")


_SHARED_MEMORY_CALLS: dict[str, Callable[[NodeCommunicator, Call, NodeGroup], Handle | None]] = {
    "all_gather": NodeCommunicator._try_start_all_gather,
    "reduce_scatter": NodeCommunicator._try_start_reduce_scatter,
    "all_reduce": NodeCommunicator._try_start_all_reduce,
    "broadcast": NodeCommunicator._try_start_broadcast,
    "all_to_all": NodeCommunicator._try_start_all_to_all,
    "barrier": NodeCommunicator._try_start_barrier,
}
"""For each operation, the method that starts it in shared memory, or returns None if that is not possible (for example,
because the arrays of the call are not in shared memory)."""
