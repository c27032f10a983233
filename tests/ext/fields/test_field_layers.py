"""Layers of fields: what they refuse, 16 bits, where they begin and how they are shown."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from amount import few
from layer_cases import check_16_bits, check_refusal
from setting import env, gradients, normal, parameters

from fsdpx import nn
from fsdpx.core.array.kernels.memory_order import channels_last as to_channels_last
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
    y, _ = nn.MaxPool1d(2).forward(env(), {}, np.array([[[1.0, 2.0, np.nan, 3.0, 4.0, 5.0]]]))
    np.testing.assert_array_equal(y, [[[2.0, np.nan, 5.0]]])


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


channels_last = partial(to_channels_last, np)
ANY_ORDER = [
    nn.GroupNorm(4, 16), nn.InstanceNorm(16), nn.GroupNorm(4, 16, weights=np.arange(256.0).reshape(16, 16)),
    nn.ChannelLayerNorm(16), nn.BatchNorm(16), nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 16, 3, groups=16),
    nn.Conv2d(16, 8, 1), nn.Conv2d(16, 9, 5, stride=2), nn.Conv2d(16, 8, 3, padding=1, padding_mode="circular"),
    nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AvgPool2d(3, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2),
    nn.ConvTranspose2d(16, 8, 3), nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear"),
    nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(),
]  # fmt: skip


@pytest.mark.parametrize("dtype", few(["float32", "float64", "float16"], 2))
@pytest.mark.parametrize("layer", ANY_ORDER, ids=repr)
def test_no_bit_depends_on_the_memory_order_where_it_is_ignored(layer, dtype):
    """A stage of a pipeline may get with channels first what the layer before gives with channels last."""
    x, dys, context = normal(4, 16, 16, 16).astype(dtype), [], replace(env(), ignores_memory_order=True)

    def run(turn_x, turn_dy):
        p = parameters(layer, dtype)
        y, saved = layer.forward(context, p, turn_x(x))
        dys.append(normal(*y.shape).astype(dtype))
        g = gradients(layer, p)
        return [y, layer.backward(context, p, g, saved, turn_dy(dys[0])), *g.values()]

    want = run(np.asarray, np.asarray)
    for orders in ((np.asarray, channels_last), (channels_last, np.asarray), (channels_last, channels_last)):
        for got, wanted in zip(run(*orders), want, strict=True):
            np.testing.assert_array_equal(got, wanted, strict=True)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda a: nn.GroupNorm(2, 4, weights=a), np.float64), (lambda a: nn.GlobalMean(weights=a), np.float64),
        (nn.Mask, np.bool_), (nn.StaticChannels, np.float64),
    ],
)  # fmt: skip
def test_a_layer_keeps_a_copy_of_the_array_it_is_given(make, dtype):
    """Sums and casts of these arrays are cached."""
    given = np.arange(16).reshape(4, 4).astype(dtype)
    layer, context, x = make(given), env(), normal(2, 4, 4, 4)
    want = layer.forward(context, parameters(layer), x)[0]
    given[...] = given[::-1].copy() + 1
    for one in (context, env()):
        np.testing.assert_array_equal(layer.forward(one, parameters(layer), x)[0], want)
