"""Trainers on grids of ranks, compared with those of one rank, and errors that all ranks raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from grids import Cuts, even

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import ConfigError, DataError
from fsdpx.testing import find_difference


def make_trainer(net: nn.Layer, grid: fsdpx.Grid | None, **more: Any) -> Trainer:
    """Train in float64 by SGD and mean squares, unless `more` says something else, on the ranks of a grid, or if it is
    None on whole fields on one rank."""
    usual = {"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=0.1), "precision": "float64", "domain": grid}
    if grid is None:
        usual["comm"] = make_single_rank_communicator()
    return net.as_distributed(**usual | more)


def train_on_parts(trainer: Trainer, x: Any, target: np.ndarray, steps: int = 2) -> Any:
    """Train on the part x of a rank and its part of the whole target. Return the losses of the steps, the parameters,
    and the whole prediction afterwards."""
    outputs = trainer.output_grid
    losses = [trainer.step(x, outputs.take_local(target)) for _ in range(steps)]
    return losses, trainer.parameters(), outputs.all_gather(trainer.predict(x))


def demand_like_alone(
    run: Callable[..., Any], shape: Sequence[int], grids: Iterable[tuple[Sequence[int], Cuts]], tolerance: float = 1e-12
) -> Any:
    """`run(comm, dims, cuts)` gives on each rank of each grid what it gives on one rank. Return that."""
    one = (1,) * len(shape)
    (want,) = spawn(run, 1, one, even(shape, one))
    demand_like(want, run, grids, tolerance)
    return want


def demand_like(want: Any, run: Callable[..., Any], grids: Iterable[Any], tolerance: float = 1e-12) -> None:
    """`run(comm, dims, cuts)` gives the same on each rank of each grid."""
    for dims, cuts in grids:
        for rank, found in enumerate(spawn(run, int(np.prod(dims)), dims, cuts)):
            apart = find_difference(found, want, tolerance)
            assert apart is None, f"{dims} {cuts}, rank {rank}, {apart}; allowed is {tolerance:g}"


def demand_refused(
    call: Any, message: str, ranks: int = 2, start: str = "", kind: Any = (ConfigError, DataError)
) -> list[str]:
    """All ranks of `call(comm)` raise an error of this kind, by default of options or data, whose text contains the
    message and begins with `start`. Return the texts."""

    def one(comm: Communicator) -> str:
        with pytest.raises(kind) as error:
            call(comm)
        return str(error.value)

    texts = spawn(one, ranks)
    for text in texts:
        assert text.startswith(start), text
        assert message in text, text
    return texts


def demand_error(kind: Any, call: Callable[[], Any], message: str) -> None:
    """The call raises an error of this class, or of one of several, whose text contains the message."""
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)
