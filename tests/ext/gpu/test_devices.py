"""Which GPU a rank takes, and what is said where there is none, or where arrays lie on several devices."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from on_gpu import train_small
from stand_in import Cupy, Device
from threads import on_ranks

from fsdpx import spawn
from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.base import environment
from fsdpx.core.comm import default_communicator
from fsdpx.core.comm.backend import start_through_host
from fsdpx.core.comm.calls import COMPLETED, Call, Handle
from fsdpx.errors import ConfigError, DataError, DesyncError
from fsdpx.ext.gpu import cupy_devices, device, visible_devices
from fsdpx.ext.gpu.cupy_devices import choose_gpu_number, list_gpu_pci_addresses
from fsdpx.ext.gpu.visible_devices import RankGpu, find_ranks_sharing_gpus, gather_gpu_assignments

X, Y = np.ones((4, 6)), np.array([0, 1, 2, 0])


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    return Cupy(gpus=2).install(monkeypatch)


def test_the_namespace_of_an_array_asks_no_driver(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    array = cupy.asarray(np.ones(3))
    for module in (cupy_devices, device):
        monkeypatch.setattr(module, "list_gpu_pci_addresses", lambda: pytest.fail("each look asked for all GPUs"))
    assert namespace_of(array) is sys.modules["cupy"]


def test_local_ranks_take_gpus_one_after_the_other_or_by_the_map() -> None:
    assert [choose_gpu_number(rank, 4) for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [choose_gpu_number(rank, 4, [3, 0]) for rank in range(2)] == [3, 0]
    assert choose_gpu_number(1, 4, {1: 2}) == 2


def test_a_map_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"device_map=\[0, 1\] has no GPU for local rank 2: name one for each"):
        choose_gpu_number(2, 4, [0, 1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="local rank 0 sees GPUs 0 to 1, with CUDA_VISIBLE_DEVICES=4,5, not 4"):
        choose_gpu_number(0, 2, [4])


def test_without_a_gpu_the_driver_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", Cupy(error="cudaErrorNoDevice: no CUDA-capable device is detected"))
    words = r"needs a GPU, and CuPy 14\.2\.0 finds none \(cudaErrorNoDevice: .*\): see what nvidia-smi lists, or use "
    with pytest.raises(ConfigError, match=words):
        list_gpu_pci_addresses()
    monkeypatch.setitem(sys.modules, "cupy", Cupy(gpus=0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="this process sees none, with CUDA_VISIBLE_DEVICES=: use device='cpu'"):
        list_gpu_pci_addresses()


def numbers(hosts: str, known: list[int | None], device_maps: Any = None) -> list[int]:
    """GPUs of ranks on hosts of one's choice, each a process. known: numbers that the launcher gave."""
    ranks = enumerate(zip(hosts, known, device_maps or [None] * len(hosts), strict=True))
    facts = [visible_devices._RankFacts(host, 100 + n, rank, ("a", "b"), by_map) for n, (host, rank, by_map) in ranks]
    comm = SimpleNamespace(size=len(hosts), rank=0, all_gather_value=lambda mine: facts)
    return [seat.gpu for seat in gather_gpu_assignments(comm)]


def test_ranks_are_numbered_on_their_host_by_mpi_or_by_the_launcher(cupy: Cupy) -> None:
    assert numbers("aabb", [None] * 4) == [0, 1, 0, 1]
    assert numbers("abab", [None] * 4) == [0, 0, 1, 1]
    assert numbers("aa", [2, 3]) == [0, 1]  # a part of the ranks, of which the launcher numbered others before
    assert numbers("aa", [1, 0]) == [1, 0]
    assert numbers("aa", [0, 0]) == [0, 1]  # of an outer launcher, the same for both: it does not count
    assert numbers("aa", [None] * 2, [[1, 0], [1, 0]]) == [1, 0]


def test_a_map_of_one_rank_that_does_not_fit_is_an_error_on_all(cupy: Cupy) -> None:
    with pytest.raises(ConfigError, match=r"^rank 1 on a: device_map=\[0\] has no GPU for local rank 1: name one"):
        numbers("aa", [None] * 2, [[0, 1], [0]])


def test_who_shares_a_gpu() -> None:
    here = [RankGpu("n1", 0, 0, "a"), RankGpu("n1", 1, 0, "b"), RankGpu("n1", 2, 0, "a"), RankGpu("n2", 0, 0, "a")]
    assert find_ranks_sharing_gpus(here) == [[0, 2]]


def test_the_number_is_known_of_a_part_of_the_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_communicator, "get_default", lambda: None)
    monkeypatch.setattr(visible_devices, "get_running_mpi", lambda: None)
    said = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}
    settings = environment.read_environment(said)
    monkeypatch.setattr(environment, "read_environment", lambda: settings)
    assert (visible_devices._find_host_local_rank(4), visible_devices._find_host_local_rank(1)) == (None, 1)


@pytest.mark.parametrize("size", [1, 3])
def test_a_stand_in_trains_as_the_host_does(cupy: Cupy, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    want, parameters = spawn(train_small, 1, X, Y)[0]
    for losses, found in spawn(lambda comm: train_small(comm, X, Y, device="cuda"), size):
        np.testing.assert_allclose(losses, want, rtol=1e-12)
        for name, array in parameters.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-11)
    shares = "fsdpx: ranks 0, 1, 2 share a GPU and take turns on it: start one rank per GPU\n"
    assert capsys.readouterr().err.count(shares) == (size == 3)


def test_ranks_that_differ_in_the_device(cupy: Cupy) -> None:
    with pytest.raises(DesyncError) as caught:
        spawn(lambda comm: train_small(comm, X, Y, device="cuda" if comm.rank else "cpu"), 2)
    assert "called different methods: rank 0: distribute; rank 1: distribute(device='cuda')" in str(caught.value)


@pytest.mark.parametrize(
    ("x", "y", "device", "words"),
    [
        ("gpu 0", "host", "cuda", r"the arrays of the batch are on GPU 0, on the host: put all of them on the host,"),
        ("gpu 0", "gpu 1", "cuda", r"the arrays of the batch are on GPU 0, on GPU 1: put all of them on the host, or "),
        ("gpu 1", "gpu 1", "cuda", r"the batch is on GPU 1, but this rank computes on GPU 0: put it there, or on "),
        ("gpu 0", "host", "cpu", r"input 'x' lies on GPU 0, and device='cpu': pass array\.get\(\)"),
    ],
)  # fmt: skip
def test_a_batch_on_the_wrong_device(cupy: Cupy, x: str, y: str, device: str, words: str) -> None:
    def put(array: np.ndarray, place: str) -> Any:
        if place == "host":
            return array
        with Device(int(place[-1])):
            return cupy.asarray(array)

    with pytest.raises(DataError, match=words):
        train_small(None, put(X, x), put(Y, y), device=device)


@on_ranks(2)
def test_send_and_recv_of_one_call_on_two_devices(comm: Any, cupy: Cupy) -> None:
    with pytest.raises(ConfigError, match=r"all_gather of w on rank \d: send is on GPU 0, recv on the host: put "):
        comm.all_gather(cupy.zeros(1), np.zeros(2), what="w")


def test_another_thread_writes_back_to_the_gpu_that_the_array_is_on(cupy: Cupy) -> None:
    with Device(1):
        buf = cupy.asarray(np.ones(3))

    def move(call: Call) -> Handle:
        call.arrays[0][:] *= 2
        return COMPLETED

    handle = start_through_host(Call("all_reduce", (buf,)), move)
    thread = threading.Thread(target=handle.wait)  # as one that moves transfers on: it begins on GPU 0
    thread.start()
    thread.join()
    assert buf.get().tolist() == [2, 2, 2]


def test_a_map_belongs_to_gpus() -> None:
    with pytest.raises(ConfigError, match=r"device_map=\[0\]: a host has only one device='cpu'; name another"):
        train_small(None, X, Y, device_map=[0])
