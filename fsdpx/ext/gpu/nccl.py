"""NCCL backend: collectives on GPU arrays. Ranks connect through MPI, which also carries host arrays and point-to-point
messages.

When a call is issued, NCCL's stream first waits for the work that this thread has issued on its own stream. A handle is
complete when NCCL's stream has reached the handle's event. The host issues all work of a call at once, so ranks that
make the same calls in the same order issue work to NCCL in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from fsdpx.core.base.messages import format_ranks
from fsdpx.core.comm.backend import Backend
from fsdpx.core.comm.calls import (
    Array,
    Call,
    FlatPartition,
    Handle,
    ReduceOp,
    copy_unless_same,
    is_in_place,
    make_balanced_partition,
    spin_until,
)
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import CommunicatorRequest, open_mpi
from fsdpx.core.comm.message_backend import DEFAULT_TIMEOUT_SECONDS
from fsdpx.core.comm.p2p_collectives import Pairs
from fsdpx.core.comm.reduction import is_half, reduce_in_rank_order_into
from fsdpx.core.comm.windows import Window
from fsdpx.errors import CommError, CommTimeout, ConfigError
from fsdpx.ext.gpu.cupy_devices import import_cupy, is_on_gpu
from fsdpx.ext.gpu.streams import SideStream
from fsdpx.ext.gpu.visible_devices import RankGpu, assign_and_select_gpus, find_ranks_sharing_gpus

__all__ = ["NcclCommunicator", "explain_missing_nccl", "open_nccl_communicator", "require_one_gpu_per_rank"]

NCCL_TYPES = {
    "uint8": 1, "bool": 1, "int32": 2, "int64": 4, "uint64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""Dtype name -> value of the enum ncclDataType_t."""
SUM, PROD, MAX, MIN = 0, 1, 2, 3
NCCL_OPERATIONS = {ReduceOp.SUM: SUM, ReduceOp.AVG: SUM, ReduceOp.PROD: PROD, ReduceOp.MAX: MAX, ReduceOp.MIN: MIN}
NCCL_BOOL_OPERATIONS = {ReduceOp.SUM: MAX, ReduceOp.MAX: MAX, ReduceOp.PROD: MIN, ReduceOp.MIN: MIN}


def explain_missing_nccl() -> str | None:
    """Return a message that explains why CuPy cannot use NCCL in this process, or None if it can."""
    return None if _import_nccl().available else "CuPy finds no libnccl.so.2: pip install nvidia-nccl-cu13 (or -cu12)"


def _import_nccl() -> Any:
    import_cupy()  # without CuPy, raises an error that explains what to install
    return import_module("cupy.cuda.nccl")


def require_one_gpu_per_rank(rank_gpus: Sequence[RankGpu]) -> None:
    """Raise ConfigError if two ranks share a GPU."""
    for ranks in find_ranks_sharing_gpus(list(rank_gpus)):
        rank_gpu = rank_gpus[ranks[0]]
        raise ConfigError(
            f"backend 'nccl': {format_ranks(ranks)} are on one GPU ({rank_gpu.bus} of {rank_gpu.host}), and NCCL takes "
            "one rank per GPU: start as many ranks as there are GPUs, or use backend='mpi', which goes through the host"
        )


def open_nccl_communicator(request: CommunicatorRequest) -> Communicator:
    """Open a communicator whose ranks connect through MPI, and whose GPUs, one per rank, connect through NCCL.
    Collective."""
    carrier = open_mpi(request)
    require_one_gpu_per_rank(assign_and_select_gpus(carrier, request.device_map))
    return NcclCommunicator(carrier, request.settings.timeout or DEFAULT_TIMEOUT_SECONDS)


class NcclCommunicator(Backend):
    """Communicator of the ranks of `carrier`, an MPI communicator. Each rank has its own GPU.

    A wait longer than `timeout` seconds aborts NCCL and raises CommTimeout. NCCL itself would round at each step of a
    float16 or bfloat16 sum. Therefore, the rank that owns a part of the result computes this part in float32, in rank
    order. This computation takes scratch memory of the size of the array to be reduced."""

    def __init__(self, carrier: Communicator, timeout: float) -> None:
        super().__init__(carrier.rank, carrier.size, carrier.progress)
        self.carrier, self.timeout = carrier, timeout
        self.xp = import_cupy()
        if (why := explain_missing_nccl()) is not None:
            raise ConfigError(f"backend 'nccl': {why}")
        self.nccl = _import_nccl()
        self.side = SideStream()
        self.stream = self.side.stream
        self.link: Any = self._create_nccl_communicator() if self.size > 1 else None

    def _create_nccl_communicator(self) -> Any:
        """Create NCCL's communicator for these ranks. Collective because every rank needs the communicator's id, which
        rank 0 creates."""
        name = self.carrier.all_gather_value(self.nccl.get_unique_id() if self.rank == 0 else None)[0]
        self.carrier.barrier(what="NCCL").wait()
        return self.nccl.NcclCommunicator(self.size, name, self.rank)

    def __repr__(self) -> str:
        return f"NcclCommunicator(rank={self.rank}, size={self.size})"

    def set_timeout(self, seconds: float) -> None:
        """Set the maximum time of a single wait, in seconds, from now on."""
        self.timeout = seconds

    def start_call(self, call: Call) -> Handle:
        arrays = [array for array in call.arrays if array is not None]
        of_gpu = bool(arrays) and is_on_gpu(arrays[0]) and arrays[0].dtype.name in NCCL_TYPES
        if of_gpu and call.verb in ("gather", "scatter", "all_to_all"):
            return super().start_call(call)
        if of_gpu and call.verb in _BODIES:
            return self._start_on_stream(call, partial(_BODIES[call.verb], self, call))
        return self.carrier.start_call(call) if isinstance(self.carrier, Backend) else self.carrier.issue(call)

    def _take_next_tag(self) -> int:
        """Return an unused message tag of the MPI communicator that carries host arrays."""
        return self.carrier._take_next_tag() if isinstance(self.carrier, Backend) else super()._take_next_tag()

    def start_messages(self, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
        def start_exchange() -> Iterable[Array]:
            self._send_and_recv(outgoing, incoming)
            return [part for _, part in (*outgoing, *incoming)]

        return self._start_on_stream(call, start_exchange)

    def _start_on_stream(self, call: Call, body: Callable[[], Iterable[Array]]) -> Handle:
        """Call `body` on NCCL's stream, and return a handle for the work that it issues. `body` returns the scratch
        arrays that it uses."""
        try:
            with self.side.issuing_on_stream() as event:
                scratch = body()
        except self.nccl.NcclError as error:
            raise CommError(f"{self._describe_call(call)}: NCCL: {error}") from error
        return _NcclWork(self, self._describe_call(call), event, (*call.arrays, *scratch))

    @contextmanager
    def _grouping_nccl_calls(self) -> Iterator[None]:
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def _describe_call(self, call: Call) -> str:
        return f"{call.name} on rank {self.rank} of {self.size}"

    def _start_all_gather(self, call: Call) -> Iterable[Array]:
        (send, recv), (partition,) = call.arrays, call.partitions
        if partition.even and partition.total:
            self.link.allGather(
                _get_pointer(send), _get_pointer(recv), send.size, _get_nccl_type(send), self.stream.ptr
            )
            return ()
        copy_unless_same(partition.get_piece(recv, self.rank), send)
        self._broadcast_pieces_from_owners(recv, partition)
        return ()

    def _broadcast_pieces_from_owners(self, array: Array, partition: FlatPartition) -> None:
        """Broadcast each part of `array` in place from its owner to all ranks. Together, these broadcasts are an
        all-gather of parts of different sizes."""
        with self._grouping_nccl_calls():
            for root in range(self.size):
                if (part := partition.get_piece(array, root)).size:
                    self.link.broadcast(
                        _get_pointer(part), _get_pointer(part), part.size, _get_nccl_type(part), root, self.stream.ptr
                    )

    def _start_reduce_scatter(self, call: Call) -> Iterable[Array]:
        (send, recv), (partition,) = call.arrays, call.partitions
        if is_half(send.dtype):
            return self._reduce_scatter_half_in_float32(send, recv, partition, call.op)
        own = partition.get_piece(send, self.rank)
        # `recv` may be the start of `send`, and the result must not overwrite data that is still to be sent
        target = own if is_in_place(send, recv) else recv
        op = _get_nccl_operation(call.op, send)
        if partition.even and partition.total:
            self.link.reduceScatter(
                _get_pointer(send), _get_pointer(target), target.size, _get_nccl_type(send), op, self.stream.ptr
            )
        else:
            with self._grouping_nccl_calls():
                for root in range(self.size):
                    if (part := partition.get_piece(send, root)).size:
                        into = target if root == self.rank else part
                        self.link.reduce(
                            _get_pointer(part),
                            _get_pointer(into),
                            part.size,
                            _get_nccl_type(part),
                            op,
                            root,
                            self.stream.ptr,
                        )
        self._divide_if_average(call.op, target)
        if not is_in_place(recv, target):
            recv[...] = target.copy()  # `recv` may overlap `target`, so make a copy of `target` first
        return ()

    def _start_all_reduce(self, call: Call) -> Iterable[Array]:
        (buf,) = call.arrays
        if is_half(buf.dtype):
            partition = make_balanced_partition(buf.size, self.size)
            scratch = self._reduce_scatter_half_in_float32(buf, partition.get_piece(buf, self.rank), partition, call.op)
            self._broadcast_pieces_from_owners(buf, partition)
            return scratch
        if buf.size:
            op = _get_nccl_operation(call.op, buf)
            self.link.allReduce(
                _get_pointer(buf), _get_pointer(buf), buf.size, _get_nccl_type(buf), op, self.stream.ptr
            )
        self._divide_if_average(call.op, buf)
        return ()

    def _start_broadcast(self, call: Call) -> Iterable[Array]:
        (buf,) = call.arrays
        if buf.size:
            self.link.broadcast(
                _get_pointer(buf), _get_pointer(buf), buf.size, _get_nccl_type(buf), call.root, self.stream.ptr
            )
        return ()

    def _start_reduce(self, call: Call) -> Iterable[Array]:
        send, recv = call.arrays
        at_root = self.rank == call.root
        if is_half(send.dtype):
            partition = make_balanced_partition(send.size, self.size)
            own = self.xp.empty(partition.counts[self.rank], dtype=send.dtype)
            scratch = self._reduce_scatter_half_in_float32(send, own, partition, call.op)
            if at_root:
                copy_unless_same(partition.get_piece(recv, self.rank), own)
                self._send_and_recv([], [(rank, partition.get_piece(recv, rank)) for rank in self._list_other_ranks()])
            else:
                self._send_and_recv([(call.root, own)], [])
            return (*scratch, own)
        if send.size:
            into, op = recv if at_root else send, _get_nccl_operation(call.op, send)
            self.link.reduce(
                _get_pointer(send), _get_pointer(into), send.size, _get_nccl_type(send), op, call.root, self.stream.ptr
            )
        if at_root:
            self._divide_if_average(call.op, recv)
        return ()

    def _reduce_scatter_half_in_float32(
        self, send: Array, recv: Array, partition: FlatPartition, op: ReduceOp
    ) -> Iterable[Array]:
        """Reduce-scatter 16-bit arrays. Each rank sends each part of its array to the owner of the part. The owner adds
        the parts from all ranks in float32, in rank order, and rounds only once.

        Returns the scratch arrays."""
        own = partition.get_piece(send, self.rank)
        rows = self.xp.empty((self.size, own.size), dtype=send.dtype)
        others = self._list_other_ranks()
        self._send_and_recv([(r, partition.get_piece(send, r)) for r in others], [(r, rows[r]) for r in others])
        rows[self.rank] = own
        reduce_in_rank_order_into(list(rows), op, [recv])
        return (rows,)

    def _send_and_recv(self, outgoing: Pairs, incoming: Pairs) -> None:
        with self._grouping_nccl_calls():
            for rank, part in outgoing:
                if part.size:
                    self.link.send(_get_pointer(part), part.size, _get_nccl_type(part), rank, self.stream.ptr)
            for rank, part in incoming:
                if part.size:
                    self.link.recv(_get_pointer(part), part.size, _get_nccl_type(part), rank, self.stream.ptr)

    def _divide_if_average(self, op: ReduceOp, total: Array) -> None:
        if op is ReduceOp.AVG:
            total /= self.size

    def _list_other_ranks(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.carrier.all_gather_bytes(data)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.carrier.all_gather_object(obj)

    def window(self, nbytes: int) -> Window:
        """Return a shared-memory window in host memory. This rank contributes `nbytes` bytes. Collective."""
        return self.carrier.window(nbytes)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        part = self.carrier.split(color, key)
        return None if part is None else NcclCommunicator(part, self.timeout)

    def close(self) -> None:
        if self.link is not None:
            self.stream.synchronize()
            self.link.destroy()
            self.link = None
        self.carrier.close()

    def abort(self, code: int = 1) -> None:
        self.abort_nccl()
        self.carrier.abort(code)

    def abort_nccl(self) -> None:
        """Abort all NCCL work of this rank, without notifying other ranks."""
        link, self.link = self.link, None
        if link is not None:
            link.abort()


class _NcclWork:
    """Handle for work on NCCL's stream. The handle keeps the arrays alive because CuPy reuses unreferenced memory
    immediately."""

    __slots__ = ("_arrays", "_comm", "_event", "_where")

    def __init__(self, comm: NcclCommunicator, where: str, event: Any, arrays: Iterable[Any]) -> None:
        self._comm, self._where, self._event = comm, where, event
        self._arrays: Any = tuple(arrays)

    def test(self) -> bool:
        if self._arrays is None:
            return True
        comm = self._comm
        if comm.link is None:
            raise CommError(f"{self._where}: NCCL's communicator was ended after an error")
        try:
            comm.link.check_async_error()
        except comm.nccl.NcclError as error:
            comm.abort_nccl()
            raise CommError(f"{self._where}: NCCL: {error}") from error
        if not self._event.done:
            return False
        self._arrays = None
        return True

    def wait(self) -> None:
        comm = self._comm
        if not spin_until(self.test, comm.progress, comm.timeout):
            comm.abort_nccl()
            raise CommTimeout(
                f"{self._where} is not complete after {comm.timeout:g} s: a peer did not call or has ended"
            )


def _get_pointer(array: Array) -> int:
    return int(array.data.ptr)


def _get_nccl_type(array: Array) -> int:
    return NCCL_TYPES[array.dtype.name]


def _get_nccl_operation(op: ReduceOp, array: Array) -> int:
    return NCCL_BOOL_OPERATIONS[op] if array.dtype.kind == "b" else NCCL_OPERATIONS[op]


_BODIES: dict[str, Callable[[NcclCommunicator, Call], Iterable[Array]]] = {
    "all_gather": NcclCommunicator._start_all_gather,
    "reduce_scatter": NcclCommunicator._start_reduce_scatter,
    "all_reduce": NcclCommunicator._start_all_reduce,
    "broadcast": NcclCommunicator._start_broadcast,
    "reduce": NcclCommunicator._start_reduce,
}
