"""The base class of backends that send messages between processes, and the transfer of GPU arrays with such backends.

A large GPU array is sent in chunks through pinned host buffers, and the transfers of its chunks overlap. Transfers to
and from different ranks advance independently.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from fsdpx.core.array.devices import CPU, get_device_of_array
from fsdpx.core.comm.backend import Backend, start_through_host
from fsdpx.core.comm.calls import Array, Call, GeneratorHandle, Handle, copy_unless_same, spin_until
from fsdpx.core.comm.communicator import CALL_SPECS
from fsdpx.core.comm.p2p_collectives import Pairs
from fsdpx.errors import CommTimeout

__all__ = [
    "CHUNK_BYTES", "CHUNK_SLOTS", "DEFAULT_TIMEOUT_SECONDS", "MessageBackend", "find_outermost_with_attribute",
    "has_gpu_array", "is_sent_in_chunks", "start_messages_through_host", "synchronize_devices",
]  # fmt: skip


def find_outermost_with_attribute(comm: Any, name: str) -> Any:
    """Search `comm` and the communicators that it wraps, from the outside in. Return the first one that has an
    attribute `name`, or None if there is none."""
    while comm is not None and not hasattr(comm, name):
        comm = getattr(comm, "comm", None) or getattr(comm, "carrier", None)
    return comm


CHUNK_BYTES = 1 << 20
"""Maximum size of a chunk and of its pinned buffer, in bytes."""
CHUNK_SLOTS = 4


def has_gpu_array(arrays: Iterable[Array]) -> bool:
    """Return whether at least one array is on a GPU. Some entries of `arrays` may be None."""
    return any(type(array) is not np.ndarray and get_device_of_array(array) is not CPU for array in arrays)


def synchronize_devices(arrays: Iterable[Array]) -> None:
    """Wait until the GPUs of these arrays have completed all work that this thread has issued. This must be called
    before a transfer, because MPI does not know about GPU streams."""
    for device in {get_device_of_array(array) for array in arrays}:
        device.synchronize()


def is_sent_in_chunks(call: Call) -> bool:
    """Return whether the GPU arrays of a call are sent as messages in chunks. The result is the same on all ranks.

    Chunks are used if an array is larger than one chunk, or if the sizes of arrays may differ between ranks."""
    return not CALL_SPECS[call.verb].same_size or any(
        array.nbytes > CHUNK_BYTES for array in call.arrays if array is not None
    )


def start_messages_through_host(comm: MessageBackend, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
    """Start the sends and receives of a call in chunks, through host memory. All arrays must be on the same GPU. Each
    array needs `CHUNK_SLOTS` chunks of pinned host memory as scratch space."""
    arrays = [array for _, array in (*outgoing, *incoming)]
    side = get_device_of_array(arrays[0]).make_copier(arrays[0])

    def send_chunk(rank: int, host: Array, gpu: Array) -> Handle:
        return comm.start_messages(call, [(rank, host)], [])

    def receive_chunk(rank: int, host: Array, gpu: Array) -> Handle:
        return comm.start_messages(call, [], [(rank, host)])

    def fetch_chunk(host: Array, gpu: Array) -> Handle:
        return side.start_copy(host, gpu)

    def put_chunk(host: Array, gpu: Array) -> Handle:
        return side.start_copy(gpu, host)

    belts = [_ChunkPipeline(array, partial(receive_chunk, rank), put_chunk) for rank, array in incoming]
    belts += [_ChunkPipeline(array, fetch_chunk, partial(send_chunk, rank)) for rank, array in outgoing]
    return GeneratorHandle(iter([_ChunkPipelines(comm, call, belts)]), comm.progress)


Phase = Callable[[Array, Array], Handle]
"""A function (pinned buffer, chunk on the GPU) that starts a transfer and returns its handle."""


class _ChunkPipeline:
    """The transfer of one GPU array to or from one rank, chunk by chunk. A chunk is either copied from the GPU to a
    pinned buffer and sent from there, or received into a pinned buffer and copied to the GPU."""

    def __init__(self, array: Array, first: Phase, second: Phase) -> None:
        data = array.view("uint8")
        self._left = deque(data[start : start + CHUNK_BYTES] for start in range(0, data.size, CHUNK_BYTES))
        self._phases = first, second
        self._under_way: tuple[deque[Any], deque[Any]] = deque(), deque()
        self._free = [
            get_device_of_array(array).allocate_pinned(min(CHUNK_BYTES, data.size))
            for _ in range(min(CHUNK_SLOTS, len(self._left)))
        ]

    def test(self) -> bool:
        (first, second), (begun, ending) = self._phases, self._under_way
        while ending and ending[0][0].test():
            self._free.append(ending.popleft()[1])
        while begun and begun[0][0].test():
            _, slot, chunk = begun.popleft()
            ending.append((second(slot[: chunk.size], chunk), slot))
        while self._left and self._free:
            slot, chunk = self._free.pop(), self._left.popleft()
            begun.append((first(slot[: chunk.size], chunk), slot, chunk))
        return not (self._left or begun or ending)


class _ChunkPipelines:
    """The handle of a call whose arrays are all transferred in chunks. The transfers of the arrays advance
    independently."""

    def __init__(self, comm: MessageBackend, call: Call, belts: list[_ChunkPipeline]) -> None:
        self._comm, self._call, self._belts = comm, call, belts

    def test(self) -> bool:
        self._belts = [belt for belt in self._belts if not belt.test()]
        return not self._belts

    def wait(self) -> None:
        comm = self._comm
        if not spin_until(self.test, comm.progress, comm.timeout):
            raise CommTimeout(
                f"{self._call.name} on rank {comm.rank} of {comm.size} is not complete after {comm.timeout:g} s: a "
                "peer did not call or has ended"
            )


DEFAULT_TIMEOUT_SECONDS = 1800.0
"""Default number of seconds after which a wait raises CommTimeout."""


class MessageBackend(Backend):
    """Base class of backends that send messages between processes.

    Attributes
    ----------
    library : short name of the library that transfers data
    timeout : maximum duration of a single wait, in seconds"""

    library: ClassVar[str]
    timeout: float

    def set_timeout(self, seconds: float) -> None:
        """Set the maximum duration of a single wait, in seconds."""
        self.timeout = seconds

    @property
    @abstractmethod
    def native_verbs(self) -> frozenset[str]:
        """Names of the operations that the library itself provides. A reduction in this set is native only for dtypes
        that the library can add. For other dtypes, it is built from messages, like all operations outside this set."""

    def start_single_message(self, call: Call) -> Handle:
        """Start a single "send" or "recv" call."""
        pairs = [(call.root, call.arrays[0])]
        return self.start_messages(call, pairs, []) if call.verb == "send" else self.start_messages(call, [], pairs)

    def start_gpu_call_through_host(self, call: Call, start_on_host: Callable[[Call], Handle]) -> Handle:
        """Start a call with GPU arrays through a library that supports only host memory.

        Small arrays are copied to the host and passed to `start_on_host`. Large arrays are sent as messages in chunks,
        and their sums are computed on the GPU.
        """
        if not is_sent_in_chunks(call):
            return start_through_host(call, start_on_host)
        return self.start_single_message(call) if call.verb in ("send", "recv") else super().start_call(call)

    def start_all_gather_with_gaps(self, call: Call, counts: Sequence[int], displs: Sequence[int]) -> Handle:
        """Start an all-gather that stores rank r's piece, which has `counts[r]` elements, at index `displs[r]` of
        `recv`, so that there may be gaps between pieces. `recv` may have up to 2^31 elements."""
        send, recv = call.arrays
        parts = [recv[start : start + count] for start, count in zip(displs, counts, strict=True)]
        copy_unless_same(parts[self.rank], send)
        others = [rank for rank in range(self.size) if rank != self.rank]
        message = call.with_arrays(call.arrays)
        message.tag = self._take_next_tag()
        own_part = parts[self.rank]
        return self.start_messages(
            message, [(rank, own_part) for rank in others], [(rank, parts[rank]) for rank in others]
        )
