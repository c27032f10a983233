"""Data ranks that bring the same samples are told so, once; constant, idle and different ones are left in peace."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.data import ArrayDataset, DataLoader


def said(batches: Any, size: int = 2, steps: int = 1, **options: Any) -> list[str]:
    """What `batches(comm, step)` makes each rank warn of."""

    def run(comm: Communicator) -> None:
        trainer = nn.Linear(3, 2).as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), **options)
        for n in range(steps):
            trainer.step(*batches(comm, n))

    return warned(lambda: spawn(run, size))


def warned(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in found]


def draw(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 3)), rng.normal(size=(rows, 2))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_same_batch_on_all_ranks_is_named_once_with_the_remedy(strategy: str) -> None:
    (text,) = said(lambda comm, n: draw(8, n), size=3, steps=3, strategy=strategy)
    assert text == (
        "fsdpx: all 3 data ranks train on the same samples (8 so far), so together they do what one rank would: give "
        "each its part of the global batch, as DataLoader(comm=trainer.data) does, or cut it by trainer.data.rank and "
        "trainer.data.size"
    )


def test_small_batches_are_named_when_chance_is_ruled_out() -> None:
    assert not said(lambda comm, n: draw(3, n), steps=2)
    assert len(said(lambda comm, n: draw(3, n), steps=3)) == 1


def test_with_a_pipe_the_data_ranks_count() -> None:
    mesh = Mesh(replica=2, pipe=2)

    def run(own: bool) -> list[str]:
        def train(comm: Communicator) -> None:
            model = nn.Chain(nn.Linear(3, 3), nn.Linear(3, 2))
            trainer = model.as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), mesh=mesh, group_bytes=0)
            trainer.step(*draw(8, trainer.data.rank if own else 0))

        return warned(lambda: spawn(train, 4))

    assert not run(own=True)
    assert len(run(own=False)) == 1


def test_constant_idle_and_different_batches_are_fine() -> None:
    assert not said(lambda comm, n: (np.ones((8, 3)), np.zeros((8, 2))), steps=3)
    assert not said(lambda comm, n: draw(8 if comm.rank == 0 else 0), steps=3)
    assert not said(lambda comm, n: draw(8, comm.rank), steps=2)
    assert not said(lambda comm, n: draw(4, comm.rank if n == 0 else 7), steps=5)  # it was right once
    assert not said(lambda comm, n: draw(8), size=1)


def test_the_loader_without_comm_needs_no_warning() -> None:
    dataset = ArrayDataset(*draw(32))

    def run(comm: Communicator) -> list[float]:
        trainer = nn.Linear(3, 2).as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1))
        return [trainer.step(x, y) for x, y in DataLoader(dataset, 16, shuffle=True)]

    alone = spawn(run, 1)[0]
    for losses in spawn(run, 4):
        assert losses == pytest.approx(alone, rel=1e-6)
