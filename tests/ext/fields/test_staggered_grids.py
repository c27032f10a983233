"""Staggered fields, with one value per face, as inputs and outputs of models, on any partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grids import even, grid_at, part_with_ghosts, random_cuts
from staggered_flow import LOSS, NX, NY, U_NEXT, V_NEXT, P, U, V, flow_model, trained
from trainings import demand_error, demand_like, demand_like_alone, make_trainer, train_on_parts

import fsdpx
from fsdpx import nn, spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def alone() -> Any:
    return spawn(lambda comm: trained(comm, (1, 1), ((0, NY), (0, NX))), 1)[0]


@pytest.mark.parametrize("dims", [(2, 2), (5, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_a_flow_on_faces_is_that_of_one_process(alone: Any, dims: tuple[int, int], shared: bool) -> None:
    """Even or random parts, and by turns one cell at the end and empty parts behind it, with the faces between ranks
    stored once or twice."""
    losses, _, predicted = alone
    assert losses[-1] < losses[0]
    assert [one.shape for one in predicted] == [U.shape, V.shape]
    cuts = random_cuts((NY, NX), dims) if dims == (5, 1) else even((NY, NX), dims)
    if shared == (dims != (1, 5)):
        cuts = tuple((0, n) if d == 1 else (0, n - 1, *(n,) * (d - 1)) for n, d in zip((NY, NX), dims, strict=True))
    demand_like(alone, lambda comm, *cut: trained(comm, *cut, shared), [(dims, cuts)], 1e-12)


def test_one_process_is_the_plain_model(alone: Any) -> None:
    """Without a grid, on complete fields (samples, channels, *cells); the loss is that of NumPy."""
    trainer = make_trainer(flow_model(), None, loss=LOSS)
    given = tuple(a[None, None] for a in (U, V, P))
    u, v = trainer.predict(given)
    first = trainer.step(given, (U_NEXT[None, None], V_NEXT[None, None]))
    relative = np.linalg.norm(v[0, 0] - V_NEXT) / np.linalg.norm(V_NEXT)
    assert first == pytest.approx(((u[0, 0] - U_NEXT) ** 2).mean() + relative, rel=1e-12)
    assert alone[0][0] == pytest.approx(first, rel=1e-12)


def test_faces_in_faces_out_with_ghosts_of_the_solver() -> None:
    """Rollouts on the faces of x, periodic along y, with ghost cells on each side, which the first layer reads."""
    model = nn.Rollout(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 1)), 2)
    wide = np.pad(np.pad(U, ((1, 1), (0, 0)), "wrap"), ((0, 0), (1, 1)), constant_values=0.25)
    target = np.random.default_rng(3).standard_normal((*U.shape, 2))

    def run(comm: Communicator, *cut: Any) -> Any:
        faces = grid_at(comm, *cut, layout="yxc", ghosts=1, periods=(True, False)).faces("x", shared=True)
        trainer, mine = make_trainer(model, faces), part_with_ghosts(wide, faces, 1, first=0)[..., None]
        return train_on_parts(trainer, mine, target)

    demand_like_alone(run, (NY, NX), [((2, 2), even((NY, NX), (2, 2)))], 1e-12)


def test_faces_are_cut_where_cells_are() -> None:
    """The last rank with cells has the last face, even if ranks without cells follow."""

    def run(comm: Communicator) -> Any:
        n = (3, 2, 0)[comm.rank]
        grid = fsdpx.Grid(comm, (4, n), dims=(1, 3), layout="yx")
        faces, both, corners = grid.faces("x"), grid.faces("x", shared=True), grid.faces("x").faces("y")
        whole = np.arange(4.0 * 6).reshape(4, 6)
        mine = faces.take_local(whole)
        np.testing.assert_array_equal(faces.all_gather(mine), whole)
        np.testing.assert_array_equal(both.all_gather(whole[:, sum((3, 2, 0)[: comm.rank]) :][:, : n + 1]), whole)
        round_ = fsdpx.Grid(comm, (4, n), dims=(1, 3), layout="yx", periods=(False, True)).faces("x", shared=True)
        assert round_.shape == (4, 5)
        wide = fsdpx.Grid(comm, (4, n), dims=(1, 3), layout="yx", ghosts=1).faces("x", shared=True)
        assert (faces.shape, corners.shape) == ((4, 6), (5, 6))
        ghosts = both.ghosts[1], round_.ghosts[1], wide.ghosts[1]
        return faces.local_shape[1], faces.offsets[1], *ghosts, corners.local_shape

    assert spawn(run, 3) == [
        (3, 0, (0, 1), (0, 1), (1, 2), (5, 3)),
        (3, 3, (0, 0), (0, 1), (1, 1), (5, 3)),
        (0, 6, (1, 0), (0, 1), (2, 1), (5, 0)),
    ]


def test_a_dry_run_has_the_shapes_of_each_input() -> None:
    cells = fsdpx.Grid.from_shape((NY, NX), (2, 2), layout="yx")
    grid = cells.with_inputs(cells.faces("x"), cells.faces("y"), cells)
    last = grid.as_rank(3)
    shapes = [last.local_array_shape(a.shape) for a in (U, V, P)]
    assert shapes == [(4, 6), (5, 5), (4, 5)]
    assert "inputs=(Grid((7, 10) cells" in repr(grid)


CONV = nn.Conv2d(1, 1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.faces("z"), "Grid.faces: dim='z': choose one of y, x"),
        (lambda g: g.faces("x").faces("y").faces("x"), "dim='x': this already is the grid of the faces across it"),
        (lambda g: g.with_inputs("x"), "Grid.with_inputs: argument 0 is 'x': pass one grid for each input, as in gr"),
        (lambda g: g.with_inputs([g, g]), "pass one grid for each input, as in grid.with_inputs(grid.faces('x'), gri"),
        (lambda g: g.faces(1), "Grid.faces: dim=1: choose one of y, x"),
        (
            lambda g: g.with_inputs(g, fsdpx.Grid.from_shape((4, 4), (1, 1), layout="xy")),
            "of input 1 has other ranks or",
        ),
        (
            lambda g: CONV.as_distributed(domain=g.with_inputs(g, g)),
            "grid.with_inputs has 2 grids, and the model reads 1 fields",
        ),
        (
            lambda g: CONV.as_distributed(domain=g).predict(np.ones((4, 5))),
            "One value more along x is what a staggered field has, with values on the faces of cells: pass "
            "domain=grid.faces('x'), or grid.with_inputs(...)",
        ),
        (
            lambda g: CONV.as_distributed(domain=g.faces("y")).predict(np.ones((6, 4))),
            "if every rank has both faces of its cells, pass grid.faces('y', shared=True)",
        ),
        (lambda g: g.faces("x").take_local(np.ones((4, 4))), "is not the whole field, which has {'y': 4, 'x': 5}"),
    ],
)
def test_grids_that_do_not_fit(call: Any, message: str) -> None:
    grid = fsdpx.Grid(make_single_rank_communicator(), (4, 4), dims=(1, 1), layout="yx")
    demand_error((ConfigError, DataError), lambda: call(grid), message)
