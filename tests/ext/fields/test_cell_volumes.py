"""Weights of cells that differ in size, for each rank's part."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from grids import cuts_of, grid_at, noise, part, uneven
from layers_on_parts import run_alone, run_over
from trainings import demand_error, demand_like_alone, make_trainer, train_on_parts

from fsdpx import Grid, data, nn, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, DataError, ShapeError

volumes_of, latitudes_of = data.compute_cell_volumes, data.compute_latitude_weights


def test_latitude_weights_are_those_of_weatherbench() -> None:
    """Equiangular with poles, Gaussian, from north to south, and a region with bounds; cells fill the sphere."""
    for at in (np.linspace(-90, 90, 33), np.linspace(85, -85, 18), np.rad2deg(np.arcsin([-0.9, -0.2, 0.5, 0.95]))):
        got = latitudes_of(at)
        rad = np.deg2rad(at if at[0] < at[-1] else at[::-1])
        edges = np.concatenate([[-np.pi / 2], (rad[:-1] + rad[1:]) / 2, [np.pi / 2]])
        want = np.sin(edges[1:]) - np.sin(edges[:-1])
        assert want.sum() == pytest.approx(2.0, rel=1e-15)
        want = want if at[0] < at[-1] else want[::-1]
        np.testing.assert_allclose(got, want / want.mean(), rtol=1e-12, atol=1e-15)
    region = latitudes_of([15.0, 45.0], bounds=[0.0, 30.0, 60.0])
    np.testing.assert_allclose(region / region[0], [1.0, np.sqrt(3.0) - 1.0], rtol=1e-14)
    np.testing.assert_allclose(latitudes_of([0.0]), [1.0])


def test_weighted_losses_are_those_of_the_whole_field() -> None:
    """Two steps on any partition, including empty parts, with the volumes of each part."""
    widths = np.random.default_rng(0).uniform(0.1, 3.0, 7), latitudes_of(np.linspace(-75, 75, 6))
    u = np.random.default_rng(1).standard_normal((7, 6, 1))
    whole = volumes_of(widths)
    np.testing.assert_allclose(whole, np.outer(*widths), rtol=1e-15)

    def run(comm: Communicator, *cut: Any) -> Any:
        grid = grid_at(comm, *cut)
        mine = volumes_of(widths, grid)
        np.testing.assert_array_equal(mine, grid.take_local(whole))
        np.testing.assert_array_equal(volumes_of((widths[0], 0.5), grid)[:, :0], mine[:, :0])
        trainer = make_trainer(nn.Conv2d(1, 1, 3, padding=1), grid, loss=nn.RelativeL2(weights=mine))
        return train_on_parts(trainer, grid.take_local(u), u + 1)

    demand_like_alone(run, (7, 6), uneven((7, 6), (2, 2), (1, 5)), 1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: volumes_of((1.0, np.ones(3))), "widths[0] has shape (): give an array with the width"),
        (lambda g: volumes_of((np.ones(5), 1.0), g), "widths[0] has shape (5,): give one width, or one"),
        (lambda g: volumes_of((1.0,), g), "1 widths, and a grid of 2 dims"),
        (lambda g: volumes_of((1.0, -np.ones(3)), g), "widths[1] has numbers below 0"),
        (lambda g: volumes_of((np.nan, 1.0), g), "widths must be finite numbers"),
        (lambda g: volumes_of(0.1, g), "widths=0.1: give a tuple with the widths along each dim"),
        (lambda g: volumes_of([]), "widths=[]: give a tuple with the widths along each dim"),
        (lambda g: latitudes_of([0, 5], [-90, -50, 90]), "latitude 0 does not lie between its bounds"),
        (lambda g: latitudes_of([0, 5], [9, 3, -2]), "bounds must have the order of the latitudes"),
        (lambda g: volumes_of(("a", 1.0), g), "widths: could not convert"),
        (lambda g: latitudes_of([0.0, 95.0]), "latitudes must increase or decrease between -90 and 90"),
        (lambda g: latitudes_of([0.0, 5.0], [0.0, 3.0]), "bounds of shape (2,): 2 latitudes have 3"),
        (lambda g: latitudes_of([0.0, 5.0], [0.0, 3.0, 2.0]), "bounds must increase or decrease"),
        (lambda g: latitudes_of(np.ones((2, 2))), "latitudes of shape (2, 2): give one number"),
    ],
)
def test_arguments_that_do_not_fit(make: Any, message: str) -> None:
    demand_error(ConfigError, lambda: make(Grid.from_shape((4, 3), (2, 1))), message)


@pytest.mark.parametrize("make", [partial(nn.GroupNorm, 2, 6), partial(nn.InstanceNorm, 6, affine=True)])
@pytest.mark.parametrize("channels", [(), (6,)], ids=["cells", "channels"])
@pytest.mark.parametrize(("dims", "seed"), [((1, 3), 1), ((2, 2), 2)], ids=str)
def test_norms_weighted_by_volumes(make: Any, channels: tuple[int, ...], dims: tuple[int, int], seed: int) -> None:
    """Values and gradients are those of the formula on the whole field, on any parts."""
    shape = (7, 9)
    x, dy = noise(3, 6, *shape) + 1.0, noise(3, 6, *shape, seed=1)
    volumes = 0.1 + noise(*channels, *shape, seed=2) ** 2
    volumes[..., 2, 3:5] = 0.0
    p = {"weight": 1.0 + noise(6, seed=3), "bias": noise(6, seed=4)}
    layer = make(weights=volumes)
    split = (3, layer.num_groups, 6 // layer.num_groups, *shape)
    w = np.broadcast_to(volumes, x.shape).reshape(split)
    total = w.sum(axis=(2, 3, 4), keepdims=True)

    def mean(a: np.ndarray) -> np.ndarray:
        return (w * a.reshape(split)).sum(axis=(2, 3, 4), keepdims=True) / total

    apart = x.reshape(split) - mean(x)
    normal = (apart / np.sqrt(mean(apart**2) + layer.eps)).reshape(x.shape)
    scale, shift = (a.reshape(1, -1, 1, 1) for a in (p["weight"], p["bias"]))
    found = run_alone(layer, p, x, lambda y: dy)
    # by a small change of x in one direction, against the gradient along it
    step = 1e-5 * noise(*x.shape, seed=5)
    low, high = (run_alone(layer, p, x + sign * step, lambda y: dy).y for sign in (-1, 1))
    np.testing.assert_allclose(2 * (found.dx * step).sum(), (dy * (high - low)).sum(), rtol=1e-6)
    np.testing.assert_allclose(found.y, normal * scale + shift, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(found.g["weight"], (dy * normal).sum((0, 2, 3)), rtol=1e-11)
    parts = cuts_of(shape, dims, seed)
    ran = run_over(lambda at: make(weights=part(volumes, parts.cuts, at, volumes.ndim - 2)), p, x, dy, dims, parts)
    assert ran.outputs == parts
    got = {"y": ran.y, "dx": ran.dx, **ran.g}
    for name, want in {"y": found.y, "dx": found.dx, **found.g}.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("unit", [1e6, 1e-6])
def test_norms_in_16_bits_do_not_depend_on_the_unit_of_their_weights(unit: float) -> None:
    x, dy, volumes = noise(2, 4, 3, 5).astype(np.float16), noise(2, 4, 3, 5).astype(np.float16), noise(3, 5) ** 2
    p = {"weight": (1.0 + noise(4)).astype(np.float16), "bias": noise(4).astype(np.float16)}
    found, want = (
        run_alone(nn.GroupNorm(2, 4, weights=factor * volumes), p, x, lambda y: dy) for factor in (unit, 1.0)
    )
    assert want.dx.dtype == np.float16
    np.testing.assert_allclose(found.y, want.y, rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(found.dx, want.dx, rtol=2e-3, atol=1e-3)


def test_norms_without_weights_and_of_wrong_ones() -> None:
    x, p = noise(2, 4, 3, 5), {"weight": 1.0 + noise(4), "bias": noise(4)}
    norm = partial(nn.GroupNorm, 2, 4)
    ones, plain = (run_alone(layer, p, x, lambda y: y) for layer in (norm(weights=np.ones((3, 5))), norm()))
    np.testing.assert_allclose(ones.y, plain.y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ones.dx, plain.dx, rtol=1e-12, atol=1e-12)
    assert repr(norm()) == "GroupNorm(2, 4)"
    assert repr(norm(weights=np.ones((3, 5)))) == "GroupNorm(2, 4, weights=<an array>)"
    with pytest.raises(ShapeError, match="weights"):
        run_alone(norm(weights=np.ones((3, 4))), p, x, lambda y: y)
    with pytest.raises(DataError, match="all weights of a group are 0"):
        run_alone(norm(weights=np.zeros((3, 5))), p, x, lambda y: y)
    with pytest.raises(ConfigError, match="GroupNorm: weights must be numbers >= 0"):
        norm(weights=[-1.0])

    def run(comm: Communicator) -> None:
        grid = Grid(comm, (2, 5), dims=(2, 1))
        with pytest.raises(ShapeError, match=r"weights of shape \(4, 5\) do not fit: this rank's part of the field"):
            norm(weights=np.ones((4, 5))).as_distributed(domain=grid)
        trainer = norm(weights=np.ones((2, 5))).as_distributed(domain=grid)
        assert trainer.predict(np.ones((2, 5, 4))).shape == (2, 5, 4)

    spawn(run, 2)
