"""MPI ranks keep the contract: mpiexec -n N python -m pytest --with-mpi tests/comm/test_mpi.py, for any N."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fsdpx.comm import Communicator, Guarded, Mesh, ReduceOp, connect
from fsdpx.errors import CommTimeout, DesyncError
from fsdpx.testing.communicator import CommunicatorContract

pytestmark = [pytest.mark.world, pytest.mark.mpi]


@pytest.fixture(scope="module")
def world():
    from fsdpx.comm.mpi import MpiCommunicator

    comm = MpiCommunicator(timeout=30)
    yield comm
    comm.close()


class OnEveryRank(CommunicatorContract):
    """A failure on one rank is a failure on all: else the others would run into the next test without it."""

    @pytest.fixture(autouse=True)
    def _take_world(self, world):
        self.world = world

    def run(self, body: Callable[[Communicator], Any]) -> Any:
        together(self.world, self.adapt(self.world), body)

    def adapt(self, world: Communicator) -> Communicator:
        return world


def together(world: Communicator, comm: Communicator, body: Callable[[Communicator], Any]) -> None:
    failure = None
    try:
        body(comm)
    except Exception:
        failure = f"[rank {world.rank}]\n{traceback.format_exc()}"
    failures = [text for text in world.all_gather_object(failure) if text]
    assert not failures, "\n".join(failures)


class TestContract(OnEveryRank):
    pass


class TestContractInChunks(OnEveryRank):
    """Every transfer of more than 4 elements goes through the code for more than 2^31 - 1."""

    def adapt(self, world):
        chunked = world.split(0, world.rank)
        chunked.limit = 4
        return chunked


class TestContractGuarded(OnEveryRank):
    def adapt(self, world):
        return Guarded(world)


def test_the_callers_communicator_is_duplicated(world):
    from mpi4py import MPI

    from fsdpx.comm.mpi import MpiCommunicator

    def body(comm):
        mine = MpiCommunicator(MPI.COMM_WORLD)
        stray = MPI.COMM_WORLD.irecv(source=comm.rank, tag=0)
        buf = np.zeros(2)
        handles = mine.recv(buf, comm.rank), mine.send(np.ones(2), comm.rank)
        for handle in handles:
            handle.wait()
        assert buf.tolist() == [1, 1]
        MPI.COMM_WORLD.send("theirs", comm.rank, tag=0)
        assert stray.wait() == "theirs"
        mine.close()
        mine.close()

    together(world, world, body)


def test_a_wait_ends_with_the_name_of_what_it_waits_for(world):
    def body(comm):
        impatient = comm.split(0, comm.rank)
        impatient.timeout = 0.2
        if comm.rank == 0:
            handle = impatient.recv(np.zeros(3), 0, 9, what="ACT1")
            with pytest.raises(
                CommTimeout, match=r"recv of ACT1 on rank 0 of \d is not complete after 0.2 s"
            ):
                handle.wait()
            impatient.send(np.zeros(3), 0, 9).wait()
            handle.wait()

    together(world, world, body)


def test_a_guard_names_who_called_what_and_who_did_not_come(world):
    def body(comm):
        if comm.size == 1:
            return
        guarded = Guarded(comm, timeout=0.5)
        with pytest.raises(DesyncError, match=r"rank 0: all_reduce of a.*: all_reduce of b"):
            guarded.all_reduce(np.zeros(3), what="a" if comm.rank == 0 else "b")
        late = Guarded(comm, timeout=0.5)
        if comm.rank != 1:
            with pytest.raises(DesyncError, match=r"ranks \[1\] did not arrive at barrier of end"):
                late.barrier(what="end")

    together(world, world, body)


def test_a_mesh_of_mpi_ranks(world):
    def body(comm):
        axes = connect(Mesh(shard=1, replica=None), comm, check=True)
        x = np.ones(6, np.float32)
        axes.replica.all_reduce(x, ReduceOp.SUM).wait()
        axes.shard.all_reduce(x, ReduceOp.SUM).wait()
        assert x.tolist() == [comm.size] * 6
        axes.close()

    together(world, world, body)
