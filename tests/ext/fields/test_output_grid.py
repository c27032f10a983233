"""The grid of results that have another size than the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grids import grid_at, place_of, random_cuts

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, DataError

NETS: dict[str, Callable[[], nn.Layer]] = {
    "finer": lambda: nn.ConvTranspose2d(1, 2, 4, stride=2, padding=1),
    "coarser": lambda: nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.MaxPool2d(2)),
    "any": lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Upsample(size=(7, 30))),
    "alike": lambda: nn.Conv2d(1, 2, 3, padding=1),
}


@pytest.mark.parametrize(
    ("net", "dims", "layout"),
    [("finer", (3, 1), "cyx"), ("coarser", (2, 2), "yxc"), ("any", (2, 2), "cyx"), ("alike", (3, 1), "yxc")],
)
def test_results_are_gathered_by_their_own_grid(net: str, dims: tuple[int, int], layout: str) -> None:
    """Known before anything is predicted, and what one rank alone gives."""
    u = np.random.default_rng(0).standard_normal((10, 12))[..., None]
    u = np.moveaxis(u, -1, layout.index("c"))

    def run(comm: Communicator) -> Any:
        cuts = random_cuts((10, 12), dims) if comm.size > 1 else ((0, 10), (0, 12))
        grid = grid_at(comm, dims if comm.size > 1 else (1, 1), cuts, layout=layout, ghosts=0)
        trainer = NETS[net]().as_distributed(
            loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), domain=grid, comm=comm, precision="float64"
        )
        result = trainer.output_grid
        y = trainer.predict(grid.take_local(u))
        whole = result.all_gather(y)
        at = tuple(slice(a, a + n) for a, n in zip(result.offsets, result.local_shape, strict=True))
        at = (slice(None), *at) if layout == "cyx" else (*at, slice(None))
        np.testing.assert_array_equal(whole[at], y)
        np.testing.assert_array_equal(result.take_local(whole), y)
        trainer.step(grid.take_local(u), result.take_local(whole))
        assert result.layout == layout
        if net != "alike":
            with pytest.raises(DataError, match=r"results of another size .* trainer\.output_grid"):
                grid.all_gather(y)
        return result.shape, whole

    (shape, whole), *_ = spawn(run, 1)
    for got, other in spawn(run, dims[0] * dims[1]):
        assert got == shape
        np.testing.assert_allclose(other, whole, rtol=1e-12)


def test_members_of_an_ensemble_gather_their_own_results() -> None:
    """Whose parts are cut in another way than those of the other member."""

    def run(comm: Communicator) -> Any:
        cuts = ((0, 2, 6), (0, 4)) if comm.rank < 2 else ((0, 5, 6), (0, 4))
        place = place_of(comm.rank % 2, (2, 1))
        own = [c[p + 1] - c[p] for c, p in zip(cuts, place, strict=True)]
        grid = fsdpx.Grid(comm, own, dims=(2, 1))
        trainer = nn.Upsample(scale_factor=2).as_distributed(domain=grid, comm=comm)
        u = np.full((*own, 1), comm.rank // 2, np.float32)
        return trainer.output_grid.all_gather(trainer.predict(u))

    for rank, whole in enumerate(spawn(run, 4)):
        np.testing.assert_array_equal(whole, np.full((12, 8, 1), rank // 2))


def test_a_trainer_of_whole_samples_has_none() -> None:
    trainer = nn.Linear(2, 2).as_distributed()
    with pytest.raises(ConfigError, match="this trainer has whole samples: give distribute a grid of fields, domain="):
        trainer.output_grid  # noqa: B018
