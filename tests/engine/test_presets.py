"""Which of the familiar names are the same thing: where they are, tests of one are tests of the other."""

from typing import Any

import numpy as np
import pytest
from amount import in_full
from models import CASES, HYBRID, STRATEGIES, make, part, placed

from fsdpx import Mesh, spawn
from fsdpx.comm import Communicator
from fsdpx.config import PRESETS, Sharding, sharding


def all_it_does(comm: Communicator, strategy: Any, **options: Any) -> tuple[Any, ...]:
    """Whatever a strategy decides: each action of every call, its bytes, and what is held before and after."""
    trainer = make(comm, "gpt", strategy, clip_norm=0.3, microbatches=2, group_bytes=600, **options)
    x, y = CASES["gpt"].batch(np.random.default_rng(0), 7)
    mine = part(trainer.data, 7)
    actions: list[str] = []
    trainer.inspect.engine.observers.append(lambda action: actions.append(str(action)))
    before = trainer.report().memory
    trainer.step(x[mine], y[mine])
    trainer.accumulate(x[mine], y[mine])
    with trainer.no_sync():
        trainer.accumulate(x[mine], y[mine])
    trainer.evaluate(x[mine], y[mine])
    trainer.update()
    trainer.backward(np.ones_like(trainer.forward(x[mine])))
    trainer.predict(x[mine])
    report = trainer.report()
    return str(trainer.program), actions, report.traffic, report.predicted, before, report.memory


@in_full
@pytest.mark.parametrize("size", [1, 2, 3])
def test_zero3_is_fsdp(size: int) -> None:
    assert PRESETS["zero3"] == PRESETS["fsdp"]
    assert spawn(all_it_does, size, "zero3") == spawn(all_it_does, size, "fsdp")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_hybrid_of_a_prime_number_of_ranks_is_fsdp(size: int) -> None:
    assert sharding("hybrid", size) == sharding("fsdp", size)
    if size < 7:
        assert spawn(all_it_does, size, "hybrid") == spawn(all_it_does, size, "fsdp")


@in_full
def test_hybrid_is_else_a_mesh_of_its_own() -> None:
    shapes = {size: (sharding("hybrid", size).replica, sharding("hybrid", size).shard) for size in HYBRID}
    assert shapes == {4: (2, 2), 6: (2, 3), 8: (2, 4)}
    assert spawn(all_it_does, 4, "hybrid") != spawn(all_it_does, 4, "fsdp")


@in_full
@pytest.mark.parametrize("strategy", [s for s in PRESETS if s != "fsdp"])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(shard=1, pipe=2)], ids=str)
def test_with_one_data_rank_all_are_one(strategy: str, mesh: Mesh) -> None:
    found = [spawn(lambda comm, s=s: all_it_does(comm, s, mesh=mesh), mesh.pipe) for s in (strategy, "fsdp")]
    assert found[0] == found[1]


@in_full
def test_the_others_are_different() -> None:
    """Else the list would be too long."""
    found = [str(spawn(all_it_does, 2, strategy)) for strategy in STRATEGIES]
    assert len(set(found)) == len(STRATEGIES)
    assert {*STRATEGIES, "zero3", "hybrid"} == set(PRESETS)
    assert placed([1, 2], [4]) == [("fsdp", 1), *((s, 2) for s in STRATEGIES), ("hybrid", 4)]
    assert spawn(all_it_does, 2, Sharding(full_grads="step")) not in found
