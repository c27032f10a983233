"""Layers of fields: what they refuse, 16 bits, where they begin and how they are shown."""

import numpy as np
import pytest
from layer_cases import check_16_bits, check_refusal
from setting import env, normal

from fsdpx import nn
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.errors import ConfigError, ShapeError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2d(1, 1, 0), "Conv2d: kernel_size must be whole numbers >= 1, got 0"),
        (lambda: nn.Conv2d(1, 1, (1, 2, 3)), "Conv2d: kernel_size must be one whole number or two"),
        (lambda: nn.Conv2d(1, 1, 3, padding=-1), "Conv2d: padding must be whole numbers >= 0, got -1"),
        (lambda: nn.MaxPool2d(3, padding=2), "MaxPool2d: padding 2 must be at most half of kernel_size 3"),
    ],
)
def test_options_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("half", ["float16", "bf16"])
@pytest.mark.parametrize("wide_gradients", [True, False])
@pytest.mark.parametrize(
    "layer", [nn.Conv2d(2, 3, 3, padding=1), nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2))], ids=repr
)
def test_16_bits(layer, half, wide_gradients):
    check_16_bits(layer, normal(3, 2, 5, 5), half, wide_gradients)


NORMS = [
    (lambda: nn.GroupNorm(3, 3), "GroupNorm", (3, 3), [(1, 3), (2, 3), (1, 3, 2)]),
    (lambda: nn.GroupNorm(1, 3), "GroupNorm", (1, 3), [(1, 3)]),
    (lambda: nn.InstanceNorm(3), "InstanceNorm1d", (3,), [(1, 3, 1)]),
    (lambda: nn.InstanceNorm(3), "InstanceNorm2d", (3,), [(2, 3, 1, 1), (2, 3, 1, 2)]),
]


@pytest.mark.parametrize(("make", "name", "given", "shapes"), NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_norms_of_one_value_are_refused_where_pytorch_refuses_them(make, name, given, shapes, training):
    torch = pytest.importorskip("torch")
    for shape in shapes:
        check_refusal(make(), getattr(torch.nn, name)(*given), np.ones(shape), training)


def test_max_pool_shows_nan_and_takes_the_first_of_equals():
    x = np.zeros((1, 1, 2, 4))
    x[0, 0, 0, 3] = np.nan
    y, saved = nn.MaxPool2d(2).forward(env(), {}, x)
    np.testing.assert_array_equal(y, [[[[0.0, np.nan]]]])
    dx, _ = nn.MaxPool2d(2).backward_input(env(), {}, saved, np.ones_like(y))
    np.testing.assert_array_equal(dx, [[[[1, 0, 0, 1], [0, 0, 0, 0]]]])


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (nn.Conv2d(4, 2, 3), (8, 3, 6, 6), r"'a' .* shape \(samples, 4, height, width\), got \(8, 3, 6, 6\)"),
        (nn.MaxPool2d(9), (8, 3, 6, 6), r"MaxPool2d\(9\): the window does not fit along dim 2, dim 3"),
        (nn.AvgPool2d(2), (8, 64), r"wants an input of shape \(samples, channels, height, width\), got \(8, 64\)"),
    ],
)
def test_a_layer_that_does_not_fit_is_named(layer, shape, message):
    with pytest.raises(ShapeError, match=message):
        nn.sharding.output_shapes(nn.sharding.linearize(nn.Sequential({"a": layer})), [ShapeArray(shape, np.float32)])


def test_a_convolution_shows_the_arguments_that_were_given():
    assert repr(nn.Conv2d(3, 8, 3, padding=1)) == "Conv2d(3, 8, 3, padding=1)"
