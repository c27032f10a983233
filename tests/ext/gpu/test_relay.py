"""Arrays of a GPU in chunks through pinned memory. Copies of the stand-in lag: who does not wait finds old numbers."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from on_gpu import OnGpu, train_on_gpu
from ranks import carrier, together
from stand_in import Cupy, Device, Stream

from fsdpx import spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.comm import message_backend as relay
from fsdpx.core.comm.calls import Call, GeneratorHandle, Handle
from fsdpx.core.comm.message_backend import MessageBackend, start_messages_through_host
from fsdpx.core.comm.p2p_collectives import Pairs
from fsdpx.errors import CommTimeout
from fsdpx.ext.gpu import streams
from fsdpx.ext.gpu.device import CUDA
from fsdpx.testing.communicator import CommunicatorContract


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    streams._make_side_stream.cache_clear()
    monkeypatch.setattr(relay, "CHUNK_BYTES", 16)
    return Cupy(gpus=2).install(monkeypatch)


class Threads(MessageBackend):
    """Thread ranks, as a library that carries memory of the host and refuses a GPU's. most: bytes of a message."""

    library = "threads"
    native_verbs = frozenset({"send", "recv"})

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size, comm.progress)
        self.comm, self.timeout, self.chunks, self.most = comm, 20.0, 0, relay.CHUNK_BYTES

    def start_call(self, call: Call) -> Handle:
        if relay.has_gpu_array(call.arrays):
            return self.start_gpu_call_through_host(call, self.comm.start_call)
        return self.comm.start_call(call)

    def start_messages(self, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
        if relay.has_gpu_array([part for _, part in (*outgoing, *incoming)]):
            return start_messages_through_host(self, call, outgoing, incoming)
        assert all(part.nbytes <= self.most for _, part in (*outgoing, *incoming))
        self.chunks += len(outgoing)
        handles = [self.comm.start_call(Call("recv", (part,), root=rank, tag=call.tag)) for rank, part in incoming]
        handles += [self.comm.start_call(Call("send", (part,), root=rank, tag=call.tag)) for rank, part in outgoing]
        return GeneratorHandle(iter(handles), self.progress)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        part = self.comm.split(color, key)
        return None if part is None else Threads(part)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return list(self.comm.all_gather_bytes(data))

    def close(self) -> None:
        self.comm.close()

    def abort(self, code: int = 1) -> None:
        self.comm.abort(code)


class TestContract(CommunicatorContract):
    def run(self, body: Callable[[Communicator], Any]) -> Any:
        for size in (1, 3):
            spawn(lambda comm: body(OnGpu(Threads(comm))), size, timeout=30)


def test_a_large_array_goes_in_chunks_in_few_slots(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """While chunks are copied others are under way, and never more than there are slots."""
    pinned = Mock(wraps=streams.allocate_pinned)
    monkeypatch.setattr(CUDA, "allocate_pinned", pinned)

    def body(comm: Any) -> None:
        over, other = Threads(comm), 1 - comm.rank
        x, y = cupy.asarray(np.arange(100.0) + comm.rank), cupy.zeros(100)
        for handle in [over.send(x, other, what="w"), over.recv(y, other, what="w")]:
            handle.wait()
        assert over.chunks == 50
        np.testing.assert_array_equal(y.get(), np.arange(100.0) + other)

    spawn(body, 2)
    # an array that is sent and one that is received, of two ranks
    assert pinned.call_args_list == [call(16)] * relay.CHUNK_SLOTS * 4


def test_sums_are_made_on_the_gpu_in_rank_order(cupy: Cupy) -> None:
    parts = [(np.arange(50) / (3 + rank)).astype("float32") for rank in range(3)]

    def body(comm: Any) -> None:
        x = cupy.asarray(parts[comm.rank])
        Threads(comm).all_reduce(x, "avg").wait()
        np.testing.assert_array_equal(x.get(), (parts[0] + parts[1] + parts[2]) / np.float32(3))

    spawn(body, 3)


def test_copies_wait_for_what_was_issued_before(cupy: Cupy) -> None:
    side = streams.get_copy_stream_after_current(cupy.zeros(1))
    assert side.stream.waited == 1
    source, target = cupy.asarray(np.arange(4.0)), streams.allocate_pinned(32)
    handle = side.start_copy(target, source)
    assert (target == 0x7F).all(), "nothing is copied before somebody looks"
    handle.wait()
    assert target.view(float).tolist() == [0, 1, 2, 3]
    assert streams.get_copy_stream_after_current(cupy.zeros(1)) is side
    with Device(1):
        assert streams.get_copy_stream_after_current(cupy.zeros(1)) is not side


@pytest.mark.world
def test_over_mpi_and_gloo(world: Communicator, cupy: Cupy) -> None:
    """Libraries that get chunks of the host, and once, where they take all of it, the array itself."""
    messages: Any = carrier(30)

    def body(comm: Communicator) -> None:
        ranks, mine = range(comm.size), comm.rank
        for dtype in ("float32", "bfloat16"):
            ours = [(np.arange(99) + 5 * rank).astype(dtype) for rank in ranks]
            buf, whole, own = cupy.asarray(ours[mine]), cupy.zeros(comm.size * 99, dtype), cupy.zeros(99, dtype)
            comm.all_reduce(buf).wait()
            want = np.sum([one.astype(float) for one in ours], 0).astype(dtype)
            np.testing.assert_array_equal(buf.get(), want)
            comm.all_gather(cupy.asarray(ours[mine]), whole).wait()
            np.testing.assert_array_equal(whole.get(), np.concatenate(ours))
            comm.reduce_scatter(whole, own, "max").wait()
            np.testing.assert_array_equal(own.get(), ours[mine])
            comm.all_to_all(whole, swapped := cupy.zeros(comm.size * 99, dtype)).wait()
            np.testing.assert_array_equal(swapped.get(), np.tile(ours[mine], comm.size))
            following, before = (mine + 1) % comm.size, (mine - 1) % comm.size
            for handle in [comm.send(cupy.asarray(ours[mine]), following), comm.recv(own, before)]:
                handle.wait()
            np.testing.assert_array_equal(own.get(), ours[before])

    together(world, messages, body)
    if hasattr(messages, "takes_gpus"):
        messages.takes_gpus = True  # as the stand-in's memory is the host's
        together(world, messages, body)
    messages.close()


def test_a_wait_in_vain_ends_with_the_name_of_the_call(cupy: Cupy) -> None:
    told = threading.Event()

    def body(comm: Any) -> None:
        over = Threads(comm)
        over.set_timeout(0.1)
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"recv of ACT1 on rank 0 of 2 is not complete after 0.1 s: a peer "):
                over.recv(cupy.zeros(100), 1, what="ACT1").wait()
            told.set()
        told.wait()  # a rank that has returned is told of at once

    spawn(body, 2)


def test_training_has_the_bits_of_copies_as_a_whole(cupy: Cupy) -> None:
    assert spawn(lambda comm: train_on_gpu(Threads(comm)), 2)[0] == spawn(train_on_gpu, 2)[0]
    assert any(stream.issued for stream in Stream.known.values())
