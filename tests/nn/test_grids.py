"""Layers give on each part of a field what they give on the whole: results, gradients of inputs and of parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fsdpx import nn
from fsdpx.testing import demand_close

from .grids import GRIDS, cuts_of, run_alone, run_over
from .setting import normal, parameters

SIZES = {2: (9, 12), 3: (6, 9, 8)}
LAYERS: dict[str, Callable[[int], nn.Layer]] = {
    "Dropout": lambda dims: nn.Dropout(0.4),
    "FillNaN": lambda dims: nn.FillNaN(),
    "Normalize": lambda dims: nn.Normalize(range(6), (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)),
    "Denormalize": lambda dims: nn.Denormalize(range(6), (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)),
    "Derivative": lambda dims: nn.Derivative(1, 2, (0.5, 2.0, 1.0)[:dims], (True, False, True)[:dims], 4),
    "DerivativeAlong": lambda dims: nn.Derivative(0, along=(1, 0, 2)[:dims]),
    "Gradient": lambda dims: nn.Gradient(0.5, (False, True, False)[:dims], 4),
    "Divergence": lambda dims: nn.Divergence(0.5, False, 2, (1, 0, 2)[:dims]),
    "Curl": lambda dims: nn.Curl((0.5, 1.0, 2.0)[:dims], (True, False, False)[:dims], 4, (1, 0, 2)[:dims]),
    "Laplacian": lambda dims: nn.Laplacian(0.5, (False, True, True)[:dims]),
    "Conserve": lambda dims: nn.Conserve(),
}
"""By name, for a number of dims."""


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dims", GRIDS, ids=str)
def test_parts_give_what_the_whole_gives(name: str, dims: tuple[int, ...]) -> None:
    """Parts of any sizes, some of them empty."""
    layer, sizes = LAYERS[name](len(dims)), SIZES[len(dims)]
    p, x = parameters(layer), normal(2, 6, *sizes)
    x = x if layer.n_inputs == 1 else (x, normal(2, 6, *sizes, seed=2))
    want = run_alone(layer, p, x, lambda y: normal(*y.shape, seed=1))
    for seed in range(3):
        found = run_over(layer, p, x, normal(*want.y.shape, seed=1), dims, cuts_of(sizes, dims, seed))
        demand_close({"y": found.y, "dx": found.dx, **found.g}, {"y": want.y, "dx": want.dx, **want.g}, 1e-12)


@pytest.mark.parametrize("dims", GRIDS, ids=str)
def test_one_mask_of_the_whole_field(dims: tuple[int, ...]) -> None:
    """Bit for bit that of one rank, in each sample and channel; long rows as well."""
    for sizes in (SIZES[len(dims)], (3,) * (len(dims) - 1) + (1100,)):
        x = normal(2, 3, *sizes)
        want = run_alone(nn.Dropout(0.4), {}, x, np.ones_like)
        assert 0.2 < (want.y == 0).mean() < 0.6
        found = run_over(nn.Dropout(0.4), {}, x, np.ones_like(x), dims, cuts_of(sizes, dims, 1))
        np.testing.assert_array_equal(found.y, want.y)
        np.testing.assert_array_equal(found.dx, want.dx)
