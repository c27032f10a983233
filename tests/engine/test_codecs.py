"""Every way to compress gradients under every placement: bytes as predicted, replicas alike, training that goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import bits
from models import CASES, make, part

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.errors import ConfigError

CODECS: dict[str, Callable[[], Any]] = {
    "topk": lambda: {"codec": fsdpx.TopK(0.05)},
    "momentum": lambda: {"codec": fsdpx.TopK(0.05, momentum=0.9, warmup=1)},
    "powersgd": lambda: {"codec": fsdpx.PowerSGD(1)},
}
each = pytest.mark.parametrize("name", CODECS)
PLACES = [
    ("ddp", 2, 3),
    ("zero1", 3, 3),
    ("zero2", 5, 1),
    ("fsdp", 3, 1),
    ("fsdp", 2, 2),
    ("fsdp", 1, 1),
    ("hybrid", 4, 1),
]
"""Strategy, ranks, microbatches."""


def run(comm: Communicator, name: str, strategy: Any, m: int = 1, count: int = 2, **options: Any) -> Any:
    options = {"precision": "float32", "group_bytes": 0, "optimizer": optim.SGD(lr=1e-2), **CODECS[name](), **options}
    trainer = make(comm, "mlp", strategy, microbatches=m, **options)
    x, y = CASES["mlp"].batch(np.random.default_rng(0), 12)
    mine = part(comm, 12)
    first = float(trainer.step(x[mine], y[mine]))
    trainer.inspect.reset()
    return trainer, [first, *(float(trainer.step(x[mine], y[mine])) for _ in range(count))]


@each
@pytest.mark.parametrize(("strategy", "size", "m"), PLACES)
def test_counted_is_predicted_and_replicas_agree(name: str, strategy: str, size: int, m: int) -> None:
    if name == "momentum" and (strategy == "hybrid" or (strategy == "fsdp" and m > 1)):
        return  # refused, see below

    def body(comm: Communicator) -> Any:
        trainer, losses = run(comm, name, strategy, m)
        report = trainer.report()
        counted = {key: count for key, count in report.traffic.items() if key[0] != "world"}
        twice = {key: (2 * count.calls, 2 * count.bytes) for key, count in report.predicted.items()}
        return (
            {key: (count.calls, count.bytes) for key, count in counted.items()} == twice,
            losses,
            bits(trainer),
        )

    found = spawn(body, size)
    assert all(same for same, _, _ in found)
    assert len({str(rest) for _, *rest in found}) == 1
    assert found[0][1][-1] < found[0][1][0]


@each
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_dry_run_predicts_the_same(name: str, strategy: str) -> None:
    model = nn.Chain(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5))
    options = {"optimizer": optim.SGD(lr=1e-2), **CODECS[name]()}
    batch = ((6, 12), "float32")
    dry = fsdpx.dry_run(model, batch, ((6, 5), "float32"), ranks=3, loss=nn.MSE(), strategy=strategy, **options)
    counted = {key: count for key, count in dry.report.traffic.items() if key[0] != "world"}
    assert counted == dry.report.predicted


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_powersgd_of_full_rank_is_plain_and_says_so(strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = [
        spawn(lambda comm, c=codec: run(comm, "topk", strategy, codec=c, precision="float64")[1], 3)[0]
        for codec in ("plain", fsdpx.PowerSGD(40))
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    said = capfd.readouterr()
    words = (
        "PowerSGD(rank=40): no fewer bytes for 0.weight (40, 12), 2.weight (60, 40), 4.weight (5, 60): whole and exact"
    )
    assert (said.out + said.err).count(words) == 1


def test_powersgd_cuts_matrices_by_whole_rows() -> None:
    """In the sums over replicas a rank has a part of a matrix: its whole rows, and vectors around them."""

    def body(comm: Communicator) -> Any:
        trainer, _ = run(comm, "powersgd", "hybrid", mesh=Mesh(replica=2, shard=2))
        place = trainer.inspect.placement
        return [place.route(p).replica.shapes for p in place.pages]

    shapes = spawn(body, 4)
    assert shapes[0][0] == ((21, 12), (8,))  # 40 x 12 weights and 40 biases, cut at 260
    assert shapes[1][0] == ((4,), (18, 12), (40,))


def test_powersgd_sends_two_messages_for_all_of_a_page() -> None:
    """All P with what travels whole, then all Q, however many matrices there are."""

    def body(comm: Communicator) -> Any:
        trainer, _ = run(comm, "powersgd", "ddp", count=1, group_bytes=1 << 20)
        return len(trainer.inspect.placement.pages), trainer.report().traffic["replica", "all_reduce"].calls

    assert spawn(body, 2)[0] == (1, 2)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("fsdp", {"microbatches": 2}, "microbatches=2 are summed one by one: choose strategy ddp or zero1, or"),
        ("fsdp", {"microbatches": 2, "mesh": Mesh(pipe=2, shard=2)}, "microbatches=2 are summed one by one: choose"),
        ("hybrid", {"mesh": Mesh(replica=2, shard=2)}, "shard=2 x tensor=1 sums them twice, over shards and over rep"),
    ],
)
def test_what_follows_gradients_wants_one_reduce_per_step(
    strategy: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Said on all ranks before anything is allocated: the folder is free for the next trainer."""
    options = {"optimizer": optim.AdamW(), "offload": fsdpx.Offload(tmp_path), **CODECS["momentum"](), **options}

    def body(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=f"codec TopK follows gradients from step to step, but .*{words}"):
            make(comm, "mlp", strategy, **options)

    spawn(body, 4)
    assert not list(tmp_path.iterdir())


def accumulated(comm: Communicator, strategy: str, calls: int, local: bool) -> Any:
    """Three steps of the same samples, in so many calls each."""
    trainer = make(comm, "mlp", strategy, optimizer=optim.SGD(lr=1e-2), **CODECS["momentum"]())
    x, y = CASES["mlp"].batch(np.random.default_rng(0), 24)
    *some, last = np.array_split(np.arange(24)[part(comm, 24)], calls)
    for _ in range(3):
        with trainer.no_sync() if local else nullcontext():
            for rows in some:
                trainer.accumulate(x[rows], y[rows])
        trainer.step(x[last], y[last])
    return trainer.parameters()


@pytest.mark.parametrize(("strategy", "local"), [("zero1", False), ("zero2", True)])
def test_what_follows_gradients_sees_those_of_several_calls_as_one(strategy: str, local: bool) -> None:
    found, wanted = (spawn(accumulated, 2, strategy, calls, local)[0] for calls in (3, 1))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


def test_what_follows_gradients_refuses_a_second_sum_in_a_step() -> None:
    words = "accumulate: codec TopK follows gradients from step to step, but a part of this step's is summed already: "

    def body(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=words):
            accumulated(comm, "zero2", 3, False)

    spawn(body, 2)


class Misspelt(fsdpx.TopK):
    recut = {"error": "anew"}  # noqa: RUF012


def test_what_becomes_of_a_memory_is_one_of_three() -> None:
    words = r"Misspelt: recut of 'error' is 'anew': choose 'sum', 'same' or 'reset'"
    with pytest.raises(ConfigError, match=words):
        spawn(lambda comm: make(comm, "mlp", codec=Misspelt(0.5)), 2)
