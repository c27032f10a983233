"""Compressed gradients under every placement: bytes as predicted, replicas alike, and training that arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from models import CASES, make, part, placed

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.comm.codecs import Codec
from fsdpx.examples.digits import draw
from fsdpx.nn.models import digits

CODECS: dict[str, Callable[[], str | Codec]] = {
    "int8": lambda: "int8",
    "unbiased": lambda: fsdpx.Int8(unbiased=True),
    "sign": lambda: "sign",
}
each = pytest.mark.parametrize("name", CODECS)


def run(comm: Communicator, name: str, strategy: Any, m: int = 1, count: int = 2, **options: Any) -> Any:
    trainer = make(
        comm, "mlp", strategy, microbatches=m, group_bytes=0, precision="float32", codec=CODECS[name](), **options
    )
    x, y = CASES["mlp"].batch(np.random.default_rng(0), 12)
    mine = part(comm, 12)
    trainer.step(x[mine], y[mine])
    trainer.reset()
    losses = [float(trainer.step(x[mine], y[mine])) for _ in range(count)]
    return trainer, losses


@each
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(("strategy", "size"), placed([1, 2, 3, 5], [4]))
def test_counted_is_predicted_and_replicas_agree(name: str, strategy: str, size: int, m: int) -> None:
    def body(comm: Communicator) -> Any:
        trainer, losses = run(comm, name, strategy, m, 1)
        report = trainer.report()
        counted = {key: count for key, count in report.traffic.items() if key[0] != "world"}
        return counted == report.predicted, losses, trainer.fingerprint()

    found = spawn(body, size)
    assert all(same for same, _, _ in found)
    assert len({str(rest) for _, *rest in found}) == 1


@each
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_bytes_are_those_of_the_formula(name: str, strategy: str) -> None:
    """Per page and rank: what the packed parts of the others have, once, and for all ranks once more."""

    def body(comm: Communicator) -> None:
        trainer, _ = run(comm, name, strategy, 1, 1)
        codec, pages = trainer.placement.codec, trainer.placement.pages.values()
        whole = [[p.size * (r + 1) // 3 - p.size * r // 3 for r in range(3)] for p in pages]
        foreign = sum(codec.nbytes(n) for counts in whole for r, n in enumerate(counts) if r != comm.rank)
        moved = trainer.report().traffic
        axis = "replica" if strategy == "ddp" else "shard"
        assert moved[axis, "all_to_all"].bytes == foreign
        if strategy == "ddp":
            assert moved[axis, "all_gather"].bytes == foreign

    spawn(body, 3)


@each
@pytest.mark.parametrize(("strategy", "size"), placed([2, 3], [4]))
def test_a_dry_run_predicts_the_same(name: str, strategy: str, size: int) -> None:
    model = nn.Chain(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5))
    batch = ((6, 12), "float32")
    dry = fsdpx.dry_run(
        model, batch, ((6, 5), "float32"), ranks=size, loss=nn.MSE(), optimizer=optim.AdamW(), strategy=strategy,
        codec=CODECS[name](),
    )  # fmt: skip
    counted = {key: count for key, count in dry.report.traffic.items() if key[0] != "world"}
    assert counted == dry.report.predicted


@pytest.mark.parametrize("name", ["int8", "unbiased"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hybrid"])
def test_digits_are_learnt_nearly_as_well(name: str, strategy: str) -> None:
    """The convolutional network of the example: after 60 steps the loss is within 15 % of plain training's."""
    loss = {codec: learn(codec, strategy) for codec in ("plain", name)}
    assert loss[name] < 1.15 * loss["plain"] + 0.02, loss


def learn(name: str, strategy: str, steps: int = 60) -> float:
    images, labels = draw(64 * 16, seed=1)

    def body(comm: Communicator) -> float:
        codec = "plain" if name == "plain" else CODECS[name]()
        trainer = digits().as_distributed(
            loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=4e-3), strategy=strategy, comm=comm, codec=codec, seed=2
        )
        last = []
        for step in range(steps):
            rows = (np.arange(64) + 64 * step) % len(labels)
            mine = rows[part(comm, 64)]
            last.append(float(trainer.step(images[mine], labels[mine])))
        return float(np.mean(last[-8:]))

    return spawn(body, 4)[0]


@each
def test_what_is_kept_is_a_row_of_memory(name: str) -> None:
    def body(comm: Communicator) -> None:
        trainer, _ = run(comm, name, "hybrid", 1, 1, mesh=Mesh(replica=2, shard=2))
        codec = trainer.placement.codec
        wanted = sum(
            sum(codec.memory(n).values()) for p in trainer.placement.pages.values() for n in (p.size, p.mine.size)
        )
        assert trainer.report().memory["codec memory"] == 4 * wanted

    spawn(body, 4)


def test_a_dynamic_loss_scale_is_refused() -> None:
    with pytest.raises(fsdpx.errors.ConfigError, match="codec Int8 keeps what it lost in units of the loss scale"):
        spawn(lambda comm: make(comm, "mlp", precision="float16", codec="int8"), 2)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("fsdp", {"microbatches": 2}, "microbatches=2 are summed one by one: choose strategy ddp or zero1"),
        ("hybrid", {"mesh": Mesh(replica=2, shard=2)}, "sums them twice, over shards and over replicas"),
    ],
)
def test_momentum_correction_wants_one_reduce_per_step(strategy: str, options: Any, words: str) -> None:
    codec = fsdpx.TopK(0.1, momentum=0.9)
    with pytest.raises(
        fsdpx.errors.ConfigError, match=f"codec TopK follows gradients from step to step, but .*{words}"
    ):
        spawn(lambda comm: make(comm, "mlp", strategy, codec=codec, **options), 4)


@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), ("fsdp", 3)])
def test_velocities_are_those_of_sgd_with_momentum(strategy: str, size: int) -> None:
    """All elements travel, unmasked: the codec's momentum is as good as the optimiser's."""

    def body(comm: Communicator, codec: Any, momentum: float) -> Any:
        trainer = make(comm, "mlp", strategy, codec=codec, optimizer=optim.SGD(lr=1e-2, momentum=momentum))
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 12)
        return [float(trainer.step(x[part(comm, 12)], y[part(comm, 12)])) for _ in range(5)]

    found = spawn(lambda comm: body(comm, fsdpx.TopK(1, momentum=0.9, masking=False), 0.0), size)
    np.testing.assert_allclose(found[0], spawn(lambda comm: body(comm, "plain", 0.9), size)[0], rtol=1e-6)
