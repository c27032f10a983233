"""What `measure-machine --device cuda` finds, on the stand-in: formats and capacity are a GPU's."""

import sys
from typing import Any

import pytest
from stand_in import Cupy, Device

from fsdpx.core.comm.local import single
from fsdpx.plan import measuring
from fsdpx.plan.measuring import Gpus, machine_text, measured


def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = Cupy(gpus=1)
    made.cuda.runtime.memGetInfo = lambda: (1 << 30, 8 << 30)
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    Device(0).use()
    monkeypatch.setattr(measuring, "ROUND", 0.001)
    for name, value in (("large", 64), ("small", 16), ("block", 1 << 12)):
        monkeypatch.setattr(Gpus, name, value)
    found = measured("card", single(), "cuda")
    assert found.compute.gpu
    assert found.compute.capacity == 8 << 30
    assert "\ngpu = true\n" in machine_text(found)
    cores = measured("cores", single())
    assert not cores.compute.gpu
    for machine in (found, cores):
        assert {*machine.compute.flops} == {"float32", "float64", "bf16", "float16"}
