"""The base class of communication backends. It checks each call, and then passes the call on to the subclass. On a
communicator with only one rank, it executes most calls locally, without the subclass.

Arguments are checked before anything is sent, so that an invalid call raises an error instead of hanging.
`FakeCommunicator` is a backend that transfers nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from fsdpx.core.array import shapes
from fsdpx.core.array.devices import get_device_of_array
from fsdpx.core.base.arguments import wrap_with_type_hint_check
from fsdpx.core.comm.calls import (
    COMPLETED,
    Array,
    Call,
    Counts,
    FlatPartition,
    GeneratorHandle,
    Handle,
    HandleWithCallback,
    Progress,
    RankGroup,
    ReduceOp,
    copy_unless_same,
    make_balanced_partition,
    make_partition_from_counts,
    to_wire_dtype,
)
from fsdpx.core.comm.communicator import CALL_SPECS, CallSpec, Communicator
from fsdpx.core.comm.p2p_collectives import COLLECTIVES, ROUNDED_COLLECTIVES, Pairs, iterate_ring_all_reduce
from fsdpx.core.comm.plain_codec import MAX_PACKED_BYTES, pack, unpack
from fsdpx.core.comm.reduction import explain_undefined_reduction, get_dtype_kind, is_half
from fsdpx.errors import Aborted, CommError, ConfigError, ShapeError

__all__ = [
    "ALGORITHMS", "USER_TAG_LIMIT", "Backend", "FakeCommunicator", "FakeNodeCommunicator",
    "check_call_and_set_final_arguments", "raise_call_error", "require_distinct_ranks_with_own", "start_through_host",
]  # fmt: skip

COMMON_DTYPE_CHARS = frozenset("dfDFbhilqBHILQ?")
"""`dtype.char` of all dtypes that communicators can transfer, except 16-bit floats."""
USER_TAG_LIMIT = 16384
"""User message tags are below this limit, and library tags are at or above it. MPI guarantees that tags up to 32767 can
be used."""
ALGORITHMS = ("library", "ring")


class Backend(Communicator):
    """Base class of communicators that transfer bytes themselves. A subclass must implement `start_call`, `split`,
    `close` and `abort`.

    The subclass's `start_call` must implement "send" and "recv". For any other operation, it may call
    `super().start_call(call)`, which builds the operation from point-to-point messages."""

    def __init__(self, rank: int, size: int, progress: Progress | None = None) -> None:
        self.rank = rank
        self.size = size
        self.progress = Progress() if progress is None else progress
        self._tags = 0

    def issue(self, call: Call) -> Handle:
        check_call_and_set_final_arguments(self, call)
        if self.size == 1 and (effect := CALL_SPECS[call.verb].on_one_rank) != "move":
            if effect == "copy":  # nothing is copied if `recv` begins at the same address as `send`
                copy_unless_same(call.arrays[1], call.arrays[0])
            return COMPLETED
        if call.algorithm == "ring":
            return self._start_ring_all_reduce(call)
        return self.start_call(call) if call.wire is None else self.start_rounded_sum(call)

    def start_call(self, call: Call) -> Handle:
        """Start a call whose arguments have been checked. On a communicator with only one rank, the call is always a
        send or a receive (a rank may send a message to itself), because other operations are executed locally."""
        call.tag = self._take_next_tag()
        return COLLECTIVES[call.verb](self, call)

    def start_rounded_sum(self, call: Call) -> Handle:
        """Start a sum over ranks in which arrays are sent in the 16-bit dtype `call.wire`. The caller has already
        checked the arguments."""
        return ROUNDED_COLLECTIVES[call.verb](self, call)

    def start_messages(self, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
        """Start all sends and receives of one call, and return a single handle for them. `outgoing` and `incoming` hold
        (rank, array) pairs. All messages have the tag of `call`."""
        messages = [("recv", *pair) for pair in incoming] + [("send", *pair) for pair in outgoing]
        calls = [Call(verb, (part,), call.op, rank, (), call.what, call.tag) for verb, rank, part in messages]
        return GeneratorHandle(iter([self.start_call(message) for message in calls]), self.progress)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        require_distinct_ranks_with_own(self, ranks)
        group = self.split(min(ranks), list(ranks).index(self.rank))
        assert group is not None
        return group

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather the bytes of all ranks with two all-gathers: one of the sizes, and one of the data. Collective.

        Both all-gathers are ordinary calls of this communicator. If a rank never makes them, the other ranks therefore
        get the same error as for any other collective."""
        own_bytes = np.frombuffer(data, np.uint8)
        sizes = np.empty(self.size, np.int64)
        self.all_gather(np.array([own_bytes.size]), sizes, what="sizes of objects").wait()
        wrong = [rank for rank, n in enumerate(sizes.tolist()) if not 0 <= n <= MAX_PACKED_BYTES]
        if wrong:
            raise CommError(
                f"rank {wrong[0]} announced {sizes[wrong[0]]} bytes, but a message has at most {MAX_PACKED_BYTES}"
            )
        pieces = make_partition_from_counts(tuple(int(n) for n in sizes))
        gathered = np.empty(pieces.total, np.uint8)
        self.all_gather(own_bytes, gathered, pieces.counts, what="objects").wait()
        return [pieces.get_piece(gathered, rank).tobytes() for rank in range(self.size)]

    def _start_ring_all_reduce(self, call: Call) -> Handle:
        call.tag = self._take_next_tag()
        return GeneratorHandle(iterate_ring_all_reduce(self.start_call, self.rank, self.size, call), self.progress)

    def _take_next_tag(self) -> int:
        """Return the next message tag that is reserved for the library. All ranks get the same tag, because they issue
        the same collectives in the same order."""
        self._tags = (self._tags + 1) % (32767 - USER_TAG_LIMIT)
        return USER_TAG_LIMIT + self._tags


def check_call_and_set_final_arguments(comm: RankGroup, call: Call) -> None:
    """Check the arguments of a call, and set its `op`, `partitions` and `wire` to their final values. Raise ShapeError
    or ConfigError if an argument is invalid."""
    verb = CALL_SPECS[call.verb]
    if verb.peer:
        require_existing_peer(comm, call, verb.peer, call.root)
    whole_here = not verb.at_root or comm.rank == call.root
    for name, array in zip(verb.arrays, call.arrays, strict=True):
        if name == verb.at_root and array is None and whole_here:
            raise_call_error(ShapeError, comm, call, f"this rank is root and needs an array for {name}")
        if name != verb.at_root or whole_here:
            require_flat_array(comm, call, name, array)
    if whole_here and len(verb.arrays) == 2:
        send, recv = call.arrays
        if send.dtype != recv.dtype:
            raise_call_error(
                ConfigError, comm, call, f"send is {send.dtype}, recv is {recv.dtype}: they must be the same"
            )
        if not type(send) is type(recv) is np.ndarray:
            places = [get_device_of_array(array).describe_location(array) for array in (send, recv)]
            if places[0] != places[1]:
                raise_call_error(
                    ConfigError, comm, call, f"send is {places[0]}, recv {places[1]}: put both on one device"
                )
    if verb.partitioned:
        _resolve_counts_and_check_sizes(comm, call, verb, whole_here)
    elif verb.at_root and whole_here:
        require_own_piece_size(comm, call, verb.at_root, call.arrays[1], call.arrays[0].size)
    if verb.reduces:
        check_and_resolve_op_and_wire_dtype(comm, call)
    if verb.peer in ("dest", "source") and not 0 <= call.tag < USER_TAG_LIMIT:
        raise_call_error(ConfigError, comm, call, f"tag={call.tag} is out of range: 0 <= tag < {USER_TAG_LIMIT}")


def _resolve_counts_and_check_sizes(comm: RankGroup, call: Call, verb: CallSpec, whole_here: bool) -> None:
    if whole_here:
        arrays = dict(zip(verb.arrays, call.arrays, strict=True))
        partitions = zip(verb.partitioned, call.counts, strict=True)
        call.partitions = tuple(
            make_valid_partition_from_counts(comm, call, name, arrays[name], counts) for name, counts in partitions
        )
        counts: Any = call.partitions[0].counts
    else:
        counts = call.counts[0]
        if counts is not None:
            require_count_per_rank(comm, call, counts)
    if len(verb.partitioned) == 2:
        sent, received = (pieces.counts[comm.rank] for pieces in call.partitions)
        if sent != received:
            raise_call_error(ShapeError, comm, call, f"it sends {sent} elements to itself, but receives {received}")
    elif counts is not None:
        index = 1 - verb.arrays.index(verb.partitioned[0])
        require_own_piece_size(comm, call, verb.arrays[index], call.arrays[index], counts[comm.rank])


def raise_call_error(kind: type[ConfigError], comm: RankGroup, call: Call, message: str) -> NoReturn:
    """Raise an error of class `kind`. As in all communication errors, the message begins with the name of the call and
    the rank."""
    raise kind(f"{call.name} on rank {comm.rank}: {message}")


def require_flat_array(comm: RankGroup, call: Call, name: str, array: Array) -> None:
    """Raise an error unless `array` is one-dimensional and contiguous and has a dtype that communicators can
    transfer."""
    if type(array) is np.ndarray and array.ndim == 1 and array.flags.c_contiguous:
        dtype = array.dtype
        if dtype.char in COMMON_DTYPE_CHARS and dtype.isnative:  # fast path: such an array passes all checks below
            return
    if getattr(array, "ndim", None) != 1:
        kind = type(array).__name__
        given, use = (array.shape, "array.reshape(-1)") if hasattr(array, "shape") else (kind, "numpy.array([...])")
        raise_call_error(ShapeError, comm, call, f"{name} must be a flat array (1-D), not {given}: use {use}")
    flags = getattr(array, "flags", None)
    if flags is not None and not flags.c_contiguous:
        raise_call_error(ShapeError, comm, call, f"{name} is not contiguous: communicate a contiguous copy")
    try:
        get_dtype_kind(array.dtype)
    except ConfigError as error:
        raise_call_error(ConfigError, comm, call, f"{name}: {error}")


def make_valid_partition_from_counts(
    comm: RankGroup, call: Call, name: str, array: Array, counts: Counts
) -> FlatPartition:
    """Return the partition of `array` over the ranks, as given by `counts`. If `counts` is None, return the balanced
    partition. Raise ShapeError if `counts` do not fit the array or the number of ranks."""
    n = array.size
    if counts is None:
        return make_balanced_partition(n, comm.size)
    pieces = make_partition_from_counts(counts)
    require_count_per_rank(comm, call, counts)
    if min(counts) < 0:
        raise_call_error(ShapeError, comm, call, f"a count is negative: {list(counts)}")
    if pieces.total != n:
        raise_call_error(ShapeError, comm, call, f"counts add up to {pieces.total}, but {name} has {n} elements")
    return pieces


def require_count_per_rank(comm: RankGroup, call: Call, counts: tuple[int, ...]) -> None:
    """Raise ShapeError unless `counts` has one entry for each rank."""
    if len(counts) != comm.size:
        raise_call_error(ShapeError, comm, call, f"{len(counts)} counts for {comm.size} ranks")


def require_own_piece_size(comm: RankGroup, call: Call, name: str, array: Array, count: int) -> None:
    """Raise ShapeError unless `array` has exactly `count` elements, which is the size of this rank's piece."""
    if array.size != count:
        raise_call_error(ShapeError, comm, call, f"{name} has {array.size} elements, but {count} belong to this rank")


def check_and_resolve_op_and_wire_dtype(comm: RankGroup, call: Call) -> None:
    """Convert `call.op` to a `ReduceOp` and `call.wire` to a dtype, in place. Raise ConfigError if the reduction is
    unknown, undefined for the dtype of the array, or not supported by the algorithm."""
    dtype = call.arrays[0].dtype
    call.op = ReduceOp.from_name(call.op)
    why_not = explain_undefined_reduction(call.op, dtype)
    if why_not is not None:
        raise_call_error(ConfigError, comm, call, why_not)
    if call.algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise_call_error(ConfigError, comm, call, f"unknown algorithm {call.algorithm!r}: use one of {known}")
    if call.algorithm == "ring" and is_half(dtype):
        raise_call_error(ConfigError, comm, call, f"a ring does not add {dtype} in rank order: use algorithm='library'")
    if call.wire is not None:
        _check_and_resolve_wire_dtype(comm, call, dtype)


def _check_and_resolve_wire_dtype(comm: RankGroup, call: Call, dtype: Any) -> None:
    """Replace the name in `call.wire` with the dtype that it stands for (the dtype in which arrays are sent). `dtype`
    is the dtype of the arrays themselves. Raise ConfigError if arrays of `dtype` cannot be sent in the dtype
    `call.wire`, or if this reduction does not support a separate dtype for sending."""
    call.wire = to_wire_dtype(call.wire)
    if get_dtype_kind(dtype) != "float" or not is_half(call.wire):
        raise_call_error(
            ConfigError, comm, call, f"wire={call.wire.name} for {dtype}: float32 or float64 in a 16-bit format"
        )
    if call.op is not ReduceOp.SUM or call.algorithm != "library":
        way = f"{call.op.name} by {call.algorithm!r}"
        raise_call_error(ConfigError, comm, call, f"wire={call.wire.name} with {way}: use SUM, algorithm='library'")


def require_existing_peer(comm: RankGroup, call: Call, name: str, other: int) -> None:
    """Raise ConfigError unless `other` is a rank of this communicator. `name` is the name of the argument that contains
    it."""
    if not isinstance(other, int | np.integer) or not 0 <= other < comm.size:
        raise_call_error(ConfigError, comm, call, f"{name}={other} is not a rank: there are ranks 0 to {comm.size - 1}")


def require_distinct_ranks_with_own(comm: RankGroup, ranks: Sequence[int]) -> None:
    """Raise ConfigError unless `ranks` are distinct ranks of `comm` that include this rank."""
    call = Call("subgroup")
    for other in ranks:
        require_existing_peer(comm, call, "ranks", other)
    if comm.rank not in ranks or len(set(ranks)) != len(ranks):
        raise_call_error(ConfigError, comm, call, f"ranks={list(ranks)} must name this rank, and no rank twice")


def start_through_host(call: Call, start_on_host: Callable[[Call], Handle]) -> Handle:
    """Start a call whose arrays may be in device memory, by calling `start_on_host` with host arrays. Return a handle
    that copies results back to the device when the transfer is complete.

    Arrays that are already on the host are used directly. Each array in device memory needs scratch memory for a host
    copy."""
    for array in call.arrays:
        if array is not None and not isinstance(array, np.ndarray):
            return _start_through_host_copies(call, start_on_host)
    return start_on_host(call)


def _start_through_host_copies(call: Call, start_on_host: Callable[[Call], Handle]) -> Handle:
    verb, arrays = CALL_SPECS[call.verb], call.arrays
    host = list(arrays)
    for index in {*verb.read_positions, *verb.write_positions}:
        if arrays[index] is not None:
            array = arrays[index]
            fresh = index not in verb.read_positions
            host[index] = np.empty(array.shape, array.dtype) if fresh else get_device_of_array(array).to_host(array)
    handle = start_on_host(call.with_arrays(tuple(host)))

    def copy_back() -> None:
        for index in verb.write_positions:
            if arrays[index] is not None:
                device = get_device_of_array(arrays[index])
                with device.use_device_of(arrays[index]):
                    arrays[index][...] = device.from_host(host[index])

    return HandleWithCallback(handle, copy_back)


class FakeCommunicator(Backend):
    """One rank of a job with `size` ranks, in which the other ranks do not exist. Arguments are checked, but nothing is
    transferred and arrays keep their values.

    `all_gather_value`, `all_gather_object` and `all_gather_bytes` return `size` copies of this rank's value. `split`
    raises ConfigError if `size` is greater than 1, because the colors of the other ranks are unknown; use `subgroup`
    instead. `abort` raises Aborted on this rank.

    Parameters
    ----------
    rank : index of this rank
    size : number of ranks
    """

    @wrap_with_type_hint_check
    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size} does not exist: 0 <= rank < size")
        super().__init__(rank, size)

    def __repr__(self) -> str:
        return f"FakeCommunicator(rank={self.rank}, size={self.size})"

    @property
    def has_peers(self) -> bool:
        return False

    def start_call(self, call: Call) -> Handle:
        return COMPLETED

    def start_rounded_sum(self, call: Call) -> Handle:
        return COMPLETED

    def _start_ring_all_reduce(self, call: Call) -> Handle:
        return COMPLETED

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        if color is None:
            return None
        if self.size > 1:
            why = "the others do not exist, so their colors are unknown: use subgroup(ranks)"
            raise_call_error(ConfigError, self, Call("split"), why)
        return FakeCommunicator(0, 1)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        require_distinct_ranks_with_own(self, ranks)
        return FakeCommunicator(list(ranks).index(self.rank), len(ranks))

    def all_gather_value(self, value: Any) -> list[Any]:
        return [unpack(pack(value))] * self.size

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.size

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.size

    def close(self) -> None:
        """Do nothing: this communicator has no resources to free."""

    def abort(self, code: int = 1) -> None:
        raise Aborted(f"fake rank {self.rank} of {self.size} aborted with code {code}")


class FakeNodeCommunicator(FakeCommunicator):
    """A fake communicator for ranks on hosts with shared memory. Code that plans memory layouts gets the same answers
    from it as from a `NodeCommunicator`.

    Parameters
    ----------
    rank : index of this rank
    size : number of ranks
    hosts : for each rank, the index of the host that it runs on"""

    def __init__(self, rank: int, hosts: Sequence[int]) -> None:
        super().__init__(rank, len(hosts))
        self.hosts, self.xp = tuple(hosts), shapes
        self.ranks_by_host = [[r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)]
        self.ranks_on_host = next(ranks for ranks in self.ranks_by_host if rank in ranks)
        self.is_sharing_useful = len({len(ranks) for ranks in self.ranks_by_host}) == 1 and len(self.ranks_on_host) > 1
        self.is_single_host = self.is_sharing_useful and len(self.ranks_by_host) == 1

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        require_distinct_ranks_with_own(self, ranks)
        return FakeNodeCommunicator(list(ranks).index(self.rank), [self.hosts[rank] for rank in ranks])

    def allocate_shared(self, nbytes: int) -> Array:
        """Return a placeholder for an array of `nbytes` bytes in shared memory. It has a shape but no memory."""
        return shapes.empty(nbytes, dtype="uint8")

    allocate_node_buffer = allocate_shared

    def free_shared(self, array: Any) -> None:
        """Do nothing: the arrays of this communicator have no memory."""

    free_shared_locally = free_shared
