"""Rollouts with histories, constants, forcing, scalars and noise: equal to PyTorch, and on any partition."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import Cuts, cuts_of, env_of, even, grid_at, noise, part_with_ghosts, sum_over_ranks
from layers_on_parts import demand_like_torch
from trainings import demand_error, demand_like, demand_like_alone, demand_refused, make_trainer

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.array.namespace import to_host
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.data import DataLoader, FieldDataset
from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.shard_specs import Replicated, ShardingContext
from fsdpx.testing import assert_close

SHAPE, ROWS, STEPS, STATES, CHANNELS = (6, 8), 3, 3, 2, 2
RNG = np.random.default_rng(0)
FIRST = RNG.standard_normal((ROWS, STATES * CHANNELS + 1, *SHAPE))
FORCING = RNG.standard_normal((ROWS, STEPS, *SHAPE))
TIMES, NUMBERS = RNG.standard_normal((ROWS, STEPS)), RNG.standard_normal((ROWS, 2))
LATER = RNG.standard_normal((ROWS, STEPS * CHANNELS, *SHAPE))
FILM_WEIGHT = np.random.default_rng(3).standard_normal((4, 8)).astype(np.float32)
INPUTS = (FIRST, FORCING, TIMES, NUMBERS)


def net(padding: str = "circular") -> nn.Layer:
    """Make a net that reads two states, a constant, forcing and a scalar of each step, and two scalars of all steps."""
    nodes: dict[str, Any] = {
        "all": (nn.Concat(1), "u", "f"),
        "numbers": (nn.Concat(1), "t", "s"),
        "conv": (nn.Conv2d(6, 4, 3, padding=1, padding_mode=padding), "all"),
        "film": (nn.FiLM(3, 4), "conv", "numbers"),
        "out": (nn.Sequential(nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1)), "film"),
    }
    return nn.Graph(nodes, inputs=("u", "f", "t", "s"), outputs=("out",))


def rollout(padding: str = "circular", **more: Any) -> nn.Layer:
    return nn.Rollout(net(padding), STEPS, inputs=STATES, constants=1, forcing=("f", "t"), **more)


def torch_rollout(torch: Any, pushforward: int, detach: bool, p: dict[str, Any], x: Sequence[Any]) -> Any:
    first, forcing, times, numbers = x
    states, constant = list(first[:, :4].split(2, dim=1)), first[:, 4:]
    found = []
    for step in range(STEPS):
        with torch.set_grad_enabled(step >= pushforward):
            y = torch.cat([*states[-2:], constant, forcing[:, step : step + 1]], dim=1)
            y = torch.nn.functional.pad(y, (1, 1, 1, 1), mode="circular")
            y = torch.nn.functional.conv2d(y, p["conv.weight"], p["conv.bias"])
            s = torch.cat([times[:, step : step + 1], numbers], dim=1)
            scale, shift = (s @ p["film.linear.weight"].T + p["film.linear.bias"])[..., None, None].chunk(2, dim=1)
            y = torch.tanh((1 + scale) * y + shift)
            y = torch.nn.functional.conv2d(y, p["out.1.weight"], p["out.1.bias"], padding=1)
        found.append(y)
        states.append(y.detach() if detach else y)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(("pushforward", "detach"), [(0, False), (1, False), (2, False), (0, True), (1, True)])
def test_gradients_are_those_of_pytorch(pushforward: int, detach: bool) -> None:
    formula = partial(torch_rollout, pytest.importorskip("torch"), pushforward, detach)
    layer = rollout(pushforward=pushforward, detach=detach)
    saved = demand_like_torch(layer, INPUTS, LATER, formula)
    kept = [a.shape for (a,) in saved[0][pushforward:]]
    assert kept == [(ROWS, CHANNELS, *SHAPE)] * (STATES + STEPS - 1 - pushforward)  # the states alone


def test_gradients_of_inputs_and_of_weights_come_apart() -> None:
    """As a schedule of pipes asks for them that puts off those of weights."""
    layer = nn.Rollout(nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 2, 1)), 3)
    p, env = {name: noise(*spec.shape) for name, spec in layer.specs().items()}, env_of(None)
    y, saved = layer.forward(env, p, noise(2, 2, 6))
    g, late = ({name: np.zeros_like(a) for name, a in p.items()} for _ in range(2))
    dx = layer.backward(env, p, g, saved, y)
    early, kept = layer.backward_input(env, p, saved, y)
    layer.backward_params(env, late, kept)
    assert_close({"dx": early, **late}, {"dx": dx, **g}, 1e-13)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "noise": {"noise": 0.2},
    "pushforward": {"noise": 0.2, "pushforward": 1},
    "detach": {"detach": True},
}


def trained(comm: Communicator, kind: str, ghosts: int, dims: Sequence[int] = (), cuts: Cuts = (), **more: Any) -> Any:
    """Train a step, predict, and compute the gradients of the inputs, of which each cell has the sum of what ranks have
    for it as their own or as a ghost. dims (): without a grid. more: arguments of `as_distributed`."""
    x, y, grid = list(INPUTS), LATER, None
    if dims:
        grid = grid_at(comm, dims, cuts, layout="cyx", ghosts=ghosts, periods=(True, False))
        ends = (0, 0), (0, 0), (ghosts, ghosts)
        wide = [np.pad(a, (*ends, (0, 0)), "wrap") for a in (FIRST, FORCING)]
        wide = [np.pad(a, ((0, 0), *ends), constant_values=0.5) for a in wide]
        x[:2], y = [part_with_ghosts(a, grid) for a in wide], grid.take_local(LATER)
    model = rollout("zeros" if ghosts else "circular", **KINDS[kind])
    trainer = make_trainer(model, grid, loss=nn.RelativeL2(), microbatches=2, **more)
    loss, predicted = trainer.step(tuple(x), y), to_host(trainer.predict(tuple(x)))
    trainer.forward(tuple(x))
    dx = [to_host(d) for d in trainer.backward(y)]
    if grid:
        predicted = grid.all_gather(predicted)
        dx[:2] = [sum_over_ranks(grid, d, ghosts) for d in dx[:2]]
    return {"loss": loss} | trainer.parameters(), trainer.gradients(), predicted, dx


@pytest.mark.filterwarnings("ignore:fsdpx. dim . is :RuntimeWarning")  # paddings and ghost cells of all kinds meet
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ghosts", [0, 1])
def test_rollouts_on_any_parts(kind: str, ghosts: int) -> None:
    """Each kind runs with ghost cells on one of the grids, and without them on another."""
    dims, seed = (((2, 1), 0), ((1, 3), 2), ((5, 1), 1), ((2, 2), 1))[(list(KINDS).index(kind) + ghosts) % 4]
    alone = ((1, 1), even(SHAPE, (1, 1))) if ghosts else ()
    (want,) = spawn(trained, 1, kind, ghosts, *alone)
    grids = [(dims, cuts_of(SHAPE, dims, seed).cuts)]
    demand_like(want, lambda comm, *cut: trained(comm, kind, ghosts, *cut), grids)


@pytest.mark.parametrize("kind", ["plain", "noise"])
def test_ghost_cells_have_the_gradient_of_central_differences(kind: str) -> None:
    """All steps read ghost cells beyond walls. Only the first step reads other ghost cells, unless noise replaces
    them."""
    grid = fsdpx.Grid.from_shape(SHAPE, (1, 1), layout="cyx", ghosts=1, periods=(True, False))
    field, env = grid.input_partition, env_of(None)
    request = ShardingContext("", [field, field, Replicated(), Replicated()], 1)
    layer = rollout("zeros", **KINDS[kind]).shard_over_ranks(request).layer
    p = {name: RNG.standard_normal(spec.shape) * 0.3 for name, spec in layer.specs().items()}
    x, forcing = (RNG.standard_normal((ROWS, n, SHAPE[0] + 2, SHAPE[1] + 2)) for n in (5, STEPS))

    def run(x: np.ndarray) -> Any:
        return layer.forward(env, p, (x, forcing, TIMES, NUMBERS))

    dx = layer.backward(env, p, {}, run(x)[1], LATER)[0]
    where = {"inside": np.s_[..., 1:-1, 1:-1], "walls": np.s_[..., 1:-1, ::9], "periodic": np.s_[..., ::7, 1:-1]}
    for name, cells in where.items():
        direction = np.zeros_like(x)
        direction[cells] = RNG.standard_normal(direction[cells].shape)
        apart = run(x + 1e-5 * direction)[0] - run(x - 1e-5 * direction)[0]
        slope = (apart * LATER).sum() / 2e-5
        np.testing.assert_allclose((dx * direction).sum(), slope, rtol=1e-7, atol=1e-8, err_msg=name)


def test_noise_is_gaussian_and_of_training_alone() -> None:
    trainer = nn.Rollout(nn.Scale(1.0), 1, noise=0.5).as_distributed(precision="float64")
    x = np.ones((4, 3, 100, 100))
    first, again = (trainer.forward(x, training=True) - x for _ in range(2))
    np.testing.assert_array_equal(trainer.predict(x), x)
    assert abs(first.mean()) < 0.01
    assert abs(first.std() - 0.5) < 0.01
    assert abs((first**4).mean() / 0.5**4 - 3) < 0.1
    assert abs(np.corrcoef(first[:2].ravel(), first[2:].ravel())[0, 1]) < 0.02
    assert again.shape == first.shape
    weights = np.arange(3 * 100 * 100.0).reshape(3, 100, 100)  # one per channel, or one for all
    for given in (weights, weights[0]):
        layer = nn.Rollout(nn.Scale(1.0), 1, noise=0.5, noise_weights=given)
        weighted = layer.as_distributed(precision="float64").forward(x, training=True) - x
        np.testing.assert_allclose(weighted, first * given, rtol=1e-9, atol=1e-9)


def test_a_net_of_whole_numbers_and_of_samples() -> None:
    """A class of each sample, read by an Embedding, without a grid. Its gradient is None."""
    nodes = {"e": (nn.Embedding(5, 3), "label"), "sum": (nn.Add(), "x", "e")}
    model = nn.Rollout(nn.Graph(nodes, inputs=("x", "label"), outputs=("sum",)), 2)
    trainer = model.as_distributed(precision="float64")
    x, labels = RNG.standard_normal((4, 3)), np.array([0, 4, 4, 2])
    y = trainer.forward((x, labels))
    table = trainer.parameters()["e.weight"]
    np.testing.assert_allclose(y, np.concatenate([x + table[labels], x + 2 * table[labels]], axis=1))
    assert trainer.backward(np.ones_like(y))[1] is None


WALLS = RNG.standard_normal((STEPS * 2, 7 + 2, 4 + 2))


def roll_out_between_walls(comm: Communicator, dims: Sequence[int], cuts: Cuts, walls: np.ndarray = WALLS) -> Any:
    """The weighted sum of a prediction, the prediction, the gradients of both inputs of a rollout with boundary values
    of each step, and the parameters."""
    grid = grid_at(comm, dims, cuts, layout="cyx", ghosts=1, periods=(False, True))
    model = nn.Rollout(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh()), STEPS, boundary=True)
    trainer = make_trainer(model, grid)
    y = trainer.forward((part_with_ghosts(walls[:2], grid, first=1), part_with_ghosts(walls, grid, first=1)))
    dx = trainer.backward(grid.take_local(WALLS[:, :-2, :-2]))
    y = grid.all_gather(y)
    return (y * WALLS[:, :-2, :-2]).sum(), y, [sum_over_ranks(grid, d, first=1) for d in dx], trainer.parameters()


def test_boundary_values_of_each_step() -> None:
    """Equal to steps between which a solver fills the ghost cells, on any ranks; gradients are those of central
    differences."""
    _, y, dx, p = demand_like_alone(roll_out_between_walls, (7, 4), [((3, 1), even((7, 4), (3, 1)))])
    state, found = WALLS[:2].copy(), []
    for step in range(STEPS):
        windows = np.lib.stride_tricks.sliding_window_view(state, (3, 3), (1, 2))
        new = np.tanh(np.einsum("oikl,iyxkl->oyx", p["0.weight"], windows) + p["0.bias"][:, None, None])
        found.append(new)
        if step + 1 < STEPS:
            state = WALLS[2 * step + 2 : 2 * step + 4].copy()
            state[:, 1:-1] = np.pad(new, ((0, 0), (0, 0), (1, 1)), mode="wrap")
    np.testing.assert_allclose(y, np.concatenate(found), rtol=1e-12)
    for index in ((1, 0, 2), (3, 0, 0), (4, 8, 3), (3, 4, 4)):
        change = np.zeros_like(WALLS)
        change[index] = 1e-6
        alone = (1, 1), even((7, 4), (1, 1))
        up, down = (spawn(roll_out_between_walls, 1, *alone, WALLS + s * change)[0][0] for s in (1, -1))
        slope = dx[1][index] + (dx[0][index] if index[0] < 2 else 0.0)
        np.testing.assert_allclose(slope, (up - down) / 2e-6, rtol=1e-6, atol=1e-9)


def test_a_rollout_begins_with_the_values_that_its_net_was_given() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1))
    net.initial = {"0.weight": lambda seed, name, start, stop, shape: np.full(stop - start, 7.0)}
    trainer = fsdpx.distribute(nn.Rollout(net, 2), loss=nn.MSELoss(), optimizer=optim.SGD(0.1))
    assert (trainer.parameters()["0.weight"] == 7.0).all()


def test_files_give_what_a_rollout_takes(tmp_path: Path) -> None:
    """States, constants and forcing from HDF5, by name: parts train like the whole field."""
    h5py = pytest.importorskip("h5py")
    u, sun = RNG.standard_normal((2, 9, *SHAPE)), RNG.standard_normal((2, 9, *SHAPE, 2))
    with h5py.File(tmp_path / "run.h5", "w") as file:
        for name, values in {"u": u, "sun": sun, "land": RNG.standard_normal(SHAPE)}.items():
            file[name] = values

    def make(grid: Any, **more: Any) -> FieldDataset:
        options = {"fields": ("u", "land"), "inputs": 2, "targets": 3, "forcing": "sun", "stride": 1}
        return FieldDataset(tmp_path / "run.h5", grid, **{**options, "dtype": np.float64, **more})

    one = fsdpx.Grid(make_single_rank_communicator(), SHAPE, dims=(1, 1), layout="cyx")
    whole = make(one)
    assert (whole.channels, whole.constants, whole.forcing_channels, len(whole)) == (1, 1, 2, 10)
    (x, f), y = whole[6]  # the second window of the second run
    np.testing.assert_array_equal(x[:2], u[1, 1:3])
    np.testing.assert_array_equal(y, u[1, 3:6])
    np.testing.assert_array_equal(f, np.moveaxis(sun[1, 2:5], -1, 1).reshape(6, *SHAPE))
    (_, strided), _ = make(one, stride=2, targets=2)[0]
    np.testing.assert_array_equal(strided, np.moveaxis(sun[0, 2:6:2], -1, 1).reshape(4, *SHAPE))
    np.testing.assert_array_equal(make(one, fields=None)[6][0][1], f)

    def run(comm: Communicator, *cut: Any) -> Any:
        grid = grid_at(comm, *cut) if cut else None
        samples = make(grid or one)
        nodes = {"all": (nn.Concat(1), "u", "sun"), "out": (nn.Conv2d(5, 1, 3, padding=1), "all")}
        inner = nn.Graph(nodes, inputs=("u", "sun"), outputs=("out",))
        model = nn.Rollout(inner, 3, inputs=2, constants=samples.constants, forcing="sun", noise=0.1)
        trainer = make_trainer(model, grid, optimizer=optim.SGD(lr=0.05))
        loader = DataLoader(samples, 4, comm=trainer.data_group, shuffle=True, seed=3)
        history = trainer.fit(loader, epochs=2, validation=loader, metrics={"rmse": nn.RMSE()}, progress=False)
        return history.losses, history.metrics["rmse"][-1][1]

    demand_like(spawn(run, 1)[0], run, [((2, 2), cuts_of(SHAPE, (2, 2), 1).cuts)])
    with pytest.raises(DataError, match=r"'land' of forcing has no time dim: leave it among the fields"):
        make(one, fields="u", forcing="land")
    message = "FieldDataset: fields and forcing both name 'sun': leave out one"
    demand_refused(lambda comm: make(None, fields=("u", "sun")), message)


def test_files_give_scalars_of_trajectories(tmp_path: Path) -> None:
    """From arrays, from the group of The Well, and from attributes."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "run.h5", "w") as file:
        file["u"], file["re"], file["long"] = RNG.standard_normal((2, 4, *SHAPE)), [100.0, 200.0], [1, 2, 3]
        file["sun"], file["scalars/dt"], file.attrs["nu"] = RNG.standard_normal((2, 4, *SHAPE)), 0.5, 7

    def make(**more: Any) -> Any:
        return FieldDataset(tmp_path / "run.h5", dims="ntyx", fields="u", **more)

    (x, s), y = make(scalars=("re", "dt", "nu"))[4]
    assert (x.shape, y.shape, s.tolist()) == ((1, *SHAPE), (1, *SHAPE), [200.0, 0.5, 7.0])
    (_, f, s), _ = make(scalars="re", forcing="sun").read_samples(np.array([0, 5]))
    assert (f.shape, s.tolist()) == ((2, 1, *SHAPE), [[100.0], [200.0]])
    assert make(scalars="re").read_samples(np.array([], int))[0][1].shape == (0, 1)
    for name, message in (("gone", "there is no scalar 'gone'"), ("long", "for each of 2 trajectories"), ("u", "u")):
        with pytest.raises(DataError, match=message):
            make(scalars=name)


CONV = nn.Conv2d(2, 2, 3, padding=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.Rollout(nn.Graph({"a": (CONV, "x"), "b": (CONV, "x")}, outputs=("a", "b")), 2), "input for each"),
        (lambda: nn.Rollout(CONV, 2, pushforward=2), "pushforward must be a whole number >= 0, below steps=2, got 2"),
        (lambda: nn.Rollout(CONV, 2, constants=-1), "Rollout: constants must be a whole number >= 0, got -1"),
        (lambda: nn.Rollout(CONV, 2, inputs=0), "Rollout: inputs must be a whole number >= 1, got 0"),
        (lambda: nn.Rollout(CONV, 2, noise=-0.1), "Rollout: noise must be a number >= 0, got -0.1"),
        (lambda: nn.Rollout(CONV, 2, forcing="f"), "forcing names 'f'; the inputs of the model after its first are no"),
        (
            lambda: nn.Rollout(CONV, 2, boundary=True).as_distributed().predict((FIRST[:, :2], FIRST[:, :4])),
            "boundary=True needs a grid with ghost cells",
        ),
        (lambda: nn.Rollout(net(), 2, forcing=("u",)), "forcing names 'u'; the inputs of the model after its first ar"),
    ],
)
def test_contradictions_are_refused(call: Any, message: str) -> None:
    demand_error((ConfigError, DataError), call, message)


def test_numbers_may_be_those_of_numpy() -> None:
    i, f = np.int64(1), np.float32(0.5)
    made = nn.Rollout(nn.Conv2d(3, 2, 1), 2, constants=i, pushforward=i, noise=f)
    assert (made.constants, made.pushforward, made.noise) == (1, 1, 0.5)
    assert nn.LayerNorm(np.int64(6)).specs()["weight"].shape == (6,)
    assert repr(nn.WhereType(i)) == repr(nn.WhereType(1))
    assert repr(nn.CrossEntropyLoss(i, f)) == repr(nn.CrossEntropyLoss(1, 0.5))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ((FIRST[:, :4], *INPUTS[1:]), "with 2 states of as many channels, and 1 constants after them, got (3, 4, "),
        ((FIRST, FORCING[:, :2], *INPUTS[2:]), "wants 3 values of forcing 'f' in dim 1, got (3, 2,"),
        ((FIRST, FORCING, TIMES[:, :2], NUMBERS), "wants 3 values of forcing 't' in dim 1, got (3, 2)"),
    ],
)
def test_batches_of_other_sizes_are_refused(x: Any, message: str) -> None:
    def run(comm: Communicator) -> None:
        grid = fsdpx.Grid(comm, (3, 8), dims=(2, 1), layout="cyx")
        rollout().as_distributed(domain=grid).predict(tuple(grid.take_local(a) if a.ndim == 4 else a for a in x))

    demand_refused(run, message)


@pytest.mark.parametrize("forcing", ["", "t"])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_times_keep_their_precision_in_16_bits_if_layers_read_them_as_numbers_too(forcing: str, dtype: str) -> None:
    nodes: dict[str, Any] = {
        "time": (nn.TimeEmbedding(8), "t"),
        "wide": (nn.Linear(1, 8), "t"),
        "both": (nn.Concat(1), "time", "wide"),
        "next": (nn.Conv2d(2, 2, 1), "u"),
        "film": (nn.FiLM(16, 2), "next", "both"),
    }
    times = np.arange(4000, 4008).reshape(4, 2)[:, : 2 if forcing else 1].astype(dtype)
    u = np.ones((4, 2, 3, 5), np.float32)
    found = {}
    for precision in ("bf16", "float64"):
        net = nn.Graph(nodes, inputs=("u", "t"), outputs=("film",))
        layer = nn.Rollout(net, 2, forcing=[forcing] if forcing else [])
        assert layer.takes == ("numbers", "exact")
        trainer = layer.as_distributed(precision=precision)
        p = {name: np.zeros_like(a) for name, a in trainer.parameters().items()}
        p["next.bias"][:] = 1.0
        p["film.linear.weight"][:, :8] = FILM_WEIGHT
        trainer.load_parameters(p)
        y = trainer.forward((u, times))
        found[precision] = [a.astype(np.float64) for a in (y, trainer.backward(np.ones_like(y))[1])]
    for got, want in zip(found["bf16"], found["float64"], strict=True):
        np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())
    assert (np.abs(np.diff(found["float64"][0], axis=0)).max(axis=(1, 2, 3)) > 0.1).all()


def test_inputs_have_the_names_of_the_model() -> None:
    nodes = {"all": (nn.Concat(1), "u", "sun"), "next": (nn.Conv2d(3, 2, 3, padding=1), "all")}
    net = nn.Graph(nodes, inputs=("u", "sun"), outputs=("next",))
    assert nn.Rollout(net, 2, boundary=True).get_declared_input_names() == ("u", "sun", "boundary")
    grid = fsdpx.Grid.from_shape((6, 8), (1, 1), layout="cyx")
    trainer = nn.Rollout(net, 2, forcing="sun").as_distributed(domain=grid)
    u, sun = np.ones((2, 6, 8)), np.ones((2, 6, 8))
    np.testing.assert_array_equal(trainer.predict({"sun": sun, "u": u}), trainer.predict((u, sun)))
    with pytest.raises(DataError, match=r"input 'sun' has shape \(2, 6, 7\)"):
        trainer.predict((u, sun[..., 1:]))
