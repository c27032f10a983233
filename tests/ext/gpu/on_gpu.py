"""What tests need that run on a GPU or on the stand-in for CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stand_in import ndarray

from fsdpx import nn, optim
from fsdpx.core.comm.calls import Call, Handle
from fsdpx.core.comm.communicator import CommunicatorWrapper
from fsdpx.errors import ConfigError
from fsdpx.ext.gpu.cupy_devices import list_gpu_pci_addresses

__all__ = ["NO_GPU", "PLACES", "OnGpu", "train_on_gpu"]

try:
    list_gpu_pci_addresses()
    NO_GPU = ""
except ConfigError as error:
    NO_GPU = f"not tried on a GPU: {error}"

PLACES = ["stand-in", pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)])]


def train_on_gpu(comm: Any) -> list[float]:
    """The losses of two steps."""
    model, text = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)), np.random.default_rng(comm.rank)
    x, y = text.standard_normal((4, 6)), text.integers(0, 3, 4)
    loss, adam = nn.CrossEntropyLoss(), optim.AdamW(lr=0.01)
    trainer = model.as_distributed(loss=loss, optimizer=adam, comm=comm, precision="float64", device="cuda")
    return [trainer.step(x, y) for _ in range(2)]


class OnGpu(CommunicatorWrapper):
    """Arrays of the host are given on as if their memory were a GPU's: by the suite of tests of communicators."""

    def issue(self, call: Call) -> Handle:
        given = call.arrays
        return self.comm.issue(call.with_arrays(tuple(ndarray(a) if isinstance(a, np.ndarray) else a for a in given)))
