"""MPI ranks that could outlive each other, and do not have to: mpirun -n N pytest -k resilient."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from test_mpi import OnEveryRank, world

from fsdpx import environment
from fsdpx.comm import Communicator, Guarded
from fsdpx.comm.communicator import Survivor, survives
from fsdpx.comm.opening import resilient

__all__ = ["world"]

pytestmark = [pytest.mark.world, pytest.mark.mpi]


class TestWithoutDeaths(OnEveryRank):
    def adapt(self, world: Communicator) -> Communicator:
        return resilient(world)

    def test_agreement(self) -> None:
        def body(comm: Survivor) -> None:
            assert comm.agree(6 + comm.rank % 2) == 6
            assert comm.agree(2**31 - 1) == 2**31 - 1
            assert comm.agree(0 if comm.rank == comm.size - 1 else 1) == 0
            assert comm.lost() == ()

        self.run(body)

    def test_shrink_keeps_all(self) -> None:
        def body(comm: Survivor) -> None:
            pair = comm.subgroup([comm.rank])
            new = comm.shrink()
            assert (new.rank, new.size) == (comm.rank, comm.size)
            assert new.all_gather_object(new.rank) == list(range(new.size))
            for each in (pair, new, comm):
                each.close()
                each.close()

        self.run(body)

    def test_a_handle_keeps_its_buffers(self) -> None:
        def body(comm: Survivor) -> None:
            arrays = np.ones(comm.size), np.ones(1)
            left = [weakref.ref(array) for array in arrays]
            handle = comm.reduce_scatter(*arrays)
            del arrays
            assert all(array() is not None for array in left) or comm.size == 1
            handle.wait()
            assert all(array() is None for array in left)

        self.run(body)

    def test_from_whatever_there_is(self) -> None:
        from mpi4py import MPI

        from fsdpx.comm.mpi.mpi import MpiCommunicator
        from fsdpx.comm.node.node import NodeCommunicator

        def body(comm: Survivor) -> None:
            for given in (MPI.COMM_WORLD, NodeCommunicator(MpiCommunicator()), Guarded(MpiCommunicator()), comm):
                made = resilient(given)
                assert (made.rank, made.size) == (comm.rank, comm.size)
                assert survives(made) == environment.read().ulfm
                made.barrier().wait()
                made.close()

        self.run(body)
