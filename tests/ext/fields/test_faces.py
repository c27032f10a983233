"""Values on cells and on faces: means, differences and divergences, on any partition."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from grids import PARTITIONS, cuts_of, env_of, noise, padded
from layers_on_parts import demand_adjoint, demand_layer_of_whole

from fsdpx import nn

SIZES = {2: (7, 5), 3: (4, 5, 6)}
KINDS: list[tuple[str, Any]] = [
    ("all", "zeros"), ("all", ("replicate", 2.0)), ("low", "circular"), ("high", "circular"), ("low", "zeros"),
    ("high", (1.5, "replicate")),
]  # fmt: skip


def bounds_of(n: int) -> np.ndarray:
    return np.cumsum([1.0, *np.random.default_rng(n).uniform(0.2, 2.0, n)])


def to_faces(x: np.ndarray, dim: int, widths: np.ndarray, derivative: int, faces: str, mode: Any) -> np.ndarray:
    """The formulas in NumPy. Beyond a wall, the adjacent cell is repeated."""
    shape = [-1 if i == dim else 1 for i in range(x.ndim)]
    h = np.pad(widths, 1, "wrap" if mode == "circular" else "edge").reshape(shape)
    wide, n = padded(x, dim, (1, 1), mode), x.shape[dim]
    lower, upper = (range(n + 1), range(1, n + 2))
    a, b, ha, hb = wide.take(lower, dim), wide.take(upper, dim), h.take(lower, dim), h.take(upper, dim)
    found = (b - a) / ((ha + hb) / 2) if derivative else (ha * a + hb * b) / (ha + hb)
    return found.take({"all": range(n + 1), "low": range(n), "high": range(1, n + 1)}[faces], dim)


def to_cells(x: np.ndarray, dim: int, widths: np.ndarray, derivative: int, faces: str, mode: Any) -> np.ndarray:
    wide = padded(x, dim, (1, 1), mode)
    many = x.shape[dim]
    wide = wide.take({"all": range(1, many + 1), "low": range(1, many + 2), "high": range(many + 1)}[faces], dim)
    n = wide.shape[dim] - 1
    a, b = wide.take(range(n), dim), wide.take(range(1, n + 1), dim)
    return (b - a) / widths.reshape([-1 if i == dim else 1 for i in range(x.ndim)]) if derivative else (a + b) / 2


def moves(number: int, derivative: int, stretched: bool, dims: int) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """Both layers of a kind along one of the dims: the layer, its input, and the arguments of its formula."""
    faces, mode = KINDS[number]
    sizes, dim = SIZES[dims], (number + derivative) % dims
    n = sizes[dim]
    bounds = bounds_of(n) if stretched else 0.5 * np.arange(n + 1)
    given = {"derivative": derivative, "spacing": bounds if stretched else 0.5, "faces": faces}
    many = (*sizes[:dim], n + 1, *sizes[dim + 1 :]) if faces == "all" else sizes
    arguments = dim + 2, np.diff(bounds), derivative, faces, mode
    yield nn.CellsToFaces(dim, padding_mode=mode, **given), noise(2, 3, *sizes), (to_faces, *arguments)
    yield nn.FacesToCells(dim, padding_mode=mode, **given), noise(2, 3, *many), (to_cells, *arguments)


@pytest.mark.parametrize("dims", SIZES)
def test_moves_are_their_formulas(dims: int) -> None:
    for given in itertools.product(range(len(KINDS)), (0, 1), (False, True)):
        for layer, x, (formula, *arguments) in moves(*given, dims):
            y, _ = layer.forward(env_of(None), {}, x)
            np.testing.assert_allclose(y, formula(x, *arguments), rtol=1e-13, atol=1e-13, err_msg=repr(layer))


@pytest.mark.parametrize(("dims", "seed"), PARTITIONS, ids=str)
def test_moves_over_any_parts_are_those_of_the_whole(dims: tuple[int, ...], seed: int) -> None:
    """Values and gradients, also on ranks without cells. Forward and backward of each layer are adjoint. Each part has
    other weights where widths differ."""
    for number, derivative in itertools.product(range(len(KINDS)), (0, 1)):
        for layer, x, _ in moves(number, derivative, True, len(dims)):
            _, ran = demand_layer_of_whole(layer, {}, x, dims, seed)
            demand_adjoint(ran, x, layer.forward(env_of(None), {}, np.zeros_like(x))[0])


@pytest.mark.parametrize(("faces", "mode"), [KINDS[i] for i in (0, 2, 3, 4)] + [("high", "zeros")])
def test_they_are_adjoint_under_the_widths(faces: str, mode: str) -> None:
    """<FacesToCells(F), c> with widths = <F, CellsToFaces(c)> with distances of centers; derivatives with a minus."""
    bounds, n = bounds_of(9), 9
    h = np.pad(np.diff(bounds), 1, "wrap" if mode == "circular" else "edge")
    between = ((h[1:] + h[:-1]) / 2)[{"all": slice(None), "low": slice(n), "high": slice(1, None)}[faces]]
    cells, flux = noise(1, 1, n), noise(1, 1, len(between), seed=1)
    for derivative in (0, 1):
        on_faces = nn.CellsToFaces(0, derivative, bounds, faces, mode).forward(env_of(None), {}, cells)[0]
        on_cells = nn.FacesToCells(0, derivative, bounds, faces, mode).forward(env_of(None), {}, flux)[0]
        one, other = (on_cells * cells * np.diff(bounds)).sum(), (flux * on_faces * between).sum()
        assert one == pytest.approx(-other if derivative else other, rel=1e-13, abs=1e-13)


def test_divergence_of_fluxes() -> None:
    """Several vectors in one array and, with walls, one array per dim. In a closed box, the total is conserved."""
    y, x = bounds_of(7), bounds_of(5)
    flux = noise(2, 4, 7, 5)
    layer = nn.FaceDivergence(2, (y, x), "low", ("zeros", "circular"), along=(1, 0))
    want = to_cells(flux[:, ::2], 3, np.diff(x), 1, "low", "circular")
    want = want + to_cells(flux[:, 1::2], 2, np.diff(y), 1, "low", "zeros")
    for dims, seed in [one for one in PARTITIONS if len(one[0]) == 2]:
        alone, found = demand_layer_of_whole(layer, {}, flux, dims, seed)
        np.testing.assert_allclose(alone.y, want, rtol=1e-12, atol=1e-13)
        assert found.outputs == cuts_of((7, 5), dims, seed)
    u, v = noise(2, 3, 7, 6, seed=2), noise(2, 3, 8, 5, seed=3)
    u[..., [0, -1]] = v[:, :, [0, -1]] = 0
    box = nn.FaceDivergence(2, [y, x], along=(1, 0))
    out = box.forward(env_of(None), {}, (u, v))[0]  # type: ignore[arg-type]
    both = to_cells(u, 3, np.diff(x), 1, "all", 0.0) + to_cells(v, 2, np.diff(y), 1, "all", 0.0)
    np.testing.assert_allclose(out, both, rtol=1e-12, atol=1e-13)
    assert abs((out * np.multiply.outer(np.diff(y), np.diff(x))).sum((2, 3))).max() < 1e-13
