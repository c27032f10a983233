"""What `measure-machine --device cuda` finds, on the stand-in: formats and capacity are a GPU's."""

from typing import Any

import pytest
from stand_in import Cupy

from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.plan import measuring
from fsdpx.plan.kernels import KernelRates
from fsdpx.plan.measuring import Gpus, Processors, format_machine_file, measure_this_machine


def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = Cupy(gpus=1)
    made.cuda.runtime.memGetInfo = lambda: (1 << 30, 8 << 30)
    made.install(monkeypatch)
    short = {"ROUNDS": 1, "ROUND_SECONDS": 0.001, "SHORT_ROUND_SECONDS": 0.001, "LAYER_COUNTS": (1, 3)}
    for name, value in {**short, "_measure_kernel_rates": lambda comm, device: KernelRates()}.items():
        monkeypatch.setattr(measuring, name, value)
    for name, value in (("large", 64), ("small", 16), ("block", 1 << 12)):
        monkeypatch.setattr(Processors, name, value)
        monkeypatch.setattr(Gpus, name, value)
    found = measure_this_machine("card", make_single_rank_communicator(), "cuda")
    assert found.compute.gpu
    assert found.compute.capacity == 8 << 30
    assert "\ngpu = true\n" in format_machine_file(found)
    cores = measure_this_machine("cores", make_single_rank_communicator())
    assert not cores.compute.gpu
    for machine in (found, cores):
        assert {*machine.compute.flops} == {"float32", "float64", "bf16", "float16"}
