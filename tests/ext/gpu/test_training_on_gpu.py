"""The same programs on CuPy arrays, communication staged through the host. Without a GPU these tests say so."""

from typing import Any

import numpy as np
import pytest
from bits import Bits, bits
from models import CASES, placed, train

from fsdpx import optim, spawn
from fsdpx.ext.gpu.cupy_devices import is_on_gpu
from fsdpx.testing import assert_close

cupy = pytest.importorskip("cupy", reason="no CuPy: GPU parity was not checked")

try:
    DEVICES = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    DEVICES = 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICES == 0, reason="no GPU: GPU parity was not checked")]


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
    for precision, bound in (("float32", 1e-4), ("bf16", 0.05)):
        sgd = optim.SGD(lr=0.05)
        _, want, _ = spawn(lambda c, o=sgd: train(c, "mlp", "ddp", precision="float32", optimizer=o), 1)[0]
        for _, got, _ in spawn(
            lambda c, o=sgd, p=precision: train(c, "mlp", strategy, precision=p, optimizer=o, device="cuda"), 2
        ):
            assert_close(got, want, bound)


def test_one_hash_on_the_gpu() -> None:
    def run(comm: Any, strategy: str) -> Bits:
        return bits(
            train(comm, "mlp", strategy, sizes=(16,), reproducible_chunks=8, precision="float32", device="cuda")[2]
        )

    assert (
        len({run_ for size in (1, 2, 3) for s in ("ddp", "fsdp") for run_ in spawn(lambda c, s=s: run(c, s), size)})
        == 1
    )
