"""Rollouts whose state consists of several fields, each on its own grid: equal to PyTorch, and on any partition."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import Cuts, cuts_of, env_of, even, grid_at, part_with_ghosts, sum_over_ranks
from layers_on_parts import demand_like_torch
from ranks import from_rank_0
from trainings import demand_error, demand_like, demand_like_alone, make_trainer

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.data import DataLoader, FieldDataset
from fsdpx.errors import ConfigError, DataError
from fsdpx.testing import assert_close

SHAPE, ROWS, STEPS, STATES = (7, 9), 2, 3, 2
RNG = np.random.default_rng(0)


def shapes_of(periodic: bool) -> tuple[tuple[int, int], ...]:
    """Cells of u on the faces across x, of v on the faces across y, of p, and of the wind."""
    ny, nx = SHAPE
    return (ny, nx + 1), (ny + (not periodic), nx), (ny, nx), (ny, nx)


WALLS = [np.random.default_rng(5).standard_normal((ROWS, STEPS, ny + 2, nx + 2)) for ny, nx in shapes_of(True)[:3]]


def arrays_of(periodic: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs u, v, p with a constant, wind of each step, dt of each step; and later states."""
    rng, channels = np.random.default_rng(1), (STATES, STATES, STATES + 1, STEPS)
    cells = shapes_of(periodic)
    given = [rng.standard_normal((ROWS, n, *shape)) for n, shape in zip(channels, cells, strict=True)]
    later = [rng.standard_normal((ROWS, STEPS, *shape)) for shape in cells[:3]]
    return [*given, rng.standard_normal((ROWS, STEPS))], later


def net(periodic: bool = False) -> nn.Layer:
    """Map two states of velocities on faces, of a pressure and a depth in cells, a wind in cells and a time step to the
    next velocities and pressure."""
    faces: Any = {"faces": "low", "padding_mode": "circular"} if periodic else {}
    end = ("circular", "replicate") if periodic else "replicate"
    nodes: dict[str, Any] = {
        "near": (nn.Conv2d(2, 1, 3, padding=1, padding_mode=end), "u"),
        "uc": (nn.FacesToCells(1), "near"),
        "beside": (nn.Conv2d(2, 2, 3, padding=1, padding_mode=end), "v"),
        "vc": (nn.FacesToCells(0, **faces), "beside"),
        "pc": (nn.Conv2d(3, 2, 3, padding=1, padding_mode=end), "p"),
        "all": (nn.Concat(1), "uc", "vc", "pc", "wind"),
        "film": (nn.FiLM(1, 6), "all", "dt"),
        "mid": (nn.Sequential(nn.Conv2d(6, 3, 3, padding=1, padding_mode=end), nn.Tanh()), "film"),
        "push": (nn.Conv2d(3, 1, 1), "mid"),
        "du": (nn.CellsToFaces(1, 1), "push"),
        "u_next": (nn.Add(), "near", "du"),
        "v_next": (nn.CellsToFaces(0, 0, **faces), "push"),
        "p_next": (nn.Conv2d(3, 1, 1), "mid"),
    }
    return nn.Graph(nodes, inputs=("u", "v", "p", "wind", "dt"), outputs=("u_next", "v_next", "p_next"))


def rollout(periodic: bool = False, **more: Any) -> nn.Layer:
    return nn.Rollout(net(periodic), STEPS, inputs=STATES, constants=(0, 0, 1), forcing=("wind", "dt"), **more)


def torch_rollout(torch: Any, pushforward: int, detach: bool, p: dict[str, Any], x: Sequence[Any]) -> tuple[Any, ...]:
    F = torch.nn.functional

    def conv(name: str, a: Any) -> Any:
        size = p[f"{name}.weight"].shape[-1] // 2
        return F.conv2d(F.pad(a, (size,) * 4, mode="replicate"), p[f"{name}.weight"], p[f"{name}.bias"])

    depth, wind, dt = x[2][:, STATES:], x[3], x[4]
    states = [list(a[:, :STATES].split(1, dim=1)) for a in x[:3]]
    found: list[list[Any]] = [[], [], []]
    for step in range(STEPS):
        with torch.set_grad_enabled(step >= pushforward):
            u, v, q = (torch.cat(one[-STATES:], dim=1) for one in states)
            near, v, q = conv("near", u), conv("beside", v), conv("pc", torch.cat([q, depth], dim=1))
            uc, vc = (near[..., 1:] + near[..., :-1]) / 2, (v[..., 1:, :] + v[..., :-1, :]) / 2
            y = torch.cat([uc, vc, q, wind[:, step : step + 1]], dim=1)
            s = dt[:, step : step + 1] @ p["film.linear.weight"].T + p["film.linear.bias"]
            scale, shift = s[..., None, None].chunk(2, dim=1)
            mid = torch.tanh(conv("mid.0", (1 + scale) * y + shift))
            push = conv("push", mid)
            u = near + F.pad(push[..., 1:] - push[..., :-1], (1, 1))
            wide = F.pad(push, (0, 0, 1, 1), mode="replicate")
            v = (wide[..., 1:, :] + wide[..., :-1, :]) / 2
            results = u, v, conv("p_next", mid)
        for all_states, into, result in zip(states, found, results, strict=True):
            into.append(result)
            all_states.append(result.detach() if detach else result)
    return tuple(torch.cat(one, dim=1) for one in found)


@pytest.mark.parametrize(("pushforward", "detach"), [(0, False), (1, False), (2, False), (0, True), (1, True)])
def test_gradients_are_those_of_pytorch(pushforward: int, detach: bool) -> None:
    formula = partial(torch_rollout, pytest.importorskip("torch"), pushforward, detach)
    layer = rollout(pushforward=pushforward, detach=detach)
    demand_like_torch(layer, *map(tuple, arrays_of(False)), formula)


def test_a_result_that_no_loss_reads_has_no_gradient_of_its_own() -> None:
    """It has one as an input of later steps. A state that the model never reads has none."""
    layer, env = rollout(), env_of(None)
    x, dy = arrays_of(False)
    p = {name: RNG.standard_normal(spec.shape) * 0.3 for name, spec in layer.specs().items()}
    saved = layer.forward(env, p, tuple(x))[1]
    found = [layer.backward(env, p, {}, saved, one) for one in ((None, None, dy[2]), (0 * dy[0], 0 * dy[1], dy[2]))]
    assert_close(*found, 1e-12)
    nodes: dict[str, Any] = {"a": (nn.Scale(2.0), "u"), "b": (nn.Scale(3.0), "u")}
    both = nn.Rollout(nn.Graph(nodes, inputs=("u", "v"), outputs=("a", "b")), 2).as_distributed(precision="float64")
    a, b = both.forward((np.ones((1, 1, 4)), np.ones((1, 1, 4))))
    np.testing.assert_array_equal(np.concatenate([a, b], axis=1)[0, :, 0], [2, 4, 3, 6])
    du, dv = both.backward((np.ones_like(a), np.ones_like(b)))
    np.testing.assert_array_equal(du, 2 + 4 + 3 + 6)
    np.testing.assert_array_equal(dv, 0)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "noise": {"noise": (0.2, 0.1, 0.0)},
    "pushforward": {"noise": 0.2, "pushforward": 1},
    "detach": {"detach": True},
    "boundary": {"boundary": True, "detach": True},
}
OPTIONS = {"loss": nn.MultiOutputLoss(nn.MSELoss(), nn.RelativeL2(), nn.L1Loss()), "microbatches": 2}


def trained(comm: Communicator, kind: str, dims: Sequence[int], cuts: Cuts, ghosts: bool, shared: bool = False) -> Any:
    """Train a step, or two with noise, which each step draws anew; predict, and compute the gradients of the inputs.
    With ghost cells, y is periodic, and the wind has none."""
    cells = grid_at(comm, dims, cuts, layout="cyx", ghosts=int(ghosts), periods=(ghosts, False))
    states = [cells.faces("x", shared), cells.faces("y"), cells]
    wind = grid_at(comm, dims, cuts, layout="cyx")
    x, later = arrays_of(ghosts)
    wides = [np.pad(np.pad(a, ((0, 0), (0, 0), (1, 1), (0, 0)), "wrap"), ((0, 0),) * 3 + ((1, 1),)) for a in x[:3]]
    given = [part_with_ghosts(w, g, 1) for g, w in zip(states, wides, strict=True)]
    given += [np.ascontiguousarray(wind.take_local(x[3])), x[4]]
    grids = [*states, wind]
    if kind == "boundary":
        grids += states
        given += [part_with_ghosts(w, g, 1) for g, w in zip(states, WALLS, strict=True)]
    trainer = make_trainer(rollout(ghosts, **KINDS[kind]), cells.with_inputs(*grids), **OPTIONS)
    target = tuple(g.take_local(a) for g, a in zip(states, later, strict=True))
    losses = [trainer.step(tuple(given), target) for _ in range(2 if kind == "noise" else 1)]
    outputs = [out.all_gather(y) for out, y in zip(trainer.output_grid, trainer.predict(tuple(given)), strict=True)]
    assert [out.local_shape for out in trainer.output_grid] == [grid.local_shape for grid in states]
    trainer.forward(tuple(given))
    rows = zip([*grids[:4], None, *grids[4:]], trainer.backward(target), strict=True)
    dx = [sum_over_ranks(grid, d) if grid else d for grid, d in rows]
    return losses, dx, outputs, trainer.gradients(), trainer.parameters()


@lru_cache
def alone(kind: str, ghosts: bool) -> Any:
    return spawn(trained, 1, kind, (1, 1), even(SHAPE, (1, 1)), ghosts)[0]


CASES = [
    ("plain", (2, 1), False), ("pushforward", (2, 2), False), ("detach", (4, 1), False), ("noise", (1, 3), False),
    ("boundary", (1, 2), True), ("noise", (3, 1), True), ("plain", (2, 2), True), ("pushforward", (1, 5), True),
    ("boundary", (2, 3), True),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:fsdpx. dim . is :RuntimeWarning")  # paddings and ghost cells of all kinds meet
@pytest.mark.parametrize(("kind", "dims", "ghosts"), CASES, ids=str)
def test_fields_of_several_grids_on_any_parts(kind: str, dims: tuple[int, int], ghosts: bool) -> None:
    """Parts of random sizes and, by turns, one cell at the end and empty parts behind it. Faces between ranks are
    stored once or twice."""
    behind = tuple((0, n - (d > 1), *(n,) * (d - 1)) for n, d in zip(SHAPE, dims, strict=True))
    cuts = (cuts_of(SHAPE, dims, 1).cuts, behind)[CASES.index((kind, dims, ghosts)) % 2]
    shared = ghosts and dims[0] != 3
    demand_like(alone(kind, ghosts), lambda comm, *cut: trained(comm, kind, *cut, ghosts, shared), [(dims, cuts)])


@pytest.mark.filterwarnings("ignore:fsdpx. dim . is :RuntimeWarning")
@pytest.mark.world
@pytest.mark.mpi
def test_fields_of_several_grids_under_mpi(world: Communicator) -> None:
    MPI = pytest.importorskip("mpi4py.MPI")
    dims = MPI.Compute_dims(world.size, 2)
    kind, ghosts = (("noise", False), ("boundary", True), ("pushforward", True))[world.size % 3]
    found = trained(world, kind, dims, cuts_of(SHAPE, dims, 1).cuts, ghosts)
    assert_close(found, from_rank_0(world, alone, kind, ghosts), 1e-12)


def test_independent_fields_roll_out_as_each_alone() -> None:
    """With two states, constants, ghost cells, periodic dims and boundary values."""
    options = {"inputs": 2, "boundary": True}
    nodes = {"a": (nn.Conv2d(3, 1, 3, padding=1), "u"), "b": (nn.Conv2d(2, 1, 3, padding=1), "v")}
    cells = fsdpx.Grid.from_shape((6, 5), (1, 1), layout="cyx", ghosts=1, periods=(True, False))
    faces = cells.faces("x")
    both = nn.Rollout(nn.Graph(nodes, inputs=("u", "v"), outputs=("a", "b")), 3, constants=(1, 0), **options)
    assert both.get_declared_input_names() == ("u", "v", "u_boundary", "v_boundary")
    u, v, walls_u, walls_v = (RNG.standard_normal((n, 8, 7 + f)) for n, f in ((3, 0), (2, 1), (3, 0), (3, 1)))
    trainer = both.as_distributed(domain=cells.with_inputs(cells, faces, cells, faces), precision="float64")
    p = trainer.parameters()
    given = {"u": u, "v": v, "u_boundary": walls_u, "v_boundary": walls_v}
    found = trainer.predict(given)
    rows = ("a", 1, cells, (u, walls_u)), ("b", 0, faces, (v, walls_v))
    for (name, constants, grid, x), got in zip(rows, found, strict=True):
        one = nn.Rollout(nodes[name][0], 3, constants=constants, **options)
        alone = one.as_distributed(domain=grid, precision="float64")
        alone.load_parameters({key.removeprefix(f"{name}."): a for key, a in p.items() if key.startswith(name)})
        np.testing.assert_allclose(got, alone.predict(x), rtol=1e-13, atol=1e-14)


def test_noise_differs_between_fields_and_keeps_to_its_weights() -> None:
    nodes = {"a": (nn.Scale(1.0), "u"), "b": (nn.Scale(1.0), "v")}
    net, u = nn.Graph(nodes, inputs=("u", "v"), outputs=("a", "b")), np.zeros((4, 1, 30, 30))
    weights = np.arange(900.0).reshape(30, 30) % 2

    def run(**more: Any) -> Any:
        return nn.Rollout(net, 1, **more).as_distributed(precision="float64").forward((u, u), training=True)

    a, b = run(noise=0.5)
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05
    assert abs(b.std() - 0.5) < 0.02
    x, y = run(noise=(0.5, 0.25), noise_weights=(weights, None))
    np.testing.assert_allclose(x, a * weights, rtol=1e-12)
    np.testing.assert_allclose(y, b / 2, rtol=1e-12)


def train_with_scalars(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
    """A field and the speed of something that it moves, which is a scalar; and a coarse field of its own parts."""
    nodes: dict[str, Any] = {
        "wide": (nn.ConcatScalars(), "u", "speed"),
        "up": (nn.Upsample(scale_factor=2), "coarse"),
        "all": (nn.Concat(1), "wide", "up"),
        "mid": (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh()), "all"),
        "u_next": (nn.Conv2d(4, 1, 1), "mid"),
        "speed_next": (nn.Sequential(nn.GlobalMean(), nn.Linear(4, 1)), "mid"),
        "coarse_next": (nn.Sequential(nn.Conv2d(4, 1, 1), nn.AvgPool2d(2)), "mid"),
    }
    inputs, outputs = ("u", "speed", "coarse"), ("u_next", "speed_next", "coarse_next")
    rollout = nn.Rollout(nn.Graph(nodes, inputs=inputs, outputs=outputs), 3, noise=(0.1, 0.0, 0.1))
    drag = nn.TimeDistributed(nn.Sequential(nn.GlobalSum(), nn.Linear(1, 1)), 3)
    states = ("r.u_next", "r.speed_next", "r.coarse_next")
    model = nn.Graph({"r": (rollout, *inputs), "drag": (drag, states[0])}, inputs=inputs, outputs=(*states, "drag"))
    fine, low = (grid_at(comm, dims, c, layout="cyx") for c in (cuts, cuts_of((4, 3), dims, 1).cuts))
    loss = nn.MultiOutputLoss(*[nn.MSELoss()] * 4)
    trainer = make_trainer(model, fine.with_inputs(fine, low), loss=loss, optimizer=optim.SGD(0.05))
    rng = np.random.default_rng(4)
    x = fine.take_local(rng.random((1, 8, 6))), [0.5], low.take_local(rng.random((1, 4, 3)))
    y = fine.take_local(rng.random((3, 8, 6))), [0.1, 0.2, 0.3], low.take_local(rng.random((3, 4, 3))), [0.5, 0.2, 0.1]
    losses = [trainer.step(x, y) for _ in range(2)]
    u, speed, coarse, drags = trainer.predict(x)
    trainer.forward(x)
    speeds = trainer.backward(tuple(np.asarray(a, np.float64) for a in y))[1]
    assert speed.shape == drags.shape == (3,)
    values = {"u": fine.all_gather(u), "c": low.all_gather(coarse), "s": speed, "ds": speeds, "drags": drags}
    return losses, trainer.parameters() | values


def test_scalars_and_several_resolutions_are_states_too() -> None:
    grids = [(dims, cuts_of((8, 6), dims, 1).cuts) for dims in ((2, 2), (5, 1))]
    demand_like_alone(train_with_scalars, (8, 6), grids)


def test_fields_of_the_same_size_keep_their_own_parts() -> None:
    nodes: dict[str, Any] = {
        "both": (nn.Concat(1), "u", "v"),
        "a": (nn.Conv1d(2, 1, 3, padding=1), "both"),
        "b": (nn.Conv1d(2, 1, 3, padding=1), "both"),
    }
    model = nn.Rollout(nn.Graph(nodes, inputs=("u", "v"), outputs=("a", "b")), 2)
    u, v = RNG.standard_normal((2, 1, 9))

    def run(comm: Communicator, cuts: Sequence[Cuts]) -> Any:
        one, two = (grid_at(comm, (comm.size,), c, layout="cx") for c in cuts)
        trainer = model.as_distributed(domain=one.with_inputs(one, two), precision="float64")
        y = trainer.predict((one.take_local(u), two.take_local(v)))
        assert [out.local_shape for out in trainer.output_grid] == [one.local_shape, two.local_shape]
        return [out.all_gather(a) for out, a in zip(trainer.output_grid, y, strict=True)]

    (want,) = spawn(run, 1, [[(0, 9)]] * 2)
    for found in spawn(run, 3, [[(0, 2, 5, 9)], [(0, 6, 6, 9)]]):
        assert_close(found, want, 1e-12)


def identity(*names: str) -> nn.Layer:
    nodes = {f"{name}_next": (nn.Scale(1.0), name) for name in names}
    return nn.Graph(nodes, names, tuple(nodes))


def of_two(**more: Any) -> nn.Layer:
    return nn.Rollout(identity("u", "v"), 2, **more)


SWAPPED = nn.Graph({"a": (nn.Scale(1.0), "u"), "b": (nn.Scale(1.0), "v")}, ("u", "v"), ("b", "a"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: nn.Rollout(SWAPPED, 2).as_distributed(domain=g.with_inputs(g, g.faces("x"))),
            "a step returns a part of a field of 8 x 9 cells for a part of a field of 8 x 8 cells of state 'u': it "
            "must keep the shape and the partition, and return the states in the order of its inputs",
        ),
        (
            lambda g: nn.Rollout(SWAPPED, 2).as_distributed().predict((np.ones((1, 1, 4)), np.ones((1, 1, 5)))),
            "a step returns (1, 1, 5) for (1, 1, 4) of state 'u': it must keep the shape, and return the states in the",
        ),
        (
            lambda g: of_two(constants=1),
            "Rollout: the model has 2 states: constants must be a tuple with one entry for each, got 1",
        ),
        (lambda g: of_two(constants=(1, -1)), "constants must be a whole number >= 0, got "),
        (lambda g: of_two(noise=(1.0,)), "noise must be a tuple with one entry for"),
        (lambda g: of_two(noise_weights=np.ones(4)), "noise_weights must be a tuple with"),
        (lambda g: of_two(forcing="v"), "forcing names 'v'; the inputs of the model after its 2 states are none"),
        (
            lambda g: of_two(inputs=2).as_distributed().predict((np.ones((1, 2, 4)), np.ones((1, 3, 4)))),
            "wants input 'v' (samples, channels, ...) with 2 states of as many channels, and 0 constants after them",
        ),
        (
            lambda g: of_two(boundary=True).as_distributed(domain=g.with_inputs(*[g] * 4))
            .predict((np.ones((1, 8, 8)),) * 2 + (np.ones((2, 8, 8)),) * 2),
            "boundary=True needs a grid with ghost cells for state 'u', as in fsdpx.Grid(..., ghosts=1)",
        ),
        (
            lambda g: of_two(boundary=True).as_distributed(domain=g.with_inputs(g, g, g, g.faces("x"))),
            "reads a part of a field of 8 x 9 cells as boundary values, which must be a part of a field of 8 x 8 "
            "cells, as state 'v': give both inputs the same grid",
        ),
        (
            lambda g: of_two(noise=0.1, noise_weights=(None, np.ones((4, 4))))
            .as_distributed(domain=fsdpx.Grid(make_single_rank_communicator(), (8, 8), dims=(1, 1))),
            "noise_weights of state 'v' of shape (4, 4) do not fit: this rank's part of the field has (8, 8) cells",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused(call: Any, message: str) -> None:
    grid = fsdpx.Grid.from_shape((8, 8), (1, 1), layout="cyx")
    demand_error((ConfigError, DataError), lambda: call(grid), message)


def test_files_give_what_a_rollout_of_fields_takes(tmp_path: Path) -> None:
    """Velocities on faces, a pressure and a depth in cells, wind of each step, a scalar: parts train like the whole."""
    h5py, rng, (ny, nx) = pytest.importorskip("h5py"), np.random.default_rng(2), SHAPE
    stored = {"u": rng.random((2, 9, ny, nx + 1)), "v": rng.random((2, 9, ny + 1, nx)), "p": rng.random((2, 9, ny, nx))}
    stored |= {"depth": rng.random((ny, nx)), "wind": rng.random((2, 9, ny, nx)), "dt": np.array([0.1, 0.2])}
    with h5py.File(tmp_path / "run.h5", "w") as file:
        for name, array in stored.items():
            file[name] = array
    options = {"inputs": STATES, "targets": STEPS, "scalars": "dt", "dtype": np.float64}

    def make(cells: fsdpx.Grid, **more: Any) -> tuple[fsdpx.Grid, FieldDataset]:
        domain = cells.with_inputs(cells.faces("x"), cells.faces("y"), cells, cells)
        given = {"fields": ("u", "v", ("p", "depth")), "forcing": ("wind",), **options, **more}
        return domain, FieldDataset(tmp_path / "run.h5", domain, **given)

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        domain, samples = make(grid_at(comm, dims, cuts, layout="cyx"))
        assert (samples.channels, samples.constants, samples.forcing_channels) == ((1, 1, 1), (0, 0, 1), 1)
        (u, v, p, wind, dt), later = samples[6]  # the second window of the second run
        parts = [(u, "u", 1, 3), (v, "v", 1, 3), (p[:-1], "p", 1, 3), (wind, "wind", 2, 5)]
        parts += [(y, name, 3, 6) for y, name in zip(later, "uvp", strict=True)]
        for (got, name, start, stop), grid in zip(parts, (domain.input_grids + domain.input_grids)[:7], strict=True):
            np.testing.assert_array_equal(got, grid.take_local(stored[name][1, start:stop]), err_msg=name)
        np.testing.assert_array_equal(p[-1:], domain.take_local(stored["depth"][None]))
        assert dt.tolist() == [0.2]
        copy = pickle.loads(pickle.dumps(samples))
        np.testing.assert_array_equal(copy[3][0][1], samples[3][0][1])
        model = nn.Rollout(net(), STEPS, inputs=STATES, constants=samples.constants, forcing="wind", noise=0.1)
        trainer = make_trainer(model, domain, **OPTIONS)
        loader = DataLoader(samples, 4, comm=trainer.data_group, shuffle=True, seed=3)
        return trainer.fit(loader, epochs=1, progress=False).losses, trainer.parameters()

    demand_like_alone(run, SHAPE, [((2, 2), cuts_of(SHAPE, (2, 2), 1).cuts)])
    one = fsdpx.Grid(make_single_rank_communicator(), SHAPE, dims=(1, 1), layout="cyx")
    assert "FieldDataset(10 windows of 1 channels on 7 x 10 cells, 1 channels on 8 x 9 cells" in repr(make(one)[1])
    faces = one.faces("x")
    alone = FieldDataset(tmp_path / "run.h5", one.with_inputs(faces, one), ("u",), forcing=(("wind", "p"),), **options)
    (u, wind, _), y = alone[0]
    assert (u.shape, wind.shape, y.shape, alone.constants) == ((2, 7, 10), (6, 7, 9), (3, 7, 10), 0)
    assert (alone.shape, alone.layout, len(alone.sources)) == ((7, 10), "cyx", 1)
    several = make(one)[1]
    assert (several.shape, several.layout) == (((7, 10), (8, 9), (7, 9)), ("cyx",) * 3)
    assert [[source.names for source in each] for each in several.sources] == [["'u'"], ["'v'"], ["'p', 'depth'"]]
    with pytest.raises(ConfigError, match=r"has the grids of 4 inputs: give fields and forcing one entry for each of"):
        make(one, forcing=())
    with h5py.File(tmp_path / "run.h5", "a") as file:
        del file["wind"]
        file["wind"] = rng.random((2, 7, ny, nx))
    with pytest.raises(DataError, match=r"'u' has 2 trajectories of 5 windows, and 'wind' 2 of 3: store as many"):
        make(one)


@pytest.mark.parametrize(
    ("groups", "wind_steps", "message"),
    [
        (("012", "012", "012"), 4, None),
        (("0", "1", "2"), 4, None),  # each field has a group of its own
        (("01", "12", "01"), 4, "group 'run 0' has 'u', but not 'p': store both"),
        (("01", "01", "12"), 4, "group 'run 0' has 'u', but not 'wind': store both"),
        (("0", "01", "0"), 4, "group 'run 1' has 'p', but not 'u': store both"),
        (("01", "01", "01"), 5, "in group 'run 0', 'u' has 1 trajectories of 3 windows, and 'wind' 1 of 4: store as"),
    ],
)
def test_fields_of_several_grids_are_paired_by_the_groups_of_a_file(
    tmp_path: Path, groups: Sequence[str], wind_steps: int, message: str | None
) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "runs.h5", "w") as file:
        for name, steps, stored in zip(("u", "p", "wind"), (4, 4, wind_steps), groups, strict=True):
            for group in stored:
                file[f"run {group}/{name}"] = np.full((steps, 8, 8 + (name == "u")), float(group))

    def run(comm: Communicator) -> Any:
        cells = fsdpx.Grid(comm, (8 // comm.size, 8), dims=(comm.size, 1), layout="cyx")
        domain = cells.with_inputs(cells.faces("x"), cells, cells)
        try:
            samples = FieldDataset(tmp_path / "runs.h5", domain, ("u", "p"), forcing="wind", dims="tyx")
        except DataError as error:
            return str(error)
        return [[float(a.flat[0]) for a in samples[i][0]] for i in range(len(samples))]

    for found in spawn(run, 2):
        if message is None:
            assert found == [list(map(float, run)) for run in zip(*groups, strict=True) for _ in range(3)]
        else:
            assert f"runs.h5: {message}" in found


@pytest.mark.parametrize("own_grids", [True, False])
def test_ranks_agree_on_the_names_of_fields_and_forcing(tmp_path: Path, own_grids: bool) -> None:
    """All ranks raise the same error if one of them names a dataset twice; lists and tuples are equal."""
    np.savez(tmp_path / "run.npz", **{name: np.ones((1, 4, 4, 4)) for name in ("u", "p", "wind")})
    fields = ("u", ("p", "wind")) if own_grids else ("u", "wind")

    def run(comm: Communicator, kind: Any, *forcing: Any) -> Any:
        cells = fsdpx.Grid(comm, (4 // comm.size, 4), dims=(comm.size, 1), layout="cyx")
        names = kind(kind(name) if isinstance(name, tuple) else name for name in fields)
        domain = cells.with_inputs(*[cells] * (2 + len(forcing))) if own_grids else cells
        try:
            return len(FieldDataset(tmp_path / "run.npz", domain, names, forcing=forcing))
        except ConfigError as error:
            return str(error)

    assert spawn(lambda comm: run(comm, (list, tuple)[comm.rank]), 2) == [3, 3]
    texts = spawn(lambda comm: run(comm, tuple, ("wind" if comm.rank else "p") if own_grids else "wind"), 2)
    assert all("rank 0: FieldDataset: fields and forcing both name" in text for text in texts)
    texts = spawn(lambda comm: run(comm, tuple, *(("wind",) if comm.rank else ())), 2)
    assert all("rank 1: FieldDataset: fields and forcing both name 'wind'" in text for text in texts)
    if not own_grids:
        with pytest.raises(ConfigError, match="both name 'wind'"):
            FieldDataset(tmp_path / "run.npz", None, ("u", "wind"), forcing="wind", dims="ntyx")
