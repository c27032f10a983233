"""The backend on NCCL keeps the contract, on a stand-in that moves memory of thread ranks."""

from collections.abc import Callable
from typing import Any

import nccl_stand_in
import numpy as np
import pytest
from on_gpu import OnGpu, train_on_gpu
from stand_in import Cupy
from threads import on_ranks

from fsdpx import nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import CommError, CommTimeout, ConfigError
from fsdpx.ext.gpu.nccl import NcclCommunicator, require_one_gpu_per_rank
from fsdpx.ext.gpu.visible_devices import RankGpu
from fsdpx.testing.communicator import CommunicatorContract


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    made = Cupy(gpus=4)
    nccl_stand_in.add_to(made)
    return made.install(monkeypatch)


class TestContract(CommunicatorContract):
    def run(self, body: Callable[[Communicator], Any]) -> Any:
        for size in (1, 3):
            spawn(lambda comm: body(OnGpu(NcclCommunicator(comm, timeout=20))), size, timeout=30)


@on_ranks(2)
def test_arrays_of_the_host_and_messages_go_by_mpi(mpi: Any, cupy: Cupy) -> None:
    comm = NcclCommunicator(mpi, timeout=20)
    calls = comm.link.calls
    x = np.ones(3)
    comm.all_reduce(x).wait()
    assert x.tolist() == [2, 2, 2]
    y = cupy.asarray(np.full(2, float(comm.rank)))
    other = 1 - comm.rank
    for handle in [comm.send(y, other), comm.recv(z := cupy.zeros(2), other)]:
        handle.wait()
    assert z.get().tolist() == [other, other]
    assert comm.link.calls == calls


def test_two_ranks_on_one_gpu_are_refused() -> None:
    seats = [RankGpu("n1", 0, 0, "0000:01:00.0"), RankGpu("n1", 1, 0, "0000:01:00.0")]
    words = r"backend 'nccl': ranks 0, 1 are on one GPU \(0000:01:00.0 of n1\), and NCCL takes one rank per GPU: start "
    with pytest.raises(ConfigError, match=words):
        require_one_gpu_per_rank(seats)
    require_one_gpu_per_rank([seats[0], seats[1]._replace(bus="0000:02:00.0")])


def test_without_the_library_the_package_is_named(cupy: Cupy) -> None:
    cupy.cuda.nccl.available = False
    with pytest.raises(ConfigError, match=r"backend 'nccl': CuPy finds no libnccl.so.2: pip install nvidia-nccl-cu13"):
        spawn(lambda comm: NcclCommunicator(comm, timeout=1), 1)


@on_ranks(2)
def test_an_error_and_a_wait_in_vain_end_the_communicator(mpi: Any, cupy: Cupy) -> None:
    comm = NcclCommunicator(mpi, timeout=20)
    handle = comm.all_reduce(cupy.zeros(2), what="w")
    comm.link.error = "unhandled system error"
    with pytest.raises(CommError, match=rf"all_reduce of w on rank {mpi.rank} of 2: NCCL: unhandled system error"):
        handle.wait()
    assert comm.link is None
    comm = NcclCommunicator(mpi, timeout=0.1)
    comm.stream.stuck = True
    link = comm.link
    with pytest.raises(CommTimeout, match=rf"all_reduce of w on rank {mpi.rank} of 2 is not complete after 0.1 s"):
        comm.all_reduce(cupy.zeros(2), what="w").wait()
    assert link.error == "aborted"


def test_it_is_of_gpus() -> None:
    with pytest.raises(ConfigError, match=r"backend='nccl' transfers arrays of device='cuda', and device='cpu'"):
        nn.Linear(6, 3).as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), backend="nccl")


def test_training_over_nccl_equals_training_through_the_host(cupy: Cupy) -> None:
    want = spawn(train_on_gpu, 2)[0]
    got = spawn(lambda comm: train_on_gpu(NcclCommunicator(comm, timeout=20)), 2)[0]
    np.testing.assert_allclose(got, want, rtol=1e-12)
