"""Layers that compute in bfloat16 beside float32 masters: right, the same everywhere, and half as large where said."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few, pairs
from bits import bits
from meshes import train as train_on_mesh
from models import CASES, make, own_part, own_parts, part, placed, train
from savers import steps

import fsdpx
from fsdpx import Mesh, Precision, nn, optim
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.comm import Communicator
from fsdpx.core.state.ledger import LedgerKey
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.nn.layer_list import linearize, parameter_specs

BF16 = Precision(compute="bf16")
ALONE = Precision("bf16", master="bf16")
KAHAN = Precision("bf16", master="bf16", rounding="kahan")
UNIT = 2.0**-8
"""Rounding to bfloat16 changes a number by at most this part of it."""


SGD = optim.SGD(lr=0.05, momentum=0.9)
"""Adam divides rounding noise by itself where a gradient is zero."""


def changes(comm: Communicator, case: str, strategy: str, precision: Any) -> Any:
    """Losses, and by how much each parameter changed."""
    trainer = make(comm, case, strategy, precision=precision, optimizer=SGD)
    first = trainer.parameters()
    losses = [trainer.step(*batch) for batch in own_parts(comm, case, (11, 3))]
    return losses, {name: last.astype("f8") - first[name] for name, last in trainer.parameters().items()}


@lru_cache
def in_float64(case: str) -> Any:
    return fsdpx.spawn(changes, 1, case, "fsdp", "float64")[0]


@lru_cache
def losses_in_float64() -> list[float]:
    return fsdpx.spawn(lambda comm: train(comm, "gpt", "fsdp", precision="float64")[0], 1)[0]


@pytest.mark.parametrize(
    ("case", "on"), few(pairs(CASES, [("hybrid", 4), ("fsdp", 3), ("zero2", 2), ("zero1", 3), ("ddp", 2)]), 2)
)
def test_training_is_that_of_float64_but_for_rounding(case: str, on: tuple[str, int]) -> None:
    """Where it runs changes no bit: test_one_hash_with_chunks_at_any_world_size_and_strategy."""
    losses, want = in_float64(case)
    for got_losses, got in fsdpx.spawn(changes, on[1], case, on[0], BF16):
        np.testing.assert_allclose(got_losses, losses, rtol=4 * UNIT)
        largest = max(map(np.linalg.norm, want.values()))  # where a gradient is zero, there is that of rounding
        for name, change in want.items():
            assert np.linalg.norm(got[name] - change) <= 16 * UNIT * max(np.linalg.norm(change), 0.1 * largest), name


def test_masters_and_sums_are_float32_and_what_is_gathered_is_half_as_large() -> None:
    def run(comm: Communicator) -> Any:
        rows = make(comm, "gpt", precision=BF16).inspect.engine.state.ledger.rows
        return {kind: rows[LedgerKey(kind, 0)].dtype for kind in ("master", "full", "grad", "part")}

    single = np.dtype("f4")
    assert fsdpx.spawn(run, 2)[0] == {"master": single, "full": parse_dtype("bf16"), "grad": single, "part": single}


PLACES = {"mlp": placed([1, 3], [4]), "gpt": [("fsdp", 1), ("zero2", 2), ("fsdp", 3), ("ddp", 5)]}


@pytest.mark.parametrize("case", PLACES)
def test_one_hash_with_chunks_at_any_world_size_and_strategy(case: str) -> None:
    def run(comm: Communicator, strategy: str) -> Any:
        losses, _, trainer = train(comm, case, strategy, sizes=(8, 4), reproducible_chunks=4, precision=BF16)
        return tuple(losses), bits(trainer)

    ranks = [fsdpx.spawn(run, size, strategy, delays=size) for strategy, size in few(PLACES[case], 5)]
    assert len({one for found in ranks for one in found}) == 1


def losses_of_wide(comm: Communicator, mesh: Mesh, precision: Any, **options: Any) -> list[float]:
    return train_on_mesh(comm, "wide", mesh, "fsdp", (4, 4, 4), precision=precision, optimizer=SGD, **options)[0]


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
    want = fsdpx.spawn(losses_of_wide, 1, Mesh(shard=1), "float64")[0]
    for got in fsdpx.spawn(lambda comm: losses_of_wide(comm, mesh, BF16, **options), mesh.size):
        np.testing.assert_allclose(got, want, rtol=4 * UNIT)


def test_parameters_travel_in_16_bits_and_gradients_as_wanted() -> None:
    def run(comm: Communicator, precision: Any) -> Any:
        trainer = make(comm, "mlp", "fsdp", precision=precision, group_bytes=0)
        trainer.step(*own_part(comm, "mlp", 8))
        report = trainer.report()
        assert {key: report.traffic[key] for key in report.predicted} == report.predicted
        return {key[1]: c.bytes for key, c in report.predicted.items()}

    wide = fsdpx.spawn(run, 2, "float32")[0]
    for precision, gradients in ((BF16, 1), (Precision(compute="bf16", reduce="bf16"), 2)):
        moved = fsdpx.spawn(run, 2, precision)[0]
        assert moved["all_gather"] * 2 == wide["all_gather"]
        sums = [sum(b for verb, b in by.items() if verb != "all_gather") for by in (moved, wide)]
        assert sums[0] * gradients == sums[1]


@pytest.mark.parametrize(("precision", "nbytes"), [(BF16, 2 * 4), (KAHAN, 3 * 2)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_plan_is_what_is_used(strategy: str, precision: Precision, nbytes: int) -> None:
    """nbytes: of the optimizer's state for each parameter."""
    options: dict[str, Any] = {"optimizer": optim.AdamW(lr=1e-2), "precision": precision, "strategy": strategy}

    def run(comm: Communicator) -> Any:
        trainer = make(comm, "mlp", **options)
        trainer.step(*own_part(comm, "mlp", 8))
        return trainer.report().memory

    model, batch = CASES["mlp"].model(), (((4, 12), "float32"), ((4, 5), "float32"))
    dry = fsdpx.dry_run(model, *batch, ranks=2, loss=nn.MSELoss(), group_bytes=2048, **options)
    real = fsdpx.spawn(run, 2)[0]
    assert {"parameters", "gradients", "optimizer"} <= set(real)
    assert real == {kind: dry.report.memory[kind] for kind in real}
    numbers = sum(spec.size for spec in parameter_specs(linearize(model)).values())
    assert real["optimizer"] in (nbytes * numbers, nbytes * (numbers // 2), nbytes * (numbers - numbers // 2))


def test_checkpoints_hold_the_masters_exactly(tmp_path: Path) -> None:
    def save(comm: Communicator) -> Any:
        _, _, trainer = train(comm, "gpt", precision=BF16)
        trainer.save(tmp_path / "a")
        return bits(trainer)

    def load(comm: Communicator, precision: Any) -> Any:
        trainer = make(comm, "gpt", "zero1", precision=precision)
        trainer.load(tmp_path / "a")
        return bits(trainer)

    wanted = fsdpx.spawn(save, 2)[0]
    assert all(array.dtype == np.float32 for array in wanted.parameters.values())
    for precision in (BF16, "float32"):
        assert fsdpx.spawn(load, 3, precision)[0] == wanted


def test_a_loop_of_ones_own_takes_and_gives_arrays_of_the_format() -> None:
    def run(comm: Communicator) -> Any:
        trainer = make(comm, "mlp", "fsdp", precision=BF16)
        x = np.random.default_rng(0).normal(size=(4, 12))
        y = trainer.forward(x)
        trainer.backward(np.ones(y.shape) / 8)
        trainer.update()
        return y.dtype, trainer.predict(x).dtype, trainer.global_step

    assert fsdpx.spawn(run, 2) == [(parse_dtype("bf16"), parse_dtype("bf16"), 1)] * 2


@pytest.mark.parametrize("precision", [ALONE, KAHAN])
@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), ("zero1", 3), ("fsdp", 2)])
def test_without_masters_everything_between_steps_is_16_bits(precision: Any, strategy: str, size: int) -> None:
    def run(comm: Communicator) -> Any:
        losses, _, trainer = train(comm, "gpt", strategy, precision=precision)
        rows = trainer.inspect.engine.state.ledger
        return losses, {r.key.kind: r.dtype for r in rows}, {r.key.name for r in rows if r.key.kind == "slot"}

    half, single = parse_dtype("bf16"), np.dtype("f4")
    for got, formats, slots in fsdpx.spawn(run, size):
        np.testing.assert_allclose(got, losses_in_float64(), rtol=8 * UNIT)
        assert (formats["master"], formats["slot"], formats["full"]) == (half, half, half)
        assert (formats["grad"], formats["part"]) == (single, single)
        assert slots == ({"m", "v", "lost"} if precision is KAHAN else {"m", "v"})


def test_without_masters_one_hash_and_checkpoints_that_go_on(tmp_path: Path) -> None:
    """Rounding by chance is a function of parameter, element and step: not of ranks, nor of a pause."""

    def run(comm: Communicator, precision: Any, strategy: str, folder: Path, load: bool) -> Any:
        trainer = make(comm, "gpt", strategy, reproducible_chunks=4, precision=precision)
        if load:
            trainer.load(folder)
        else:
            steps(trainer, "gpt", 0, 1, rows=4)
            trainer.save(folder)
        steps(trainer, "gpt", 1, 2, rows=4)
        return bits(trainer)

    for name, precision in (("alone", ALONE), ("kahan", KAHAN)):
        first = fsdpx.spawn(run, 2, precision, "fsdp", tmp_path / name, False)
        assert len({*first, *fsdpx.spawn(run, 3, precision, "ddp", tmp_path / f"{name}3", False)}) == 1
        assert {*first} == {*fsdpx.spawn(run, 2, precision, "zero1", tmp_path / name, True)}
    with pytest.raises(CheckpointError, match="is bfloat16 there and float32 in the trainer: say convert=True"):
        fsdpx.spawn(run, 1, BF16, "fsdp", tmp_path / "alone", True)
    with pytest.raises(CheckpointError, match="slots m, v, lost in the checkpoint, AdamW with slots m, v here"):
        fsdpx.spawn(run, 1, ALONE, "fsdp", tmp_path / "kahan", True)


def test_parameters_may_travel_wider_than_layers_compute() -> None:
    def run(comm: Communicator, param: str) -> Any:
        losses, _, trainer = train(comm, "mlp", precision=Precision("bf16", param=param))
        return losses, bits(trainer)

    assert fsdpx.spawn(run, 2, "bf16")[0] == fsdpx.spawn(run, 2, "float32")[0]


NORMED: dict[str, Callable[[], list[nn.Layer]]] = {
    "rows": lambda: [nn.Flatten(), nn.Linear(108, 8), nn.BatchNorm(8), nn.ReLU(), nn.Linear(8, 2)],
    "images": lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 2)],
}


@pytest.mark.parametrize("of", few(NORMED, 2))
def test_running_statistics_are_float32_beside_layers_in_16_bits_or_float64(of: str) -> None:
    def run(comm: Communicator, precision: Any) -> Any:
        model = nn.Sequential(*NORMED[of]())
        trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=SGD, precision=precision, comm=comm)
        rng = np.random.default_rng(0)
        for _ in range(2):
            x = rng.normal(size=(8, 3, 6, 6))
            trainer.step(x[part(comm, 8)], x[part(comm, 8)].mean(axis=(2, 3))[:, :2])
        return {name: value for name, value in trainer.parameters().items() if "running" in name}

    want = fsdpx.spawn(run, 1, "float64")[0]
    others = [Precision(compute, buffers=b) for compute in ("bf16", "float32") for b in ("float32", "float64")]
    for precision in (BF16, ALONE, *others):
        got = fsdpx.spawn(run, 2, precision)[0]
        assert want
        assert got.keys() == want.keys()
        for name, value in got.items():
            assert value.dtype == parse_dtype(precision.statistics_dtype)
            np.testing.assert_allclose(value, want[name], rtol=4 * UNIT, atol=4 * UNIT)


@pytest.mark.parametrize("buffers", ["bf16", "fp16", "bfloat16", "float16"])
def test_running_statistics_are_not_kept_in_16_bits(buffers: str) -> None:
    """They would stall where a tenth of the distance is less than half of the last bit."""
    with pytest.raises(ConfigError, match=r"Precision\(buffers='\w+', .*: choose None or float32 or float64"):
        Precision("bf16", buffers=buffers)


@pytest.mark.parametrize("precision", ["float32", "bf16", "bf16-true"])
def test_running_statistics_arrive_at_what_they_follow(precision: str) -> None:
    def run(comm: Communicator) -> Any:
        norm = nn.BatchNorm(2, momentum=0.4)
        trainer = norm.as_distributed(loss=nn.MSELoss(), optimizer=SGD, precision=precision, comm=comm)
        x = np.array([[140.0, -1.0], [164.0, 3.0]])[comm.rank :: comm.size]
        for _ in range(30):
            trainer.step(x, np.zeros_like(x))
        return trainer.parameters()

    for found in fsdpx.spawn(run, 2):
        np.testing.assert_allclose(found["running_mean"], [152.0, 1.0], rtol=1e-6)
        np.testing.assert_allclose(found["running_var"], [288.0, 8.0], rtol=5e-6)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_averages_of_parameters_in_16_bits_do_not_add_up_what_rounding_does(rounding: Any) -> None:
    """The average is that of the rounded parameters, to half of the last bit in which it is read."""

    def run(comm: Communicator) -> None:
        trainer = nn.Linear(16, 16).as_distributed(
            loss=nn.MSELoss(), optimizer=optim.SGD(lr=1e-2), average=fsdpx.EMA(0.98), comm=comm,
            precision=Precision("bf16", master="bf16", rounding=rounding),
        )  # fmt: skip
        rng, mean = np.random.default_rng(0), None
        for _ in range(150):
            x, y = rng.normal(size=(2, 16, 16))
            trainer.step(x, y)
            now = {name: a.astype(np.float64) for name, a in trainer.parameters().items()}
            mean = now if mean is None else {name: 0.98 * a + 0.02 * now[name] for name, a in mean.items()}
        assert trainer.report().memory["averages"] == 2 * trainer.report().memory["parameters"]
        for name, got in trainer.parameters(weights="average").items():
            np.testing.assert_allclose(got.astype(np.float64), mean[name], rtol=UNIT, atol=1e-4)

    fsdpx.spawn(run, 1)


def test_fp16_layers_recover_from_overflow_on_all_ranks_alike() -> None:
    def run(comm: Communicator) -> Any:
        precision = Precision("fp16", loss_scale="dynamic", initial_scale=2.0**20)
        trainer = make(comm, "mlp", "fsdp", precision=precision, optimizer=SGD)
        batch, seen, state = own_part(comm, "mlp", 8), [], trainer.inspect.engine.state
        for _ in range(40):
            before = bits(trainer)
            trainer.step(*batch)
            seen.append((trainer.inspect.last_update.skipped, state.scaler.value, before == bits(trainer)))
        return seen, trainer.global_step

    (seen, made), other = fsdpx.spawn(run, 2)
    assert (seen, made) == other
    skipped = sum(skip for skip, _, _ in seen)
    assert 0 < skipped < 40
    assert made == 40 - skipped
    # the first ones, and none of them changes anything
    assert seen[:skipped] == [(True, 2.0 ** (19 - n), True) for n in range(skipped)]
