"""Layers give on each part of a field what they give on the whole: results, gradients of inputs and of parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from grids import PARTITIONS, cuts_of, env_of
from layers_on_parts import demand_layer_of_whole, run_alone, run_over
from setting import normal, parameters

from fsdpx import nn
from fsdpx.nn.shard_specs import FieldPartition, ShardingContext

SIZES = {2: (9, 12), 3: (6, 9, 8)}
LAYERS: dict[str, Callable[[int], nn.Layer]] = {
    "Dropout": lambda dims: nn.Dropout(0.4),
    "FillNaN": lambda dims: nn.FillNaN(),
    "GroupNorm": lambda dims: nn.GroupNorm(2, 6),
    "InstanceNorm": lambda dims: nn.InstanceNorm(6, affine=True),
    "Standardize": lambda dims: nn.Standardize(range(6), (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)),
    "Destandardize": lambda dims: nn.Destandardize(range(6), (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)),
    "Derivative": lambda dims: nn.FieldDerivative(1, 2, (0.5, 2.0, 1.0)[:dims], (True, False, True)[:dims], 4),
    "DerivativeAlong": lambda dims: nn.FieldDerivative(0, along=(1, 0, 2)[:dims]),
    "Gradient": lambda dims: nn.FieldGradient(0.5, (False, True, False)[:dims], 4),
    "Divergence": lambda dims: nn.FieldDivergence(0.5, False, 2, (1, 0, 2)[:dims]),
    "Curl": lambda dims: nn.FieldCurl((0.5, 1.0, 2.0)[:dims], (True, False, False)[:dims], 4, (1, 0, 2)[:dims]),
    "Laplacian": lambda dims: nn.FieldLaplacian(0.5, (False, True, True)[:dims]),
    "Pad": lambda dims: nn.Pad(((2, 1), (0, 3), (1, 0))[:dims]),
    "PadRound": lambda dims: nn.Pad(((3, 1), (0, 2), (1, 1))[:dims], "circular"),
    "PadMirrored": lambda dims: nn.Pad(((1, 2), (2, -1), (0, 1))[:dims], "reflect"),
    "Crop": lambda dims: nn.Pad(((-2, 0), (-1, -5), (0, -3))[:dims]),
    "MatchMean": lambda dims: nn.MatchMean(),
    "Mean": lambda dims: getattr(nn, f"AdaptiveAvgPool{dims}d")(1),
    "Means": lambda dims: getattr(nn, f"AdaptiveAvgPool{dims}d")((4, 13, 3)[:dims]),
}
"""By name, for a number of dims."""


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("dims", "seed"), PARTITIONS, ids=str)
def test_parts_give_what_the_whole_gives(name: str, dims: tuple[int, ...], seed: int) -> None:
    """Parts of any sizes, some of them empty."""
    layer, sizes = LAYERS[name](len(dims)), SIZES[len(dims)]
    one, other = normal(2, 6, *sizes), normal(2, 6, *sizes, seed=2)
    demand_layer_of_whole(layer, parameters(layer), one if layer.n_inputs == 1 else (one, other), dims, seed)


def test_a_pad_below_zero_cuts() -> None:
    """`test_padding_sides.py` has all others."""
    x = normal(2, 3, 5, 6)
    y, _ = nn.Pad(((-2, -1), (1, -3))).forward(env_of(None), {}, x)
    np.testing.assert_array_equal(y, np.pad(x[:, :, 2:4, :3], ((0, 0), (0, 0), (0, 0), (1, 0))))


def test_padding_goes_to_the_outer_ranks() -> None:
    parts = FieldPartition(((0, 2, 5), (0, 1, 4, 6)))
    kind = nn.Pad(((2, 1), (-2, 3))).shard_over_ranks(ShardingContext("pad", [parts], 1)).kind
    assert isinstance(kind, FieldPartition)
    assert kind.cuts == ((0, 4, 8), (0, 0, 2, 7))


@pytest.mark.parametrize("dims", [(1, 5), (2, 2, 2)], ids=str)
def test_one_mask_of_the_whole_field(dims: tuple[int, ...]) -> None:
    """Bit for bit that of one rank, in each sample and channel; long rows as well."""
    for sizes in (SIZES[len(dims)], (3,) * (len(dims) - 1) + (1100,)):
        x = normal(2, 3, *sizes)
        want = run_alone(nn.Dropout(0.4), {}, x, np.ones_like)
        assert 0.2 < (want.y == 0).mean() < 0.6
        found = run_over(nn.Dropout(0.4), {}, x, np.ones_like(x), dims, cuts_of(sizes, dims, 1))
        np.testing.assert_array_equal(found.y, want.y)
        np.testing.assert_array_equal(found.dx, want.dx)
