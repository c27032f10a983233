"""What tests need that run on a GPU or on the stand-in for CuPy."""

from typing import Any

import numpy as np
import pytest
from stand_in import ndarray

from fsdpx import nn, optim
from fsdpx.core.comm.calls import Call, Handle
from fsdpx.core.comm.communicator import CommunicatorWrapper
from fsdpx.errors import ConfigError
from fsdpx.ext.gpu.cupy_devices import list_gpu_pci_addresses

__all__ = ["PLACES", "OnGpu", "needs_gpu", "train_on_gpu", "train_small"]

try:
    list_gpu_pci_addresses()
    NO_GPU = ""
except ConfigError as error:
    NO_GPU = f"not tried on a GPU: {error}"

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]
PLACES = ["stand-in", pytest.param("gpu", marks=needs_gpu)]


def train_small(comm: Any, x: Any, y: Any, **options: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of three steps, and parameters."""
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    loss, adam = nn.CrossEntropyLoss(), optim.AdamW(lr=0.01)
    trainer = model.as_distributed(loss=loss, optimizer=adam, comm=comm, precision="float64", **options)
    losses = [trainer.step(x, y) for _ in range(3)]
    return losses, {name: np.asarray(a) for name, a in trainer.parameters().items()}


def train_on_gpu(comm: Any) -> list[float]:
    """The losses of steps with other samples on each rank."""
    random = np.random.default_rng(comm.rank)
    return train_small(comm, random.standard_normal((4, 6)), random.integers(0, 3, 4), device="cuda")[0]


class OnGpu(CommunicatorWrapper):
    """Arrays of the host are given on as if their memory were a GPU's: by the suite of tests of communicators."""

    def issue(self, call: Call) -> Handle:
        given = call.arrays
        return self.comm.issue(call.with_arrays(tuple(ndarray(a) if isinstance(a, np.ndarray) else a for a in given)))
