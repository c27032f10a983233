"""Losses: sums and weights that add up, and labels that cannot be used."""

import numpy as np
import pytest

from fsdpx import nn
from fsdpx.array import shapes
from fsdpx.errors import ConfigError, DataError

from .setting import env, normal

LABELS = np.array([0, 3, -100, 4, 1, -100])
CASES = [
    (nn.CrossEntropy(), LABELS),
    (nn.CrossEntropy(label_smoothing=0.2), LABELS),
    (nn.MSE(), normal(6, 5, seed=2)),
    (nn.BCEWithLogits(), normal(6, 5, seed=2) > 0),
]


@pytest.mark.parametrize(("loss", "target"), CASES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_parts_of_a_batch_add_up(loss, target, dtype):
    y = normal(6, 5).astype(dtype)
    total, weight, saved = loss.forward(env(), y, target)
    whole = loss.backward(env(), saved, 0.25)
    assert whole.dtype == dtype
    assert isinstance(total, float)
    assert isinstance(weight, float)
    parts = [loss.forward(env(), y[cut], target[cut]) for cut in (slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 6))]
    np.testing.assert_allclose(sum(part[0] for part in parts), total, rtol=1e-6)
    assert sum(part[1] for part in parts) == weight
    pieces = [loss.backward(env(), part[2], 0.25) for part in parts]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize(("loss", "target"), CASES)
def test_backward_is_the_derivative(loss, target):
    y, direction = normal(6, 5), normal(6, 5, seed=1)
    _, _, saved = loss.forward(env(), y, target)
    slope = [loss.forward(env(), y + s * direction, target)[0] for s in (1e-6, -1e-6)]
    got = float(np.sum(loss.backward(env(), saved, 0.5) * direction))
    np.testing.assert_allclose(got, 0.5 * (slope[0] - slope[1]) / 2e-6, rtol=1e-7)


def test_all_ignored_weighs_nothing():
    loss = nn.CrossEntropy()
    total, weight, saved = loss.forward(env(), normal(3, 5), np.full(3, -100))
    assert (total, weight) == (0.0, 0.0)
    np.testing.assert_array_equal(loss.backward(env(), saved, 1.0), np.zeros((3, 5)))


def test_large_logits_do_not_overflow():
    y = np.array([[1e4, -1e4], [-1e4, 1e4]])
    total, _, saved = nn.CrossEntropy().forward(env(), y, np.array([0, 0]))
    assert total == 2e4
    total, _, saved = nn.BCEWithLogits().forward(env(), y, np.ones((2, 2)))
    assert total == 2e4
    assert np.isfinite(nn.BCEWithLogits().backward(env(), saved, 1.0)).all()


@pytest.mark.parametrize(("loss", "target"), CASES)
def test_shape_only(loss, target):
    y, flat = shapes.ShapeArray((6, 5), np.float32), shapes.ShapeArray(target.shape, target.dtype)
    total, weight, saved = loss.forward(env(xp=shapes), y, flat)
    dy = loss.backward(env(xp=shapes), saved, 1.0)
    assert (dy.shape, dy.dtype) == ((6, 5), np.float32)
    assert isinstance(total, float)
    assert isinstance(weight, float)


@pytest.mark.parametrize(
    ("loss", "shape", "target", "message"),
    [
        (
            nn.CrossEntropy(),
            (2, 3, 10),
            np.array([[0, 1, 2], [3, 12, 5]]),
            r"label 12 at position \(1, 1\) is out of range: it must be from 0 to 9, or ignore_index -100",
        ),
        (nn.CrossEntropy(), (2, 10), np.array([0, -1]), r"label -1 at position \(1,\)"),
        (
            nn.CrossEntropy(),
            (2, 10),
            np.array([[0], [1]]),
            r"wants labels for an output of shape \(2, 10\): \(2,\), got \(2, 1\)",
        ),
        (nn.CrossEntropy(), (2, 10), np.array([0.0, 1.0]), "labels must be whole numbers, got float64"),
        (
            nn.MSE(),
            (2, 10),
            np.zeros(2),
            r"MSE\(\) wants a target of the output's shape: \(2, 10\), got \(2,\)",
        ),
        (nn.BCEWithLogits(), (2,), np.zeros((2, 1)), r"got \(2, 1\)"),
    ],
)
def test_targets_that_cannot_be_used(loss, shape, target, message):
    with pytest.raises(DataError, match=message):
        loss.validate(shape, target)


def test_targets_that_can():
    nn.CrossEntropy().validate((6, 5), LABELS)
    nn.CrossEntropy().validate((0, 5), LABELS[:0])
    nn.MSE().validate((6, 5), normal(6, 5))
    nn.BCEWithLogits().validate((6,), np.ones(6, bool))


def test_options():
    with pytest.raises(ConfigError, match="CrossEntropy: label_smoothing must be between 0 and 1, got 2"):
        nn.CrossEntropy(label_smoothing=2)
    with pytest.raises(ConfigError, match="ignore_index must be a whole number, got None"):
        nn.CrossEntropy(ignore_index=None)
    assert repr(nn.CrossEntropy(label_smoothing=0.1)) == "CrossEntropy(label_smoothing=0.1)"


def test_a_loss_may_look_at_whole_samples_unless_it_says_otherwise():
    assert nn.Loss.acts_on == "sample"
    for loss in (nn.CrossEntropy, nn.MSE, nn.BCEWithLogits, nn.VocabCrossEntropy):
        assert loss.acts_on == "position"
