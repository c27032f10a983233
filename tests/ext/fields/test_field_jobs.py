"""All of it in one job: masks, dropout, derivatives, losses and metrics, on parts, in ensembles and under MPI."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from grids import cuts_of, grid_at
from ranks import from_rank_0
from trainings import make_trainer

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.comm import Communicator

SHAPE = (7, 10)
ROWS = 5
MASK = np.arange(70).reshape(SHAPE) % 6 > 0
RNG = np.random.default_rng(0)
FIELDS = np.where(MASK[..., None], RNG.standard_normal((ROWS, *SHAPE, 2)), np.nan)


def trained(comm: Communicator, grid: Any = None, mesh: Mesh | None = None, samples: slice = slice(None)) -> Any:
    """Losses, metrics and parameters of two steps, twice, on this rank's parts, or on whole fields."""
    mask, u = MASK, np.moveaxis(FIELDS[samples], -1, 1)
    more: dict[str, Any] = {"comm": comm}
    if grid is not None:
        mask, u = grid.take_local(MASK), grid.take_local(FIELDS[samples])
        more |= {"mesh": mesh, "strategy": "fsdp", "microbatches": 2}
    net = nn.Sequential(
        nn.FillNaN(), nn.Standardize((0.1, -0.1), (1.0, 2.0)), nn.Conv2d(2, 6, 3, padding=1), nn.Dropout(0.2),
        nn.Tanh(), nn.Mask(mask), nn.FieldGradient(periodic=(False, True)), nn.Conv2d(12, 2, 1),
        nn.Pad(((1, 0), (0, 1))), nn.Pad(((-1, 0), (0, -1))), nn.Destandardize((0.1, -0.1), (1.0, 2.0)),
    )  # fmt: skip
    nodes = {"filled": (nn.FillNaN(), "x"), "net": (net, "x"), "kept": (nn.MatchMean(), "net", "filled")}
    loss = nn.PhysicsLoss(nn.VRMSE(weights=mask), nn.FieldDivergence(0.5, (False, True), 4, (1, 0)), 0.1)
    model = nn.Graph(nodes, outputs=("kept",))
    trainer = make_trainer(model, grid, loss=loss, optimizer=optim.AdamW(lr=1e-2), **more)
    clean = np.nan_to_num(u)
    of_clean = {"low": nn.BandRMSE(0, 2), "high": nn.BandRMSE(2)}
    of_clean |= {"edge": nn.BoundaryRMSE(), "most": nn.MaxError(), "mean": nn.ConservedRMSE()}
    found = []
    for y, metrics in ((clean, of_clean), (u, {"nan": nn.RMSE(skipna=True)})):
        history = trainer.fit([(u, clean)] * 2, validation=[(u, y)], metrics=metrics, progress=False)
        found.append((history.losses, {k: v[-1][1] for k, v in history.metrics.items()}))
    return found, trainer.parameters()


@lru_cache
def alone() -> Any:
    return spawn(trained, 1)[0]


def compare(found: Any, want: Any = None) -> None:
    (histories, parameters), (wanted, values) = found, want or alone()
    for (losses, metrics), (first, second) in zip(histories, wanted, strict=True):
        assert losses == pytest.approx(first, rel=1e-9)
        assert metrics == pytest.approx(second, rel=1e-8)
    for name, value in values.items():
        np.testing.assert_allclose(parameters[name], value, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(("dims", "seed"), [((1, 1), 0), ((2, 2), 0), ((1, 5), 2)], ids=str)
def test_a_job_on_parts(dims: tuple[int, int], seed: int) -> None:
    cuts = cuts_of(SHAPE, dims, seed).cuts
    for found in spawn(lambda comm: trained(comm, grid_at(comm, dims, cuts)), dims[0] * dims[1]):
        compare(found)


def test_a_job_of_two_members() -> None:
    """Several fields at once, each on a grid of its own. One member has four samples, the other one, which leaves it a
    microbatch without samples."""

    def run(comm: Communicator) -> Any:
        samples = slice(4) if comm.rank < 2 else slice(4, None)
        grid = grid_at(comm, (1, 2), cuts_of(SHAPE, (1, 2), 1).cuts)
        return trained(comm, grid, Mesh(replica=2, domain=(1, 2)), samples)

    for found in spawn(run, 4):
        compare(found)


@pytest.mark.world
@pytest.mark.mpi
def test_a_job_under_mpi(world: Communicator) -> None:
    MPI = pytest.importorskip("mpi4py.MPI")
    dims = MPI.Compute_dims(world.size, 2)
    compare(trained(world, grid_at(world, dims, cuts_of(SHAPE, dims, 1).cuts)), from_rank_0(world, alone))
