"""Staggered fields, with one value per face, as inputs and outputs of models, on any partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grids import even, grid_at, random_cuts
from staggered_flow import NX, NY, OPTIONS, U_NEXT, V_NEXT, P, U, V, flow_model, trained

import fsdpx
from fsdpx import nn, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, DataError
from fsdpx.testing import assert_close


@pytest.fixture(scope="module")
def alone() -> Any:
    return spawn(lambda comm: trained(comm, (1, 1), ((0, NY), (0, NX))), 1)[0]


@pytest.mark.parametrize("dims", [(2, 2), (5, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_a_flow_on_faces_is_that_of_one_process(alone: Any, dims: tuple[int, int], shared: bool) -> None:
    """Even or random parts, and by turns one cell at the end and empty parts behind it, with the faces between ranks
    stored once or twice."""
    losses, values, predicted = alone
    assert losses[-1] < losses[0]
    assert [one.shape for one in predicted] == [U.shape, V.shape]
    cuts = random_cuts((NY, NX), dims) if dims == (5, 1) else even((NY, NX), dims)
    if shared == (dims != (1, 5)):
        cuts = tuple((0, n) if d == 1 else (0, n - 1, *(n,) * (d - 1)) for n, d in zip((NY, NX), dims, strict=True))
    for got, found, mine in spawn(lambda comm: trained(comm, dims, cuts, shared), int(np.prod(dims))):
        np.testing.assert_allclose(got, losses, rtol=1e-12)
        assert_close(found, values, 1e-12)
        for one, other in zip(mine, predicted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def test_one_process_is_the_plain_model(alone: Any) -> None:
    """Without a grid, on complete fields (samples, channels, *cells); the loss is that of NumPy."""
    trainer = flow_model().as_distributed(**OPTIONS)
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

    def run(comm: Communicator, dims: tuple[int, int]) -> Any:
        grid = grid_at(comm, dims, even((NY, NX), dims), layout="yxc", ghosts=1, periods=(True, False))
        faces = grid.faces("x", shared=True)
        trainer = model.as_distributed(domain=faces, comm=comm, **OPTIONS | {"loss": nn.MSELoss()})
        (y, x), (ny, nx), ghosts = faces.offsets, faces.local_shape, faces.ghosts
        mine = wide[y : y + ny + 2, x : x + nx + sum(ghosts[1]), None]
        losses = [trainer.step(mine, faces.take_local(target)) for _ in range(2)]
        return losses, trainer.parameters() | {"predicted": faces.all_gather(trainer.predict(mine))}

    losses, values = spawn(run, 1, (1, 1))[0]
    for got, found in spawn(run, 4, (2, 2)):
        np.testing.assert_allclose(got, losses, rtol=1e-12)
        assert_close(found, values, 1e-12)


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
            lambda g: nn.Conv2d(1, 1, 1).as_distributed(domain=g.with_inputs(g, g)),
            "grid.with_inputs has 2 grids, and the model reads 1 fields",
        ),
        (
            lambda g: nn.Conv2d(1, 1, 1).as_distributed(domain=g).predict(np.ones((4, 5))),
            "One value more along x is what a staggered field has, with values on the faces of cells: pass "
            "domain=grid.faces('x'), or grid.with_inputs(...)",
        ),
        (
            lambda g: nn.Conv2d(1, 1, 1).as_distributed(domain=g.faces("y")).predict(np.ones((6, 4))),
            "if every rank has both faces of its cells, pass grid.faces('y', shared=True)",
        ),
        (lambda g: g.faces("x").take_local(np.ones((4, 4))), "is not the whole field, which has {'y': 4, 'x': 5}"),
    ],
)
def test_grids_that_do_not_fit(call: Any, message: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises((ConfigError, DataError)) as error:
            call(fsdpx.Grid(comm, (4, 4), dims=(1, 1), layout="yx"))
        assert message in str(error.value)

    spawn(run, 1)
