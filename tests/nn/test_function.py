"""Lambda: a function of NumPy with a derivative that is checked when the layer is made."""

import numpy as np
import pytest

from fsdpx import nn
from fsdpx.errors import ConfigError, ShapeError

from .setting import env, normal


def softclip(x):
    return x / (1.0 + np.abs(x))


def slope(x):
    return 1.0 / np.square(1.0 + np.abs(x))


def test_it_is_the_function_and_its_derivative():
    layer, x, dy = nn.Lambda(softclip, slope), normal(4, 3), normal(4, 3, seed=1)
    y, saved = layer.forward(env(), {}, x)
    np.testing.assert_array_equal(y, softclip(x))
    np.testing.assert_array_equal(layer.backward_input(env(), {}, saved, dy)[0], dy * slope(x))
    assert repr(layer) == "Lambda(softclip, slope)"
    assert repr(nn.Lambda(np.hypot, (lambda a, b: a / np.hypot(a, b), lambda a, b: b / np.hypot(a, b)))) == (
        "Lambda(hypot, (<lambda>, <lambda>))"
    )


@pytest.mark.parametrize(
    ("function", "derivative", "message"),
    [
        (
            np.sin,
            lambda x: -np.cos(x),
            r"Lambda\(sin, <lambda>\): at 0\.12\S* the derivative gives -0\.99\S*, but the ",
        ),
        (np.exp, lambda x: np.exp(x) * 1.001, "the derivative gives"),
        (np.multiply, (lambda a, b: b, lambda a, b: b), "the derivative by input 1 gives"),
        (lambda x: x - x.mean(), lambda x: 1.0 + 0 * x, "does not act on each element by itself"),
        (lambda x: x.sum(), np.ones_like, "does not act on each element by itself"),
        (lambda x: x * np.float64(2), lambda x: 2.0 + 0 * x, "the function turns float32 into float64"),
        (lambda x: x * 2.0, lambda x: np.full(x.shape, 2.0), "the derivative turns float32 into float64"),
        (lambda x: np.log(x - 100), lambda x: 1 / (x - 100), "no finite value between -2 and 2"),
        (
            lambda a, b: a * b,
            lambda a, b: b,
            r"the function does not take 1 inputs, .*: two inputs need a tuple of two derivatives, nn\.Lambda\(f, \(by",
        ),
        (np.multiply, (lambda a, b: b, lambda b: b), "the derivative does not take 2 inputs, .* each of both inputs"),
        (np.sin, (np.cos, np.cos), "the function does not take 2 inputs, which is the number of derivatives"),
        (np.sin, None, "a function and its derivative are needed"),
        (np.sin, (), "a function and its derivative are needed"),
    ],
)
def test_what_is_no_function_with_its_derivative_is_refused(function, derivative, message):
    with pytest.raises(ConfigError, match=message):
        nn.Lambda(function, derivative)


def test_where_the_function_is_not_finite_nothing_is_compared():
    layer, x = nn.Lambda(np.log, lambda x: 1.0 / x), np.abs(normal(4, 3))
    np.testing.assert_array_equal(layer.forward(env(), {}, x)[0], np.log(x))


def test_a_derivative_may_be_a_number():
    layer, x = nn.Lambda(lambda x: 3.0 * x, lambda x: 3.0), normal(4, 3).astype(np.float32)
    _, saved = layer.forward(env(), {}, x)
    dx, _ = layer.backward_input(env(), {}, saved, x)
    assert dx.dtype == np.float32
    np.testing.assert_array_equal(dx, 3 * x)


def test_inputs_have_one_shape():
    with pytest.raises(ShapeError, match=r"wants inputs of one shape, got \(4, 3\), \(4, 1\)"):
        nn.Lambda(np.add, (lambda a, b: 1.0, lambda a, b: 1.0)).forward(env(), {}, (normal(4, 3), normal(4, 1)))
