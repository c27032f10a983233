"""The first step tells of arrays with ghost cells that their grid was not told of."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from grids import bounds, even, place_of
from trainings import make_trainer

import fsdpx
from fsdpx import data, nn, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import DataError
from fsdpx.ext.fields.overlaps import count_overlap_rows_by_dim, describe_padding_periodicity_conflict

SHAPE = (24, 32)
CONV = nn.Conv2d(1, 1, 3, padding=1)
train = partial(make_trainer, precision=None)


def even_grid(comm: Communicator, dims: Sequence[int], **more: Any) -> fsdpx.Grid:
    return fsdpx.Grid(comm, [n // width for n, width in zip(SHAPE, dims, strict=True)], dims=dims, **more)


def told(
    field: np.ndarray, dims: Sequence[int], sides: Sequence[tuple[int, int]], walls: bool = False,
    corners: bool = True, **more: Any,
) -> str:  # fmt: skip
    """What the first two steps say on arrays with ghost cells of which the grid knows nothing, all ranks together. At
    walls lies what the solver has there, or with `walls` nothing. corners: whether the solver fills them."""

    def run(comm: Communicator) -> None:
        rows, place = [], place_of(comm.rank, dims)
        mine = bounds(even(SHAPE, dims), place)
        for (a, b), (low, high), at, width, n in zip(mine, sides, place, dims, SHAPE, strict=True):
            low, high = (low * (at > 0), high * (at < width - 1)) if walls else (low, high)
            rows.append(np.arange(a - low, b + high) % n)
        u = field[rows[0][:, None], rows[1]]
        if not corners:
            u[np.ix_([0, -1], [0, -1])] = comm.rank
        grid = fsdpx.Grid(comm, u.shape, dims=dims, layout="yx", **more)
        trainer = train(nn.Sequential(nn.FillNaN(), CONV), grid, loss=nn.MSELoss(skipna=True))
        for _ in range(2):
            trainer.step(u, u)

    texts = warned_of("ghost cells", run, int(np.prod(dims)))
    assert len(texts) <= 1
    return texts[0] if texts else ""


def warned_of(what: str, run: Callable[[Communicator], Any], ranks: int) -> list[str]:
    """Return the warnings of ranks that name `what`."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        spawn(run, ranks)
    return [text for text in (str(one.message) for one in found) if what in text]


def train_quietly(run: Callable[[Communicator], Any], ranks: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spawn(run, ranks)


def waves() -> np.ndarray:
    y, x = np.meshgrid(*(np.arange(n) for n in SHAPE), indexing="ij")
    return np.sin(y / 3) * np.cos(x / 4) + 0.1 * y


@pytest.mark.parametrize("walls", [False, True])
@pytest.mark.parametrize(
    ("dims", "low", "high"), [((2, 1), 1, 2), ((1, 3), 2, 2), ((2, 2), 1, 1), ((3, 2), 2, 2), ((3, 2), 1, 2)]
)
def test_ghost_cells_of_which_nothing_was_said_are_told_of(
    dims: tuple[int, int], low: int, high: int, walls: bool
) -> None:
    text, rows = told(waves(), dims, [(low, high)] * 2, walls), low + high
    cut = ", ".join(f"{letter} ({rows} rows)" for letter, d in zip("yx", dims, strict=True) if d > 1)
    assert text.startswith(f"fsdpx: along dim {cut} the end of each part is the beginning of the next one"), text
    assert text.endswith("ghosts=((low, high), ...))" if rows == 3 else f"ghosts={rows // 2})")


def test_corners_that_a_solver_does_not_fill_do_not_hide_it() -> None:
    text = told(waves(), (2, 2), [(1, 1)] * 2, corners=False)
    assert text.startswith("fsdpx: along dim y (2 rows), x (2 rows) the end of each part")


def test_rows_that_are_equal_in_one_place_do_not_hide_it() -> None:
    field = waves()
    field[[5, 17]] = field[:, [5, 21]] = 0.0
    text = told(field, (2, 2), [(1, 1)] * 2)
    assert text.startswith("fsdpx: along dim y (2 rows), x (2 rows) the end of each part")


@pytest.mark.parametrize(("last", "expected"), [("c", {"y": 2}), ("x", {}), (None, {})])
def test_all_neighbors_share_rows_or_it_is_chance(last: str | None, expected: dict[str, int]) -> None:
    ends: Any = [[[pair] * 5] for pair in (("a", "b"), ("b", "c"), (last, "d"))]
    assert count_overlap_rows_by_dim((3,), "y", (False,), ends) == expected


def test_a_periodic_field_of_one_rank_meets_itself() -> None:
    assert told(waves(), (1, 1), [(1, 1)] * 2, periods=(False, True)).startswith("fsdpx: along dim x (2 rows) the")
    assert not told(waves(), (1, 1), [(1, 1)] * 2)


@pytest.mark.parametrize(
    ("padding", "ghosts", "expected"),
    [
        (("zeros", "circular"), 0, ""),
        (("circular", "circular"), 0, "dim y is not periodic, but layer 'encoder1.enc1conv1' pads it with 'circular'"),
        ("zeros", 0, "dim x is periodic, but layer 'encoder1.enc1conv1' pads it with 'zeros': choose 'circular'"),
        ("zeros", 1, "dim x is periodic, but layer 'encoder1.enc1conv2' pads it with 'zeros': choose 'circular'"),
    ],
)  # fmt: skip
def test_padding_that_contradicts_the_periods_is_told_of(padding: Any, ghosts: int, expected: str) -> None:
    noise = np.random.default_rng(0).standard_normal((8 + 2 * ghosts, 8 + 2 * ghosts))

    def run(comm: Communicator) -> None:
        grid = fsdpx.Grid(comm, (8, 8), dims=(1, 1), layout="yx", periods=(False, True), ghosts=ghosts)
        trainer = train(nn.UNet(1, 1, 2, 4, 1, padding), grid)
        trainer.step(noise, noise[ghosts : 8 + ghosts, ghosts : 8 + ghosts])

    texts = warned_of("periodic", run, 1)
    assert len(texts) == bool(expected)
    assert not texts or texts[0].startswith(f"fsdpx: {expected}")


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.CellsToFaces(1, faces="low", padding_mode="circular"), ""),
        (nn.CellsToFaces(1, faces="low"), "dim x is periodic, but layer '0' pads it with 'replicate': choose 'circula"),
        (nn.CellsToFaces(1), "but layer '0' pads it with 'replicate': choose 'circular' with faces='low' or 'high'"),
        (nn.FacesToCells(1), ""),
        (nn.FacesToCells(0, faces="high", padding_mode="circular"), "dim y is not periodic, but layer '0' pads it wi"),
        (nn.FaceDivergence(2, faces="low"), "dim x is periodic, but layer '0.outflow1' pads it with 'zeros': choose"),
        (nn.FieldGradient(periodic=(False, True)), ""),
        (nn.FieldGradient(), "dim x is periodic, but layer '0' reads it with periodic=False: choose periodic=True for"),
        (nn.FieldDerivative(0, periodic=True), "dim y is not periodic, but layer '0' reads it with periodic=True: cho"),
        (nn.FieldDerivative(0, along=(1, 0)), "dim x is periodic, but layer '0' reads it with periodic=False: choose"),
        (nn.NeighborhoodAttention(2, 1, 3, (False, True)), ""),
        (nn.NeighborhoodAttention(2, 1, 3), "dim x is periodic, but layer '0' keeps windows of attention within the f"),
        (nn.Pad(((1, 1), (0, 0)), "circular"), "dim y is not periodic, but layer '0' pads it with 'circular': choose"),
        (nn.Rollout(nn.Conv2d(1, 1, 3, padding=1), 2), "dim x is periodic, but layer '0' pads it with 'zeros': choose"),
    ],
)  # fmt: skip
def test_layers_that_contradict_the_periods_are_told_of(layer: nn.Layer, expected: str) -> None:
    text = describe_padding_periodicity_conflict(nn.Sequential(layer), "yx", (False, True), ((0, 0), (0, 0)))
    assert expected in text
    assert bool(text) == bool(expected)
    assert not describe_padding_periodicity_conflict(nn.Sequential(layer), "yx", (False, False), ((0, 0), (0, 0)))


def test_a_target_larger_than_what_a_window_without_padding_leaves_names_the_padding() -> None:
    def run(comm: Communicator) -> None:
        grid = fsdpx.Grid(comm, (8, 8), dims=(1, 1), layout="yx", ghosts=1)
        train(nn.Conv2d(1, 1, 3), grid).evaluate(np.zeros((10, 10)), np.zeros((8, 8)))

    with pytest.raises(DataError, match=r"output has 6 x 6 cells, the field 8 x 8; .* with padding=1, also"):
        spawn(run, 1)


FIELDS = {
    "waves": waves(),
    "constant": np.ones(SHAPE),
    "constant along one dim": np.repeat(np.arange(32.0)[None], 24, 0),
    "zero but in one place": np.where(np.hypot(*np.mgrid[-3:21, -3:29]) < 3, 1.0, 0.0),
    "a checkerboard": np.indices(SHAPE).sum(0) % 2.0,
    "stripes": np.repeat((np.arange(24) // 2 % 2.0)[:, None], 32, 1),
    "land": np.where(np.arange(24)[:, None] > 5, np.nan, waves()),
    "steps": np.floor(waves()),
}


@pytest.mark.parametrize("name", FIELDS)
def test_parts_without_ghost_cells_are_not_told_of(name: str) -> None:
    for dims in ((3, 2), (1, 1)):
        assert not told(FIELDS[name], dims, [(0, 0)] * 2, periods=(True, True)), dims


def test_ghost_cells_that_the_grid_knows_are_not_told_of() -> None:
    def run(comm: Communicator) -> None:
        grid = fsdpx.Grid(comm, (12, 32), dims=(2, 1), layout="yx", ghosts=(1, 0))
        u = np.pad(waves(), ((1, 1), (0, 0)), mode="wrap")[12 * comm.rank :][:14]
        train(CONV, grid).step(u, u)

    train_quietly(run, 2)


@pytest.mark.parametrize(("dims", "ghosts"), [((2, 2), 0), ((1, 2), 1)])
def test_a_whole_field_in_place_of_a_part_is_refused(dims: tuple[int, int], ghosts: int) -> None:
    message = r"This is the whole field: give this rank's part, grid\.take_local\(array\)"

    def run(comm: Communicator) -> None:
        trainer = train(CONV, even_grid(comm, dims, layout="yx", ghosts=ghosts))
        for field in (waves(), waves()[None], np.pad(waves(), ghosts)):
            with pytest.raises(DataError, match=message):
                trainer.predict(field)

    spawn(run, dims[0] * dims[1])


@pytest.mark.parametrize("dims", [(2, 1), (2, 2)])
def test_a_whole_field_given_to_the_grid_by_each_rank_is_told_of(dims: tuple[int, int]) -> None:
    def run(comm: Communicator, field: np.ndarray) -> None:
        train(CONV, fsdpx.Grid(comm, field.shape, dims=dims, layout="yx")).step(field, field)

    ranks = dims[0] * dims[1]
    with pytest.warns(RuntimeWarning, match=r"pass the same array of 24 x 32 cells, .* each rank gave the whole field"):
        spawn(run, ranks, waves())
    # parts may be equal where nothing varies, or where nothing varies along y, which is divided
    for field in (np.ones(SHAPE), np.repeat(waves()[3:4], SHAPE[0], axis=0)):
        train_quietly(lambda comm, u=field: run(comm, u), ranks)


def load(grid: fsdpx.Grid, **options: Any) -> data.DataLoader:
    fields = grid.take_local(np.random.default_rng(1).standard_normal((12, *SHAPE, 1)))
    return data.DataLoader(data.ArrayDataset(fields, fields), 4, **options)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (lambda c: {}, lambda a: a),
        (lambda c: {"shuffle": True}, lambda a: a[..., :]),
        (lambda c: {"comm": c}, lambda a: a.transpose(0, 2, 1, 3)[::1].transpose(0, 2, 1, 3)),
        (lambda c: {"rank": 0, "size": 1, "shuffle": True, "seed": c.rank}, lambda a: a),
    ],
)
def test_loaders_that_give_the_ranks_of_a_grid_different_samples_are_refused(options: Any, change: Any) -> None:
    def run(comm: Communicator) -> None:
        grid = even_grid(comm, (2, 1))
        trainer, loader = train(CONV, grid), load(grid, **options(comm))
        for _ in range(2):
            for x, y in loader:
                with pytest.raises(DataError, match="the DataLoader of rank 1 gives other samples than that of rank 0"):
                    trainer.step(change(x), change(y))
        for x, y in load(grid, comm=trainer.data_group, shuffle=True):
            trainer.step(change(x), change(y))

    spawn(run, 2)


def test_different_samples_are_refused_on_ranks_of_all_pipeline_stages() -> None:
    """Ranks of stage 1 pass copies of arrays, whose samples are unknown."""

    def run(comm: Communicator) -> None:
        grid = fsdpx.Grid(comm.subgroup([0, 1] if comm.rank < 2 else [2, 3]), (12, 32), dims=(2, 1), layout="yxc")
        net, mesh = nn.Sequential(CONV, nn.Conv2d(1, 1, 3, padding=1)), fsdpx.Mesh(pipe=2, domain=(2, 1))
        trainer = train(net, grid, comm=comm, mesh=mesh)
        x, y = next(iter(load(grid, rank=0, size=1, shuffle=True, seed=comm.rank % 2)))
        x, y = (x, y) if comm.rank < 2 else (x.copy(), y.copy())
        with pytest.raises(DataError, match="the DataLoader of rank 1 gives other samples than that of rank 0"):
            trainer.step(x, y)

    spawn(run, 4)


def test_loaders_of_members_may_give_different_samples() -> None:
    """Two members of an ensemble, each on two ranks; within a member, orders must be equal."""

    def run(comm: Communicator) -> None:
        grid, mesh, options = even_grid(comm, (2, 1)), fsdpx.Mesh(replica=2, domain=(2, 1)), {"rank": 0, "size": 1}
        trainer = train(CONV, grid, comm=comm, mesh=mesh)
        trainer.fit(load(grid, shuffle=True, seed=trainer.data_group.rank, **options), epochs=1, progress=False)
        trainer = train(CONV, grid, comm=comm, mesh=mesh)
        with pytest.raises(DataError, match="gives other samples than that of rank"):
            trainer.fit(load(grid, shuffle=True, seed=comm.rank, **options), epochs=1, progress=False)

    spawn(run, 4)
