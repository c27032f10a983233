"""Arrays of GPUs between processes of a host, from GPU to GPU. Copies of the stand-in lag, and its processes reach the
memory of others by handles only; threads stand for processes where they say so."""

from __future__ import annotations

import sys
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import stand_in
from amount import in_full
from on_gpu import OnGpu
from ranks import carrier, together
from stand_in import Cupy, Device
from test_relay import Threads, train

from fsdpx import spawn
from fsdpx.comm import Communicator, ipc, relay
from fsdpx.comm.ipc import reach, settle
from fsdpx.cuda import ipc as memory
from fsdpx.cuda import streams
from fsdpx.errors import CommTimeout, ConfigError
from fsdpx.testing.communicator import CommunicatorContract


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    made = Cupy(gpus=2)
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    Device(0).use()
    streams._side.cache_clear()
    for module, numbers in ((relay, {"CHUNK": 16}), (ipc, {"CHUNK": 16, "SLOTS": 2, "_slabs": PerProcess()})):
        for name, value in numbers.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(memory, "_opened", PerProcess())
    return made


class PerProcess(UserDict[Any, Any]):
    """What each process has of its own, where threads stand for them."""

    def __contains__(self, key: object) -> bool:
        return (stand_in.process(), key) in self.data

    def __getitem__(self, key: Any) -> Any:
        return self.data[stand_in.process(), key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.data[stand_in.process(), key] = value


def apart(comm: Any) -> Threads:
    """A thread rank as a process of its own, which reaches all others."""
    stand_in._at.process = comm.rank + 1
    over = Threads(comm)
    over.reached = frozenset(range(comm.size)) - {comm.rank}
    over.notes = Threads(comm.split(0, comm.rank))
    over.notes.most = ipc.NOTE.itemsize
    return over


class TestContract(CommunicatorContract):
    def run(self, body: Callable[[Communicator], Any]) -> Any:
        for size in (2, 3):
            spawn(lambda comm: body(OnGpu(apart(comm))), size, timeout=30)


@in_full
class TestContractWhereSomeReachEachOther(CommunicatorContract):
    """Ranks 0 and 1 share memory; rank 2 is on another host."""

    def run(self, body: Callable[[Communicator], Any]) -> Any:
        def one(comm: Any) -> None:
            over = apart(comm)
            over.reached = frozenset({0, 1} - {comm.rank} if comm.rank < 2 else ())
            body(OnGpu(over))

        spawn(one, 3, timeout=30)


def exchanged(cupy: Cupy, count: int = 3) -> None:
    """Several messages of one tag at once, both ways, longer than all slots."""

    def body(comm: Any) -> None:
        over, other = apart(comm), 1 - comm.rank
        x = [cupy.asarray(np.arange(40.0 + 9 * n) + 100 * comm.rank + n) for n in range(count)]
        y = [cupy.zeros(a.size) for a in x]
        handles = [h for a, b in zip(x, y, strict=True) for h in (over.send(a, other), over.recv(b, other))]
        for handle in reversed(handles):
            handle.wait()
        assert over.chunks == 0 < over.notes.chunks
        for n, got in enumerate(y):
            np.testing.assert_array_equal(got.get(), np.arange(40.0 + 9 * n) + 100 * other + n)

    spawn(body, 2, timeout=30)


def test_messages_of_one_tag_come_in_order(cupy: Cupy) -> None:
    exchanged(cupy)
    assert sum(map(len, ipc._slabs.data.values())) == 2 * 3, "each message has slots of its own, and gives them back"
    exchanged(cupy)
    assert sum(map(len, ipc._slabs.data.values())) == 2 * 3


def test_nothing_goes_through_the_host_but_notes(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "pinned", lambda nbytes: pytest.fail("pinned memory"))
    exchanged(cupy)


def test_who_does_not_wait_for_a_copy_finds_old_numbers(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.Landmark, "test", lambda self: True)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        exchanged(cupy)


def test_who_takes_a_slot_too_early_spoils_a_chunk(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender takes slots for free as soon as it has told of them; or it ends before all notes have come back."""
    tell = ipc.PeerExchange._tell

    def early(self: Any, kind: int, slot: int, *rest: Any) -> None:
        tell(self, kind, slot, *rest)
        if kind == ipc.FULL and self._chunks:
            self.free.append(slot)

    monkeypatch.setattr(ipc.PeerExchange, "_tell", early)
    with pytest.raises((AssertionError, KeyError)):
        exchanged(cupy)


def test_training_has_the_bits_of_copies_through_the_host(cupy: Cupy) -> None:
    direct = spawn(lambda comm: train(apart(comm), progress="loop"), 2)
    assert direct[0] == spawn(lambda comm: train(Threads(comm), progress="loop"), 2)[0]
    assert ipc._slabs.data


def test_a_peer_that_does_not_come_is_waited_for_in_vain(cupy: Cupy) -> None:
    def body(comm: Any) -> None:
        over = apart(comm)
        over.wait_up_to(0.1)
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"send of ACT1 on rank 0 of 2 is not complete after 0.1 s: a peer "):
                over.send(cupy.zeros(100), 1, what="ACT1").wait()

    spawn(body, 2)


# -- who reaches whom --------------------------------------------------------------------------------------------------


def told(size: int, monkeypatch: pytest.MonkeyPatch, hosts: str = "aaa") -> list[Any]:
    monkeypatch.setattr(ipc, "_place", lambda: (hosts[stand_in._at.process - 1], stand_in._at.process))
    return spawn(lambda comm: reach(apart(comm)), size)


def test_processes_of_a_host_find_out_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = told(3, monkeypatch, "aab")
    assert first.ranks == ({1}, {0}, frozenset())
    assert first.evidence == ("1 pair of ranks read what the other wrote",)
    assert all(other == first for other in others)
    assert told(2, monkeypatch, "ab")[0].evidence == ("no host has several processes with a GPU",)


def test_what_cannot_be_exported_opened_or_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(memory, "export", broken("cudaErrorNotSupported: operation not supported"))
        (one, *_) = told(2, patch)
        assert not any(one.ranks)
        assert one.evidence[0] == "rank 1 exports nothing: cudaErrorNotSupported: operation not supported"
    with monkeypatch.context() as patch:
        patch.setattr(memory, "opened", broken("cudaErrorPeerAccessUnsupported: peer access is not supported"))
        assert "rank 0 cannot read rank 1's: cudaErrorPeerAccessUnsupported" in told(2, patch)[0].evidence[0]
    with monkeypatch.context() as patch:
        stale = memory.write
        patch.setattr(memory, "write", lambda address, data: stale(address, data[:5]))
        assert told(2, patch)[0].evidence[0] == "rank 0 cannot read rank 1's: other bytes than were written"


def broken(text: str) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise RuntimeError(text)

    return fail


def test_it_is_used_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_place", lambda: ("here", stand_in._at.process))

    def body(comm: Any) -> frozenset[int]:
        over = apart(comm)
        over.reached = frozenset()
        settle(over)
        return over.reached

    assert spawn(body, 2) == [frozenset(), frozenset()]
    monkeypatch.setenv("FSDPX_CUDA_IPC", "1")
    assert spawn(body, 2) == [{1}, {0}]
    monkeypatch.setattr(memory, "opened", broken("cudaErrorPeerAccessUnsupported"))
    words = r"FSDPX_CUDA_IPC=1, but ranks 0 and 1 of here do not share memory of their GPUs \(rank 0 cannot"
    with pytest.raises(ConfigError, match=words):
        spawn(body, 2)


@pytest.mark.world
def test_over_mpi_and_gloo(world: Communicator, cupy: Cupy) -> None:
    """Real processes: the probe, then every kind of message, of the whole and of a group."""
    messages: Any = carrier(30)

    def body(comm: Any) -> None:
        found = reach(comm)
        assert found.ranks[comm.rank] == frozenset(range(comm.size)) - {comm.rank}
        comm.reached, comm.notes = found.ranks[comm.rank], comm.split(0, comm.rank)
        everywhere(cupy, comm)
        group = comm.split(comm.rank % 2, -comm.rank)
        assert group.reached == frozenset(range(group.size)) - {group.rank}
        everywhere(cupy, group)
        group.close()

    together(world, messages, body)
    messages.close()


def everywhere(cupy: Cupy, comm: Any) -> None:
    mine, size = comm.rank, comm.size
    for dtype in ("float32", "bfloat16"):
        ours = [(np.arange(99) + 5 * rank).astype(dtype) for rank in range(size)]
        whole, own = cupy.zeros(size * 99, dtype), cupy.zeros(99, dtype)
        comm.all_gather(cupy.asarray(ours[mine]), whole).wait()
        np.testing.assert_array_equal(whole.get(), np.concatenate(ours))
        buf = cupy.asarray(ours[mine])
        comm.all_reduce(buf).wait()
        want = np.sum([one.astype(float) for one in ours], 0).astype(dtype)
        np.testing.assert_array_equal(buf.get(), want)
        comm.all_to_all(whole, swapped := cupy.zeros(size * 99, dtype)).wait()
        np.testing.assert_array_equal(swapped.get(), np.tile(ours[mine], size))
        following, before = (mine + 1) % size, (mine - 1) % size
        handles = deque([comm.send(cupy.asarray(ours[mine]), following), comm.recv(own, before)])
        while handles:
            handles.popleft().wait()
        np.testing.assert_array_equal(own.get(), ours[before])
