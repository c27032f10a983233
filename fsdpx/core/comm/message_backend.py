"""The base class of backends that send messages between processes, and the transfer of GPU arrays by such backends.

A large GPU array is sent through pinned host buffers in overlapping chunks. Transfers with different ranks advance
independently.
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
    "CHUNK_BYTES", "CHUNK_SLOTS", "DEFAULT_TIMEOUT_SECONDS", "MessageBackend", "find_inner_with_attribute",
    "has_gpu_array", "is_sent_in_chunks", "start_messages_through_host", "synchronize_devices",
]  # fmt: skip


def find_inner_with_attribute(comm: Any, name: str) -> Any:
    """Search `comm` and the communicators that it wraps, from the outside in, and return the first one that has an
    attribute `name`; None if there is none."""
    while comm is not None and not hasattr(comm, name):
        comm = getattr(comm, "comm", None) or getattr(comm, "carrier", None)
    return comm


CHUNK_BYTES = 1 << 20
"""Size of a chunk, and of its pinned buffer, in bytes."""
CHUNK_SLOTS = 4


def has_gpu_array(arrays: Iterable[Array]) -> bool:
    """Return whether at least one array is on a GPU. Entries may be None."""
    return any(type(array) is not np.ndarray and get_device_of_array(array) is not CPU for array in arrays)


def synchronize_devices(arrays: Iterable[Array]) -> None:
    """Wait until the GPUs of these arrays have completed all work that this thread has issued. MPI does not know about
    streams, so this must precede a transfer."""
    for device in {get_device_of_array(array) for array in arrays}:
        device.synchronize()


def is_sent_in_chunks(call: Call) -> bool:
    """Return whether a call on GPU arrays is carried out by messages in chunks. The answer is the same on all ranks.

    This is the case if an array is larger than one chunk, or if array lengths may differ between ranks."""
    return not CALL_SPECS[call.verb].same_size or any(
        array.nbytes > CHUNK_BYTES for array in call.arrays if array is not None
    )


def start_messages_through_host(comm: MessageBackend, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
    """Start the sends and receives of a call, in chunks that go through host memory. All arrays are on the same GPU.
    The scratch memory is CHUNK_SLOTS chunks of pinned memory for each array."""
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
"""A function of a pinned buffer and a chunk on the GPU that returns a handle."""


class _ChunkPipeline:
    """The transfer of one GPU array to or from one rank, chunk by chunk. Each chunk is copied between the GPU and a
    pinned buffer, and sent from or received into that buffer."""

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
    """The handle of a call whose arrays are all transferred in chunks. The arrays advance independently of each other.
    """

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
"""Longest wait before CommTimeout, in seconds."""


class MessageBackend(Backend):
    """Base class of backends that send messages between processes.

    Attributes
    ----------
    library : short name of the library that transfers the bytes
    timeout : maximum duration of a single wait, in seconds"""

    library: ClassVar[str]
    timeout: float

    def set_timeout(self, seconds: float) -> None:
        """Set the maximum duration of a single wait, in seconds."""
        self.timeout = seconds

    @property
    @abstractmethod
    def native_verbs(self) -> frozenset[str]:
        """Names of the operations that the library itself provides; it provides reductions only for dtypes that it can
        add. All other operations are built from messages."""

    def start_single_message(self, call: Call) -> Handle:
        """Start a single "send" or "recv" call."""
        pairs = [(call.root, call.arrays[0])]
        return self.start_messages(call, pairs, []) if call.verb == "send" else self.start_messages(call, [], pairs)

    def start_gpu_transfer(self, call: Call, start_on_host: Callable[[Call], Handle]) -> Handle:
        """Start a call on GPU arrays with a library that supports only host memory.

        Small arrays are copied to the host and passed to `start_on_host`. Large arrays are sent as messages in chunks,
        and sums are computed on the GPU.
        """
        if not is_sent_in_chunks(call):
            return start_through_host(call, start_on_host)
        return self.start_single_message(call) if call.verb in ("send", "recv") else super().start_transfer(call)

    def start_all_gather_with_gaps(self, call: Call, counts: Sequence[int], displs: Sequence[int]) -> Handle:
        """Start an all-gather in which rank r's piece of `counts[r]` elements is stored at index `displs[r]` of
        `recv`, so that there may be gaps between pieces. Supports up to 2^31 elements."""
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
