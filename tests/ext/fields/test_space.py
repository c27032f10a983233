"""Fields that are cut over a grid of ranks: trained and predicted as by one process that has the whole of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import Cuts, OfLine, by_turns, grid_at, part_with_ghosts, sum_over_ranks, uneven
from hypothesis import given
from hypothesis import strategies as st
from trainings import demand_like, demand_like_alone, demand_refused, make_trainer, train_on_parts

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.array.random import Random
from fsdpx.core.comm import Communicator
from fsdpx.data import DataLoader
from fsdpx.errors import ConfigError
from fsdpx.ext.fields.halo import MODES, HaloSpec
from fsdpx.ext.fields.halo_plan import make_halo_plan
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.nn.layer import LayerContext


def windows() -> nn.Layer:
    """Odd sizes, even windows, dilation, strides, each padding; one mask of the field."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, padding_mode=("reflect", "circular")), nn.GELU(),
        nn.Conv2d(5, 6, 3, 2, 1, padding_mode="replicate"), nn.Tanh(),
        nn.Conv2d(6, 4, 5, padding=4, dilation=2), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(4, 3, 2),
    )  # fmt: skip


def sizes() -> nn.Layer:
    """Resolutions that fall and rise by factors that divide nothing."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"), nn.MaxPool2d(3, 2, 1), nn.InstanceNorm(4, affine=True),
        nn.AvgPool2d(2, 2, ceil_mode=True), nn.Upsample(scale_factor=3, mode="bilinear"),
        nn.ConvTranspose2d(4, 3, 3, 2, 1, 1), nn.Upsample(size=(31, 29), mode="bicubic"), nn.Conv2d(3, 3, 3, groups=3),
    )  # fmt: skip


def one_step() -> nn.Layer:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1))


def attentions() -> nn.Layer:
    """Each kind of attention, among patches, and a ConvNeXt block."""
    kinds = nn.NeighborhoodAttention(6, 3, 3, (True, False)), nn.GlobalAttention(6, 2), nn.PhysicsAttention(6, 2, 4)
    block = nn.ConvNeXtBlock(6, kernel_size=5, layer_scale=0.5, padding=("circular", "replicate"))
    return nn.Sequential(nn.Conv2d(2, 6, 2, 2), *map(nn.Residual, kinds), block, nn.ConvTranspose2d(6, 3, 2, 2))


MODELS: dict[str, tuple[Callable[[], nn.Layer], tuple[int, ...], list[tuple[int, ...]]]] = {
    "windows": (windows, (13, 17), [(1, 1), (1, 5), (2, 2)]),
    "sizes": (sizes, (19, 23), [(2, 2), (3, 1)]),
    "unet": (lambda: nn.UNet(2, 3, 2, 4, 2, ("reflect", "circular"), "batch", "tanh"), (24, 16), [(2, 2), (3, 1)]),
    "rollout": (lambda: nn.Sequential(nn.Rollout(one_step(), 3), nn.PointwiseConv(6, 3)), (6, 9), [(2, 1), (2, 2)]),
    "fno": (lambda: nn.FNO(2, 3, (4, 6), 6, 2), (9, 12), [(2, 2), (1, 5)]),
    "fno3": (lambda: nn.FNO(2, 3, (2, 4, 2), 4, 1), (4, 6, 5), [(2, 1, 2), (3, 1, 1)]),
    "unet1": (lambda: nn.UNet(2, 3, 1, 4, 3, "circular", None, "relu"), (40,), [(3,), (5,)]),
    "attention": (attentions, (14, 10), [(2, 2), (1, 5)]),
    "unet3": (
        lambda: nn.UNet(2, 3, 3, 2, 1, "replicate", "group", "silu", attention=2),
        (8, 6, 10),
        [(2, 1, 1), (2, 2, 2)],
    ),
}


def trained(name: str, loss: nn.Loss, grid: fsdpx.Grid | None = None, **more: Any) -> Any:
    """Return the loss of a step, the parameters, and the prediction of the whole field afterwards. grid None: on one
    rank that has the whole field. more: arguments of `as_distributed`."""
    make, shape, _ = MODELS[name]
    x = np.random.default_rng(1).standard_normal((2, *shape, 2))
    with make_trainer(make(), grid, loss=loss, **more) as trainer:
        if grid is None:
            x = np.moveaxis(x, -1, 1)
            target = np.moveaxis(wanted(trainer.predict(x).shape[2:]), -1, 1)
            return [trainer.step(x, target)], trainer.parameters(), np.moveaxis(trainer.predict(x), 1, -1)
        return train_on_parts(trainer, grid.take_local(x), wanted(trainer.output_grid.shape), 1)


def wanted(shape: Sequence[int]) -> np.ndarray:
    return np.sin(np.arange(6.0 * np.prod(shape))).reshape(2, *shape, 3)


@pytest.mark.parametrize("name", MODELS)
def test_parts_train_as_the_whole_does(name: str) -> None:
    """Even and uneven parts and two losses by turns: test_field_losses.py has all losses on both."""
    _, shape, grids = MODELS[name]
    loss = (nn.RelativeL2(), nn.MSELoss())[list(MODELS).index(name) % 2]
    cuts = by_turns(shape, grids)
    demand_like(trained(name, loss), lambda comm, *cut: trained(name, loss, grid_at(comm, *cut)), cuts)


@given(st.integers(1, 13), st.data())
def test_moves_between_ranks_are_adjoint(n: int, data: st.DataObject) -> None:
    """Any parts, also empty ones; halos over several parts; each kind of padding."""
    ranks = data.draw(st.integers(1, 4))
    cuts = (0, *sorted(data.draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1))), n)
    mode = data.draw(st.sampled_from(MODES))
    most = {"circular": n, "reflect": n - 1}.get(mode, 3)
    starts = [data.draw(st.integers(-most, n)) for _ in range(ranks)]
    needs = tuple((a, data.draw(st.integers(a, n + most))) for a in starts)
    reach, x = HaloSpec(2, cuts, needs, mode), np.random.default_rng(n).standard_normal((2, 1, n))

    def run(comm: Communicator) -> tuple[Any, ...]:
        env = LayerContext(np, OfLine(comm), Random(0))  # type: ignore[arg-type]
        mine = x[:, :, cuts[comm.rank] : cuts[comm.rank + 1]]
        y = exchange_halo(env, mine, (reach,))
        dy = np.random.default_rng(comm.rank).standard_normal(y.shape)
        return mine, y, dy, exchange_halo_backward(env, dy, (reach,))

    found = spawn(run, ranks)
    for rank, (_, y, _, _) in enumerate(found):
        at = np.arange(*needs[rank])
        full = {"circular": at % n, "replicate": np.clip(at, 0, n - 1)}.get(mode, at)
        if mode == "reflect":
            full = np.where(np.abs(at) >= n, 2 * (n - 1) - np.abs(at), np.abs(at))
        inside = (full >= 0) & (full < n)
        assert (y == np.where(inside, x[:, :, np.clip(full, 0, n - 1)], 0)).all(), (rank, reach)
    forward = sum(float((y * dy).sum()) for _, y, dy, _ in found)
    backward = sum(float((mine * dx).sum()) for mine, _, _, dx in found)
    assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


def test_what_is_as_large_as_the_input_is_cut_as_the_input() -> None:
    """12 rows over 2 ranks are 6, 3 and 2 or 1 on the levels of a U-Net: its result is 6 and 6 all the same."""

    def run(comm: Communicator) -> tuple[int, ...]:
        grid = fsdpx.Grid(comm, (6, 8), dims=(2, 1))
        trainer = nn.UNet(1, 1, 2, 4, 2).as_distributed(domain=grid)
        return tuple(trainer.predict(np.ones((6, 8, 1), np.float32)).shape)

    assert spawn(run, 2) == [(6, 8, 1)] * 2


@pytest.mark.parametrize("ghosts", [0, 1])
def test_backward_by_hand_gives_the_gradient_of_each_part(ghosts: int) -> None:
    """For a solver that is differentiated together with the model."""
    rng = np.random.default_rng(2)
    x, dy = rng.standard_normal((9 + 2 * ghosts, 7 + 2 * ghosts, 2)), rng.standard_normal((9, 7, 3))

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        grid = grid_at(comm, dims, cuts, ghosts=ghosts)
        net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1))
        trainer, mine = make_trainer(net, grid, loss=None), part_with_ghosts(x, grid, first=0)
        y = trainer.forward(mine)
        dx = trainer.backward(grid.take_local(dy))
        trainer.update()
        assert dx.shape == mine.shape
        return grid.all_gather(y), sum_over_ranks(grid, dx, ghosts, 0), trainer.parameters()

    demand_like_alone(run, (9, 7), uneven((9, 7), (2, 1), (2, 2)))


def test_the_same_grid_gives_the_same_bits() -> None:
    def run(comm: Communicator) -> tuple[list[float], str]:
        cells = (7, 9)[comm.rank // 2], (5, 7)[comm.rank % 2]
        grid = fsdpx.Grid(comm, cells, dims=(2, 2))
        net = nn.UNet(1, 1, 2, 4, 2, ("reflect", "circular"), "batch", "gelu")
        options = {"loss": nn.RelativeL2(), "optimizer": optim.AdamW(lr=1e-2), "clip_norm": 1.0}
        trainer = make_trainer(net, grid, precision=None, **options)
        u = np.random.default_rng(comm.rank).standard_normal((*cells, 1)).astype(np.float32)
        return [trainer.step(u, u) for _ in range(2)], trainer.inspect.compute_fingerprint()

    assert spawn(run, 4) == spawn(run, 4)


def test_what_only_chooses_values_has_the_same_bits_on_all_grids() -> None:
    """Maxima, nearest cells and functions of single cells; sums depend on who adds them, in their last bits."""
    cells = (13, 17)
    whole = np.random.default_rng(0).standard_normal((*cells, 2)).astype(np.float32)
    net = nn.Sequential(
        nn.MaxPool2d(3, 2, 1), nn.GELU(), nn.Upsample(size=(15, 11), mode="nearest"), nn.MaxPool2d(2, 1)
    )

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> np.ndarray:
        grid = grid_at(comm, dims, cuts)
        trainer = net.as_distributed(domain=grid)
        return trainer.output_grid.all_gather(trainer.predict(grid.take_local(whole)))

    demand_like_alone(run, cells, uneven(cells, (2, 1), (1, 5), (3, 2)), 0.0)


def test_cells_and_nothing_else_travel() -> None:
    """A convolution of 3 x 3 cells on a 2 x 2 grid: each rank gives a row in forward, then a column that is longer by
    the row it got and by the padding, and the gradients of as many cells back."""

    def run(comm: Communicator) -> int:
        grid = fsdpx.Grid(comm, (8, 6), dims=(2, 2))
        net = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1))
        trainer = make_trainer(net, grid)
        u = np.ones((8, 6, 3))
        trainer.step(u, u)
        counters = trainer.inspect.placement.axes.counters
        before = counters.table["domain", "send"].bytes
        trainer.step(u, u)
        return counters.table["domain", "send"].bytes - before

    halo = 3 * 8 * (6 + (8 + 1 + 1))  # channels, bytes, cells
    assert spawn(run, 4) == [halo * 3] * 4  # both convolutions forward, the second one backward: the first is data


def test_predictions_wait_for_neighbors_alone() -> None:
    """Beside a solver: once parts of a kind have been predicted, nothing is sent but cells, and no rank meets all."""

    def run(comm: Communicator) -> Any:
        grid = fsdpx.Grid(comm, (8, 6), dims=(3, 1))
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 3, 3, padding=1))
        trainer = net.as_distributed(domain=grid, comm=comm, strategy="ddp")
        u = np.full((8, 6, 3), comm.rank, np.float32)
        found = [trainer.predict(u)]
        counters = trainer.inspect.placement.axes.counters
        before = {key: (one.calls, one.bytes) for key, one in counters.table.items()}
        found.append(trainer.predict(u))
        after = {key: (one.calls, one.bytes) for key, one in counters.table.items()}
        moved = {key: (a - b, c - d) for key, (a, c) in after.items() for b, d in [before.get(key, (0, 0))] if a > b}
        return moved, np.array_equal(*found)

    for rank, (moved, same) in enumerate(spawn(run, 3)):
        many, row = (1, 2, 1)[rank], 6 * 4  # neighbors; bytes of a row of one channel
        assert set(moved) <= {("domain", "send"), ("domain", "recv")}
        assert moved["domain", "send"] == (2 * many, many * row * 7)  # channels of both layers
        assert same


def test_a_model_reads_several_fields() -> None:
    """Each as the solver holds it, with or without a dim of samples."""
    rng = np.random.default_rng(0)
    u, f = rng.standard_normal((2, 3, 8, 6, 2))
    net = nn.Graph({"flow": (nn.Conv2d(2, 2, 3, padding=1), "u"), "sum": (nn.Add(), "flow", "f")}, ("u", "f"), ("sum",))

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        grid = grid_at(comm, dims, cuts)
        trainer = make_trainer(net, grid)
        mine, forcing = grid.take_local(u), grid.take_local(f)
        losses = [trainer.step((mine, forcing), mine), trainer.step({"f": forcing[0], "u": mine[0]}, mine[0])]
        one = trainer.predict([mine[0].tolist(), forcing[0].tolist()])
        y = trainer.forward((mine[0], forcing[0]))
        slopes = trainer.backward(y)
        assert [a.shape for a in (one, y, *slopes)] == [mine[0].shape] * 4
        return losses, grid.all_gather(one), [grid.all_gather(slope) for slope in slopes]

    demand_like_alone(run, (8, 6), uneven((8, 6), (2, 2)))


def test_bytes_of_modes_do_not_depend_on_the_field() -> None:
    def run(comm: Communicator, n: int) -> int:
        grid = fsdpx.Grid(comm, (n, n), dims=(2, 1))
        trainer = make_trainer(nn.FNO(1, 1, (4, 4), 4, 2), grid, precision=None)
        u = np.ones((n, n, 1), np.float32)
        table = trainer.inspect.placement.axes.counters.table
        trainer.step(u, u)
        before = sum(count.bytes for count in table.values())
        trainer.step(u, u)
        return sum(count.bytes for count in table.values()) - before

    small, large = (spawn(lambda comm, n=n: run(comm, n), 2) for n in (8, 64))
    assert small == large


@pytest.mark.parametrize("layout", ["yxc", "cyx", "xyc", "yx"])
def test_arrays_are_as_the_solver_holds_them(layout: str) -> None:
    """And masks are arrays without channels, whatever the layout."""
    sizes, channels = {"y": 6, "x": 9, "c": 2}, 2 if "c" in layout else 1
    whole = np.random.default_rng(0).standard_normal([sizes[letter] for letter in layout])
    first, second = (sizes[letter] for letter in layout.replace("c", ""))
    mask = np.arange(54).reshape(first, second) % 5 > 0

    def run(comm: Communicator) -> list[bool]:
        grid = fsdpx.Grid(comm, ((2, first - 2)[comm.rank], second), dims=(2, 1), layout=layout)
        mine, here = grid.take_local(whole), grid.take_local(mask)
        trainer = nn.Conv2d(channels, channels, 1).as_distributed(domain=grid)
        assert trainer.predict(mine).shape == mine.shape
        assert trainer.predict(np.stack([mine] * 3)).shape == (3, *mine.shape)
        cut = np.array_equal(here, (mask[:2], mask[2:])[comm.rank])
        return [np.array_equal(grid.all_gather(mine), whole), cut, np.array_equal(grid.all_gather(here), mask)]

    assert spawn(run, 2) == [[True, True, True]] * 2


def test_a_layout_without_channels_has_room_for_one() -> None:
    def run(comm: Communicator, net: nn.Layer) -> None:
        grid = fsdpx.Grid(comm, (2, 3), dims=(2, 1), layout="yx")
        net.as_distributed(domain=grid).predict(np.ones((2, 3), np.float32))

    wanted = "the result has 3 channels, and the grid's layout 'yx' has room for one: put 'c' into it"
    for net in (nn.Conv2d(1, 3, 1), nn.Rollout(nn.Conv2d(1, 1, 1), 3)):
        assert demand_refused(lambda comm, net=net: run(comm, net), wanted) == [wanted] * 2


def test_fit_checkpoints_and_other_grids(tmp_path: Path) -> None:
    """A loader gives all ranks the same samples; training goes on at other grids, and without one, where it stopped."""
    whole = np.random.default_rng(0).standard_normal((4, 8, 12, 2))

    def run(comm: Communicator, dims: tuple[int, int] | None, load: bool, steps: int) -> list[float]:
        grid = None if dims is None else fsdpx.Grid(comm, (8 // dims[0], 12 // dims[1]), dims=dims)
        u = np.moveaxis(whole, -1, 1) if grid is None else grid.take_local(whole)
        options = {"clip_norm": 1.0, "recompute": "all", "microbatches": 2, "optimizer": optim.AdamW(lr=1e-2)}
        trainer = make_trainer(nn.UNet(2, 2, 2, 4, 1, "circular", "group"), grid, **options)
        if load:
            trainer.load(tmp_path / "saved")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that ranks have the same samples, or other ones, is as it should be
            loader = DataLoader([(a, a) for a in u], 4, comm=trainer.data_group)
            found = [x for _ in range(steps) for x in trainer.fit(loader, epochs=1, progress=False).losses]
        if not load and dims == (2, 2):
            trainer.save(tmp_path / "saved")
            with pytest.raises(ConfigError, match="a rank has parts of samples: return"):
                trainer.fit(loader, epochs=1, validation=loader, metrics={"m": lambda y, t: 0.0}, progress=False)
        return found

    begun = spawn(lambda comm: run(comm, (2, 2), False, 1), 4)[0]
    straight = spawn(lambda comm: run(comm, None, False, 3), 1)[0]
    for dims, ranks in (((1, 3), 3), (None, 1)):
        went_on = spawn(lambda comm, d=dims: run(comm, d, True, 2), ranks)[0]
        np.testing.assert_allclose([*begun, *went_on], straight, rtol=1e-9, err_msg=str(dims))


def grid_of(comm: Communicator, **more: Any) -> Any:
    return fsdpx.Grid(comm, (4, 6), dims=(1, 2), **more)


def on_grid(net: nn.Layer, **options: Any) -> Callable[[Communicator], Any]:
    return lambda comm: net.as_distributed(domain=grid_of(comm), **options)


def predict(comm: Communicator, *shape: int) -> Any:
    return nn.Conv2d(2, 2, 1).as_distributed(domain=grid_of(comm)).predict(np.zeros(shape))


SUM = nn.Graph({"sum": (nn.Add(), "u", "f")}, inputs=("u", "f"), outputs=("sum",))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: fsdpx.Grid(c, (4 + c.rank, 6), dims=(1, 2)), "along dim y rank 1 has 5 cells, and rank 0, next"),
        (lambda c: fsdpx.Grid(c, (4, 6), dims=(2, 2)), "rank 0: dims=(2, 2) are 4 ranks, the communicator has 2"),
        (lambda c: fsdpx.Grid(c, (4,), dims=(1, 2)), "rank 0: shape=(4,): give the cells of this rank's part"),
        (lambda c: fsdpx.Grid(c, (4, 6.5 if c.rank else 6), dims=(1, 2)), "rank 1: shape=(4, 6.5), dims=(1, 2)"),
        (lambda c: fsdpx.Grid(c, (4, 6), dims=(True, 2)), "rank 0: shape=(4, 6), dims=(True, 2), ghosts=0: True is no"),
        (lambda c: grid_of(c, periods="ab"), "periods='ab': say True or False for each dim"),
        (lambda c: fsdpx.Grid(c, (4, 6)), "rank 0: shape=(4, 6): give the cells of this rank's part along each of the"),
        (
            lambda c: predict(c, 4, 6 + c.rank, 2),
            "One value more along x is what a staggered field has, with values on the faces of cells: pass ",
        ),
        (lambda c: grid_of(c).all_gather(np.ones((4, 6 + c.rank, 1))), "along x is what a staggered field has"),
        (lambda c: grid_of(c).take_local(np.ones((5, 12))), "One value more along y is what a staggered field has"),
        (lambda c: grid_of(c, periods=True), "periods=True: 'bool' object is not iterable"),
        (lambda c: grid_of(c, ghosts=(1, "a")), "rank 0: shape=(4, 6), dims=(1, 2), ghosts="),
        (lambda c: fsdpx.Grid(None, (4, 6)), "Grid: None is not a communicator: pass one of mpi4py, such as comm.Crea"),
        (lambda c: grid_of(c, layout="ycc"), "layout='ycc': name each of the 2 dims by a"),
        (lambda c: grid_of(c, layout=("yxc", "cyx")[c.rank]), "rank 0 has layout 'yxc' on (1, 2) ranks, rank 1 'cyx'"),
        (
            on_grid(nn.Sequential(nn.Flatten(), nn.Linear(3, 2))),
            "'0' Flatten() reads a part of a field of 4 x 12 cells, but acts on each sample as a whole",
        ),
        (
            on_grid(nn.Residual(nn.Sequential(nn.Conv2d(1, 1, 3, 2, 1), nn.Upsample(scale_factor=3, mode="nearest")))),
            "which must have as many cells: along each dim take a multiple of the product of the strides before it",
        ),
        (
            lambda c: nn.UNet(1, 1, 2, 4, 2).as_distributed(comm=c, domain=fsdpx.Grid(c, (6, 8), dims=(1, 2))),
            "UNet(1, 1, width=4, depth=2): the input has 6 x 16 cells, and each size must be a multiple of 4 (2 to the "
            "power of depth=2): along dim y, level 2 has 3 cells, which cannot be halved",
        ),
        (on_grid(nn.Conv3d(1, 1, 3)), "has windows of 3 dims and reads a part of a field of 4 x 12 cells"),
        (
            on_grid(nn.Conv2d(1, 1, 11, padding=5, padding_mode="reflect")),
            "padding 5 of mode 'reflect' along dim y needs fields of at least 6 cells, got 4",
        ),
        (
            on_grid(nn.ReLU(), mesh=fsdpx.Mesh(tensor=2)),
            "domain: a tensor axis of 2 ranks splits matrices, but field layers have none to split; use these ranks as",
        ),
        (
            on_grid(nn.ReLU(), reproducible_chunks=2),
            "domain: reproducible_chunks=2 splits the batch by samples, but each rank has a part of every sample",
        ),
        (on_grid(nn.ReLU(), strategy="diloco"), "domain: strategy='diloco' lets replicas train independently"),
        (on_grid(nn.ReLU(), strategy="gossip"), "domain: strategy='gossip' lets ranks step at their own speed"),
        (lambda c: nn.ReLU().as_distributed(comm=c, domain="2x1"), "domain='2x1': give a fsdpx.Grid"),
        (lambda c: grid_of(c).take_local(np.ones((12, 4))), "an array of shape (12, 4) is not the whole field, which"),
        (lambda c: grid_of(c).all_gather(np.ones((4, 6 + c.rank, 1))), "(4, 7, 1) is not the part of rank 1, which"),
        (lambda c: grid_of(c).all_gather(np.ones(3)), "of shape (3,) is not the part of rank 0, which has {'y': 4"),
        (lambda c: grid_of(c).all_gather(np.ones((4, 6), "f4 f8".split()[c.rank])), "((4, 6), '<f4'), and rank 1 ((4,"),
        (
            lambda c: on_grid(SUM)(c).predict((np.zeros((4, 6, 2)), np.zeros((4, 5, 2)))),
            "input 'f' has shape (4, 5, 2), but this rank's part, in layout 'yxc', is (4, 6, channels)",
        ),
        (
            lambda c: predict(c, 5, 6, 2),
            "the input has shape (5, 6, 2), but this rank's part, in layout 'yxc', is (4, 6, channels)",
        ),
        (
            lambda c: predict(c, 4, 6, 2 + c.rank),
            "rank 1: layer '' Conv2d(2, 2, 1) does not fit: Conv2d(2, 2, 1) wants an input of shape (samples, 2, hei",
        ),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(call: Any, message: str) -> None:
    demand_refused(call, message)


def test_an_exchange_is_planned_once_for_each_shape_of_a_part() -> None:
    """What travels follows from who has which cells, and not from the values: a second call plans nothing."""

    def run(comm: Communicator) -> list[bool]:
        grid = fsdpx.Grid(comm, (8, 6), dims=(2, 1))
        model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.MaxPool2d(2, 1))
        trainer = model.as_distributed(domain=grid)
        made = []
        for samples in (2, 2, 3, 3, 2):
            trainer.predict(np.ones((samples, 8, 6, 2), np.float32))
            comm.barrier().wait()
            made.append(make_halo_plan.cache_info().misses)
            comm.barrier().wait()
        return [after > before for before, after in pairwise(made)]

    assert spawn(run, 2) == [[False, True, False, False]] * 2
