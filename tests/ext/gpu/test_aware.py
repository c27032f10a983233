"""Does MPI take arrays of a GPU? Asked of a child job, which may crash; of the stand-in's child jobs, some do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpx.core.base import environment
from fsdpx.errors import ConfigError
from fsdpx.ext.gpu import visible_devices
from fsdpx.ext.gpu.visible_devices import GpuAwareness

HERE = Path(__file__).parent
STAND_IN = """
import sys, mmap, ctypes
sys.path.insert(0, {here!r})
import numpy as np, stand_in
sys.modules["cupy"] = made = stand_in.Cupy(gpus=2)
nowhere = {nowhere!r}

def interface(self):
    found = self.memory.__array_interface__
    if nowhere:  # as an address of a GPU is to the host
        found = dict(found, data=(1 << 20, False))
    return dict(found, version=3, stream=None)

stand_in.ndarray.__cuda_array_interface__ = property(interface)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Child processes import a stand-in for CuPy whose arrays lie in memory of the host, or nowhere."""

    def make(nowhere: bool) -> None:
        (tmp_path / "sitecustomize.py").write_text(STAND_IN.format(here=str(HERE), nowhere=nowhere))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    return make


@pytest.mark.jobs
def test_the_probe_of_arrays_that_mpi_can_read(child: Any) -> None:
    child(nowhere=False)
    assert visible_devices.probe_gpu_transfer_in_child() == (True, "a probe of 2 ranks moved and added arrays of a GPU")


@pytest.mark.jobs
def test_the_probe_of_arrays_that_mpi_cannot_read(child: Any) -> None:
    """Memory that the host cannot read ends the processes that try."""
    child(nowhere=True)
    able, why = visible_devices.probe_gpu_transfer_in_child()
    assert not able
    assert why.startswith("the probe ended with status ")


def test_a_probe_without_a_gpu_or_that_hangs_or_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(status: int, out: str = "", error: str = "") -> tuple[bool, str]:
        done = subprocess.CompletedProcess([], status, out, error)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
        return visible_devices.probe_gpu_transfer_in_child([])

    no_gpu = "Traceback:\nfsdpx.errors.ConfigError: device 'cuda' needs CuPy\n"
    assert ends(1, error=no_gpu) == (
        False, "the probe ended with status 1 (fsdpx.errors.ConfigError: device 'cuda' needs CuPy)",
    )  # fmt: skip
    assert ends(0) == (False, "the probe got other numbers than were sent")

    def hangs(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("mpiexec", 60)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert visible_devices.probe_gpu_transfer_in_child([]) == (False, "the probe did not end within 60 s")


def test_what_the_user_says_counts_but_not_against_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        visible_devices,
        "probe_gpu_transfer_in_child",
        lambda: (asked.append(1), (False, "the probe ended with status 139"))[1],
    )
    monkeypatch.setattr(
        visible_devices, "list_gpu_awareness_claims", lambda: [(False, "MPIX_Query_cuda_support() = 0")]
    )
    assert visible_devices.probe_gpu_awareness(False) == GpuAwareness(False, ("FSDPX_GPU_AWARE_MPI=0",))
    assert visible_devices.probe_gpu_awareness(None) == GpuAwareness(False, ("MPIX_Query_cuda_support() = 0",))
    assert not asked
    assert visible_devices.probe_gpu_awareness(True).evidence[-1] == "the probe ended with status 139"
    monkeypatch.setattr(visible_devices, "list_gpu_awareness_claims", lambda: [(True, "MPIX_Query_cuda_support() = 1")])
    assert not visible_devices.probe_gpu_awareness(None).able

    class Mpi:
        rank, takes_gpus = 0, False
        all_gather_value = staticmethod(lambda one: [one])

    monkeypatch.setenv("FSDPX_GPU_AWARE_MPI", "1")
    with pytest.raises(
        ConfigError, match=r"FSDPX_GPU_AWARE_MPI=1, but this MPI does not accept .* status 139\): leave it"
    ):
        visible_devices.agree_on_gpu_awareness(Mpi())  # type: ignore[arg-type]
    monkeypatch.setattr(visible_devices, "probe_gpu_transfer_in_child", lambda: (True, "moved"))
    mpi: Any = Mpi()
    visible_devices.agree_on_gpu_awareness(mpi)
    assert mpi.takes_gpus


def test_the_variable() -> None:
    values = [environment.get_gpu_aware_mpi_setting({"FSDPX_GPU_AWARE_MPI": text}) for text in ("1", "0", "auto")]
    assert values == [True, False, None]
    assert environment.get_gpu_aware_mpi_setting({}) is None
