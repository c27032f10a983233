"""The MPI backend, through mpi4py: nonblocking collectives, waits with a timeout, one-sided windows, and communicators
that survive the death of ranks."""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from os import _exit
from typing import Any, cast

import mpi4py
import numpy as np
from mpi4py import MPI

from fsdpx.core.base import environment, hooks
from fsdpx.core.comm.calls import (
    Array,
    Call,
    Handle,
    HandleWithCallback,
    Progress,
    ReduceOp,
    copy_unless_same,
    format_call_label,
    is_in_place,
    spin_until,
)
from fsdpx.core.comm.communicator import (
    CALL_SPECS,
    Communicator,
    SurvivorCommunicator,
    drain_transfers,
    make_rank_lost_error,
)
from fsdpx.core.comm.message_backend import (
    DEFAULT_TIMEOUT_SECONDS,
    MessageBackend,
    has_gpu_array,
    start_messages_through_host,
    synchronize_devices,
)
from fsdpx.core.comm.node.shared_windows import MappedWindow
from fsdpx.core.comm.p2p_collectives import Pairs
from fsdpx.core.comm.reduction import is_half, needs_rank_order_reduction
from fsdpx.core.comm.windows import Window
from fsdpx.errors import CommError, CommTimeout, ConfigError, RankLost

__all__ = [
    "DEATH_ERROR_CODES", "MAX_MESSAGE_ELEMENTS", "MpiCommunicator", "MpiRequests", "MpiWindow", "MpiWorld",
    "UlfmCommunicator", "as_wire_buffer", "convert_mpi_error_to_comm_error", "get_failed_ranks", "get_mpi_op",
    "is_ulfm_active", "require_ulfm", "skip_finalize_barrier",
]  # fmt: skip

_NAMES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
DEATH_ERROR_CODES = {getattr(MPI, name, MPI.ERR_UNKNOWN) for name in _NAMES} - {MPI.ERR_UNKNOWN}
"""MPI error classes that report the death of a rank. The set is empty if the MPI library or mpi4py (before version 4)
does not support user-level failure mitigation (ULFM)."""


@cache
def is_ulfm_active() -> bool:
    """Return whether this job continues when a rank dies. Only jobs started by Open MPI's `mpiexec --with-ft ulfm`
    continue. All other launchers end the job, even MPICH's launcher with -disable-auto-cleanup."""
    return bool(DEATH_ERROR_CODES) and "Open MPI" in MPI.Get_library_version() and environment.read_environment().ulfm


def require_ulfm() -> None:
    """Raise ConfigError if this version of mpi4py does not provide the functions for finding out which ranks have
    died."""
    if not hasattr(MPI, _NAMES[0]):
        raise ConfigError(
            f"ranks that outlive others (mpiexec --with-ft ulfm) need mpi4py 4.0 or newer, and this is "
            f"{mpi4py.__version__}: pip install 'mpi4py>=4.0', or start the job without --with-ft"
        )


def get_failed_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of `comm` that are dead, as far as MPI on this rank knows."""
    if not DEATH_ERROR_CODES:
        return ()
    failed, everyone = comm.Get_failed(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, None, everyone)
    failed.Free()
    everyone.Free()
    return tuple(sorted(ranks))


def skip_finalize_barrier() -> None:
    """Make MPI_Finalize skip its barrier in this process.

    If several ranks die at about the same time, the launcher of Open MPI 5.0 sometimes waits forever for the dead ranks
    in this barrier. Setting the environment variable OMPI_MCA_async_mpi_finalize=1 has the same effect, but only if it
    is set before MPI is initialized.
    """
    with suppress(ValueError, OSError):  # other versions of Open MPI may lack this variable
        ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_async_mpi_finalize").value = True


_OPS = {
    ReduceOp.SUM: MPI.SUM, ReduceOp.AVG: MPI.SUM, ReduceOp.MAX: MPI.MAX, ReduceOp.MIN: MPI.MIN, ReduceOp.PROD: MPI.PROD
}  # fmt: skip
_BOOL_OPS = {ReduceOp.SUM: MPI.LOR, ReduceOp.MAX: MPI.LOR, ReduceOp.PROD: MPI.LAND, ReduceOp.MIN: MPI.LAND}
_BOOL = np.dtype(bool)


class MpiRequests:
    """The handle for the MPI requests of one call. It keeps all buffers alive until all requests are complete, because
    mpi4py keeps only some of them alive. If a request fails, each call of `test` advances the other requests and then
    raises the error."""

    __slots__ = ("_buffers", "_comm", "_error", "_requests", "_test", "_verb", "_what")

    def __init__(self, comm: MpiCommunicator, call: Call, requests: list[MPI.Request], buffers: object) -> None:
        self._comm, self._verb, self._what = comm, call.verb, call.what
        self._requests = requests
        self._buffers = buffers
        self._error: CommError | None = None
        self._test: Callable[[], bool] = (
            requests[0].Test if len(requests) == 1 else partial(MPI.Request.Testall, requests)
        )

    def test(self) -> bool:
        try:
            done = self._test()
        except MPI.Exception as error:
            if self._error is None:
                self._error = convert_mpi_error_to_comm_error(error, str(self), self._comm.raw)
                self._error.__cause__ = error
            done = not self.active
        if done:
            self._buffers = None
        if self._error is not None:
            raise self._error
        return done

    @property
    def active(self) -> bool:
        """True as long as MPI may access a buffer. If one of several requests fails, the other requests stay active."""
        return any(request != MPI.REQUEST_NULL for request in self._requests)

    def wait(self) -> None:
        if self.test():
            return
        comm = self._comm
        if not spin_until(self.test, comm.progress, comm.timeout):
            raise CommTimeout(f"{self} is not complete after {comm.timeout:g} s: a peer did not call or has ended")

    def __str__(self) -> str:
        return f"{format_call_label(self._verb, self._what)} on rank {self._comm.rank} of {self._comm.size}"


def convert_mpi_error_to_comm_error(error: MPI.Exception, call_text: str, comm: MPI.Intracomm) -> CommError:
    """Return the error to raise after an MPI error: RankLost if `comm` has lost a rank or has been revoked, and
    CommError otherwise. `call_text` is a description of the call.

    The MPI error class alone does not show which error to raise, for two reasons. If several requests are tested at
    once, the class only says that one of them failed. If a connection breaks, MPI may not know yet that a rank has
    died."""
    dead = get_failed_ranks(comm)
    if error.Get_error_class() in DEATH_ERROR_CODES or (DEATH_ERROR_CODES and (dead or comm.Is_revoked())):
        return make_rank_lost_error(call_text, dead)
    return CommError(f"{call_text}: {error}")


def as_wire_buffer(array: Array) -> Array:
    """Return a view of `array` with a dtype that MPI can send. float16 and bfloat16 are sent as uint16, because MPI has
    no bfloat16 and may lack float16."""
    return array.view(np.uint16) if is_half(array.dtype) else array


def get_mpi_op(op: ReduceOp, dtype: np.dtype) -> MPI.Op:
    return _BOOL_OPS[op] if dtype == _BOOL else _OPS[op]


PROBES_PER_CHECK = 8
"""Number of `Iprobe` calls per check. One call is not enough, because Open MPI polls its sockets only once every 8
calls."""


class MpiWindow(Window):
    """An MPI window for one-sided access, with a part for each rank of `comm`. Creating it is collective.
    `open_locked_part` yields a copy of the data, which is written back if `write` is true.

    If the network does not support remote memory access, other hosts can access a part only while its owner is inside
    an MPI call that polls the network. If a rank reads a part on its own host, MPI might not poll the network. A rank
    that waits in a loop of such reads would therefore block other hosts, so the loop also polls the network explicitly.
    When ranks synchronize, each rank keeps polling the network until all ranks have arrived, because other ranks may
    still need to read its part."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int, timeout: float) -> None:
        self._win = MPI.Win.Allocate(max(nbytes, 8), 1, comm=comm)
        own_bytes = np.frombuffer(cast(Any, self._win.tomemory()), np.uint8)
        self._win.Lock(comm.Get_rank())
        own_bytes[...] = 0
        self._win.Unlock(comm.Get_rank())
        comm.Barrier()
        super().__init__(comm.Get_rank(), comm.Get_size(), own_bytes, timeout)
        self._comm = comm

    @contextmanager
    def open_locked_part(self, rank: int, start_byte: int, stop_byte: int, write: bool = True) -> Iterator[Array]:
        self._win.Lock(rank, MPI.LOCK_EXCLUSIVE if write else MPI.LOCK_SHARED)
        try:
            block = np.empty(stop_byte - start_byte, np.uint8)
            location = (start_byte, block.size, MPI.BYTE)
            self._win.Get([block, MPI.BYTE], rank, location)
            # make sure that this rank now holds the lock, because some libraries acquire it only at the first access
            self._win.Flush(rank)
            yield block
            if write:
                self._win.Put([block, MPI.BYTE], rank, location)
        finally:
            self._win.Unlock(rank)

    def read_word(self, rank: int, word_index: int) -> int:
        word_buffer = np.empty(1, np.int64)
        self._win.Lock(rank, MPI.LOCK_SHARED)
        self._win.Fetch_and_op([word_buffer, MPI.INT64_T], [word_buffer, MPI.INT64_T], rank, 8 * word_index, MPI.NO_OP)
        self._win.Unlock(rank)
        return int(word_buffer[0])

    def write_word(self, word_index: int, value: int) -> None:
        given, before = np.array([value], np.int64), np.empty(1, np.int64)
        self._win.Lock(self.rank, MPI.LOCK_SHARED)
        self._win.Fetch_and_op([given, MPI.INT64_T], [before, MPI.INT64_T], self.rank, 8 * word_index, MPI.REPLACE)
        self._win.Unlock(self.rank)

    def check_ranks_and_make_progress(self, missing: Callable[[], Sequence[int]] = list, what: str = "") -> None:
        for _ in range(PROBES_PER_CHECK):
            self._comm.Iprobe()

    def wait_for_all_ranks(self, missing: Callable[[], Sequence[int]], what: str) -> None:
        super().wait_for_all_ranks(missing, what)
        others, barrier = [rank for rank in range(self.size) if rank != self.rank], self._comm.Ibarrier()
        self.poll_until_none_missing(lambda: [] if barrier.Test() else others, what)

    def close(self) -> None:
        self.own = np.empty(0, np.uint8)
        self._win.Free()


MAX_MESSAGE_ELEMENTS = 2**31 - 1
"""Maximum number of elements in one MPI message, because counts and displacements are C ints before MPI 4."""


class MpiCommunicator(MessageBackend):
    """A communicator that uses MPI. It duplicates the given communicator (`raw` is the duplicate), so that its messages
    cannot be confused with the messages of the application that owns the original.

    Testing or waiting for any handle in the process advances all transfers. No two threads advance a transfer at the
    same time. GPU arrays are passed to MPI if `takes_gpus` is true (`fsdpx.ext.gpu.visible_devices` sets it). Otherwise
    they go through host memory: small arrays are copied as a whole, and large arrays are sent in chunks, with sums
    computed on the GPU.

    Attributes
    ----------
    timeout : number of seconds after which a wait raises CommTimeout
    limit : maximum number of elements in one MPI message; longer transfers are split"""

    library = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        limit: int = MAX_MESSAGE_ELEMENTS,
    ) -> None:
        self._initialize(
            _duplicate_communicator(MPI.COMM_WORLD if comm is None else comm, timeout), timeout, limit, Progress()
        )

    def _initialize(self, comm: MPI.Intracomm, timeout: float, limit: int, progress: Progress) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), progress)
        self.raw, self.timeout, self.limit = comm, timeout, limit
        self.takes_gpus = False

    @property
    def native_verbs(self) -> frozenset[str]:
        return frozenset(_NATIVE_CALLS)

    def __repr__(self) -> str:
        return f"MpiCommunicator(rank={self.rank}, size={self.size})"

    def start_call(self, call: Call) -> Handle:
        """Start a call. If MPI raises an exception immediately, raise a CommError instead, as if a request had
        failed."""
        try:
            if self.takes_gpus or not has_gpu_array(call.arrays):
                return self._start_call(call)
            return self.start_gpu_call_through_host(call, self._start_call)
        except MPI.Exception as error:
            raise self._translate_error(error, call) from error

    def _start_call(self, call: Call) -> Handle:
        """Start a call with the MPI library. If the library does not provide the operation, or if values must be
        combined in rank order, build the operation from messages."""
        begin, reduces = _NATIVE_CALLS.get(call.verb), CALL_SPECS[call.verb].reduces
        if begin is None or (reduces and needs_rank_order_reduction(call.op, call.arrays[0].dtype)):
            return super().start_call(call)
        if self.takes_gpus:
            synchronize_devices(call.arrays)
        return begin(self, call)

    def start_messages(self, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
        parts = [part for _, part in (*outgoing, *incoming)]
        if self.takes_gpus:
            synchronize_devices(parts)
        elif has_gpu_array(parts):
            return start_messages_through_host(self, call, outgoing, incoming)
        comm, chunks, tag = self.raw, self._split_message, call.tag
        try:
            requests = [comm.Irecv(c, rank, tag) for rank, part in incoming for c in chunks(as_wire_buffer(part))]
            requests += [comm.Isend(c, rank, tag) for rank, part in outgoing for c in chunks(as_wire_buffer(part))]
        except MPI.Exception as error:
            raise self._translate_error(error, call) from error
        return self._make_handle_keeping_buffers(call, requests, outgoing, incoming)

    def _start_all_gather(self, call: Call) -> Handle:
        (send, recv), (pieces,) = call.arrays, call.partitions
        source, target = as_wire_buffer(send), as_wire_buffer(recv)
        own_part = pieces.get_piece(target, self.rank)
        if target.size > self.limit:
            copy_unless_same(own_part, source)
            parts = [(root, pieces.get_piece(target, root)) for root in range(self.size)]
            requests = [self.raw.Ibcast(chunk, root) for root, part in parts for chunk in self._split_message(part)]
            return self._make_handle_keeping_buffers(call, requests, target)
        if not pieces.even:
            return self.start_all_gather_with_gaps(call, pieces.counts, pieces.displs)
        request = self.raw.Iallgather(MPI.IN_PLACE if is_in_place(source, own_part) else source, target)
        return self._make_handle_keeping_buffers(call, [request], source, target)

    def start_all_gather_with_gaps(self, call: Call, counts: Sequence[int], displs: Sequence[int]) -> Handle:
        source, target = as_wire_buffer(call.arrays[0]), as_wire_buffer(call.arrays[1])
        start = displs[self.rank]
        in_place = is_in_place(source, target[start : start + counts[self.rank]])
        request = self.raw.Iallgatherv(MPI.IN_PLACE if in_place else source, (target, (counts, displs)))
        return self._make_handle_keeping_buffers(call, [request], source, target)

    def _start_reduce_scatter(self, call: Call) -> Handle:
        (send, recv), (pieces,) = call.arrays, call.partitions
        if send.size > self.limit:
            return self._average_when_done(call, self._start_long_reduce_scatter(call), recv)
        in_place, at_home = (
            is_in_place(send, recv),
            is_in_place(recv, pieces.get_piece(send, self.rank)),
        )
        source, target = (MPI.IN_PLACE, send) if in_place or at_home else (send, recv)
        kind = get_mpi_op(call.op, send.dtype)
        if pieces.even:
            request = self.raw.Ireduce_scatter_block(source, target, kind)
        else:
            request = self.raw.Ireduce_scatter(source, target, pieces.counts, kind)
        handle = self._make_handle_keeping_buffers(call, [request], source, target)
        if at_home:
            handle = HandleWithCallback(handle, partial(np.copyto, recv, send[: recv.size]))
        return self._average_when_done(call, handle, recv)

    def _start_long_reduce_scatter(self, call: Call) -> Handle:
        """Start a reduce-scatter whose array is too long for one MPI call. Instead of one call, use one reduce per
        rank, which sums that rank's piece.

        If `recv` occupies the start of `send`, the reduces to other ranks may still be reading the elements there. In
        this case, write the result to this rank's own piece of `send`, and copy it to `recv` when all reduces are
        complete."""
        (send, recv), (pieces,) = call.arrays, call.partitions
        own_part, requests = pieces.get_piece(send, self.rank), []
        target = own_part if is_in_place(send, recv) else recv
        for root in range(self.size):
            requests += self._start_reduce_requests(
                pieces.get_piece(send, root), target if root == self.rank else None, call.op, root
            )
        handle = self._make_handle_keeping_buffers(call, requests, send, target)
        return handle if target is recv else HandleWithCallback(handle, partial(np.copyto, recv, own_part))

    def _start_all_reduce(self, call: Call) -> Handle:
        (buf,) = call.arrays
        kind = get_mpi_op(call.op, buf.dtype)
        requests = [self.raw.Iallreduce(MPI.IN_PLACE, chunk, kind) for chunk in self._split_message(buf)]
        return self._average_when_done(call, self._make_handle_keeping_buffers(call, requests, buf), buf)

    def _start_broadcast(self, call: Call) -> Handle:
        (buf,) = call.arrays
        requests = [self.raw.Ibcast(chunk, call.root) for chunk in self._split_message(as_wire_buffer(buf))]
        return self._make_handle_keeping_buffers(call, requests, buf)

    def _start_reduce(self, call: Call) -> Handle:
        send, recv = call.arrays
        at_root = self.rank == call.root
        requests = self._start_reduce_requests(send, recv if at_root else None, call.op, call.root)
        handle = self._make_handle_keeping_buffers(call, requests, send, recv)
        return self._average_when_done(call, handle, recv) if at_root else handle

    def _start_reduce_requests(self, send: Array, recv: Array | None, op: ReduceOp, root: int) -> list[MPI.Request]:
        kind, sources = get_mpi_op(op, send.dtype), self._split_message(send)
        targets = [None] * len(sources) if recv is None else self._split_message(recv)
        if recv is not None and is_in_place(send, recv):
            sources = [MPI.IN_PLACE] * len(sources)
        return [self.raw.Ireduce(*pair, kind, root) for pair in zip(sources, targets, strict=True)]

    def _start_barrier(self, call: Call) -> Handle:
        return self._make_handle_keeping_buffers(call, [self.raw.Ibarrier()])

    def _split_message(self, array: Array) -> list[Any]:
        """Divide `array` into parts that each fit into one MPI message. Sender and receiver divide their arrays in the
        same way."""
        if array.size <= self.limit:
            return [array]
        return [array[start : start + self.limit] for start in range(0, array.size, self.limit)]

    def _make_handle_keeping_buffers(self, call: Call, requests: list[MPI.Request], *buffers: object) -> Handle:
        return MpiRequests(self, call, requests, buffers)

    def _average_when_done(self, call: Call, handle: Handle, total: Array) -> Handle:
        average = call.op is ReduceOp.AVG
        return HandleWithCallback(handle, partial(np.divide, total, self.size, total)) if average else handle

    def _translate_error(self, error: MPI.Exception, call: Call) -> CommError:
        return convert_mpi_error_to_comm_error(error, f"{call.name} on rank {self.rank} of {self.size}", self.raw)

    def window(self, nbytes: int) -> Window:
        """Return an MPI window for one-sided access. If ranks may die and all ranks are on one host, return a window in
        shared memory instead, because it remains usable after a rank dies."""

        if is_ulfm_active() and len(set(self.all_gather_value(platform.node()))) == 1:
            skip_finalize_barrier()
            return MappedWindow(self, nbytes, self.timeout)
        return MpiWindow(self.raw, nbytes, self.timeout)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        try:
            part = self.raw.Split(MPI.UNDEFINED if color is None else color, key)
        except MPI.Exception as error:
            raise self._translate_error(error, Call("split")) from error
        if color is None:
            return None
        group = object.__new__(type(self))
        group._initialize(cast(MPI.Intracomm, part), self.timeout, self.limit, self.progress)
        group.takes_gpus = self.takes_gpus
        return group

    def get_failed_ranks(self) -> tuple[int, ...]:
        """Return the ranks that this rank knows to be dead, or () if a death would end the entire job."""
        return get_failed_ranks(self.raw) if is_ulfm_active() else ()

    def close(self) -> None:
        """Free the communicator. If a rank has died, do nothing and keep the communicator until the process ends."""
        hooks.release_hooks_of_owner(self)
        if self.raw != MPI.COMM_NULL and not self.get_failed_ranks():
            self.raw.Free()

    def abort(self, code: int = 1) -> None:
        MpiWorld.abort(code)


SECONDS_BETWEEN_ABORTS, SECONDS_TO_ABORT = 0.5, 5.0


class MpiWorld:
    """An object that can abort all MPI ranks before any communicator is open. It has only `rank` and `abort`."""

    rank = property(lambda self: int(MPI.COMM_WORLD.Get_rank()))

    @staticmethod
    def abort(code: int = 1) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE and threading.current_thread() is not threading.main_thread():
            # MPI does not allow calls from this thread, so exit without calling MPI_Finalize; the launcher then ends
            # the job
            _exit(code)
        if environment.read_environment().ulfm:
            gone = get_failed_ranks(MPI.COMM_WORLD)
            alive = [rank for rank in range(MPI.COMM_WORLD.Get_size()) if rank not in gone]
            if len(alive) == 1:
                _exit(code)  # exit instead of aborting, because Open MPI 5.0 would report the abort as success
            # ranks abort one after another, because the launcher may hang if several ranks abort at once after a death
            if gone:
                time.sleep(SECONDS_BETWEEN_ABORTS * sum(rank < MPI.COMM_WORLD.Get_rank() for rank in alive))
            # make sure that this process exits even if the launcher does not react to the abort
            stuck = threading.Timer(SECONDS_TO_ABORT, _exit, (code,))
            stuck.daemon = True
            stuck.start()
        MPI.COMM_WORLD.Abort(code)


def _duplicate_communicator(comm: MPI.Intracomm, timeout: float) -> MPI.Intracomm:
    """Return a duplicate of a communicator. Raise CommTimeout if any rank does not take part within `timeout`
    seconds."""
    who = f"rank {comm.Get_rank()} of {comm.Get_size()}"
    try:
        duplicate, request = comm.Idup()
        complete = spin_until(request.Test, Progress(), timeout)
    except MPI.Exception as error:
        raise convert_mpi_error_to_comm_error(error, f"opening a communicator on {who}", comm) from error
    if not complete:
        raise CommTimeout(
            f"opening a communicator on {who}: not all ranks have arrived within {timeout:g} s. All of them call "
            "fsdpx.init() or distribute(); a rank that is missing has ended or is elsewhere"
        )
    return duplicate


_NATIVE_CALLS: dict[str, Callable[[MpiCommunicator, Call], Handle]] = {
    "all_gather": MpiCommunicator._start_all_gather,
    "reduce_scatter": MpiCommunicator._start_reduce_scatter,
    "all_reduce": MpiCommunicator._start_all_reduce,
    "broadcast": MpiCommunicator._start_broadcast,
    "reduce": MpiCommunicator._start_reduce,
    "barrier": MpiCommunicator._start_barrier,
    "send": MpiCommunicator.start_single_message,
    "recv": MpiCommunicator.start_single_message,
}
"""For each operation that MPI libraries provide, the method that starts it. Other operations are built from
messages."""


_MAX_KEPT_HANDLES = 64
_SECONDS_TO_DRAIN = 0.02


class UlfmCommunicator(MpiCommunicator, SurvivorCommunicator):
    """An MPI communicator whose remaining ranks can continue when a rank dies (ULFM, user-level failure mitigation).
    It only sends messages and uses no shared memory.

    Without ULFM, this class works as long as no rank dies: `agree_on_flags` is an all-reduce, `shrink` returns a
    duplicate, and `revoke` does nothing. With ULFM, the death of a rank on this host is detected within milliseconds.
    The launcher detects the death of an entire host, either through sockets or, if it sends heartbeats, within the
    heartbeat timeout (10 s, `--prtemca errmgr_detector_heartbeat_timeout`)."""

    def _initialize(self, comm: MPI.Intracomm, timeout: float, limit: int, progress: Progress) -> None:
        super()._initialize(comm, timeout, limit, progress)
        # a duplicate inherits the error handler of its original, and that handler may abort instead of returning errors
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.survives = is_ulfm_active()
        self._parts: list[UlfmCommunicator] = []
        self._under_way: list[MpiRequests] = []

    def __repr__(self) -> str:
        return f"UlfmCommunicator(rank={self.rank}, size={self.size}, survives={self.survives})"

    def _make_handle_keeping_buffers(self, call: Call, requests: list[MPI.Request], *buffers: object) -> Handle:
        """Return a handle for the requests, and keep a reference to it so that the buffers stay alive. After the loss
        of a rank, the caller may drop the handle while other ranks are still sending."""
        handle = MpiRequests(self, call, requests, buffers)
        if len(self._under_way) >= _MAX_KEPT_HANDLES:
            self._under_way = [kept for kept in self._under_way if kept.active]
        self._under_way.append(handle)
        return handle

    def _list_kept_requests(self) -> list[MpiRequests]:
        """Return the handles that this communicator and its subgroups keep alive."""
        return [*self._under_way, *(handle for part in self._parts for handle in part._list_kept_requests())]

    def get_failed_ranks(self) -> tuple[int, ...]:
        return get_failed_ranks(self.raw)

    def revoke(self) -> None:
        """Revoke this communicator and all of its subgroups. Include subgroups that this rank no longer uses, because
        other ranks of these subgroups may still be waiting for this rank."""
        if self.survives and self.raw != MPI.COMM_NULL and not self.raw.Is_revoked():
            self.raw.Revoke()
        for part in self._parts:
            part.revoke()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Create the subgroup of this rank, and return only when all ranks have created their subgroups. If a rank
        returned earlier, it could start to wait for a rank that has not created the subgroup yet. That rank could not
        revoke the subgroup after a failure, and the waiting rank would wait forever."""
        self._parts = [part for part in self._parts if part.raw != MPI.COMM_NULL]
        part = super().split(color, key)
        if isinstance(part, UlfmCommunicator):
            self._parts.append(part)
        if self.survives:
            self.barrier(what="groups made").wait()
        return part

    def agree_on_flags(self, flags: int) -> int:
        """Return the bitwise AND of the flags of all ranks, or 0 if a rank has died. fsdpx never acknowledges failures
        to MPI. Every agreement after the death of a rank therefore fails on all ranks."""
        given = np.array([flags], np.intc)
        request = self.raw.Iagree(given) if self.survives else self.raw.Iallreduce(MPI.IN_PLACE, given, MPI.BAND)

        def is_decided() -> bool:
            # ignore RankLost here, because waiting for the affected transfer raises RankLost again
            with suppress(RankLost):
                self.progress.advance_transfers()
            return request.Test()

        try:
            if not spin_until(is_decided, Progress(self.progress.polls_before_yield), self.timeout):
                raise CommTimeout(f"agree on rank {self.rank} of {self.size} is not complete after {self.timeout:g} s")
        except MPI.Exception as error:
            failure = self._translate_error(error, Call("agree"))
            if not isinstance(failure, RankLost):
                raise failure from error
            return 0
        return int(given[0])

    def shrink(self) -> UlfmCommunicator:
        """Create a communicator of the living ranks. If another rank dies in the meantime, try again until all ranks of
        the new communicator agree that none of them has died."""
        before = self
        while True:
            try:
                comm = before.raw.Shrink() if self.survives else before.raw.Dup()
            except MPI.Exception as error:
                raise self._translate_error(error, Call("shrink")) from error
            shrunk = object.__new__(UlfmCommunicator)
            shrunk._initialize(
                cast(MPI.Intracomm, comm), self.timeout, self.limit, Progress(self.progress.polls_before_yield)
            )
            if shrunk.agree_on_flags(1):
                shrunk._under_way = cast(
                    list[MpiRequests], drain_transfers(self._list_kept_requests(), _SECONDS_TO_DRAIN)
                )
                if shrunk.size < self.size:
                    skip_finalize_barrier()
                return shrunk
            before = shrunk

    def close(self) -> None:
        """Free the communicator or, if a rank has died, keep it until the process ends. In both cases, make
        MPI_Finalize skip its barrier, because a rank may still die before the process ends."""
        if self.survives:
            skip_finalize_barrier()
        if self.raw != MPI.COMM_NULL and not (self.survives and (self.raw.Is_revoked() or self.get_failed_ranks())):
            super().close()
