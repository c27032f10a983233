"""Derivatives by finite differences, what is conserved, and a loss from physics."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from grids import PARTITIONS, env_of, even, grid_at, noise
from layers_on_parts import demand_adjoint, demand_layer_of_whole, demand_loss_of_whole, run_alone
from trainings import demand_like_alone, make_trainer, train_on_parts

from fsdpx import nn
from fsdpx.core.comm import Communicator
from fsdpx.ext.fields.halo import MODES


def of(layer: nn.Layer, x: np.ndarray) -> np.ndarray:
    return layer.forward(env_of(None), {}, x)[0]


@pytest.mark.parametrize("derivative", [1, 2])
@pytest.mark.parametrize("order", [2, 4])
def test_polynomials_have_their_derivatives(derivative: int, order: int) -> None:
    """Between walls, to the degree that the order promises, also in the smallest field."""
    for degree, n in itertools.product(range(order + derivative), (6, 11)):
        at, line = 0.25 * np.arange(n), np.polynomial.Polynomial(np.arange(1.0, degree + 2))
        got = of(nn.FieldDerivative(0, derivative, 0.25, False, order), line(at)[None, None])
        np.testing.assert_allclose(got[0, 0], line.deriv(derivative)(at), rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("derivative", [1, 2])
@pytest.mark.parametrize("order", [2, 4])
def test_errors_fall_as_the_order_says(derivative: int, order: int) -> None:
    """Periodic, and between walls, where second derivatives beside walls are as good as those inside."""
    for periodic in (True, False):
        coarse, fine = (
            error_for_sine(np.arange(n) * (2 * np.pi / n), 2 * np.pi / n, derivative, periodic, order) for n in (40, 80)
        )
        assert coarse / fine > 0.85 * 2**order


def error_for_sine(x: np.ndarray, spacing: Any, derivative: int, periodic: bool, order: int) -> float:
    """The largest error of a derivative of sin(x)."""
    found = of(nn.FieldDerivative(0, derivative, spacing, periodic, order), np.sin(x)[None, None])
    return np.abs(found[0, 0] - (np.cos(x) if derivative == 1 else -np.sin(x))).max()


def test_gradient_divergence_curl_and_laplacian() -> None:
    """On arrays (y, x) with vectors (u, v), and in three dims; periodic, so that they are rolls of the field."""
    h = {0: 0.5, 1: 0.25, 2: 2.0}

    def d(a: np.ndarray, dim: int) -> np.ndarray:
        return (np.roll(a, -1, dim) - np.roll(a, 1, dim)) / (2 * h[dim])

    u, v = noise(8, 9), noise(8, 9, seed=1)
    given: dict[str, Any] = {"spacing": (0.5, 0.25), "periodic": True, "along": (1, 0)}
    x = np.stack([u, v])[None]
    np.testing.assert_allclose(of(nn.FieldDivergence(**given), x)[0, 0], d(u, 1) + d(v, 0), rtol=1e-12)
    np.testing.assert_allclose(of(nn.FieldCurl(**given), x)[0, 0], d(v, 1) - d(u, 0), rtol=1e-12)
    slopes = np.stack([d(u, 1), d(u, 0), d(v, 1), d(v, 0)])
    np.testing.assert_allclose(of(nn.FieldGradient(**given), x)[0], slopes, rtol=1e-12)
    second = sum((np.roll(u, 1, i) - 2 * u + np.roll(u, -1, i)) / h[i] ** 2 for i in (0, 1))
    np.testing.assert_allclose(of(nn.FieldLaplacian(**given), x)[0, 0], second, rtol=1e-10)
    a, b, c = (noise(4, 5, 6, seed=s) for s in (1, 2, 3))
    got = of(nn.FieldCurl(tuple(h.values()), True), np.stack([a, b, c])[None])[0]
    want = np.stack([d(c, 1) - d(b, 2), d(a, 2) - d(c, 0), d(b, 0) - d(a, 1)])
    np.testing.assert_allclose(got, want, rtol=1e-12)
    once = nn.FieldDivergence(1.0, (True, False, True))
    assert np.abs(of(once, of(nn.FieldCurl(1.0, (True, False, True)), noise(1, 6, 5, 6, 7)))).max() < 1e-13


@pytest.mark.parametrize("sizes", [(7, 11), (6, 7, 8)], ids=str)
def test_derivatives_are_adjoint(sizes: tuple[int, ...]) -> None:
    for order, periodic in itertools.product((2, 4), (True, False)):
        x = noise(1, 6, *sizes)
        for make, spacing in ((nn.FieldGradient, 0.5), (nn.FieldCurl, 0.5), (nn.FieldLaplacian, 1.0)):
            layer = make(spacing, periodic, order)
            demand_adjoint(run_alone(layer, {}, x), x)


@pytest.mark.parametrize(("dims", "seed"), PARTITIONS[2:], ids=str)
def test_stretched_derivatives_are_adjoint_over_any_parts(dims: tuple[int, ...], seed: int) -> None:
    """And those of the whole field; `test_grids.py` has even spacings."""
    sizes = (7, 11) if len(dims) == 2 else (6, 7, 8)
    for order, periodic in itertools.product((2, 4), (True, False)):
        x = noise(1, 6, *sizes)
        one_stretched = (bounds(sizes[0]), *(0.5,) * (len(sizes) - 1))
        for make, spacing in ((nn.FieldGradient, [bounds(n) for n in sizes]), (nn.FieldCurl, one_stretched)):
            layer = make(spacing, periodic, order)
            demand_adjoint(demand_layer_of_whole(layer, {}, x, dims, seed)[1], x)


def bounds(n: int, ends: tuple[float, float] = (0.0, 1.0)) -> np.ndarray:
    """Return the bounds of cells whose widths change smoothly."""
    at = np.linspace(0.0, 1.0, n + 1)
    return ends[0] + (ends[1] - ends[0]) * (at + 0.1 * np.sin(2 * np.pi * at))


def test_stretched_derivatives_are_exact_for_polynomials_and_of_their_order() -> None:
    """Positions of values, or bounds of cells, may decrease. In the interior, results equal NumPy's gradient, which
    uses the same formula."""
    edges = bounds(12, (3.0, -1.0))
    at = (edges[1:] + edges[:-1]) / 2
    x = noise(1, 2, 12)
    want = np.gradient(x, at, axis=2)[..., 1:-1]
    for spacing in (edges, at):
        np.testing.assert_allclose(of(nn.FieldDerivative(0, 1, (spacing,)), x)[..., 1:-1], want, rtol=1e-12, atol=1e-12)
    for (derivative, order), degree in {(1, 2): 2, (1, 4): 4, (2, 2): 2, (2, 4): 4}.items():
        line = np.polynomial.Polynomial(np.arange(1.0, degree + 2))
        got = of(nn.FieldDerivative(0, derivative, (edges,), False, order), line(at)[None, None])
        np.testing.assert_allclose(got[0, 0], line.deriv(derivative)(at), rtol=1e-9, atol=1e-9)
        for periodic in (True, False):
            coarse, fine = (
                error_for_sine((e[1:] + e[:-1]) / 2, (e,), derivative, periodic, order)
                for e in (bounds(n, (0.0, 2 * np.pi)) for n in (64, 128))
            )
            assert coarse / fine > 0.8 * 2**order
    for periodic, order in itertools.product((True, False), (2, 4)):
        steps, x = np.linspace(0.0, 6.0, 13), noise(2, 2, 12)
        found, want = (of(nn.FieldLaplacian(spacing, periodic, order), x) for spacing in ((steps,), 0.5))
        np.testing.assert_allclose(found, want, rtol=1e-11, atol=1e-11)


def test_a_mean_is_conserved() -> None:
    """The nearest field with the mean of the other; a projection."""
    y, x = noise(2, 3, 5, 4), noise(2, 3, 5, 4, seed=1) + 7
    found = of(nn.MatchMean(), (y, x))  # type: ignore[arg-type]
    np.testing.assert_allclose(found.mean((2, 3)), x.mean((2, 3)), rtol=1e-13)
    np.testing.assert_allclose(of(nn.MatchMean(), (found, x)), found, rtol=1e-13)  # type: ignore[arg-type]
    np.testing.assert_allclose(np.ptp(found - y, axis=(2, 3)), 0.0, atol=1e-13)


def test_a_loss_from_physics_is_its_formula() -> None:
    y, target = noise(3, 2, 7, 8), noise(3, 2, 7, 8, seed=1)
    divergence = nn.FieldDivergence(0.5, (False, True), 4)
    residual = of(divergence, y)
    for loss in (nn.RelativeL2(), nn.MSELoss(), nn.VRMSE()):
        total, weight, _ = nn.PhysicsLoss(loss, divergence, 0.3).forward(env_of(None), y, target)
        plain = loss.forward(env_of(None), y, target)
        assert total / weight == pytest.approx(plain[0] / plain[1] + 0.3 * float((residual**2).mean()), rel=1e-12)


@pytest.mark.parametrize(("dims", "seed"), PARTITIONS, ids=str)
def test_a_loss_from_physics_over_parts(dims: tuple[int, ...], seed: int) -> None:
    sizes = (7, 8) if len(dims) == 2 else (6, 7, 8)
    y, target = noise(3, len(dims), *sizes), noise(3, len(dims), *sizes, seed=1)
    divergence = nn.FieldDivergence(0.5, (False, True, False)[: len(dims)], 4)
    for loss, residual, weight in ((nn.RelativeL2(), divergence, 0.3), (nn.MSELoss(), nn.FieldLaplacian(), 2.0)):
        demand_loss_of_whole(nn.PhysicsLoss(loss, residual, weight), y, target, dims, seed, 1e-9, 1e-13)


def test_training_with_physics_over_a_grid() -> None:
    """A flow that must have no divergence and must keep its mean, as one process trains it."""

    def run(comm: Communicator, *cut: Any) -> Any:
        grid = grid_at(comm, *cut)
        net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode=MODES[1]), nn.Tanh(), nn.Conv2d(4, 2, 1))
        model = nn.Graph({"net": (net, "x"), "kept": (nn.MatchMean(), "net", "x")}, outputs=("kept",))
        loss = nn.PhysicsLoss(nn.MSELoss(), nn.FieldDivergence(1.0, True, along=(1, 0)), 0.5)
        return train_on_parts(make_trainer(model, grid, loss=loss), grid.take_local(u), u)

    u = noise(6, 9, 2)
    losses, *_ = demand_like_alone(run, (6, 9), [((2, 3), even((6, 9), (2, 3)))])
    assert losses[-1] < losses[0]
