"""Several fields at once, each over a grid of its own: replicas, pipes and shards beside the grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from grids import grid_at, random_cuts
from test_space import grid_of
from trainings import demand_refused, make_trainer, train_on_parts

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.testing import assert_close

SHAPE = (10, 7)


def make(grid: fsdpx.Grid | None, norm: nn.Layer | None = None, **more: Any) -> Any:
    """A trainer with a norm of its own, or with BatchNorm."""
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode=("reflect", "circular")), norm or nn.BatchNorm(4), nn.GELU(),
        nn.FNO(4, 4, (4, 4), 4, 1), nn.Conv2d(4, 6, 3, 2, 1), nn.GroupNorm(2, 6), nn.Tanh(), nn.Conv2d(6, 3, 1),
    )  # fmt: skip
    return make_trainer(net, grid, loss=nn.RelativeL2(), clip_norm=1.0, optimizer=optim.AdamW(lr=1e-2), **more)


def batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Fields and targets of the whole, channels last."""
    rng = np.random.default_rng(3)
    return rng.standard_normal((rows, *SHAPE, 2)), rng.standard_normal((rows, 5, 4, 3))


@lru_cache
def alone(rows: int, norm: nn.Layer | None = None) -> Any:
    trainer, (x, y) = make(None, norm), (np.moveaxis(a, -1, 1) for a in batch(rows))
    return [trainer.step(x, y) for _ in range(2)], trainer.parameters(), np.moveaxis(trainer.predict(x), 1, -1)


def trained(
    comm: Communicator, mesh: Mesh, strategy: str, dims: tuple[int, int], rows: Sequence[int],
    place: Callable[[int], tuple[int, int]] | None = None,
) -> Any:  # fmt: skip
    """As `alone`, with each member's share of the samples. place: rank -> (member, place in its grid); members are
    groups of neighbors by default."""
    width = int(np.prod(dims))
    member, at = place(comm.rank) if place else divmod(comm.rank, width)
    grid = grid_at(comm.split(member, at) if place else comm, dims, random_cuts(SHAPE, dims))
    trainer = make(grid, comm=comm, mesh=mesh, strategy=strategy)
    x, y = batch(sum(rows))
    samples = slice(sum(rows[: trainer.data_group.rank]), sum(rows[: trainer.data_group.rank + 1]))
    mine, outputs = grid.take_local(x[samples]), trainer.output_grid
    losses = [trainer.step(mine, outputs.take_local(y[samples])) for _ in range(2)]
    assert (trainer.data_group.size, trainer.data_group.rank, trainer.domain_group.size) == (len(rows), member, width)
    return losses, trainer.parameters(), trainer.predict(mine), outputs, samples


@pytest.mark.parametrize(
    ("mesh", "strategy", "dims", "rows"),
    [
        (Mesh(replica=2, domain=(2, 1)), "fsdp", (2, 1), (2, 3)),
        (Mesh(replica=2, domain=(2, 2)), "ddp", (2, 2), (1, 2)),
        (Mesh(replica=1, domain=(1, 2)), "zero1", (1, 2), (2, 1)),
        (Mesh(replica=3, domain=(1, 2)), "fsdp", (1, 2), (1, 0, 2)),
        (None, "ddp", (1, 2), (1, 0, 2)),
        (None, "zero1", (2, 1), (1, 2)),
        (None, "hybrid", (1, 2), (2, 1)),
    ],
    ids=str,
)
def test_members_train_as_one_process(mesh: Mesh | None, strategy: str, dims: Any, rows: tuple[int, ...]) -> None:
    _compare(mesh, strategy, dims, len(rows) * int(np.prod(dims)), rows)


def _compare(mesh: Any, strategy: str, dims: Any, ranks: int, rows: Any, place: Any = None) -> None:
    losses, parameters, predicted = alone(sum(rows))
    found = spawn(lambda comm: trained(comm, mesh, strategy, dims, rows, place), ranks)
    for rank, (*got, outputs, samples) in enumerate(found):
        assert_close(got, [losses, parameters, outputs.take_local(predicted[samples])], 1e-11, rank=rank)


def test_a_grid_may_have_any_ranks_of_the_trainer_in_any_order() -> None:
    """Members are interleaved, and one of them counts its ranks backwards."""
    places = {0: (0, 1), 2: (0, 0), 1: (1, 0), 3: (1, 1)}
    _compare(None, "fsdp", (2, 1), 4, (2, 1), places.__getitem__)


@pytest.mark.parametrize("order", [("pipe", "replica", "shard", "tensor"), ("replica", "shard", "tensor", "pipe")])
def test_stages_of_a_pipe_hold_parts(order: tuple[str, ...]) -> None:
    """Pipe 2 x space (2, 1); the stages are neighbors, or the parts are."""
    norm = nn.InstanceNorm(4)  # BatchNorm would see each microbatch by itself, as in any pipe

    def run(comm: Communicator) -> Any:
        mesh = Mesh(pipe=2, shard=2, domain=(2, 1), order=order)
        at = mesh.coordinates_of(comm.rank)
        grid = grid_at(comm.split(at.pipe, at.shard), (2, 1), random_cuts(SHAPE, (2, 1)))
        trainer, (x, y) = make(grid, norm, comm=comm, mesh=mesh), batch(4)
        return train_on_parts(trainer, grid.take_local(x), y)

    for found in spawn(run, 4):
        assert_close(found, alone(4, norm), 1e-11)


def made(comm: Communicator, grid: Any = None, **options: Any) -> Any:
    return make_trainer(nn.Conv2d(1, 1, 1), grid or grid_of(comm), comm=comm, precision=None, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: made(c, mesh=Mesh(tensor=2)), "a tensor axis of 2 ranks splits matrices, but field layers"),
        (lambda c: made(c, mesh=Mesh(replica=2, domain=(2, 1))), "Mesh(domain=(2, 1)): the grid has (1, 2) ranks"),
        (
            lambda c: nn.Conv2d(1, 1, 1).as_distributed(comm=c, mesh=Mesh(replica=2, domain=(2, 1))),
            "Mesh(domain=(2, 1)): which cells each rank has is not known; give domain=fsdpx.Grid(comm, u.shape[:2]",
        ),
        (
            lambda c: made(c, fsdpx.Grid(c.split(c.rank // 2, c.rank), (4, 6), dims=(2, 1)), mesh=Mesh(pipe=4)),
            "domain: a field is on 2 ranks, and the data axis of pipe=4 x replica=1 x shard=1 x tensor=1 has 1",
        ),
        (lambda c: fsdpx.Grid(c, (4, 6), dims=(3, 1)), "rank 0: dims=(3, 1) are 3 ranks, the communicator has 4"),
        (
            lambda c: made(c, fsdpx.Grid(c.split(c.rank % 2, c.rank), (4, 6), dims=(1, 2)), mesh=Mesh(pipe=2)),
            "rank 0 has a grid of ranks [0, 2], of which each must have the same grid and be on the data axis of ",
        ),
        (
            lambda c: made(c).step(np.ones((1 + c.rank % 2, 4, 6, 1)), np.ones((1 + c.rank % 2, 4, 6, 1))),
            "data rank 0 has 1 samples, and data rank 1, which has another part of the same fields, 2",
        ),
        (
            lambda c: grid_of(c, periods=(False, c.rank == 2)),
            "Grid: along dim x rank 0 has walls, rank 2 a periodic field",
        ),
        (lambda c: Mesh(domain=(2, 0)), "mesh domain=(2, 0): ranks along each of 1 to 3 dims, at least 1"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(call: Any, message: str) -> None:
    demand_refused(call, message, ranks=4)


def test_a_mesh_is_read_with_its_grid() -> None:
    mesh = Mesh.parse("replica=2,domain=2x1")
    assert mesh == Mesh(replica=2, domain=(2, 1))
    assert str(mesh.resolve_open_axis(4)) == "pipe=1 x replica=2 x shard=2 x tensor=1 (domain=2x1)"
    assert mesh.fill_from_strategy("ddp", 4).shape == (1, 4, 1, 1)
    assert mesh.fill_from_strategy("fsdp", 4).shape == (1, 2, 2, 1)


def test_a_dry_run_counts_what_a_rank_moves() -> None:
    """Halos of shapes are halos of arrays, to the byte."""
    dims, net = (2, 2, 1), nn.UNet(3, 3, 3, 4, 1)
    options = {"loss": nn.MSELoss(), "optimizer": optim.AdamW(lr=1e-3)}

    def run(comm: Communicator) -> Any:
        mine = fsdpx.Grid.from_shape((8, 8, 6), dims, comm.rank).local_shape
        trainer = net.as_distributed(domain=fsdpx.Grid(comm, mine, dims=dims), **options)
        u = np.ones((*mine, 3), np.float32)
        trainer.inspect.reset_counters()
        trainer.step(u, u)
        return trainer.report().traffic

    def dry(rank: int) -> Any:
        grid = fsdpx.Grid.from_shape((8, 8, 6), dims, rank)
        part = (1, *grid.local_shape, 3), "float32"
        return fsdpx.dry_run(net, part, part, ranks=4, rank=rank, domain=grid, **options).report.traffic

    for rank, traffic in enumerate(spawn(run, 4)):
        for (axis, call), count in dry(rank).items():
            if axis != "world":
                assert traffic[axis, call] == count, (rank, axis, call)
