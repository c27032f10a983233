"""Windows keep the contract of communicators: one machine, several of one size, and of different sizes."""

import time

import numpy as np
import pytest
from ranks import carrier, on_every_rank, together
from windows import ROOM, InWindows, open_node
from windows import room as room
from windows import world as world

from fsdpx.core.base import environment
from fsdpx.core.comm import Communicator, ReduceOp, split_evenly
from fsdpx.core.comm.communicator import make_balanced_partition
from fsdpx.core.comm.node.shared_windows import BOARD_SLOTS, MAX_PAYLOAD_BYTES
from fsdpx.errors import CommTimeout
from fsdpx.testing.communicator import CommunicatorContract

pytestmark = [pytest.mark.world, pytest.mark.mpi]


@pytest.fixture(autouse=True)
def _all_through_windows(monkeypatch):
    """Small arrays, too."""
    monkeypatch.setattr("fsdpx.core.comm.node.node.SMALL_SUM_BYTES", -1)


@pytest.fixture(scope="module")
def cluster():
    """Machines of two ranks each where that comes out even, taken in turn: neighbors are on different machines."""
    size = environment.read_environment().expected_size or 1
    comm = open_node([rank % (size // 2) if size % 2 == 0 else rank // 2 for rank in range(size)])
    yield comm
    comm.close()


@pytest.fixture(scope="module")
def rooms(world):
    return world.allocate_shared(ROOM), world.allocate_node_buffer(ROOM)


@pytest.fixture(scope="module")
def cluster_rooms(cluster):
    return cluster.allocate_shared(ROOM), cluster.allocate_node_buffer(ROOM)


class OnNode(CommunicatorContract):
    common = False

    @pytest.fixture(autouse=True)
    def _take(self, world, rooms):
        self.world, self.room, self.shared = world, *rooms

    def run(self, body) -> None:
        together(self.world, self.adapt(self.world), body)

    def adapt(self, world) -> Communicator:
        return InWindows(world, self.room, self.shared if self.common and world.is_sharing_useful else None)


class TestPlainArrays(OnNode):
    """Arrays outside of windows."""

    def adapt(self, world):
        return world


class TestInWindows(OnNode):
    pass


class TestInCommonMemory(OnNode):
    common = True


class TestOverMachines(OnNode):
    @pytest.fixture(autouse=True)
    def _take(self, cluster, cluster_rooms):
        self.world, self.room, self.shared = cluster, *cluster_rooms


class TestCommonMemoryOverMachines(TestOverMachines):
    common = True


def test_a_cluster_has_lanes_when_its_machines_are_alike(cluster):
    size = cluster.size
    assert (cluster.lanes is not None) == (size % 2 == 0 and size > 2)
    assert cluster.is_single_host == (size == 2)
    assert cluster.is_sharing_useful == (size % 2 == 0)


@pytest.mark.parametrize(("machines", "common"), [("one", True), ("several", False), ("several", True)])
def test_many_calls_in_flight_with_ranks_out_of_step(world, cluster, machines, common):
    """More calls than the board has places, waited for at the end, while ranks fall behind each other."""
    world = world if machines == "one" else cluster
    room, shared = world.allocate_shared(ROOM), world.allocate_node_buffer(ROOM)

    def body(comm):
        if not comm.is_sharing_useful:
            return
        n, rng = 60, np.random.default_rng(comm.rank)
        bufs = [room[i * 512 :][: 8 * n].view(np.float64) for i in range(200)]
        fulls = [(shared if common else room)[150_000 + i * 512 :][: 8 * n].view(np.float64) for i in range(200)]
        cut, handles = make_balanced_partition(n, comm.size), []
        for i, (buf, full) in enumerate(zip(bufs, fulls, strict=True)):
            buf[:] = comm.rank + i
            handles.append(comm.all_reduce(buf))
            own = cut.get_piece(full, comm.rank)
            own[...] = 1000 * i + comm.rank
            handles.append(comm.all_gather(own, full))
            if rng.random() < 0.1:
                time.sleep(0.002)
        for handle in rng.permutation(np.array(handles, dtype=object)):
            handle.wait()
        for i, (buf, full) in enumerate(zip(bufs, fulls, strict=True)):
            assert (buf == sum(range(comm.size)) + i * comm.size).all()
            assert (full == np.repeat([1000 * i + r for r in range(comm.size)], split_evenly(n, comm.size))).all()

    together(world, world, body)
    world.free_shared(shared)
    world.free_shared(room)


@on_every_rank
def test_messages_of_collectives_that_are_under_way_together_do_not_mix(comm):
    """A sum of halves is made by the carrier, a ring above it: on a new communicator both begin to count tags."""
    fresh = comm.split(0, comm.rank)
    half, ring = np.ones(5, np.float16), np.ones(5)
    handles = [fresh.all_reduce(half), fresh.all_reduce(ring, ReduceOp.SUM, "ring")]
    for handle in handles if comm.rank == 0 else handles[::-1]:
        handle.wait()
    assert (half == comm.size).all()
    assert (ring == comm.size).all()
    fresh.close()


@on_every_rank
def test_a_buffer_can_be_written_as_soon_as_the_call_is_complete(comm, room):
    buf, out = room[:8000].view(np.float64), np.empty(split_evenly(1000, comm.size)[comm.rank])
    for i in range(100):
        buf[:] = i + comm.rank
        if comm.rank == i % comm.size:
            time.sleep(0.0005)
        comm.reduce_scatter(buf, out).wait()
        buf[:] = -1  # the others must have read by now
        assert (out == i * comm.size + sum(range(comm.size))).all(), i


@on_every_rank
def test_sums_are_in_rank_order(comm, room):
    ours = [np.random.default_rng(r).standard_normal(70_000).astype(np.float32) for r in range(comm.size)]
    want = sum(ours)
    buf = room[:280_000].view(np.float32)
    buf[:] = ours[comm.rank]
    comm.all_reduce(buf).wait()
    if comm.is_sharing_useful:
        assert buf.tobytes() == want.tobytes()


@on_every_rank
def test_a_few_bytes_inside_a_host_travel_on_the_board(comm, monkeypatch):
    """Also more of them at one time than the board has places. One byte too many is a message."""
    sent, move = [], comm.carrier.start_call
    monkeypatch.setattr(comm.carrier, "start_call", lambda call: sent.append(call.what) or move(call))
    for most, what in ((MAX_PAYLOAD_BYTES, "letter"), (MAX_PAYLOAD_BYTES + 1, "message")):
        counts = [most - 16 * rank for rank in range(comm.size)]
        fulls = [np.zeros(sum(counts), np.uint8) for _ in range(BOARD_SLOTS + 6)]
        handles = []
        for i, full in enumerate(fulls):
            own = np.full(counts[comm.rank], i + comm.rank, np.uint8)
            handles.append(comm.all_gather(own, full, counts, what=what))
            if i % 20 == comm.rank:
                time.sleep(0.002)
        for i, (handle, full) in enumerate(zip(handles, fulls, strict=True)):
            handle.wait()
            assert (full == np.repeat([i + rank for rank in range(comm.size)], counts)).all()
    assert set(sent) == ({"message"} if comm.is_single_host else {"letter", "message"} if comm.size > 1 else set())


@on_every_rank
def test_groups_have_boards_of_their_own(comm, room):
    group = comm.split(comm.rank % 2, -comm.rank)
    buf = room[:800].view(np.float64)
    buf[:] = comm.rank
    group.all_reduce(buf, ReduceOp.MAX).wait()
    assert (buf == max(range(comm.rank % 2, comm.size, 2))).all()
    group.close()


def test_who_does_not_come_is_named():
    comm, everyone = open_node(), carrier()
    room = comm.allocate_shared(4096)
    comm.set_timeout(0.3)
    if comm.is_sharing_useful and comm.rank == 0:
        with pytest.raises(CommTimeout, match=r"all_reduce of page 'w' on rank 0 .* ranks \[1\b.*window"):
            comm.all_reduce(room[:800].view(np.float64), what="page 'w'").wait()
    everyone.barrier().wait()
    everyone.close()


@on_every_rank
def test_a_machine_without_room_is_known_to_all(comm, monkeypatch):
    if comm.rank == 0:
        monkeypatch.setattr("fsdpx.core.comm.node.shared_windows.count_free_shared_bytes", lambda: 1000)
    refused, small = comm.allocate_shared(600 if comm.size > 1 else 1200), comm.allocate_shared(8)
    comm.free_shared(small)  # all ranks have made their calls: one that finds another answer keeps none waiting
    assert refused is None
    assert small.nbytes == 8
