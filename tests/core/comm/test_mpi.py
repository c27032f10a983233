"""MPI ranks keep the contract: mpiexec -n N python -m pytest --with-mpi tests/core/comm/test_mpi.py, for any N."""

import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from present import is_present, needs
from ranks import on_every_rank, together

import fsdpx
from fsdpx import nn
from fsdpx.core.array import cores
from fsdpx.core.base import environment
from fsdpx.core.comm import CheckedCommunicator, Communicator, ReduceOp, split_evenly
from fsdpx.core.comm.calls import COMPLETED, Call
from fsdpx.core.comm.communicator import CALL_SPECS, SurvivorCommunicator, can_survive
from fsdpx.core.comm.init import CommunicatorRequest, open_fault_tolerant_communicator, open_mpi
from fsdpx.core.comm.p2p_collectives import COLLECTIVES
from fsdpx.core.trainer import array_collectives, initialize
from fsdpx.data import DistributedSampler, gather_channel_statistics
from fsdpx.errors import CommTimeout, ConfigError, DesyncError
from fsdpx.testing.communicator import CommunicatorContract

pytestmark = [pytest.mark.world, pytest.mark.mpi]


@pytest.fixture(scope="module")
def world():
    from fsdpx.core.comm.mpi.mpi import MpiCommunicator

    comm = MpiCommunicator(timeout=30)
    yield comm
    comm.close()


@pytest.fixture(autouse=True)
def _same_hooks():
    """Also after a test that fails between `init` and `finalize`."""
    excepthook, threadhook = sys.excepthook, threading.excepthook
    yield
    sys.excepthook, threading.excepthook = excepthook, threadhook


class OnEveryRank(CommunicatorContract):
    """A failure on one rank is a failure on all: else the others would run into the next test without it."""

    @pytest.fixture(autouse=True)
    def _take_world(self, world):
        self.world = world

    def run(self, body: Callable[[Communicator], Any]) -> Any:
        comm = self.adapt(self.world)
        together(self.world, comm, body)
        if comm is not self.world and not isinstance(comm, CheckedCommunicator):  # else this would close the world
            comm.close()

    def adapt(self, world: Communicator) -> Communicator:
        return world


class TestContract(OnEveryRank):
    pass


class TestContractInChunks(OnEveryRank):
    """Every transfer of more than 7 elements goes through the code for more than 2^31 - 1: arrays of the contract have
    fewer, as many, and several times as many and some."""

    def adapt(self, world):
        chunked = world.split(0, world.rank)
        chunked.limit = 7
        return chunked


class TestContractGuarded(OnEveryRank):
    dtypes = "float32", "float16", "bool"

    def adapt(self, world):
        return CheckedCommunicator(world)


def test_a_new_reduction_needs_no_row_elsewhere(world, monkeypatch):
    """Reductions in rank order do not use MPI's reductions, even for a verb that only CALL_SPECS marks as a
    reduction."""
    from fsdpx.core.comm.mpi import mpi

    asked = []
    monkeypatch.setitem(CALL_SPECS, "scan", CALL_SPECS["all_reduce"])
    monkeypatch.setitem(COLLECTIVES, "scan", lambda comm, call: COMPLETED)
    monkeypatch.setitem(mpi._NATIVE_CALLS, "scan", lambda comm, call: asked.append(call.op) or COMPLETED)
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        world.start_call(Call("scan", (np.zeros(1),), op))
    assert asked == [ReduceOp.SUM]


@on_every_rank
def test_the_callers_communicator_is_duplicated(comm):
    from mpi4py import MPI

    from fsdpx.core.comm.mpi.mpi import MpiCommunicator

    mine = MpiCommunicator(MPI.COMM_WORLD)
    stray = MPI.COMM_WORLD.irecv(source=comm.rank, tag=0)
    buf = np.zeros(2)
    for handle in (mine.recv(buf, comm.rank), mine.send(np.ones(2), comm.rank)):
        handle.wait()
    assert buf.tolist() == [1, 1]
    MPI.COMM_WORLD.send("theirs", comm.rank, tag=0)
    assert stray.wait() == "theirs"
    mine.close()
    mine.close()


@on_every_rank
def test_a_wait_ends_with_the_name_of_what_it_waits_for(comm):
    impatient = comm.split(0, comm.rank)
    impatient.timeout = 0.2
    if comm.rank == 0:
        handle = impatient.recv(np.zeros(3), 0, 9, what="ACT1")
        with pytest.raises(CommTimeout, match=r"recv of ACT1 on rank 0 of \d is not complete after 0.2 s"):
            handle.wait()
        impatient.send(np.zeros(3), 0, 9).wait()
        handle.wait()


@on_every_rank
def test_a_guard_names_who_called_what_and_who_did_not_come(comm):
    if comm.size == 1:
        return
    guarded = CheckedCommunicator(comm)
    with pytest.raises(DesyncError, match=r"rank 0: all_reduce of a.*: all_reduce of b"):
        guarded.all_reduce(np.zeros(3), what="a" if comm.rank == 0 else "b")
    late = CheckedCommunicator(comm, timeout=0.5)
    if comm.rank != 1:
        # on a busy machine others may be late as well
        with pytest.raises(DesyncError, match=r"ranks \[(0, )?1\b.* did not arrive at barrier of end"):
            late.barrier(what="end")


@on_every_rank
def test_the_functional_api_on_mpi(comm):
    from mpi4py import MPI

    initialize.init("mpi")
    assert (initialize.rank(), initialize.world_size()) == (comm.rank, comm.size)
    assert sorted(comm.all_gather_object(initialize.local_rank())) == list(range(comm.size))
    x = np.full((2, 3), comm.rank + 1.0)
    assert np.all(array_collectives.all_reduce(x, "max") == comm.size)
    assert array_collectives.all_gather(x).shape == (comm.size, 2, 3)
    own_rows = split_evenly(7, comm.size)[comm.rank]
    assert array_collectives.reduce_scatter(np.ones((7, 2))).sum() == 2 * comm.size * own_rows
    initialize.finalize()
    initialize.init(comm=MPI.COMM_WORLD)
    assert array_collectives.broadcast(x, root=comm.size - 1)[0, 0] == comm.size
    initialize.finalize()


@on_every_rank
def test_communicators_that_give_one_of_mpi4py_are_taken(comm):
    """As `PETSc.Comm` does."""
    from mpi4py import MPI

    petsc = SimpleNamespace(rank=comm.rank, size=comm.size, tompi4py=lambda: MPI.COMM_WORLD)
    if is_present("fields"):
        assert fsdpx.Grid(petsc, (4,), offsets=(4 * comm.rank,)).shape == (4 * comm.size,)
    assert len(DistributedSampler(comm.size, comm=petsc)) == 1
    assert gather_channel_statistics([np.full((1, 1), comm.rank)], comm=petsc).mean == ((comm.size - 1) / 2,)
    trainer = nn.Linear(2, 2).as_distributed(comm=petsc)
    assert trainer.call_runner.world.size == comm.size
    trainer.close()
    initialize.init(comm=petsc)
    assert array_collectives.all_reduce(np.ones(1)).tolist() == [comm.size]
    initialize.finalize()
    apart = open_fault_tolerant_communicator(petsc)
    assert apart.size == comm.size
    apart.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: initialize.init(comm=comm),
        lambda comm: nn.Linear(2, 2).as_distributed(comm=comm),
        lambda comm: DistributedSampler(4, comm=comm),
        pytest.param(lambda comm: fsdpx.Grid(comm, (4,)), marks=needs("fields")),
        lambda comm: gather_channel_statistics([np.ones((2, 2))], comm=comm),
    ],
)
@on_every_rank
def test_only_ranks_of_an_intracommunicator_are_taken(comm, call):
    """Of other communicators collectives mean something else, and a rank that `Split` leaves out has none."""
    from mpi4py import MPI

    if comm.rank == comm.size - 1:
        with pytest.raises(ConfigError, match=r"^comm is MPI\.COMM_NULL: this rank is not in it, or it was freed"):
            call(MPI.COMM_NULL)
    with pytest.raises(ConfigError, match=r"^comm is an MPI\.Group: the ranks of one Intracomm are needed$"):
        call(MPI.COMM_WORLD.Get_group())
    if comm.size == 1:
        return
    half = MPI.COMM_WORLD.Split(comm.rank % 2, comm.rank)
    between = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - comm.rank % 2)
    with pytest.raises(ConfigError, match=r"^comm is an MPI\.Intercomm: the ranks of one Intracomm are needed$"):
        call(between)
    between.Free()
    half.Free()


@on_every_rank
def test_other_transfers_go_on_while_a_wait_lasts(comm):
    """A big reduce ends on rank 0 although rank 1 waits for a message that rank 0 sends afterwards only."""
    big, note = np.ones(300_000, np.float16), np.zeros(1)
    handle = comm.all_reduce(big)
    if comm.rank == 0:
        handle.wait()
        for other in range(1, comm.size):
            comm.send(note, other).wait()
    else:
        comm.recv(note, 0).wait()
    handle.wait()
    assert np.all(big == comm.size)


class TestWithoutDeaths(OnEveryRank):
    dtypes = "float64", "bfloat16", "int16"

    def adapt(self, world: Communicator) -> Communicator:
        return open_fault_tolerant_communicator(world)

    def test_agreement(self) -> None:
        def body(comm: SurvivorCommunicator) -> None:
            assert comm.agree_on_flags(6 + comm.rank % 2) == 6
            assert comm.agree_on_flags(2**31 - 1) == 2**31 - 1
            assert comm.agree_on_flags(0 if comm.rank == comm.size - 1 else 1) == 0
            assert comm.get_failed_ranks() == ()

        self.run(body)

    def test_shrink_keeps_all(self) -> None:
        def body(comm: SurvivorCommunicator) -> None:
            pair = comm.subgroup([comm.rank])
            new = comm.shrink()
            assert (new.rank, new.size) == (comm.rank, comm.size)
            assert new.all_gather_object(new.rank) == list(range(new.size))
            for each in (pair, new, comm):
                each.close()
                each.close()

        self.run(body)

    def test_a_handle_keeps_its_buffers(self) -> None:
        def body(comm: SurvivorCommunicator) -> None:
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

        from fsdpx.core.comm.mpi.mpi import MpiCommunicator
        from fsdpx.core.comm.node.node import NodeCommunicator

        def body(comm: SurvivorCommunicator) -> None:
            others = NodeCommunicator(MpiCommunicator()), CheckedCommunicator(MpiCommunicator())
            for given in (MPI.COMM_WORLD, *others, comm):
                made = open_fault_tolerant_communicator(given)
                assert (made.rank, made.size) == (comm.rank, comm.size)
                assert can_survive(made) == environment.read_environment().ulfm
                made.barrier().wait()
                made.close()

        self.run(body)


def test_ranks_outside_of_a_communicator_need_cores_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    started = environment.read_environment().launcher
    several = started is not None and (started.local_size or 0) > 1
    for cores_of_host, yields in ((1, several), (64, False)):  # with 64, this process is bound to one of them
        monkeypatch.setattr(cores, "count_usable_cores", lambda: 1)
        monkeypatch.setattr(cores, "set_threads_per_rank", lambda ranks: 1)
        monkeypatch.setattr(os, "cpu_count", lambda n=cores_of_host: n)
        part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank)
        comm = open_mpi(CommunicatorRequest(environment.read_environment(), part))
        try:
            assert (comm.progress.polls_before_yield == 0) is yields
        finally:
            comm.close()
            part.Free()
