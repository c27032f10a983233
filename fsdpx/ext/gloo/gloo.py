"""The Gloo communicator: collectives and messages on NumPy arrays through torch.distributed, without MPI."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hmac import compare_digest
from os import _exit  # the original os._exit, which watch/rank_exits.py replaces
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdpx.core.base import environment, hooks
from fsdpx.core.comm.calls import (
    COMPLETED,
    Array,
    Call,
    Handle,
    HandleWithCallback,
    Progress,
    ReduceOp,
    copy_unless_same,
    format_call_label,
    spin_until,
)
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.local import LocalCommunicator, ThreadGroup, ThreadWorld
from fsdpx.core.comm.message_backend import (
    DEFAULT_TIMEOUT_SECONDS,
    MessageBackend,
    has_gpu_array,
    start_messages_through_host,
)
from fsdpx.core.comm.p2p_collectives import Pairs
from fsdpx.core.comm.reduction import needs_rank_order_reduction
from fsdpx.errors import CommError, CommTimeout, ConfigError
from fsdpx.ext.gloo.rendezvous import CHALLENGE_BYTES, SEAL_BYTES, Rendezvous, compute_hmac

__all__ = ["GlooCommunicator"]

_NO_TIMEOUT = timedelta(days=30)
"""Timeout passed to Gloo. This timeout never takes effect because fsdpx's own waits end earlier."""
_SECONDS_TO_RECORD_END = 1.0
"""Maximum time that a rank spends on recording its end in the store when it aborts the job."""
_SECONDS_TO_FINISH = 5.0
"""Maximum time that an exiting process waits for its message threads to return."""


class GlooCommunicator(MessageBackend):
    """Communicator of the ranks of a `Rendezvous`, connected by Gloo. A wait longer than `timeout` seconds raises
    CommTimeout.

    Gloo's threads transfer the data, so transfers make progress in the background. To sum float16 or bfloat16 values,
    ranks exchange point-to-point messages, and each rank adds the values in rank order. GPU arrays are copied through
    the host."""

    library = "gloo"

    def __init__(self, rendezvous: Rendezvous, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        rendezvous.worlds += 1
        self._connect_ranks(rendezvous, str(rendezvous.worlds), rendezvous.rank, rendezvous.size, timeout, Progress())

    def _connect_ranks(
        self, rendezvous: Rendezvous, name: str, rank: int, size: int, timeout: float, progress: Progress
    ) -> None:
        super().__init__(rank, size, progress)
        self.rendezvous, self.timeout = rendezvous, timeout
        self._name, self._groups = name, 0
        self._itself = LocalCommunicator(ThreadGroup(ThreadWorld(timeout), [0]), 0, progress)
        self._gloo: Any = None
        if size > 1:
            with rendezvous.translating_torch_errors(
                f"rank {rendezvous.rank} of {rendezvous.size} could not connect to the others by Gloo"
            ):
                gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack ProcessGroupGloo's options
                options = gloo._Options()
                options._timeout = timedelta(
                    seconds=rendezvous.compute_seconds_left() if name == "1" else max(timeout, rendezvous.timeout)
                )
                options._devices = [_make_gloo_device(rendezvous)]
                store = SealedStore(rendezvous) if rendezvous.secret else rendezvous.store
                self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)
                self._gloo._set_default_timeout(_NO_TIMEOUT)
            if rendezvous.secret:
                self._authenticate_ranks(name)

    def __repr__(self) -> str:
        return f"GlooCommunicator(rank={self.rank}, size={self.size})"

    @property
    def native_verbs(self) -> frozenset[str]:
        return frozenset(_NATIVE_CALLS)

    def _authenticate_ranks(self, name: str) -> None:
        """Authenticate all ranks to each other. Each rank proves that it knows the job's secret. Collective.

        `name` is the name of this communicator, and proofs are valid only for this name. Ranks send the proofs over the
        connections that will carry data. Raises CommError if a proof is wrong."""
        patience, self.timeout = self.timeout, self.rendezvous.timeout
        number, width = self.size * CHALLENGE_BYTES, compute_hmac(b"", "").size
        asked = np.empty(number, np.uint8)
        self.all_gather(np.frombuffer(os.urandom(CHALLENGE_BYTES), np.uint8), asked, what="challenges").wait()
        answers, found = np.empty((self.size, width), np.uint8), np.empty(self.size * width, np.uint8)
        for other in range(self.size):
            answers[other] = compute_hmac(self.rendezvous.secret, f"{name} {self.rank} to {other}", asked.tobytes())
        self.all_to_all(answers.reshape(-1), found, what="proofs").wait()
        for other in range(self.size):
            wanted = compute_hmac(self.rendezvous.secret, f"{name} {other} to {self.rank}", asked.tobytes())
            if not compare_digest(wanted.tobytes(), found[other * width :][:width].tobytes()):
                raise CommError(
                    f"rank {self.rank} of {self.size}: who answers as rank {other} does not know the FSDPX_SECRET "
                    "of this job, and is refused: a stranger has connected, or FSDPX_SECRET differs between ranks"
                )
        self.timeout = patience

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather one pickled object from each rank, and return the objects in rank order on all ranks. Collective.

        Raises ConfigError if the job has no secret that authenticates ranks, because unpickling executes code sent by
        other ranks."""
        if self.size > 1 and not self.rendezvous.secret:
            raise ConfigError(
                "all_gather_object over Gloo runs what other ranks have pickled, and without FSDPX_SECRET nobody knows "
                "who they are: set FSDPX_SECRET to the same secret on all ranks (openssl rand -hex 32), start them by "
                "fsdpx run, which makes one, or send plain data by all_gather_value"
            )
        return super().all_gather_object(obj)

    def start_call(self, call: Call) -> Handle:
        with self.rendezvous.translating_torch_errors(f"{call.name} on rank {self.rank} of {self.size}"):
            if has_gpu_array(call.arrays):
                return self.start_gpu_call_through_host(call, self._start_call)
            return self._start_call(call)

    def _start_call(self, call: Call) -> Handle:
        begin = _NATIVE_CALLS.get(call.verb)
        if begin is None or (call.verb == "all_reduce" and _find_gloo_op(call.arrays[0], call.op) is None):
            return super().start_call(call)
        return begin(self, call)

    def start_messages(self, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
        """Start the sends and receives that make up a collective. No message is sent for an empty array, because both
        ranks know that it is empty."""
        if has_gpu_array([part for _, part in (*outgoing, *incoming)]):
            return start_messages_through_host(self, call, outgoing, incoming)
        receives = [(rank, _as_byte_tensor(part)) for rank, part in incoming if part.size]
        sends = [(rank, _as_byte_tensor(part)) for rank, part in outgoing if part.size]
        works = [self._gloo.recv([data], rank, call.tag) for rank, data in receives]
        works += [self._gloo.send([data], rank, call.tag) for rank, data in sends]
        return GlooWorks(self, call, [WaitedMessages(works)], (receives, sends)) if works else COMPLETED

    def start_single_message(self, call: Call) -> Handle:
        """Start a single send or receive. A message from a rank to itself is copied locally because Gloo does not
        connect a rank to itself."""
        if call.root == self.rank:
            call = call.with_arrays(call.arrays)
            call.root = 0
            return self._itself.start_call(call)
        return super().start_single_message(call)

    def _start_all_gather(self, call: Call) -> Handle:
        (send, recv), (pieces,) = call.arrays, call.partitions
        copy_unless_same(pieces.get_piece(recv, self.rank), send)
        if pieces.even and recv.size:
            target = _as_byte_tensor(recv)
            source = _as_byte_tensor(pieces.get_piece(recv, self.rank))
            return GlooWorks(self, call, [self._gloo._allgather_base(target, source)], (source, target))
        parts = [
            (root, _as_byte_tensor(pieces.get_piece(recv, root))) for root in range(self.size) if pieces.counts[root]
        ]
        return GlooWorks(self, call, [self._start_broadcast_work(part, root) for root, part in parts], parts)

    def _start_all_reduce(self, call: Call) -> Handle:
        (buf,) = call.arrays
        if not buf.size:
            return COMPLETED
        options = dist.AllreduceOptions()
        data, options.reduceOp = torch.from_numpy(_view_bool_as_uint8(buf)), _find_gloo_op(buf, call.op)
        handle = GlooWorks(self, call, [self._gloo.allreduce([data], options)], data)
        average = call.op is ReduceOp.AVG
        return HandleWithCallback(handle, partial(np.divide, buf, self.size, buf)) if average else handle

    def _start_broadcast(self, call: Call) -> Handle:
        (buf,) = call.arrays
        data = _as_byte_tensor(buf)
        return GlooWorks(self, call, [self._start_broadcast_work(data, call.root)], data) if buf.size else COMPLETED

    def _start_broadcast_work(self, data: torch.Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._gloo.broadcast([data], options)

    def _start_barrier(self, call: Call) -> Handle:
        """Start a barrier as an all-reduce, because Gloo's own barrier also waits for all transfers started before it.
        """
        return self._start_all_reduce(call.with_arrays((np.zeros(1, np.uint8),)))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        given = self.all_gather_value((color, key))
        self._groups += 1
        if color is None:
            return None
        ranks = [rank for _, rank in sorted((key, rank) for rank, (wanted, key) in enumerate(given) if wanted == color)]
        group = object.__new__(type(self))
        name = f"{self._name}/{self._groups}.{color}"
        group._connect_ranks(self.rendezvous, name, ranks.index(self.rank), len(ranks), self.timeout, self.progress)
        return group

    def close(self) -> None:
        hooks.release_hooks_of_owner(self)
        self._gloo = None

    def abort(self, code: int = 1) -> None:
        """End this process at once. Other ranks notice from the store and from their broken connections.

        The process waits at most _SECONDS_TO_RECORD_END for the store to record the end of this process. The wait is
        limited because the store may not answer, for example if the rank that hosts it has ended."""

        def report_end() -> None:
            with suppress(Exception):
                self.rendezvous.record_first_ended_rank(self.rendezvous.rank)

        telling = threading.Thread(target=report_end, daemon=True)
        telling.start()
        telling.join(_SECONDS_TO_RECORD_END)
        _exit(code)


def _make_gloo_device(rendezvous: Rendezvous) -> Any:
    """Return the network device that Gloo listens on.

    The result is the loopback interface if all ranks are on this host and the user has not chosen an interface.
    Otherwise, it is Gloo's default device."""
    if rendezvous.loopback and not environment.get_gloo_interface():
        return dist.ProcessGroupGloo.create_device(hostname=rendezvous.loopback)
    return dist.ProcessGroupGloo.create_default_device()


class SealedStore(dist.Store):
    """Store through which Gloo's ranks exchange their addresses. Each address has a message authentication code.

    Without this code, an attacker with access to the store could replace a rank's address and relay the traffic between
    two ranks."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rendezvous = rendezvous

    def set(self, key: str, value: Any) -> None:
        self._rendezvous.store.set(key, self._rendezvous.compute_authentication_code(key, bytes(value)) + bytes(value))

    def get(self, key: str) -> bytes:
        data = bytes(self._rendezvous.store.get(key))
        seal, value = data[:SEAL_BYTES], data[SEAL_BYTES:]
        if not compare_digest(seal, self._rendezvous.compute_authentication_code(key, value)):
            raise CommError(
                f"rank {self._rendezvous.rank} of {self._rendezvous.size}: the address of another rank at "
                f"{self._rendezvous.where} is not from a rank that knows the FSDPX_SECRET of this job, and is refused: "
                "a stranger has written it"
            )
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._rendezvous.store.wait(keys, *timeout)


class GlooWorks:
    """Handle for the Gloo operations of one call. The handle keeps the tensors alive until all operations are
    complete."""

    __slots__ = ("_comm", "_tensors", "_verb", "_what", "_works")

    def __init__(self, comm: GlooCommunicator, call: Call, works: Sequence[Any], tensors: object) -> None:
        self._comm, self._verb, self._what = comm, call.verb, call.what
        self._works, self._tensors = list(works), tensors

    def test(self) -> bool:
        works = self._works
        while works and works[-1].is_completed():
            with self._comm.rendezvous.translating_torch_errors(str(self)):
                works[-1].wait()
            works.pop()
        if not works:
            self._tensors = None
        return not works

    def wait(self) -> None:
        comm = self._comm
        if not self.test() and not spin_until(self.test, comm.progress, comm.timeout, polls_before_yield=0):
            raise CommTimeout(f"{self} is not complete after {comm.timeout:g} s: a peer did not call or has ended")

    def __str__(self) -> str:
        return f"{format_call_label(self._verb, self._what)} on rank {self._comm.rank} of {self._comm.size}"


class WaitedMessages:
    """Messages that a background thread waits for, one by one. Gloo reports the completion of a message only to a
    thread that waits for it."""

    __slots__ = ("_done", "_error", "_works")

    def __init__(self, works: list[Any]) -> None:
        self._works, self._done = works, False
        self._error: Exception | None = None
        _THREADS.wait_in_background(self)

    def wait_and_keep_error(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except Exception as error:
            self._error = error
        self._done = True

    def is_completed(self) -> bool:
        return self._done

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Make the background thread return. To do so, the calling thread waits for the same messages, with a short
        timeout.

        When this wait times out, Gloo fails all pending operations of the group, which ends the wait of the background
        thread."""
        for work in self._works:
            with suppress(RuntimeError):  # a wait that times out raises RuntimeError
                work.wait(timedelta(milliseconds=1))


class _WaitingThreads:
    """Background threads that wait for messages. Each thread waits for one `WaitedMessages` at a time.

    The threads do not delay the end of the process. Their waits are aborted before the interpreter shuts down, because
    a thread that returns to Python during shutdown would crash the process."""

    def __init__(self) -> None:
        self._given: SimpleQueue[WaitedMessages] = SimpleQueue()
        self._free = threading.Semaphore(0)
        self._waiting: set[WaitedMessages] = set()
        atexit.register(self.abandon_all_messages)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._waiting.clear)  # a forked child has no threads to wait for

    def wait_in_background(self, waited: WaitedMessages) -> None:
        self._waiting.add(waited)
        self._given.put(waited)
        if not self._free.acquire(blocking=False):
            threading.Thread(target=self._run_waiting_loop, name="fsdpx gloo", daemon=True).start()

    def _run_waiting_loop(self) -> None:
        while True:
            waited = self._given.get()
            waited.wait_and_keep_error()
            self._waiting.discard(waited)
            self._free.release()

    def abandon_all_messages(self) -> None:
        """Abandon all incomplete messages at the end of the process. This is safe because the peers of these messages
        either never made the matching call or will notice that this rank has ended."""
        for waited in list(self._waiting):
            waited.abandon()
        last = time.monotonic() + _SECONDS_TO_FINISH
        while self._waiting and time.monotonic() < last:
            time.sleep(0.001)


_THREADS = _WaitingThreads()
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.AVG: dist.ReduceOp.SUM, ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN, ReduceOp.PROD: dist.ReduceOp.PRODUCT,
}  # fmt: skip
_BOOL_OPS = {ReduceOp.SUM: dist.ReduceOp.MAX, ReduceOp.PROD: dist.ReduceOp.MIN}


def _find_gloo_op(array: Array, op: ReduceOp) -> Any:
    """Return Gloo's reduction for `op`, or None if Gloo does not support the dtype or reduces it differently than
    fsdpx."""
    if needs_rank_order_reduction(op, array.dtype):
        return None
    if array.dtype.kind == "b":
        return _BOOL_OPS.get(op, _OPS[op])
    return _OPS[op] if array.dtype.name in ("float32", "float64", "int32", "int64", "uint8") else None


def _view_bool_as_uint8(array: Array) -> Array:
    """Return a bool array as uint8 because torch cannot compute MAX and MIN of bools. Return any other array
    unchanged."""
    return array.view(np.uint8) if array.dtype.kind == "b" else array


def _as_byte_tensor(array: Array) -> torch.Tensor:
    """Return a tensor of the bytes of an array. The tensor shares the array's memory. For a read-only array, the tensor
    is a copy, which can be sent but must not be used to receive."""
    data = array.view(np.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())


_NATIVE_CALLS: dict[str, Callable[[GlooCommunicator, Call], Handle]] = {
    "all_gather": GlooCommunicator._start_all_gather,
    "all_reduce": GlooCommunicator._start_all_reduce,
    "broadcast": GlooCommunicator._start_broadcast,
    "barrier": GlooCommunicator._start_barrier,
    "send": GlooCommunicator.start_single_message,
    "recv": GlooCommunicator.start_single_message,
}
"""Collectives that use Gloo's own operations. All others are built from messages."""
