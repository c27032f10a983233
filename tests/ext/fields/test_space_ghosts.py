"""Arrays that bring the ghost cells of a solver: what lies there is the padding of the layers that read a field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from amount import few
from grids import Cuts, OfLine, by_turns, even, grid_at, part_with_ghosts, place_of
from hypothesis import assume, given
from hypothesis import strategies as st
from test_space import grid_of
from trainings import demand_like, demand_like_alone, demand_refused, make_trainer, train_on_parts

import fsdpx
from fsdpx import nn, spawn
from fsdpx.core.array.random import Random
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.mesh import make_single_rank_axes as alone_mesh
from fsdpx.errors import ConfigError
from fsdpx.ext.fields.ghost_cells import exchange_ghost_cells, exchange_ghost_cells_backward
from fsdpx.nn.container import list_input_names
from fsdpx.nn.layer import LayerContext
from fsdpx.nn.shard_specs import FieldPartition
from fsdpx.testing import assert_close

SHAPE, GHOSTS = (9, 11), (2, 1)
ENV = LayerContext(np, alone_mesh(), Random(0))


def tail(channels: int) -> list[nn.Layer]:
    """What reads a result of the first layer, by its own padding."""
    modes = ("replicate", "circular")
    return [nn.Tanh(), nn.Conv2d(channels, 3, 3, padding=1, padding_mode=modes), nn.GroupNorm(1, 3)]


FIRST: dict[str, Callable[[int], nn.Layer]] = {
    "as wide": lambda pad: nn.Conv2d(2, 4, (5, 3), padding=(2 * pad, pad)),
    "narrower": lambda pad: nn.Conv2d(2, 4, 3, padding=pad),
    "strided": lambda pad: nn.Conv2d(2, 4, (5, 3), 2, (2 * pad, pad)),
    "dilated": lambda pad: nn.Conv2d(2, 4, 3, padding=(2 * pad, pad), dilation=(2, 1)),
    "beyond the ghosts": lambda pad: nn.Conv2d(2, 4, (9, 6), padding=(2 * pad, pad)),
    "from beyond a neighbor": lambda pad: nn.Conv2d(2, 4, (4, 3), 2, (pad, pad), dilation=(3, 4)),
    "grouped": lambda pad: nn.Conv2d(2, 4, 3, padding=pad, groups=2),
    "behind cells": lambda pad: nn.Sequential(
        nn.Standardize((0.1, -0.2), (2.0, 0.5)), nn.Tanh(), nn.Conv2d(2, 4, 3, padding=pad)
    ),
}
NEEDS = dict.fromkeys(FIRST, (1, 1)) | dict.fromkeys(("as wide", "strided", "dilated", "beyond the ghosts"), (2, 1))


def padded(rows: int) -> np.ndarray:
    """A field with what lies beyond its ends, channels last."""
    return np.random.default_rng(5).standard_normal((rows, SHAPE[0] + 2 * GHOSTS[0], SHAPE[1] + 2 * GHOSTS[1], 2))


def wanted(shape: Sequence[int]) -> np.ndarray:
    return np.cos(np.arange(6.0 * np.prod(shape))).reshape(2, *shape, 3)


def train(net: nn.Layer, grid: fsdpx.Grid | None) -> Any:
    return make_trainer(net, grid, loss=nn.RelativeL2())


def alone(first: str) -> Any:
    """The first layer without padding on the padded field, by one process."""
    trainer = train(nn.Sequential(FIRST[first](0), *tail(4)), None)
    inside = [slice(g - n, -(g - n) or None) for g, n in zip(GHOSTS, NEEDS[first], strict=True)]
    x = np.moveaxis(padded(2)[:, *inside], -1, 1)
    target = np.moveaxis(wanted(trainer.predict(x).shape[2:]), -1, 1)
    return [trainer.step(x, target)], trainer.parameters(), np.moveaxis(trainer.predict(x), 1, -1)


@pytest.mark.parametrize("first", few(list(FIRST), 8))
def test_ghost_cells_are_the_padding(first: str) -> None:
    """On even parts and on uneven ones by turns."""

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        grid = grid_at(comm, dims, cuts, ghosts=GHOSTS)
        trainer = train(nn.Sequential(FIRST[first](1), *tail(4)), grid)
        return train_on_parts(trainer, part_with_ghosts(padded(2), grid, first=1), wanted(trainer.output_grid.shape), 1)

    number = list(FIRST).index(first)
    grids = (2, 2), ((1, 1), (1, 3), (3, 1))[number % 3]
    demand_like(alone(first), run, by_turns(SHAPE, grids, number))


def test_what_acts_on_cells_keeps_ghost_cells_to_itself() -> None:
    """As a model, before a sum with what has none, and behind a layer that reads none."""
    x = np.random.default_rng(0).standard_normal((6, 7, 2))
    inside, tanh = x[1:-1, 1:-1], nn.Tanh()
    same = nn.Conv2d(2, 2, 3, padding=1, bias=False)
    both = nn.Graph({"t": (tanh, "x"), "m": (nn.MaxPool2d(1), "x"), "s": (nn.Add(), "t", "m")}, outputs="s")
    nets: list[tuple[nn.Layer, Any]] = [
        (tanh, np.tanh(inside)),
        (nn.Sequential(tanh, nn.Scale(2.0)), 2 * np.tanh(inside)),
        (nn.Sequential(nn.MaxPool2d(1), tanh), np.tanh(inside)),
        (both, np.tanh(inside) + inside),
        (nn.Sequential(tanh, nn.Residual(same)), None),
    ]

    def run(comm: Communicator, net: nn.Layer) -> Any:
        rows = slice(0, 4) if comm.rank == 0 else slice(2, 6)
        grid = fsdpx.Grid(comm, (2, 5), dims=(2, 1), ghosts=1)
        trainer = train(net, grid)
        trainer.step(x[rows], trainer.predict(x[rows]) + 1.0)
        return grid.all_gather(trainer.predict(x[rows])), trainer.parameters()

    for net, want in nets:
        found, parameters = spawn(lambda comm, net=net: run(comm, net), 2)[0]
        if want is None:  # the sum of the part and of what is made of it with its ghost cells
            y = np.moveaxis(np.tanh(x), -1, 0)[None]
            plain = nn.Conv2d(2, 2, 3, bias=False).forward(ENV, {"weight": next(iter(parameters.values()))}, y)[0]
            want = np.tanh(inside) + np.moveaxis(plain[0], 0, -1)
        assert_close({type(net).__name__: found}, {type(net).__name__: want}, 1e-12)


def test_no_cell_travels_for_the_first_layer() -> None:
    def run(comm: Communicator) -> tuple[int, tuple[int, ...]]:
        grid = fsdpx.Grid(comm, (4, 6), dims=(2, 2), ghosts=1)
        trainer = make_trainer(CONV, grid, precision=None)
        u = np.ones((6, 8, 1), np.float32)
        trainer.step(u, u)  # a target may bring ghost cells as well
        trainer.step(u, u[1:-1, 1:-1])
        table = trainer.inspect.placement.axes.counters.table
        return sum(count.calls for key, count in table.items() if key[0] == "domain"), trainer.predict(u).shape

    assert spawn(run, 4) == [(0, (4, 6, 1))] * 4


def test_layers_that_read_no_ghost_cells_are_given_the_part_alone() -> None:
    def run(comm: Communicator, ghosts: int) -> Any:
        grid = fsdpx.Grid(comm, (3, 5), dims=(2, 1), ghosts=ghosts)
        trainer = make_trainer(nn.Sequential(nn.FNO(1, 2, (2, 2), 4, 1), nn.Tanh()), grid, precision=None)
        u = np.random.default_rng(comm.rank).standard_normal((3, 5, 1)).astype(np.float32)
        u = np.pad(u, ((ghosts, ghosts), (ghosts, ghosts), (0, 0)), constant_values=np.nan)
        return trainer.step(u, np.ones((3, 5, 2), np.float32)), trainer.predict(u).tolist()

    assert spawn(lambda comm: run(comm, 2), 2) == spawn(lambda comm: run(comm, 0), 2)


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_ghost_cells_replace_a_padding_that_does_not_fit(mode: str) -> None:
    """A field of fewer cells than the padding takes, on one rank and on two."""
    u = np.random.default_rng(0).standard_normal((2 + 6, 4 + 6, 1))

    def run(comm: Communicator) -> Any:
        rows = 2 // comm.size
        grid = fsdpx.Grid(comm, (rows, 4), dims=(comm.size, 1), ghosts=3)
        trainer = train(nn.Sequential(nn.Conv2d(1, 1, 7, padding=3, padding_mode=mode), nn.Tanh()), grid)
        mine = u[rows * comm.rank :][: rows + 6]
        trainer.step(mine, np.ones((rows, 4, 1)))
        return grid.all_gather(trainer.predict(mine)), trainer.parameters()

    found, p = spawn(run, 1)[0]
    conv, _ = nn.Conv2d(1, 1, 7).forward(ENV, {name[2:]: a for name, a in p.items()}, u[None, None, ..., 0])
    assert_close({"y": found}, {"y": np.tanh(conv[0, 0])[..., None]}, 1e-12)
    for other, _ in spawn(run, 2):
        assert_close({"y": other}, {"y": found}, 1e-9)


@pytest.mark.parametrize("periods", [(False, True), (True, True), (False, False)])
def test_a_rollout_fills_ghost_cells_between_steps(periods: tuple[bool, bool]) -> None:
    """Beyond walls they stay as they were; across ends of a periodic dim, and between ranks, they are the newest."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1))
    y = np.random.default_rng(1).standard_normal((1, *SHAPE, 3))
    state = field_with_ghosts(1, 1, periods)

    def by_hand() -> np.ndarray:
        step = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 1, 1)).as_distributed(precision="float64")
        at, found = state, []
        for _ in range(3):
            new = np.moveaxis(step.predict(np.moveaxis(at, -1, 1)), 1, -1)
            found.append(new)
            at = with_neighbors(state, new, periods)
        return np.concatenate(found, -1)

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        grid = grid_at(comm, dims, cuts, ghosts=1, periods=periods)
        trainer = train(nn.Rollout(net, 3), grid)
        x = part_with_ghosts(state, grid, first=1)
        predicted = grid.all_gather(trainer.predict(x))
        return predicted, trainer.step(x, grid.take_local(y)), trainer.parameters()

    predicted, *_ = demand_like_alone(run, SHAPE, by_turns(SHAPE, ((3, 1), (2, 2)), sum(periods)))
    assert_close(predicted, by_hand(), 1e-10)


def field_with_ghosts(samples: int, channels: int, periods: Sequence[bool]) -> np.ndarray:
    """Random values, also in the ghost cells beyond walls; other ghost cells have those of the field."""
    values = np.random.default_rng(0).standard_normal((samples, SHAPE[0] + 2, SHAPE[1] + 2, channels))
    return with_neighbors(values, values[:, 1:-1, 1:-1], periods)


def with_neighbors(ghosts: np.ndarray, field: np.ndarray, periods: Sequence[bool]) -> np.ndarray:
    """The field with a ghost cell on each side: across the ends of periodic dims its own, and else those given."""
    rows, columns = (slice(None) if p else slice(1, -1) for p in periods)
    state = ghosts.copy()
    state[:, rows, columns] = np.pad(field, ((0, 0), (1, 1), (1, 1), (0, 0)), "wrap")[:, rows, columns]
    return state


@given(st.integers(1, 9), st.data())
def test_filling_is_adjoint(n: int, data: st.DataObject) -> None:
    """Any parts, also empty ones, and ghost cells of several parts."""
    ranks, periodic = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    side = st.integers(0, n)
    cuts = (0, *sorted(data.draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1))), n)
    sides = tuple(data.draw(st.lists(st.tuples(side, side), min_size=ranks, max_size=ranks)))
    parts = FieldPartition((cuts,), (sides,), (periodic,))

    def run(comm: Communicator) -> float:
        env, rng = LayerContext(np, OfLine(comm), Random(0)), np.random.default_rng(comm.rank)  # type: ignore[arg-type]
        size = cuts[comm.rank + 1] - cuts[comm.rank]
        wide = size + sum(sides[comm.rank])
        y, first, dstate = (rng.standard_normal((1, 2, k)) for k in (size, wide, wide))
        state, dfirst = exchange_ghost_cells(env, y, first, parts), np.zeros_like(first)
        forward = float((state * dstate).sum())
        dy = exchange_ghost_cells_backward(env, dstate, dfirst, parts)
        return forward - float((y * dy).sum()) - float((first * dfirst).sum())

    assert sum(spawn(run, ranks)) == pytest.approx(0, abs=1e-12)


@given(st.data())
def test_windows_reach_beyond_the_ghost_cells_of_a_part(data: st.DataObject) -> None:
    """What they reach inside the field comes from its owners, and beyond it from the ghost cells that some rank
    brings; on an end without any, the layer pads."""
    draw = data.draw
    ranks, n, kernel, stride, dilation = (draw(st.integers(*ends)) for ends in ((1, 4), (1, 9), (1, 6), (1, 3), (1, 3)))
    padding = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    ends = [draw(st.sampled_from([0, pad, pad + 1])) for pad in padding]
    assume(n + sum(padding) > dilation * (kernel - 1))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1))), n]
    sides = [
        (draw(st.integers(0, min(a + ends[0], 3))), draw(st.integers(0, min(n - b + ends[1], 3))))
        for a, b in pairwise(cuts)
    ]
    sides[0] = ends[0], sides[0][1]
    sides[-1] = sides[-1][0], ends[1]
    field = np.random.default_rng(n).standard_normal((ends[0] + n + ends[1], 3, 1))
    out = (n + sum(padding) - dilation * (kernel - 1) - 1) // stride + 1

    def run(comm: Communicator) -> Any:
        (a, b), (low, high) = cuts[comm.rank : comm.rank + 2], sides[comm.rank]
        grid = fsdpx.Grid(comm, (b - a, 3), dims=(ranks, 1), ghosts=((low, high), 0))
        net = nn.Conv2d(1, 2, (kernel, 3), (stride, 1), (padding, (1, 1)), (dilation, 1))
        trainer = train(net, grid)
        y = trainer.forward(field[ends[0] + a - low : ends[0] + b + high])
        trainer.backward(trainer.output_grid.take_local(dy))
        return {"y": trainer.output_grid.all_gather(y)} | trainer.gradients(), trainer.parameters()

    dy = np.random.default_rng(out).standard_normal((out, 3, 2))
    results = spawn(run, ranks)
    pads = [0 if end else pad for pad, end in zip(padding, ends, strict=True)]
    start, stop = (end - pad if end else 0 for pad, end in zip(padding, ends, strict=True))
    x = np.pad(field[start : len(field) - stop], (pads, (0, 0), (0, 0)))
    net, p = nn.Conv2d(1, 2, (kernel, 3), (stride, 1), ((0, 0), (1, 1)), (dilation, 1)), results[0][1]
    y, saved = net.forward(ENV, p, np.moveaxis(x, -1, 0)[None])
    g = {name: np.zeros_like(a) for name, a in p.items()}
    net.backward(ENV, p, g, saved, np.moveaxis(dy, -1, 0)[None])
    for found, _ in results:
        assert_close(found, {"y": np.moveaxis(y[0], 0, -1)} | g, 1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: nn.Conv2d(1, 1, 5, padding=2).as_distributed(comm=c, domain=grid_of(c, ghosts=1)),
            "windows reach 2 cells beyond the field along dim y, and arrays have ghosts=1 there: give the grid more",
        ),
        (lambda c: grid_of(c, ghosts=(1, -1)), "rank 0: ghosts=(1, -1): give the cells beyond each side along each of"),
        (
            lambda c: grid_of(c, ghosts=((1, c.rank), 1)),
            "along dim y rank 1 has 1 ghost cells before and 1 after, and rank 0, next to it, 1 ghost cel",
        ),
        (
            lambda c: nn.Conv2d(1, 1, 5, padding=2).as_distributed(comm=c, domain=grid_of(c, ghosts=(0, (0, c.rank)))),
            "windows reach 2 cells beyond the field along dim x, and arrays have ghosts=1 there: give the grid more",
        ),
        (
            lambda c: nn.ReLU().as_distributed(comm=c, domain=grid_of(c, ghosts=1)).predict(np.ones((4, 6, 1))),
            "the input has shape (4, 6, 1), but this rank's part, with ghost cells, in layout 'yxc', is (6, 8, chan",
        ),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(call: Any, message: str) -> None:
    demand_refused(call, message)


SIDES = ["none at walls", "low alone", "none in the middle"]
WALLS = ["zeros", "reflect", "replicate", "circular"]


@pytest.mark.parametrize("mode", WALLS)
@pytest.mark.parametrize("kind", SIDES)
def test_sides_without_ghost_cells_are_as_without_a_solver(kind: str, mode: str) -> None:
    """If a rank passes ghost cells only next to neighbors, results and gradients equal those of the whole field:
    missing cells come from their owners, and walls get the layer's padding. Each kind and each mode has other grids,
    with even and uneven parts by turns."""
    turn, number = SIDES.index(kind), WALLS.index(mode)
    dims = ((3, 1), (1, 3), (2, 2), (3, 2))[(turn + number) % 4]
    uneven = (0, 2, 5, 9)[: dims[0]] + (9,), (0, 3, 4, 11)[: dims[1]] + (11,)
    cuts = uneven if (turn + number // 2) % 2 else even(SHAPE, dims)
    field = np.random.default_rng(0).standard_normal((2, *SHAPE, 2))
    net = nn.Sequential(nn.Conv2d(2, 4, (5, 3), padding=(2, 1), padding_mode=mode), *tail(4))

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        grid = grid_at(comm, dims, cuts, ghosts=sides_of(kind, comm.rank, dims, GHOSTS))
        return train_on_parts(train(net, grid), part_with_ghosts(field, grid, 0, 1), wanted(SHAPE), 1)

    demand_like_alone(run, SHAPE, [(dims, cuts)])


def sides_of(kind: str, rank: int, dims: Sequence[int], ghosts: Sequence[int]) -> list[tuple[int, int]]:
    """The ghost cells of a rank along each dim, all of them cells of neighbors."""
    found = []
    for place, d, g in zip(place_of(rank, dims), dims, ghosts, strict=True):
        inner = g * (place > 0), g * (place < d - 1)
        of_kind = {"none at walls": inner, "low alone": (inner[0], 0), "none in the middle": inner if place else (0, 0)}
        found.append(of_kind[kind])
    return found


def test_a_rollout_has_ghost_cells_between_ranks_alone() -> None:
    """None at walls, as PETSc has them: each step pads there, and later states have those of their neighbors."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, padding_mode="replicate"), nn.Tanh(), nn.Conv2d(4, 1, 1))
    whole = np.random.default_rng(0).standard_normal((1, *SHAPE, 1))
    y = np.random.default_rng(1).standard_normal((1, *SHAPE, 3))

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        grid = grid_at(comm, dims, cuts, ghosts=sides_of("none at walls", comm.rank, dims, (1, 1)))
        return train_on_parts(train(nn.Rollout(net, 3), grid), part_with_ghosts(whole, grid, 0, 1), y, 1)

    demand_like_alone(run, SHAPE, [((3, 2), even(SHAPE, (3, 2)))])


def combine(layer: nn.Layer, *before: nn.Layer | None, after: nn.Layer | None = None) -> nn.Graph:
    """Combine the inputs u and f, each after a layer, and then run another layer."""
    nodes: dict[str, Any] = {f"of {name}": (one, name) for name, one in zip("uf", before, strict=False) if one}
    sources = [f"of {name}" if f"of {name}" in nodes else name for name in "uf"]
    channels = 2 if isinstance(layer, nn.Concat) else 1
    nodes |= {"both": (layer, *sources), "out": (after or nn.Conv2d(channels, 1, 3, padding=1), "both")}
    return nn.Graph(nodes, inputs=("u", "f"), outputs=("out",))


CONV = nn.Conv2d(1, 1, 3, padding=1)
SUM = nn.Lambda(np.add, (lambda a, b: 1.0, lambda a, b: 1.0))


def with_scalars(layer: nn.Layer, channels: int) -> nn.Graph:
    """Combine u and scalars into `channels` channels, and read the result and f by one convolution."""
    nodes: dict[str, Any] = {"v": (layer, "u", "s"), "both": (nn.Concat(1), "v", "f")}
    nodes |= {"out": (nn.Conv2d(channels + 1, 1, 3, padding=1), "both")}
    return nn.Graph(nodes, inputs=("u", "f", "s"), outputs=("out",))


@pytest.mark.parametrize(
    ("model", "widths", "ignored"),
    [
        (combine(nn.Concat(1)), (1, 0), "u"),
        (combine(nn.Concat(1)), (0, 1), "f"),
        (combine(nn.Concat(1)), (1, 2), "u"),
        (combine(nn.Add()), (1, 0), "u"),
        (combine(nn.Multiply()), (1, 0), "u"),
        (combine(SUM), (1, 0), "u"),
        (combine(nn.Concat(1), nn.Tanh(), nn.ChannelLayerNorm(1)), (1, 0), "u"),
        (combine(nn.Concat(1), nn.Standardize((0.0,), (1.0,))), (1, 0), "u"),
        (combine(nn.Concat(1), None, nn.Destandardize((0.0,), (1.0,))), (0, 1), "f"),
        (with_scalars(nn.ConcatScalars(), 3), (1, 0), "u"),
        (with_scalars(nn.ScaleShift(), 1), (1, 0), "u"),
        (combine(nn.Concat(1), None, CONV), (1, 1), "u"),  # only the ghost cells of f are read
        (nn.Rollout(combine(nn.Add()), 2), (1, 0), "u"),
        (combine(nn.Add(), after=nn.TimeDistributed(CONV, 1)), (1, 0), "u"),
        (combine(nn.Add(), after=nn.MaxPool2d(3, 1, 1)), (1, 0), "u"),
    ],
)  # fmt: skip
def test_ghost_cells_that_only_some_of_the_combined_fields_have(
    model: nn.Layer, widths: tuple[int, int], ignored: str
) -> None:
    with pytest.raises(ConfigError, match=f"the ghost cells of input '{ignored}' would be ignored: .* combines it"):
        model.as_distributed(domain=domain_with_ghosts(widths))


@pytest.mark.parametrize(
    ("model", "widths", "read"),
    [
        (combine(nn.Concat(1)), (1, 1), "uf"),
        (combine(nn.Concat(1), nn.Standardize((0.1,), (2.0,))), (1, 1), "uf"),
        (combine(nn.Concat(1), None, nn.Destandardize((0.1,), (2.0,))), (1, 1), "uf"),
        (with_scalars(nn.ConcatScalars(), 3), (1, 1), "uf"),
        (with_scalars(nn.ScaleShift(), 1), (1, 1), "uf"),
        (combine(nn.Concat(1), CONV, CONV), (1, 1), "uf"),
        (combine(nn.Concat(1), CONV, CONV), (1, 0), "u"),
        (combine(nn.Concat(1), nn.Dropout(0.3), nn.Dropout2d(0.3)), (1, 1), "uf"),
        (combine(nn.Add(), after=nn.Tanh()), (1, 0), ""),
        (combine(nn.Add(), after=nn.Conv2d(1, 1, 1)), (1, 0), ""),
        (combine(nn.Add(), after=nn.Sequential(nn.GroupNorm(1, 1), nn.Conv2d(1, 1, 1))), (1, 1), ""),
        (combine(nn.Add(), CONV, nn.MaxPool2d(1)), (1, 0), "u"),
        (nn.Rollout(combine(nn.Add()), 2), (1, 1), "uf"),
        (nn.Rollout(combine(nn.Add(), after=nn.Tanh()), 2), (1, 0), ""),
        (combine(nn.Add(), after=nn.TimeDistributed(CONV, 1)), (1, 1), "uf"),
        (combine(nn.Add(), after=nn.TimeDistributed(nn.Tanh(), 1)), (1, 0), ""),
        (nn.Graph({"r": (nn.Residual(CONV), "u"), "o": (nn.Add(), "r", "f")}, ("u", "f"), ("o",)), (1, 1), "u"),
        (nn.Graph({"r": (nn.Residual(CONV), "u"), "o": (CONV, "r"), "p": (nn.Add(), "o", "f")}, ("u", "f"), ("p",)),
         (1, 0), "u"),
    ],
)  # fmt: skip
def test_predictions_change_with_the_ghost_cells_that_are_read(
    model: nn.Layer, widths: tuple[int, int], read: str
) -> None:
    """And with no others."""
    trainer, rng = model.as_distributed(domain=domain_with_ghosts(widths)), np.random.default_rng(0)
    inputs = [rng.standard_normal((1, 8 + 2 * width, 6 + 2 * width)) for width in widths]
    inputs += [rng.standard_normal(2)] * (len(list_input_names(model)) - 2)
    y = trainer.predict(tuple(inputs))
    assert y.shape[1:] == (8, 6)
    for i, (name, width) in enumerate(zip("uf", widths, strict=True)):
        if width:
            changed = inputs[i].copy()
            changed[:, 0] += 3.0
            found = trainer.predict((*inputs[:i], changed, *inputs[i + 1 :]))
            assert (found != y).any() == (name in read), name


@pytest.mark.parametrize(
    "layer",
    [
        nn.GroupNorm(1, 1), nn.InstanceNorm(1), nn.BatchNorm(1), nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 3),
        nn.MaxPool2d(1), nn.AvgPool2d(2), nn.FacesToCells(0, faces="low"), nn.CellsToFaces(1), nn.FieldLaplacian(),
        nn.Upsample(scale_factor=2), nn.Mask(np.ones((8, 6))), nn.StaticChannels(np.ones((1, 8, 6))),
        nn.Rollout(nn.Tanh(), 1), nn.TimeDistributed(nn.Tanh(), 1), nn.Residual(nn.GroupNorm(1, 1)),
        nn.Sequential(nn.Dropout(0.1), nn.MaxPool2d(1), nn.Tanh()),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_ghost_cells_that_a_layer_drops_before_a_convolution_pads(layer: nn.Layer) -> None:
    message = "the ghost cells of input 'x' would be ignored: .* (drops them|combines it).*pads the result along dim y"
    domain = fsdpx.Grid.from_shape((8, 6), (1, 1), ghosts=1, layout="cyx")
    for after in (CONV, nn.Sequential(nn.Tanh(), CONV), nn.TimeDistributed(CONV, 1)):
        with pytest.raises(ConfigError, match=message):
            nn.Sequential(layer, after).as_distributed(domain=domain)
    nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), layer, CONV).as_distributed(domain=domain)
    nn.Sequential(layer, nn.Conv2d(1, 1, 3)).as_distributed(domain=domain)  # it pads nothing


@pytest.mark.parametrize(
    ("layer", "ends"),
    [
        (nn.MaxPool2d(3, 1, 1), "both"),
        (nn.AvgPool2d((3, 1), 1, (1, 0)), "both"),
        (nn.MaxPool2d(3, 1), "none"),  # it pads nothing
        (nn.ConvTranspose2d(1, 1, 3, padding=1), "both"),
        (nn.ConvTranspose2d(1, 1, 4, stride=2, padding=1), "both"),
        (nn.ConvTranspose2d(1, 1, 3), "both"),  # the outputs at the ends read zeros beyond them
        (nn.ConvTranspose2d(1, 1, 2, stride=2), "none"),  # its windows do not overlap
        (nn.ConvTranspose2d(1, 1, 3, stride=2, padding=1), "none"),
        (nn.ConvTranspose2d(1, 1, 3, stride=2, padding=1, output_padding=1), "upper"),
    ],
    ids=repr,
)
def test_ghost_cells_that_pools_and_transposed_convolutions_would_replace(layer: nn.Layer, ends: str) -> None:
    """The ghost cells are ignored exactly if the result depends on cells beyond the ends."""
    x = np.zeros((1, 1, 10, 6))
    x[:, :, [0, -1]] = 9.0  # the cells beyond the ends
    whole = layer.as_distributed(precision="float64", seed=1)
    inside, outside = whole.predict(x[:, :, 1:-1]), whole.predict(x)
    shift = (outside.shape[2] - inside.shape[2]) // 2
    changed = (outside[:, :, shift : shift + inside.shape[2]] != inside).any((0, 1, 3))
    assert [changed[:1].any(), changed[-1:].any()] == {"none": [0, 0], "both": [1, 1], "upper": [0, 1]}[ends]
    for side in (0, 1):
        widths = ((1, 0), (0, 1))[side]
        domain = fsdpx.Grid.from_shape((8, 6), (1, 1), ghosts=(widths, (0, 0)), layout="cyx")
        for model in (layer, nn.Sequential(nn.Conv2d(1, 1, 1), layer)):
            if ends == "both" or (ends == "upper" and side == 1):
                with pytest.raises(ConfigError, match=r"would be ignored: .* drops them.*pads the result along dim y"):
                    model.as_distributed(domain=domain)
            else:
                model.as_distributed(domain=domain)
        nn.Sequential(CONV, layer).as_distributed(domain=domain)


def test_patches_with_wider_kernels_read_ghost_cells() -> None:
    domain, x = fsdpx.Grid.from_shape((8, 6), (1, 1), ghosts=1, layout="cyx"), np.zeros((1, 10, 8))
    with pytest.raises(ConfigError, match=r"for patches, kernel_size=stride \+ 2 and padding=1"):
        nn.Sequential(nn.Conv2d(1, 1, 2, stride=2), CONV).as_distributed(domain=domain)
    net = nn.Sequential(nn.Conv2d(1, 1, 4, stride=2, padding=1), CONV)
    trainer = net.as_distributed(domain=domain)
    y = trainer.predict(x)
    x[:, 0] = 3.0
    assert y.shape[1:] == (4, 3)
    assert (trainer.predict(x) != y).any()


@pytest.mark.parametrize(
    ("kernel", "padding", "dim"), [((1, 3), (0, 1), "y"), ((3, 1), (1, 0), "x"), ((2, 3), ((1, 0), (1, 1)), "y")]
)
def test_each_end_of_the_field_counts(kernel: tuple[int, int], padding: Any, dim: str) -> None:
    """A convolution reads no ghost cells along a dim, or beyond an end, that it does not pad."""
    net = nn.Sequential(nn.Conv2d(1, 1, kernel, padding=padding), CONV)
    message = rf"the ghost cells of input 'x' would be .*'0' Conv2d.* drops them, and '1' .* along dim {dim}: apply"
    with pytest.raises(ConfigError, match=message):
        net.as_distributed(domain=fsdpx.Grid.from_shape((8, 6), (1, 1), ghosts=1, layout="cyx"))


def test_ghost_cells_may_be_dropped_if_they_are_cells_of_the_field() -> None:
    """Inside the field, and beyond the ends of periodic dims that later layers pad with the same cells."""
    whole = np.random.default_rng(0).standard_normal((8, 6, 1))
    net = nn.Sequential(nn.GroupNorm(1, 1), nn.Conv2d(1, 1, 3, padding=1, padding_mode=("circular", "zeros")))

    def run(comm: Communicator, ghosts: int) -> Any:
        sides = (ghosts, (0, 0))
        grid = fsdpx.Grid(comm, (4, 6), dims=(2, 1), ghosts=sides, periods=(True, False))
        rows = np.arange(4 * comm.rank - ghosts, 4 * comm.rank + 4 + ghosts) % 8
        trainer = train(net, grid)
        trainer.step(whole[rows], np.ones((4, 6, 1)))
        return trainer.predict(whole[rows]).tolist()

    assert spawn(lambda comm: run(comm, 1), 2) == spawn(lambda comm: run(comm, 0), 2)

    def faces(comm: Communicator) -> None:
        grid = fsdpx.Grid(comm, (4, 6), dims=(2, 1), layout="cyx")
        both = grid.faces("y", shared=True)
        trainer = train(nn.Sequential(nn.FacesToCells(0), CONV), both)
        assert trainer.predict(np.ones((1, 5, 6))).shape == (1, 4, 6)

    spawn(faces, 2)
    grid = fsdpx.Grid.from_shape((8, 6), (1, 1), ghosts=1, layout="cyx", periods=(True, True))
    with pytest.raises(ConfigError, match="would be ignored"):
        nn.Sequential(nn.GroupNorm(1, 1), CONV).as_distributed(domain=grid)


@pytest.mark.parametrize("periods", [(False, False), (True, False), (True, True)])
def test_dropout_keeps_ghost_cells_with_the_mask_of_their_owners(periods: tuple[bool, bool]) -> None:
    """Each ghost cell beyond a wall has one mask on all ranks that hold it."""
    drop = nn.Sequential(nn.Dropout(0.4), nn.Tanh())
    net = nn.Sequential(drop, nn.Conv2d(2, 3, 3, padding=1))
    field = field_with_ghosts(2, 2, periods)

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        grid = grid_at(comm, dims, cuts, ghosts=1, periods=periods)
        return train_on_parts(train(net, grid), part_with_ghosts(field, grid, first=1), wanted(SHAPE))

    losses, *_ = demand_like_alone(run, SHAPE, by_turns(SHAPE, ((1, 3), (2, 2)), sum(periods)))
    if all(periods):  # without ghost cells, circular padding reads the same cells
        circular = nn.Sequential(drop, nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"))
        trainer = train(circular, fsdpx.Grid.from_shape(SHAPE, (1, 1)))
        found = [trainer.step(field[:, 1:-1, 1:-1], wanted(SHAPE)) for _ in range(2)]
        np.testing.assert_allclose(found, losses, rtol=1e-11)


def test_a_rollout_reads_ghost_cells_of_boundary_values() -> None:
    """Another layer may then drop these ghost cells."""
    nodes: dict[str, Any] = {"r": (nn.Rollout(CONV, 2, boundary=True), "u", "b"), "both": (nn.Concat(1), "b", "f")}
    nodes |= {"read": (nn.Conv2d(3, 2, 3, padding=1), "both"), "out": (nn.Add(), "r", "read")}
    model = nn.Graph(nodes, inputs=("u", "b", "f"), outputs=("out",))
    trainer = model.as_distributed(domain=domain_with_ghosts((1, 1, 0)))
    u, b, f = (np.random.default_rng(0).standard_normal(shape) for shape in ((1, 10, 8), (2, 10, 8), (1, 8, 6)))
    y = trainer.predict((u, b, f))
    b[:, 0] += 3.0
    assert (trainer.predict((u, b, f)) != y).any()


def domain_with_ghosts(widths: tuple[int, ...]) -> fsdpx.Grid:
    grids = [fsdpx.Grid.from_shape((8, 6), (1, 1), ghosts=width, layout="cyx") for width in widths]
    return grids[0].with_inputs(*grids)


@pytest.mark.parametrize("widths", [(1, 0), (0, 1), (1, 2)])
def test_a_model_inside_another_reads_the_ghost_cells_of_each_input(widths: tuple[int, int]) -> None:
    nodes: dict[str, Any] = {"a": (CONV, "u"), "b": (CONV, "f"), "sum": (nn.Add(), "a", "b")}
    inner = nn.Graph(nodes, inputs=("u", "f"), outputs=("sum",))
    outer = nn.Graph({"net": (inner, "u", "f")}, inputs=("u", "f"), outputs=("net",))
    one, two = (model.as_distributed(domain=domain_with_ghosts(widths)) for model in (inner, outer))
    two.load_parameters({f"net.{name}": value for name, value in one.parameters().items()})
    x = tuple(np.random.default_rng(w).standard_normal((1, 8 + 2 * w, 6 + 2 * w)) for w in widths)
    np.testing.assert_array_equal(two.predict(x), one.predict(x))
