"""The same programs on CuPy arrays, communication staged through the host. Without a GPU these tests say so."""

from typing import Any

import numpy as np
import pytest
from bits import Bits, bits, demand_same
from models import CASES, placed, train
from on_gpu import needs_gpu

from fsdpx import optim, spawn
from fsdpx.ext.gpu.cupy_devices import is_on_gpu
from fsdpx.testing import assert_close

pytestmark = needs_gpu


@pytest.mark.parametrize(("strategy", "size"), placed([1, 2], [4]))
@pytest.mark.parametrize("case", CASES)
def test_equals_the_host(case: str, strategy: str, size: int) -> None:
    options: dict[str, Any] = {"clip_norm": 0.3}
    losses, want, _ = spawn(lambda comm: train(comm, case, "ddp", **options), 1)[0]
    for got_losses, got, trainer in spawn(lambda comm: train(comm, case, strategy, device="cuda", **options), size):
        assert is_on_gpu(trainer.inspect.engine.state.ledger.get_array("master", 0))
        np.testing.assert_allclose(got_losses, losses, rtol=1e-11)
        assert_close(got, want, 1e-11)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_float32_and_bf16(strategy: str) -> None:
    def run(comm: Any, strategy: str, precision: str, device: str) -> Any:
        return train(comm, "mlp", strategy, precision=precision, device=device, optimizer=optim.SGD(lr=0.05))[1]

    want = spawn(run, 1, "ddp", "float32", "cpu")[0]
    for precision, bound in (("float32", 1e-4), ("bf16", 0.05)):
        for got in spawn(run, 2, strategy, precision, "cuda"):
            assert_close(got, want, bound)


def test_one_hash_on_the_gpu() -> None:
    def run(comm: Any, strategy: str) -> Bits:
        options = {"reproducible_chunks": 8, "precision": "float32", "device": "cuda"}
        return bits(train(comm, "mlp", strategy, sizes=(16,), **options)[2])

    demand_same(one for size in (1, 2, 3) for strategy in ("ddp", "fsdp") for one in spawn(run, size, strategy))
