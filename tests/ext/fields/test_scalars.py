"""Models with scalars and several fields as inputs and outputs: results on any partition equal those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
from grids import Cuts, cuts_of, even, grid_at, part, part_with_ghosts, place_of, random_cuts, uneven
from layers_on_parts import demand_like_torch
from ranks import from_rank_0
from trainings import demand_like, demand_like_alone, demand_refused, make_trainer, train_on_parts

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.array.namespace import to_host
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError
from fsdpx.ext.fields.over_parts import find_scalar_inputs
from fsdpx.testing import assert_close

SHAPE, ROWS = (7, 9), 5
RNG = np.random.default_rng(0)
U, FORCING = RNG.standard_normal((ROWS, 2, *SHAPE)), RNG.standard_normal((ROWS, 1, *SHAPE))
TIMES, NUMBERS = RNG.uniform(0, 100, ROWS), RNG.standard_normal((ROWS, 2))
NEXT, DRAG = RNG.standard_normal((ROWS, 2, *SHAPE)), RNG.standard_normal((ROWS, 2))
TERRAIN, VOLUMES = RNG.standard_normal((2, *SHAPE)), RNG.random(SHAPE)


def net(terrain: np.ndarray, volumes: np.ndarray) -> nn.Layer:
    """Make a model that embeds and mixes scalars, broadcasts them to cells, and computes scalars from fields."""
    nodes: dict[str, Any] = {
        "static": (nn.StaticChannels(terrain), "u"),
        "all": (nn.Concat(1), "static", "forcing"),
        "time": (nn.Sequential(nn.TimeEmbedding(6), nn.Linear(6, 4), nn.SiLU(), nn.Linear(4, 3)), "t"),
        "given": (nn.Concat(-1), "time", "s"),
        "first": (nn.Conv2d(5, 4, 3, padding=1), "all"),
        "film": (nn.FiLM(5, 4), "first", "given"),
        "act": (nn.Tanh(), "film"),
        "spread": (nn.ConcatScalars(), "act", "s"),
        "out": (nn.Conv2d(6, 2, 3, padding=1, padding_mode="circular"), "spread"),
        "mean": (nn.GlobalMean(volumes), "out"),
        "sum": (nn.GlobalSum(), "act"),
        "found": (nn.Concat(-1), "mean", "sum"),
        "drag": (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)), "found"),
    }
    return nn.Graph(nodes, inputs=("u", "t", "forcing", "s"), outputs=("out", "drag"))


LOSS = nn.MultiOutputLoss(nn.RelativeL2(), nn.MSELoss(), loss_weights=(1.0, 0.5))


def trained(
    comm: Communicator, dims: Sequence[int] = (), cuts: Cuts = (), samples: Any = slice(None), **more: Any
) -> Any:
    """Train two steps, one of them by `fit`. Return losses and parameters, and whole fields, scalars and gradients; all
    are equal on all ranks of a field. group: these ranks, in more."""
    grid = grid_at(more.pop("group", comm), dims, cuts, layout="cyx") if dims else None
    mine, whole = (grid.take_local, lambda a: grid.all_gather(to_host(a))) if grid else (np.asarray, np.asarray)
    trainer = make_trainer(net(mine(TERRAIN), mine(VOLUMES)), grid, loss=LOSS, comm=comm, microbatches=2, **more)
    x = mine(U[samples]), TIMES[samples], mine(FORCING[samples]), NUMBERS[samples]
    y = mine(NEXT[samples]), DRAG[samples]
    found: dict[str, Any] = {"losses": [trainer.step(x, y)], "evaluated": trainer.evaluate(x, y)}
    history = trainer.fit([(x, y)], validation=[(x, y)], metrics={"same": LOSS}, progress=False)
    found |= {"metric": history.metrics["same"][0][1], "validated": history.validation[0][1]}
    out, drag = trainer.predict(x)
    fields = {"out": whole(out), "drag": drag}
    if "mesh" not in more:
        trainer.forward(x, training=False)
        du, dt, df, ds = trainer.backward(y)
        fields |= {"dx": [whole(du), dt, whole(df), ds], "gradients": trainer.gradients()}
    return found | trainer.parameters(), fields


@lru_cache
def alone() -> Any:
    ((found, fields),) = spawn(trained, 1)
    assert found["metric"] == pytest.approx(found["validated"], rel=1e-12)
    return found, fields


@pytest.mark.parametrize(("dims", "seed"), [((1, 1), 0), ((3, 1), 1), ((2, 2), 0), ((1, 5), 1)], ids=str)
def test_scalars_and_fields_on_any_parts(dims: tuple[int, int], seed: int) -> None:
    demand_like(alone(), trained, [(dims, cuts_of(SHAPE, dims, seed).cuts)])


@pytest.mark.parametrize("kind", ["members", "pipe"])
def test_each_member_and_each_stage_has_its_scalars(kind: str) -> None:
    """Two fields, each on two ranks; or two pipeline stages, each on two ranks."""
    axis, rows = ("replica", (slice(0, 3), slice(3, ROWS))) if kind == "members" else ("pipe", (slice(None),) * 2)

    def run(comm: Communicator) -> Any:
        mesh = Mesh(**{axis: 2}, shard=2, domain=(2, 1))
        at = mesh.coordinates_of(comm.rank)
        samples, group = rows[getattr(at, axis)], comm.split(getattr(at, axis), at.shard)
        return samples, trained(comm, (2, 1), even(SHAPE, (2, 1)), samples, group=group, mesh=mesh)

    for rank, (samples, found) in enumerate(spawn(run, 4)):
        values, fields = alone()
        want = values, {name: fields[name][samples] for name in ("out", "drag")}
        assert_close(found, want, 1e-12, rank=rank)


def test_samples_without_a_dim_of_their_own_and_other_layouts() -> None:
    """A single channels-last field with scalars (n,) gives the same results as a batch of one sample."""
    cuts = random_cuts(SHAPE, (1, 2))

    def run(comm: Communicator) -> Any:
        at, grid = place_of(comm.rank, (1, 2)), grid_at(comm, (1, 2), cuts)
        model = net(part(TERRAIN, cuts, at, 1), part(VOLUMES, cuts, at, 0))
        u, f, y = (np.moveaxis(part(a[:1], cuts, at)[0], 0, -1) for a in (U, FORCING, NEXT))
        x = {"u": u, "t": TIMES[0], "forcing": f, "s": NUMBERS[0]}
        loss, dx, (out, drag), (on_cells, of_scalars) = predicted(model, grid, x, (y, DRAG[0]))
        assert of_scalars is None
        assert [np.shape(a) for a in dx] == [u.shape, (), f.shape, (2,)]
        return loss, dx[3], np.moveaxis(on_cells.all_gather(out), -1, 0), drag

    x = tuple(a[:1] for a in (U, TIMES, FORCING, NUMBERS))
    loss, dx, (out, drag), _ = predicted(net(TERRAIN, VOLUMES), None, x, (NEXT[:1], DRAG[:1]))
    for found in spawn(run, 2):
        assert_close(found, (loss, dx[3][0], out[0], drag[0]), 1e-12)


def predicted(model: nn.Layer, grid: fsdpx.Grid | None, x: Any, target: Any) -> Any:
    """Return the loss of a step, the gradients of the inputs, the next prediction and its grids."""
    trainer = make_trainer(model, grid, loss=LOSS)
    loss = trainer.step(x, target)
    trainer.forward(x)
    return loss, trainer.backward(target), trainer.predict(x), grid and trainer.output_grid


def test_ghost_cells_are_scaled_and_shifted_too() -> None:
    """A FiLM before the convolution that reads ghost cells, and a scalar output after it."""
    wide = RNG.standard_normal((3, 2, 9, 11))

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        grid = grid_at(comm, dims, cuts, layout="cyx", ghosts=1)
        nodes = {"film": (nn.FiLM(2, 2), "x", "s"), "conv": (nn.Conv2d(2, 2, 3, padding=1), "film")}
        nodes |= {"mean": (nn.GlobalMean(), "conv")}
        trainer = make_trainer(nn.Graph(nodes, inputs=("s", "x"), outputs=("mean",)), grid, loss=nn.RelativeL2())
        x = NUMBERS[:3], part_with_ghosts(wide, grid)
        losses = [trainer.step(x, DRAG[:3]) for _ in range(2)]
        with pytest.raises(ConfigError, match="output_grid: the model's outputs are scalars"):
            _ = trainer.output_grid
        trainer.forward(x)
        return losses, trainer.backward(DRAG[:3])[0], trainer.predict(x), trainer.parameters()

    demand_like_alone(run, SHAPE, uneven(SHAPE, (2, 2)))


def test_layers_compute_what_pytorch_and_papers_say() -> None:
    torch = pytest.importorskip("torch")

    def film(p: dict[str, Any], x: Any) -> Any:
        moved = torch.nn.functional.linear(x[1], p["linear.weight"], p["linear.bias"])
        scale, shift = moved[..., None, None].chunk(2, dim=1)
        return (1 + scale) * x[0] + shift

    demand_like_torch(nn.FiLM(2, 2), (U, NUMBERS), NEXT, film)

    def predict(layer: nn.Layer, x: Any) -> Any:
        return layer.as_distributed(precision="float64").predict(x)

    # the first lines of Ho et al.'s get_timestep_embedding
    frequencies = torch.exp(torch.arange(3) * -(np.log(10000.0) / 2))
    angles = torch.tensor(TIMES)[:, None] * frequencies.double()[None]
    embedded = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    np.testing.assert_allclose(predict(nn.TimeEmbedding(6), TIMES), embedded, rtol=1e-5)
    np.testing.assert_array_equal(predict(nn.TimeEmbedding(6), TIMES[:, None]), predict(nn.TimeEmbedding(6), TIMES))
    mean = np.average(U.reshape(ROWS, 2, -1), axis=2, weights=VOLUMES.reshape(-1))
    np.testing.assert_allclose(predict(nn.GlobalMean(VOLUMES), U), mean, rtol=1e-12)
    np.testing.assert_allclose(predict(nn.GlobalSum(TERRAIN**2), U), (U * TERRAIN**2).sum((2, 3)), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("precision", ["bf16", fsdpx.Precision("float16")], ids=["bf16", "float16"])
def test_times_keep_their_precision_in_16_bits(precision: Any, dtype: str) -> None:
    """bfloat16 has no integer between 256 and 258, and float16 none between 2048 and 2050."""
    times = np.arange(4000, 4008).astype(dtype)
    direct = nn.TimeEmbedding(8).as_distributed(precision=precision).predict(times)
    want = nn.TimeEmbedding(8).as_distributed(precision="float64").predict(times)
    np.testing.assert_allclose(direct.astype(np.float64), want, atol=5e-3)
    assert all((a != b).any() for a, b in itertools.pairwise(direct))
    # a layer that reads the same input as a number gets it in 16 bits
    nodes = {"time": (nn.TimeEmbedding(8), "t"), "wide": (nn.Linear(1, 8), "t"), "sum": (nn.Add(), "time", "wide")}
    both = nn.Graph(nodes, inputs=("t",), outputs=("sum",)).as_distributed(precision=precision)
    y = both.forward(times[:, None])
    assert y.dtype == direct.dtype
    dx = both.backward(np.ones_like(y))
    weight = both.parameters()["wide.weight"].astype(np.float64).sum()
    alone = nn.TimeEmbedding(8).as_distributed(precision="float64")
    alone.forward(times.astype(np.float64)[:, None])
    np.testing.assert_allclose(dx.astype(np.float64), alone.backward(np.ones((8, 8))) + weight, atol=2e-2)


NOISY, STEPS = RNG.standard_normal((3, 2, 8, 12)), np.array([0.0, 5.0, 20.0])


def diffusion_net(**more: Any) -> nn.UNet:
    return nn.UNet(2, 2, 2, 4, 1, "circular", "group", "silu", time_embedding=4, **more)


def torch_unet(torch: Any, heads: int | None, p: dict[str, Any], given: Any) -> Any:
    F, (u, t) = torch.nn.functional, given

    def linear(name: str, x: Any) -> Any:
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def block(name: str, x: Any, time: Any) -> Any:
        for turn in (1, 2):
            weight = p[f"{name}conv{turn}.weight"]
            x = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight)
            x = F.group_norm(x, 1, p[f"{name}norm{turn}.weight"], p[f"{name}norm{turn}.bias"])
            if turn == 1:
                scale, shift = linear(f"{name}film.linear", time)[..., None, None].chunk(2, dim=1)
                x = (1 + scale) * x + shift
            x = F.silu(x)
        return x

    angles = t[:, None] * torch.tensor([1.0, 1e-4], dtype=torch.float64)
    time = F.silu(linear("time.mlp1", torch.cat([angles.sin(), angles.cos()], dim=1)))
    time = F.silu(linear("time.mlp2", time))
    kept = block("encoder1.enc1", u, time)
    low = block("bottleneck.bottleneck", F.max_pool2d(kept, 2), time)
    if heads is not None:
        path = "attention.body"
        normed = F.group_norm(low, 1, p[f"{path}.norm.weight"], p[f"{path}.norm.bias"]).flatten(2).mT
        q, k, v = linear(f"{path}.attention.qkv", normed).unflatten(2, (3, heads, -1)).movedim(2, 0).transpose(2, 3)
        merged = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        low = low + linear(f"{path}.attention.out", merged).mT.reshape(low.shape)
    up = F.conv_transpose2d(low, p["upconv1.weight"], p["upconv1.bias"], 2)
    return F.conv2d(block("decoder1.dec1", torch.cat([up, kept], dim=1), time), p["conv.weight"], p["conv.bias"])


@pytest.mark.parametrize("heads", [None, 2])
def test_unets_of_time_are_those_of_pytorch(heads: int | None) -> None:
    """Results and all gradients, from the same parameters by name."""
    formula = partial(torch_unet, pytest.importorskip("torch"), heads)
    demand_like_torch(diffusion_net(attention=heads), (NOISY, STEPS), NOISY[::-1].copy(), formula)


def test_unets_of_time_train_alike_on_any_parts() -> None:
    """With attention."""

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts) -> Any:
        grid = grid_at(comm, dims, cuts, layout="cyx")
        trainer = make_trainer(diffusion_net(attention=2), grid, microbatches=2)
        return train_on_parts(trainer, (grid.take_local(NOISY), STEPS), NOISY[::-1], 1)

    demand_like_alone(run, (8, 12), uneven((8, 12), (2, 2), (1, 3)))


def test_several_outputs_of_whole_samples() -> None:
    """Without a grid, a loss of several outputs works on whole samples, on data ranks and in microbatches."""
    x, targets = RNG.standard_normal((6, 3)), (RNG.standard_normal((6, 2)), RNG.standard_normal((6, 4)))
    model = nn.Graph({"a": (nn.Linear(3, 2), "x"), "b": (nn.Linear(3, 4), "x")}, outputs=("a", "b"))
    loss = nn.MultiOutputLoss(nn.MSELoss(), nn.RelativeL2(), loss_weights=(2.0, 0.5))

    def run(comm: Communicator) -> Any:
        rows = slice(6 * comm.rank // comm.size, 6 * (comm.rank + 1) // comm.size)
        trainer = make_trainer(model, None, comm=comm, loss=loss, microbatches=2, check_finite=True)
        mine = tuple(t[rows] for t in targets)
        losses = [trainer.step(x[rows], mine) for _ in range(2)]
        a, b = trainer.predict(x)
        wrong = [np.linalg.norm((b - targets[1]).reshape(6, -1), axis=1) / np.linalg.norm(targets[1], axis=1)]
        by_hand = 2.0 * np.mean((a - targets[0]) ** 2) + 0.5 * np.mean(wrong)
        np.testing.assert_allclose(trainer.evaluate(x[rows], list(mine)), by_hand, rtol=1e-12)
        parameters, held = trainer.parameters(), [(x[rows], list(mine))]
        history = trainer.fit(held, validation=held, metrics={"half": 0.5 * loss}, progress=False)
        assert history.metrics["half"][-1][1] == pytest.approx(0.5 * history.validation[-1][1], rel=1e-12)
        return losses, parameters

    want, *found = *spawn(run, 1), *spawn(run, 3)
    for got in found:
        assert_close(got, want, 1e-12)


def test_missing_targets_count_alike_in_any_parts_and_microbatches() -> None:
    """A field and scalars of four samples, with NaN in some cells of the first, in all of the third, and in the scalars
    of the last."""
    field, scalars = NEXT[:4].copy(), DRAG[:4].copy()
    field[0, :, :2], field[2], scalars[2], scalars[3, 1] = np.nan, np.nan, np.nan, np.nan
    model = nn.Graph({"c": (nn.Conv2d(2, 2, 3, padding=1), "u"), "m": (nn.GlobalMean(), "c")}, ("u",), ("c", "m"))
    loss = 2 * nn.MultiOutputLoss(nn.MSELoss(skipna=True), nn.L1Loss(skipna=True))

    def run(comm: Communicator, dims: Sequence[int], cuts: Cuts, microbatches: int) -> list[float]:
        grid = grid_at(comm, dims, cuts, layout="cyx")
        trainer = make_trainer(model, grid, loss=loss, microbatches=microbatches)
        return [trainer.step(grid.take_local(U[:4]), (grid.take_local(field), scalars)) for _ in range(2)]

    (want,) = spawn(run, 1, (1, 1), even(SHAPE, (1, 1)), 1)
    for dims, microbatches in (((1, 1), 4), ((2, 2), 2)):
        demand_like(want, partial(run, microbatches=microbatches), uneven(SHAPE, dims))


def test_which_inputs_are_scalars_follows_from_their_readers() -> None:
    mlp = nn.Residual(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    add = nn.Graph({"y": (nn.Add(), "u", "f")}, inputs=("u", "f"), outputs=("y",))
    inner = nn.Sequential(nn.FiLM(2, 2), nn.Tanh())
    nested = nn.Graph({"m": (mlp, "s"), "inner": (inner, "u", "m")}, inputs=("s", "u"), outputs=("inner",))
    assert find_scalar_inputs(net(TERRAIN, VOLUMES)) == (False, True, False, True)
    assert find_scalar_inputs(nested) == (True, False)
    assert find_scalar_inputs(add) == (False, False)
    assert find_scalar_inputs(nn.Linear(2, 2)) == (False,)  # and sharding it raises an error


def grid_of(comm: Communicator) -> Any:
    return fsdpx.Grid(comm, (4, 3), dims=(1, 2))


def film(comm: Communicator, x: Any, y: Any = None, loss: nn.Loss | None = None) -> Any:
    model = nn.Graph({"f": (nn.FiLM(2, 1), "u", "s")}, inputs=("u", "s"), outputs=("f",))
    trainer = make_trainer(model, grid_of(comm), loss=loss or nn.MSELoss(), precision=None)
    return trainer.predict(x) if y is None else trainer.step(x, y)


def two(comm: Communicator, loss: nn.Loss, y: Any) -> Any:
    model = nn.Graph({"c": (nn.Conv2d(1, 1, 1), "u"), "m": (nn.GlobalMean(), "c")}, inputs=("u",), outputs=("c", "m"))
    return make_trainer(model, grid_of(comm), loss=loss, precision=None).step(np.ones((4, 3, 1)), y)


def domain_of(model: Any, inputs: Any, outputs: Any) -> Any:
    return lambda c: nn.Graph(model, inputs=inputs, outputs=outputs).as_distributed(domain=grid_of(c))


def predict_with(layer: nn.Layer) -> Any:
    return lambda c: layer.as_distributed(domain=grid_of(c)).predict(CELLS)


CELLS = np.ones((4, 3, 1))
BOTH = nn.MultiOutputLoss(nn.MSELoss(), nn.MSELoss())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: film(c, (CELLS, np.ones((1, 2)))), "input 's' has shape (1, 2): the model reads or returns scala"),
        (lambda c: film(c, (CELLS[None], np.ones((2, 2)))), "input 's' has 2 samples, input 'u' has 1"),
        (lambda c: film(c, (CELLS, np.ones(3))), "wants an input of shape (samples, ..., 2), got (1, 3)"),
        (lambda c: film(c, (np.ones((4, 3, 2)), np.ones(2))), "a field of 2 channels takes 4 scales and shifts, got 2"),
        (
            domain_of({"l": (nn.Linear(2, 1), "s"), "y": (nn.Add(), "u", "l")}, ("u", "s"), ("y",)),
            "Add() reads a part of a field of 4 x 6 cells, a whole input together: combine scalars,",
        ),
        (
            domain_of({"c": (nn.Conv2d(1, 2, 1), "u"), "f": (nn.ScaleShift(), "u", "c")}, ("u",), ("f",)),
            "'f' ScaleShift() reads a part of a field of 4 x 6 cells and a part of a field of 4 x 6 cells: its second",
        ),
        (
            domain_of({"m": (nn.GlobalMean(), "u"), "b": (nn.BatchNorm(1), "m")}, ("u",), ("b",)),
            "takes statistics of scalars, which several ranks hold: use LayerNorm",
        ),
        (lambda c: two(c, BOTH, CELLS), "the target must be a tuple with one array for each of 2 outputs"),
        (lambda c: two(c, BOTH, (CELLS,)), "the model has 2 outputs: give a tuple of as many targets, got 1"),
        (lambda c: two(c, BOTH, (CELLS, np.ones((1, 1)))), "target 1 has shape (1, 1): the model reads or returns sc"),
        (lambda c: two(c, BOTH, (CELLS[:3], np.ones(1))), "target 0 has shape (3, 3, 1), but this rank's part, in"),
        (lambda c: two(c, nn.MultiOutputLoss(nn.MSELoss()), CELLS), "has 1 losses, and the model 2 outputs"),
        (lambda c: nn.MultiOutputLoss(), "MultiOutputLoss: give a loss for each output, got "),
        (lambda c: nn.MultiOutputLoss(nn.MSELoss(), loss_weights=(1, 2)), "1 losses have 2 loss_weights"),
        (lambda c: nn.MultiOutputLoss(nn.MSELoss(), loss_weights=(np.nan,)), "loss_weights[0] must be a finite number"),
        (lambda c: BOTH + nn.L1Loss(), "cannot be added to a loss: add losses of one output, as in nn.MultiOutputL"),
        (lambda c: sum([nn.L1Loss(), BOTH]), "cannot be added to a loss: add losses of one output"),
        (lambda c: two(c, nn.MSELoss(), (CELLS, np.ones(1))), "give nn.MultiOutputLoss(...) with a loss for each"),
        (lambda c: two(c, nn.PhysicsLoss(nn.L1Loss(), nn.Tanh()), CELLS), "compares one output with one target: for a"),
        (lambda c: film(c, (CELLS, np.ones(2)), CELLS, nn.MultiOutputLoss(nn.L1Loss())), "and the model has 1: give"),
        (lambda c: nn.TimeEmbedding(6, np.inf), "TimeEmbedding: max_period must be a finite number, got inf"),
        (lambda c: nn.UNet(1, 1, time_embedding=5), "TimeEmbedding(dim=5, max_period=10000.0): dim must be even and a"),
        (lambda c: nn.TimeEmbedding(5), "TimeEmbedding(dim=5, max_period=10000.0): dim must be even and at least 4"),
        (lambda c: nn.StaticChannels([[1.0, 2.0], [3.0]]), "StaticChannels: values: setting an array element with a s"),
        (lambda c: nn.Mask([[True, False], [True]]), "Mask: cells: setting an array element with a sequence"),
        (lambda c: nn.StaticChannels("a"), "StaticChannels: give a number or bool for each cell, got <U1"),
        (
            predict_with(nn.StaticChannels(np.ones((2, 4, 4)))),
            "has values of shape (2, 4, 4), and this rank's part of the field has",
        ),
        (
            predict_with(nn.GlobalMean(np.ones((4, 4)))),
            "weights of shape (4, 4) do not fit: this rank's part of the field has",
        ),
        (predict_with(nn.GlobalMean(np.zeros((4, 3)))), "all weights of a channel are 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call: Any, message: str) -> None:
    demand_refused(call, message)


def test_scalars_that_differ_between_ranks_are_told() -> None:
    with pytest.warns(RuntimeWarning, match="rank 1 passes other scalars than rank 0 with its part of the same field"):
        spawn(lambda comm: film(comm, (CELLS, np.full(2, float(comm.rank))), CELLS), 2)
    with pytest.warns(RuntimeWarning, match="rank 1 passes other scalar targets than rank 0 with its part of the same"):
        spawn(lambda comm: two(comm, BOTH, (CELLS, np.full(1, float(comm.rank)))), 2)


HOLD_ARRAYS: list[tuple[Any, str]] = [
    (lambda w: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Mask(w)), "'1' Mask(0.0): the mask has (4, 4) cells"),
    (lambda w: nn.Sequential(nn.StaticChannels(w), nn.Conv2d(2, 1, 1)), "'0' StaticChannels() has values of shape (4,"),
    (lambda w: nn.Rollout(nn.Sequential(nn.StaticChannels(w), nn.Conv2d(2, 1, 1)), 1), "'0' StaticChannels() has valu"),
    (lambda w: nn.Rollout(nn.Conv2d(1, 1, 1), 1, noise=0.1, noise_weights=w), "noise_weights of shape (4, 4) do not"),
    (lambda w: nn.Sequential(nn.Conv2d(1, 1, 1), nn.GlobalMean(w)), "'1' GlobalMean(weights=<an array>): weights of s"),
]


@pytest.mark.parametrize(("make", "message"), HOLD_ARRAYS)
def test_an_array_that_fits_all_parts_but_one_is_an_error_on_all_ranks(make: Any, message: str) -> None:
    def run(comm: Communicator, size: int) -> Any:
        return make(np.ones((4, size if comm.rank else 3))).as_distributed(domain=grid_of(comm))

    demand_refused(lambda comm: run(comm, 4), message, start="rank 1: ")
    spawn(run, 2, 3)


def test_weights_of_other_channels_on_one_rank_are_an_error_on_all() -> None:
    def run(comm: Communicator) -> None:
        layer = nn.GlobalMean(np.ones((1 + comm.rank, 4, 3)))
        make_trainer(layer, grid_of(comm), precision=None).evaluate(CELLS, np.ones(1))

    demand_refused(run, "weights of 2 channels do not fit a field of 1", start="rank 1: ")


def test_a_layer_of_two_fields_alone_drops_their_ghost_cells() -> None:
    """With gradients of both inputs."""
    wide = RNG.standard_normal((2, 1, 2, 9, 11))

    def run(comm: Communicator, ghosts: int) -> Any:
        cuts = random_cuts(SHAPE, (2, 1))
        grid = grid_at(comm, (2, 1), cuts, layout="cyx", ghosts=ghosts)
        trainer = nn.MatchMean().as_distributed(domain=grid, precision="float64")
        y = trainer.forward(tuple(part_with_ghosts(a, grid, 1) for a in wide))
        own = (slice(None), slice(None), *(slice(ghosts, -ghosts or None),) * 2)
        return y, *(dx[own] for dx in trainer.backward(y * y))

    assert_close(spawn(run, 2, 1), spawn(run, 2, 0), 1e-12)


def test_a_dry_run_knows_scalars() -> None:
    grid = fsdpx.Grid.from_shape((8, 8), (2, 2), layout="cyx")
    terrain, volumes = np.ones((2, 4, 4)), np.ones((4, 4))
    x = np.ones((3, 2, 4, 4)), np.ones(3), np.ones((3, 1, 4, 4)), np.ones((3, 2))
    y = np.ones((3, 2, 4, 4)), np.ones((3, 2))
    options = {"loss": LOSS, "optimizer": optim.SGD(lr=0.1), "precision": "float64"}
    made = fsdpx.dry_run(net(terrain, volumes), x, y, ranks=4, domain=grid, **options)
    assert "all-reduce over domain" in str(made.report)


@pytest.mark.world
@pytest.mark.mpi
def test_scalars_under_mpi(world: Communicator) -> None:
    MPI = pytest.importorskip("mpi4py.MPI")
    dims = MPI.Compute_dims(world.size, 2)
    found = trained(world, dims, cuts_of(SHAPE, dims, world.size % 2).cuts)
    assert_close(found, from_rank_0(world, alone), 1e-12)
