"""chunks with a codec: each chunk is packed by itself, and training has one hash at any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from amount import few, in_full
from bits import bits
from models import CASES, make, part, train

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.errors import ConfigError

CODECS: dict[str, Callable[[], dict[str, Any]]] = {
    "int8": lambda: {"codec": "int8"},
    "unbiased": lambda: {"codec": fsdpx.Int8(unbiased=True)},
    "topk": lambda: {"codec": fsdpx.TopK(0.1, momentum=0.9, warmup=2, block=256)},
}
PLACES = [("fsdp", 1), ("zero1", 2), ("fsdp", 3), ("zero2", 4), ("fsdp", 5)]


def run(comm: Communicator, name: str, strategy: str, chunks: int = 4) -> Any:
    """What training came to, alike everywhere; the bytes that were counted, and those predicted."""
    options = {"group_bytes": 0, "precision": "float32", "optimizer": optim.SGD(lr=1e-2), **CODECS[name]()}
    trainer, losses = make(comm, "mlp", strategy, chunks=chunks, **options), []
    x, y = CASES["mlp"].batch(np.random.default_rng(5), 8)
    mine = part(comm, 8, chunks)
    for step in range(4):
        if step == 2:  # warm-ups are over
            trainer.inspect.reset()
        losses.append(float(trainer.step(x[mine], y[mine])))
    report = trainer.report()
    counted = {key: (n.calls, n.bytes) for key, n in report.traffic.items() if key[0] != "world"}
    errors = [one.error for one in report.reduces]
    return (
        (tuple(losses), bits(trainer)),
        counted == {key: (2 * n.calls, 2 * n.bytes) for key, n in report.predicted.items()},
        errors,
    )


@in_full
@pytest.mark.parametrize("name", CODECS)
def test_one_hash_at_any_world_size_and_bytes_as_predicted(name: str) -> None:
    found = [
        one
        for strategy, size in few(PLACES, 2)
        for one in spawn(lambda comm, s=strategy: run(comm, name, s), size, delays=size)
    ]
    assert len({same for same, _, _ in found}) == 1
    assert all(right for _, right, _ in found)
    assert found[-1][0][0][-1] < found[-1][0][0][0]
    if name == "int8":
        assert all(0 < error < 1 for _, _, some in found[1:3] for error in some)


def test_all_elements_of_each_chunk_are_plain_chunks() -> None:
    """What a codec does not lose is added along the same tree."""
    options = {"precision": "float32", "optimizer": optim.SGD(lr=1e-2), "sizes": (8, 8), "chunks": 4}
    found = {
        spawn(lambda comm, c=codec: bits(train(comm, "mlp", "fsdp", codec=c, **options)[2]), 3)[0]
        for codec in ("plain", fsdpx.TopK(1, block=1024))
    }
    assert len(found) == 1


def test_a_rank_keeps_what_its_chunks_owe_and_a_dry_run_knows() -> None:
    model = nn.Chain(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5))
    batch, target = ((4, 12), "float32"), ((4, 5), "float32")
    options: dict[str, Any] = {"codec": "int8", "chunks": 6, "loss": nn.MSE(), "optimizer": optim.SGD(lr=1e-2)}

    def held(comm: Communicator) -> Any:
        trainer = model.as_distributed(comm=comm, strategy="fsdp", **options)
        trainer.step(np.zeros((4, 12), np.float32), np.zeros((4, 5), np.float32))
        return trainer.report().memory, trainer.report().traffic

    dry = fsdpx.dry_run(model, batch, target, ranks=3, strategy="fsdp", **options)
    memory, traffic = spawn(held, 3)[0]
    assert memory["codec memory"] == 4 * 2 * dry.report.parameters  # chunks 0 and 1
    assert memory == dry.report.memory
    assert {key: n for key, n in traffic.items() if key[0] != "world"} == dry.report.predicted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": fsdpx.PowerSGD(2)}, "what PowerSGD makes of an element depends on all that is carried with it"),
        ({"codec": "topk"}, "what TopK makes of an element depends on all"),
        ({"codec": {"*.bias": "plain", "*": "int8"}}, "packs some gradients and not others; choose one codec for all"),
        ({"codec": "int8", "strategy": "ddp"}, "2 replicas would pack the sum of all chunks once more; with a codec"),
    ],
)
def test_what_would_show_how_many_ranks_there_are_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        spawn(lambda comm: make(comm, "mlp", chunks=4, precision="float32", **options), 2)
