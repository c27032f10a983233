"""Codecs under real MPI, at whatever number of ranks the tests are run with: the bits of thread ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from amount import pairs
from bits import Bits, bits
from models import make, own_part
from ranks import from_rank_0

import fsdpx
from fsdpx import optim, spawn
from fsdpx.core.comm import Communicator

pytestmark = [pytest.mark.world, pytest.mark.mpi]

CODECS: dict[str, Callable[[], dict[str, Any]]] = {
    "bf16": lambda: {"compression": "bf16"},
    "int8": lambda: {"compression": "int8"},
    "topk": lambda: {"compression": fsdpx.TopK(0.1)},
    "topk in blocks": lambda: {"compression": fsdpx.TopK(0.1, block=256)},
    "powersgd": lambda: {"compression": fsdpx.PowerSGD(2)},
}


def trained(comm: Communicator, name: str, strategy: str) -> tuple[list[float], Bits, dict[str, np.ndarray]]:
    options = {"optimizer": optim.SGD(lr=1e-2), "precision": "float32", **CODECS[name]()}
    trainer = make(comm, "mlp", strategy, **options)
    batch = own_part(comm, "mlp", 12)
    losses = [float(trainer.step(*batch)) for _ in range(2)]
    found = losses, bits(trainer), trainer.parameters()
    trainer.close()
    return found


def trained_on_threads(size: int, name: str, strategy: str) -> Any:
    return spawn(trained, size, name, strategy)[0]


@pytest.mark.parametrize(("name", "strategy"), [*pairs(CODECS, ["ddp", "fsdp"]), ("int8", "ddp"), ("powersgd", "fsdp")])
def test_bits_are_those_of_thread_ranks(world: Communicator, name: str, strategy: str) -> None:
    """Codecs add by themselves, in rank order; PowerSGD sums by the library, whose order is its own."""
    if strategy == "ddp" and world.size == 1:
        pytest.skip("the same as fsdp")

    losses, digest, parameters = trained(world, name, strategy)
    told = from_rank_0(world, trained_on_threads, world.size, name, strategy)
    if name == "powersgd":
        np.testing.assert_allclose(losses, told[0], rtol=1e-5)
        for key, array in parameters.items():
            np.testing.assert_allclose(array, told[2][key], rtol=0, atol=1e-5 * np.abs(array).max())
    else:
        assert (losses, digest) == told[:2]
