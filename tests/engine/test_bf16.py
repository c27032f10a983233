"""Layers that compute in bfloat16 beside float32 masters: right, the same everywhere, and half as large where said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few
from models import CASES, KNOWN, make, part, placed, train

import fsdpx
from fsdpx import Mesh, Precision, nn, optim
from fsdpx.array.namespace import dtype
from fsdpx.comm import Communicator
from fsdpx.errors import ConfigError
from fsdpx.state.ledger import Key

BF16 = Precision(compute="bf16")
UNIT = 2.0**-8
"""Rounding to bfloat16 changes a number by at most this part of it."""


SGD = optim.SGD(lr=0.05, momentum=0.9)
"""Adam divides rounding noise by itself where a gradient is zero."""


def changes(comm: Communicator, case: str, strategy: str, precision: Any, **options: Any) -> Any:
    """Losses, and by how much each parameter changed."""
    first = make(comm, case, strategy, precision=precision, optimizer=SGD, **options).parameters()
    losses, last, _ = train(comm, case, strategy, precision=precision, optimizer=SGD, **options)
    return losses, {name: last[name].astype("f8") - first[name] for name in last}


@pytest.mark.parametrize(("strategy", "size"), few(placed([1, 2, 3], [4]), 4))
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_float64_but_for_rounding(case: str, strategy: str, size: int) -> None:
    losses, want = fsdpx.spawn(changes, 1, case, "fsdp", "float64")[0]
    for got_losses, got in fsdpx.spawn(changes, size, case, strategy, BF16):
        np.testing.assert_allclose(got_losses, losses, rtol=4 * UNIT)
        largest = max(map(np.linalg.norm, want.values()))  # where a gradient is zero, there is that of rounding
        for name, change in want.items():
            assert np.linalg.norm(got[name] - change) <= 16 * UNIT * max(np.linalg.norm(change), 0.1 * largest), name


def test_masters_and_sums_are_float32_and_what_is_gathered_is_half_as_large() -> None:
    def run(comm: Communicator) -> Any:
        trainer = make(comm, "gpt", "fsdp", precision=BF16)
        rows = trainer.engine.state.ledger.rows
        return {kind: rows[Key(kind, 0)].dtype for kind in ("master", "full", "grad", "part")}

    (found, _) = fsdpx.spawn(run, 2)
    single = np.dtype("f4")
    assert found == {"master": single, "full": dtype("bf16"), "grad": single, "part": single}


@pytest.mark.parametrize("case", ["mlp", "gpt"])
def test_one_hash_with_chunks_at_any_world_size_and_strategy(case: str) -> None:
    def run(comm: Communicator, strategy: str) -> Any:
        losses, _, trainer = train(comm, case, strategy, sizes=(16, 8), chunks=8, precision=BF16)
        return tuple(losses), trainer.fingerprint()

    seen = {
        result
        for strategy, size in few(placed([1, 2, 3, 5], [4]), 5)
        for result in fsdpx.spawn(run, size, strategy, delays=size)
    }
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(shard=2, pipe=2), {"microbatches": 2}),
        (Mesh(shard=1, tensor=2), {}),
        (Mesh(shard=1, tensor=2), {"sequence": "ring"}),
        (Mesh(shard=1, pipe=2, tensor=2), {"microbatches": 2, "schedule": "1f1b", "recompute": "all"}),
    ],
)
def test_other_axes(mesh: Mesh, options: dict[str, Any]) -> None:
    def run(comm: Communicator, mesh: Mesh, precision: Any, **more: Any) -> list[float]:
        trainer = make(comm, "wide", "fsdp", mesh=mesh, precision=precision, optimizer=SGD, **more)
        rng, losses = np.random.default_rng(5), []
        for n in (8, 8, 8):
            x, y = KNOWN["wide"].batch(rng, n)
            mine = part(trainer.data, n)
            losses.append(trainer.step(x[mine], y[mine]))
        return losses

    want = fsdpx.spawn(run, 1, Mesh(shard=1), "float64")[0]
    for got in fsdpx.spawn(lambda comm: run(comm, mesh, BF16, **options), mesh.size):
        np.testing.assert_allclose(got, want, rtol=4 * UNIT)


def test_parameters_travel_in_16_bits_and_gradients_as_wanted() -> None:
    def run(comm: Communicator, precision: Any) -> Any:
        trainer = make(comm, "mlp", "fsdp", precision=precision, group_bytes=0)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 8)
        trainer.step(x[part(comm, 8)], y[part(comm, 8)])
        report = trainer.report()
        counted = {key: c for key, c in report.traffic.items() if key in report.predicted}
        return counted, report.predicted, {key[1]: c.bytes for key, c in report.predicted.items()}

    wide = fsdpx.spawn(run, 2, "float32")[0][2]
    for precision, gradients in ((BF16, 1), (Precision(compute="bf16", reduce="bf16"), 2)):
        counted, predicted, moved = fsdpx.spawn(run, 2, precision)[0]
        assert counted == predicted
        assert moved["all_gather"] * 2 == wide["all_gather"]
        sums = [sum(b for verb, b in by.items() if verb != "all_gather") for by in (moved, wide)]
        assert sums[0] * gradients == sums[1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_plan_is_what_is_used(strategy: str) -> None:
    def run(comm: Communicator) -> Any:
        trainer = make(comm, "mlp", strategy, precision=BF16)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 8)
        trainer.step(x[part(comm, 8)], y[part(comm, 8)])
        return trainer.report().memory

    model, batch = CASES["mlp"].model(), (((4, 12), "float32"), ((4, 5), "float32"))
    dry = fsdpx.dry_run(
        model, *batch, ranks=2, loss=nn.MSE(), optimizer=optim.AdamW(lr=1e-2), precision=BF16, strategy=strategy,
        group_bytes=2048,
    )  # fmt: skip
    real = fsdpx.spawn(run, 2)[0]
    for kind in ("working set", "gradients", "optimizer state"):
        if kind in real:
            assert real[kind] == dry.report.memory[kind], kind


def test_checkpoints_hold_the_masters_exactly(tmp_path: Path) -> None:
    def save(comm: Communicator) -> Any:
        _, parameters, trainer = train(comm, "gpt", "fsdp", precision=BF16)
        trainer.save(tmp_path / "a")
        return parameters, trainer.fingerprint()

    def load(comm: Communicator, precision: Any) -> Any:
        trainer = make(comm, "gpt", "zero1", precision=precision)
        trainer.load(tmp_path / "a")
        return trainer.parameters(), trainer.fingerprint()

    wanted, digest = fsdpx.spawn(save, 2)[0]
    assert all(array.dtype == np.float32 for array in wanted.values())
    for precision in (BF16, "float32"):
        got, same = fsdpx.spawn(load, 3, precision)[0]
        assert same == digest
        for name, array in wanted.items():
            np.testing.assert_array_equal(got[name], array)


def test_a_loop_of_ones_own_takes_and_gives_arrays_of_the_format() -> None:
    def run(comm: Communicator) -> Any:
        trainer = make(comm, "mlp", "fsdp", precision=BF16)
        x = np.random.default_rng(0).normal(size=(4, 12))
        y = trainer.forward(x)
        trainer.backward(np.ones(y.shape) / 8)
        trainer.update()
        return y.dtype, trainer.predict(x).dtype, trainer.steps

    assert fsdpx.spawn(run, 2) == [(dtype("bf16"), dtype("bf16"), 1)] * 2


@pytest.mark.parametrize("compute", ["fp8", "float16", 16])
def test_formats_that_do_not_compute(compute: Any) -> None:
    with pytest.raises(ConfigError, match="choose float32, float64 or bf16"):
        Precision(compute=compute)
