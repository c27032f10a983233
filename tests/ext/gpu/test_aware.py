"""Does MPI take arrays of a GPU? Asked of a child job, which may crash; of the stand-in's child jobs, some do."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from fsdpx.core.base import environment
from fsdpx.errors import ConfigError
from fsdpx.ext.gpu import visible_devices
from fsdpx.ext.gpu.visible_devices import GpuAwareness

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


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("nowhere", "words"),
    [(False, "^a probe of 2 ranks moved and added arrays of a GPU$"), (True, "^the probe ended with status ")],
    ids=["arrays that MPI can read", "arrays that MPI cannot read"],
)
def test_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nowhere: bool, words: str) -> None:
    """Of the stand-in's arrays in memory of the host, or nowhere: that ends the processes that try to read it."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN.format(here=str(Path(__file__).parent), nowhere=nowhere))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    able, why = visible_devices.probe_gpu_transfer_in_child()
    assert able == (not nowhere)
    assert re.search(words, why)


def test_a_probe_without_a_gpu_or_that_hangs_or_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(status: int, out: str = "", error: str = "") -> tuple[bool, str]:
        done = subprocess.CompletedProcess([], status, out, error)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
        return visible_devices.probe_gpu_transfer_in_child([])

    no_gpu = "Traceback:\nfsdpx.errors.ConfigError: device 'cuda' needs CuPy\n"
    words = "the probe ended with status 1 (fsdpx.errors.ConfigError: device 'cuda' needs CuPy)"
    assert ends(1, error=no_gpu) == (False, words)
    assert ends(0) == (False, "the probe got other numbers than were sent")

    monkeypatch.setattr(subprocess, "run", Mock(side_effect=subprocess.TimeoutExpired("mpiexec", 60)))
    assert visible_devices.probe_gpu_transfer_in_child([]) == (False, "the probe did not end within 60 s")


def test_what_the_user_says_counts_but_not_against_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, claims = Mock(return_value=(False, "the probe ended with status 139")), Mock()
    monkeypatch.setattr(visible_devices, "probe_gpu_transfer_in_child", probe)
    monkeypatch.setattr(visible_devices, "list_gpu_awareness_claims", claims)
    claims.return_value = [(False, "MPIX_Query_cuda_support() = 0")]
    assert visible_devices.probe_gpu_awareness(False) == GpuAwareness(False, ("FSDPX_GPU_AWARE_MPI=0",))
    assert visible_devices.probe_gpu_awareness(None) == GpuAwareness(False, ("MPIX_Query_cuda_support() = 0",))
    probe.assert_not_called()
    assert visible_devices.probe_gpu_awareness(True).evidence[-1] == "the probe ended with status 139"
    claims.return_value = [(True, "MPIX_Query_cuda_support() = 1")]
    assert not visible_devices.probe_gpu_awareness(None).able
    mpi = SimpleNamespace(rank=0, takes_gpus=False, all_gather_value=lambda one: [one])
    monkeypatch.setenv("FSDPX_GPU_AWARE_MPI", "1")
    words = r"FSDPX_GPU_AWARE_MPI=1, but this MPI does not accept .* status 139\): leave it"
    with pytest.raises(ConfigError, match=words):
        visible_devices.agree_on_gpu_awareness(mpi)
    assert not mpi.takes_gpus
    probe.return_value = True, "moved"
    visible_devices.agree_on_gpu_awareness(mpi)
    assert mpi.takes_gpus


def test_the_variable() -> None:
    values = [environment.get_gpu_aware_mpi_setting({"FSDPX_GPU_AWARE_MPI": text}) for text in ("1", "0", "auto")]
    assert values == [True, False, None]
    assert environment.get_gpu_aware_mpi_setting({}) is None
