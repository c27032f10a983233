"""Padding that differs between the two ends of a dim, or between dims: given values, zero gradient, periodic."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from grids import PARTITIONS, env_of, grid_at, noise, padded, part_with_ghosts, place_of, random_cuts
from hypothesis import given
from hypothesis import strategies as st
from layers_on_parts import demand_adjoint, demand_layer_of_whole
from trainings import demand_like_alone, make_trainer, train_on_parts

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.comm import Communicator
from fsdpx.ext.fields.halo import MODES

MIXED: tuple[Any, ...] = (("reflect", 1.5), "circular", (-0.5, "replicate"))
SIZES = {2: (7, 11), 3: (6, 7, 8)}
WIDTHS = ((2, 1), (0, 3), (1, 2))


def padded_along_all(x: np.ndarray, padding: Any, modes: Any) -> np.ndarray:
    """One dim after the other."""
    for dim, (widths, sides) in enumerate(zip(padding, modes, strict=True), 2):
        x = padded(x, dim, widths, sides)
    return x


ONCE = [*MODES, 2.5, -1]
BOTH = [(a, b) for a, b in itertools.product(ONCE, repeat=2) if a == b or "circular" not in (a, b)]


@given(st.integers(1, 3), st.data())
def test_each_end_is_padded_as_by_numpy_over_any_parts(dims: int, data: st.DataObject) -> None:
    draw = data.draw
    sizes = tuple(draw(st.integers(3, 6)) for _ in range(dims))
    modes = tuple(draw(st.sampled_from(BOTH)) for _ in range(dims))
    padding = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(dims))
    width = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    layer, x = nn.Pad(padding, modes), noise(2, 3, *sizes)
    want = padded_along_all(x, padding, modes)
    width = width if np.prod(width) <= 6 else (2,) * dims
    alone, found = demand_layer_of_whole(layer, {}, x, width, draw(st.integers(0, 9)))
    np.testing.assert_array_equal(alone.y, want)
    np.testing.assert_array_equal(found.y, want)
    np.testing.assert_allclose(found.dx, alone.dx, rtol=1e-12, atol=1e-13)
    demand_adjoint(found, x, layer.forward(env_of(None), {}, np.zeros_like(x))[0])


@pytest.mark.parametrize(("dims", "seed"), PARTITIONS, ids=str)
def test_a_convolution_pads_each_end(dims: tuple[int, ...], seed: int) -> None:
    """Equal to PyTorch on the padded field, with strides, dilations and groups, on one rank or many."""
    torch = pytest.importorskip("torch")
    many, sizes = len(dims), SIZES[len(dims)]
    for stride, dilation, groups in ((1, 1, 1), (2, 1, 2), (1, 2, 1)):
        modes, padding = MIXED[:many], WIDTHS[:many]
        make, functional = (nn.Conv2d, nn.Conv3d)[many - 2], (torch.conv2d, torch.conv3d)[many - 2]
        layer, x = make(2, 4, 3, stride, padding, dilation, groups, padding_mode=modes), noise(2, 2, *sizes)
        p = {name: noise(*spec.shape, seed=2) for name, spec in layer.specs().items()}
        full = torch.tensor(padded_along_all(x, padding, modes))
        want = functional(full, *map(torch.tensor, (p["weight"], p["bias"])), stride, 0, dilation, groups).numpy()
        alone, _ = demand_layer_of_whole(layer, p, x, dims, seed)
        np.testing.assert_allclose(alone.y, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("cuts", "ghosts"),
    [
        (((0, 3, 8), (0, 6)), True), (((0, 4, 8), (0, 3, 6)), True),
        (random_cuts((8, 6), (2, 2)), False), (random_cuts((8, 6), (5, 1)), False),
    ],
    ids=str,
)  # fmt: skip
def test_two_steps_with_walls_are_those_of_one_process(cuts: Any, ghosts: bool) -> None:
    """A U-Net with another first layer. The first layer reads the solver's ghost cells. Beyond the upper wall there are
    none, so it pads with the wall's value."""
    walls = ((300.0, 1.5), "circular")
    unet = nn.UNet(2, 1, 2, 2, 1, (("replicate", 0.5), "circular"))
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode=walls), unet)
    field, target = noise(8, 6), noise(8, 6, seed=1)

    def run(comm: Communicator, dims: tuple[int, int], cuts: Any) -> Any:
        (y, _), rows = place_of(comm.rank, dims), cuts[0]
        sides = [(int(y == 0 or rows[y] > 0), int(y < dims[0] - 1 and rows[y + 1] < 8)), (1, 1)] if ghosts else 0
        grid = grid_at(comm, dims, cuts, layout="yx", ghosts=sides, periods=(False, True))
        trainer = make_trainer(net, grid, optimizer=optim.SGD(lr=1e-3))
        mine = part_with_ghosts(np.pad(field, 1, "wrap"), grid, 1, first=0)
        return train_on_parts(trainer, mine, target)

    demand_like_alone(run, (8, 6), [((len(cuts[0]) - 1, len(cuts[1]) - 1), cuts)], 1e-12)


def test_a_dim_may_reflect_one_end_alone() -> None:
    """The other end may be wider than the field; `test_field_layers.py` has the error if it reflects."""
    assert nn.Pad(((6, 0),), ((0.0, "reflect"),)).forward(env_of(None), {}, noise(1, 1, 5))[0].shape == (1, 1, 11)


def test_a_warning_names_the_ends_that_are_not_periodic() -> None:
    grid = fsdpx.Grid.from_shape((8, 6), (2, 1), periods=(False, True))
    net = nn.Conv2d(1, 1, 3, padding=1, padding_mode=("zeros", (1.0, "zeros")))
    text = grid.make_sample_layout(net, None).padding_mistake  # type: ignore[arg-type]
    assert "dim x is periodic, but layer '' pads it with (1.0, 'zeros'): choose 'circular'" in text
