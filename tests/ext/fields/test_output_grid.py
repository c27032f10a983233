"""The grid of results that have another size than the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grids import grid_at, uneven
from trainings import demand_like_alone, make_trainer

from fsdpx import nn, spawn
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
    u = np.expand_dims(np.random.default_rng(0).standard_normal((10, 12)), layout.index("c"))

    def run(comm: Communicator, *cut: Any) -> Any:
        grid = grid_at(comm, *cut, layout=layout)
        trainer = make_trainer(NETS[net](), grid)
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

    demand_like_alone(run, (10, 12), uneven((10, 12), dims), 1e-12)


def test_members_of_an_ensemble_gather_their_own_results() -> None:
    """Whose parts are cut in another way than those of the other member."""

    def run(comm: Communicator) -> Any:
        cuts = ((0, 2, 6), (0, 4)) if comm.rank < 2 else ((0, 5, 6), (0, 4))
        grid = grid_at(comm, (2, 1), cuts)
        trainer = nn.Upsample(scale_factor=2).as_distributed(domain=grid, comm=comm)
        u = np.full((*grid.local_shape, 1), comm.rank // 2, np.float32)
        return trainer.output_grid.all_gather(trainer.predict(u))

    for rank, whole in enumerate(spawn(run, 4)):
        np.testing.assert_array_equal(whole, np.full((12, 8, 1), rank // 2))


def test_a_trainer_of_whole_samples_has_none() -> None:
    trainer = nn.Linear(2, 2).as_distributed()
    with pytest.raises(ConfigError, match="this trainer has whole samples: give distribute a grid of fields, domain="):
        trainer.output_grid  # noqa: B018
