"""Losses: sums and weights that add up, and labels that cannot be used."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
from setting import env, normal

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.array.kernels.memory_order import channels_last
from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.losses import match_memory_order
from fsdpx.testing import LossContract

LABELS = np.array([0, 3, -100, 4, 1, -100])
CASES = [
    (nn.CrossEntropyLoss(), LABELS),
    (nn.CrossEntropyLoss(label_smoothing=0.2), LABELS),
    (nn.MSELoss(), normal(6, 5, seed=2)),
    (nn.L1Loss(), normal(6, 5, seed=2)),
    (nn.HuberLoss(0.5), normal(6, 5, seed=2)),
    (nn.SmoothL1Loss(0.5), normal(6, 5, seed=2)),
    (nn.BCEWithLogitsLoss(), normal(6, 5, seed=2) > 0),
]


def ask(contract, loss, y, target):
    """Let a contract test this loss."""
    contract.make, contract.outputs, contract.target = lambda: loss, lambda: y, lambda: target
    return contract


class TestContract(LossContract):
    """Every loss, on rows and on sequences."""

    @pytest.fixture(params=[(loss, t, dims) for loss, t in CASES for dims in (1, 2)], autouse=True)
    def case(self, request):
        loss, target, dims = request.param
        y = normal(6, 5)
        if dims == 2:
            y, target = np.stack([y, normal(6, 5, seed=3)], axis=1), np.stack([target, target[::-1]], axis=1)
        ask(self, loss, y, target)


class Wrong(nn.MSELoss):
    """MSELoss with one mistake."""

    def __init__(self, mistake):
        self.mistake = mistake

    def forward(self, env, y, target):
        total, weight, saved = super().forward(env, y, target)
        if self.mistake == "a mean" and y.size:
            return total / y.size, 1.0, saved
        return total, weight + (self.mistake == "one more"), saved

    def backward(self, env, saved, seed):
        dy = super().backward(env, saved, 1.0 if self.mistake == "no seed" else seed)
        return dy.astype(np.float64) if self.mistake == "float64" else dy * (1.5 if self.mistake == "slope" else 1.0)

    def validate(self, shape, target):
        if self.mistake != "takes all":
            super().validate(shape, target)


@pytest.mark.parametrize(
    ("mistake", "test"),
    [
        ("a mean", "test_parts_of_a_batch_add_up"),
        ("one more", "test_empty_batch_has_zero_weight"),
        ("no seed", "test_seed_multiplies_the_gradient"),
        ("slope", "test_backward_is_the_derivative_of_the_total"),
        ("float64", "test_gradients_have_the_shape_and_dtype_of_the_outputs"),
        ("takes all", "test_validate_accepts_target_and_rejects_wrong_shapes"),
    ],
)
def test_the_contract_finds_a_mistake(mistake, test):
    y, target = normal(6, 5), normal(6, 5, seed=1)
    with pytest.raises(AssertionError):
        getattr(ask(LossContract(), Wrong(mistake), y, target), test)()
    getattr(ask(LossContract(), nn.MSELoss(), y, target), test)()


@pytest.mark.parametrize(("factor", "accepted"), [(1.5, False), (1 + 2**-51, True)], ids=["another slope", "rounding"])
def test_the_contract_compares_both_passes_together_with_both_apart(factor, accepted):
    class Together(nn.MSELoss):
        def forward_and_backward(self, env, y, target, seed):
            total, weight, dy = super().forward_and_backward(env, y, target, seed)
            return total * (1 + 2**-52), weight, dy * factor

    contract = ask(LossContract(), Together(), normal(6, 5), normal(6, 5, seed=1))
    with nullcontext() if accepted else pytest.raises(AssertionError):
        contract.test_both_passes_together_give_the_same_results()


def in_all_orders(*arrays):
    """Return the arrays with their channels first and last in memory, in all combinations, if they have cells."""
    return itertools.product(*[(a, channels_last(np, a)) if a.ndim > 2 else (a,) for a in arrays])


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(2, 32, 32, 32), (3, 8, 64, 64), (1, 4, 5, 7), (2, 3, 16384), (0, 4, 3), (2, 1, 9)])
def test_squared_errors_in_one_pass_have_the_same_bits(shape, kind):
    """With any order of channels in memory, in blocks of whole cells and in others."""
    for a, b in in_all_orders(*(normal(*shape, seed=seed).astype(kind) for seed in (0, 1))):
        total, weight, dy = nn.MSELoss().forward_and_backward(env(), a, b, 0.5)
        assert (total, weight) == nn.MSELoss().forward(env(), a, match_memory_order(None, b, a))[:2]
        np.testing.assert_array_equal(dy, a - b, strict=True)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(2, 32, 32, 32), (1, 4, 5, 7), (0, 4, 3), (6, 5)])
@pytest.mark.parametrize(
    "loss", [nn.L1Loss(), nn.HuberLoss(0.5), nn.HuberLoss(1e-35), nn.SmoothL1Loss(0.3), nn.SmoothL1Loss(0)], ids=repr
)
def test_kernels_of_robust_losses_agree_with_array_code(loss, shape, kind):
    """With any order of channels in memory, in one pass and in two, and where some errors are 0 or NaN."""
    plain = type("Plain", (type(loss),), {})(*(vars(loss)[name] for name in ("delta", "beta") if name in vars(loss)))
    y, target = (normal(*shape, seed=seed).astype(kind) for seed in (0, 1))
    y[..., :1], bound = target[..., :1], 1e-6 if kind is np.float32 else 1e-13
    for a, b in in_all_orders(y, target):
        total, weight, saved = plain.forward(env(), a, b)
        want = plain.backward(env(), saved, 0.5)
        *found, saved = loss.forward(env(), a, b)
        for got in (loss.forward_and_backward(env(), a, b, 0.5), (*found, loss.backward(env(), saved, 0.5))):
            assert got[0] == pytest.approx(total, rel=bound)
            assert got[1] == weight
            np.testing.assert_allclose(got[2], want, rtol=bound, atol=bound)
    if y.size:
        y[(-1,) * y.ndim] = np.nan
        total, _, dy = loss.forward_and_backward(env(), y, target, 0.5)
        assert np.isnan(total)
        assert np.isnan(dy).sum() == 1


def test_a_loss_of_users_may_have_only_the_two_passes_and_change_one_of_them():
    class Plain:
        acts_on, partial, counts, skipna, kernel_names = "sample", False, "samples", False, ()

        def forward(self, env, y, target):
            return float(((y - target) ** 2).sum(dtype=np.float64)), float(len(y)), (y, target)

        def backward(self, env, saved, seed):
            return (2 * seed) * (saved[0] - saved[1])

        def validate(self, shape, target):
            pass

    class Doubled(nn.MSELoss):
        def backward(self, env, saved, seed):
            return 2 * super().backward(env, saved, seed)

    def weight_after_a_step(loss, lr):
        trainer = fsdpx.distribute(nn.Linear(3, 2), loss=loss, optimizer=optim.SGD(lr=lr), seed=0)
        trainer.step(normal(4, 3).astype(np.float32), normal(4, 2, seed=1).astype(np.float32))
        return trainer.parameters()["weight"]

    wanted = weight_after_a_step(nn.MSELoss(), 0.1)
    for loss in (Plain(), Doubled()):
        np.testing.assert_allclose(weight_after_a_step(loss, 0.05), wanted, rtol=1e-6)


def test_all_ignored_weighs_nothing():
    loss = nn.CrossEntropyLoss()
    total, weight, saved = loss.forward(env(), normal(3, 5), np.full(3, -100))
    assert (total, weight) == (0.0, 0.0)
    np.testing.assert_array_equal(loss.backward(env(), saved, 1.0), np.zeros((3, 5)))


def test_large_logits_do_not_overflow():
    y = np.array([[1e4, -1e4], [-1e4, 1e4]])
    assert nn.CrossEntropyLoss().forward(env(), y, np.array([0, 0]))[0] == 2e4
    total, _, saved = nn.BCEWithLogitsLoss().forward(env(), y, np.ones((2, 2)))
    assert total == 2e4
    assert np.isfinite(nn.BCEWithLogitsLoss().backward(env(), saved, 1.0)).all()


@pytest.mark.parametrize(
    ("loss", "shape", "target", "message"),
    [
        (nn.CrossEntropyLoss, (2, 3, 10), [[0, 1, 2], [3, 12, 5]],
         r"label 12 at position \(1, 1\) is out of range: it must be from 0 to 9, or ignore_index -100"),
        (nn.CrossEntropyLoss, (2, 10), [0, -1], r"label -1 at position \(1,\)"),
        (nn.CrossEntropyLoss, (2, 10), [[0], [1]],
         r"wants labels for an output of shape \(2, 10\): \(2,\), got \(2, 1\)"),
        (nn.CrossEntropyLoss, (2, 10), [0.0, 1.0], "labels must be whole numbers, got float64"),
        (nn.MSELoss, (2, 10), [0.0, 0.0], r"MSELoss\(\) wants a target of the output's shape: \(2, 10\), got \(2,\)"),
        (nn.BCEWithLogitsLoss, (2,), [[0.0], [0.0]], r"got \(2, 1\)"),
        (nn.BCEWithLogitsLoss, (2,), [0.5, 7.0], r"target 7.0 at position \(1,\) is not from 0 to 1"),
        (nn.BCEWithLogitsLoss, (2, 1), [[-1], [0]], r"target -1 at position \(0, 0\) is not from 0 to 1"),
        (nn.BCEWithLogitsLoss, (2,), [np.nan, 1.0], r"target nan at position \(0,\) is not from 0 to 1"),
    ],
)  # fmt: skip
def test_targets_that_cannot_be_used(loss, shape, target, message):
    with pytest.raises(DataError, match=message):
        loss().validate(shape, np.array(target))


def test_targets_that_can():
    nn.CrossEntropyLoss().validate((6, 5), LABELS)
    nn.CrossEntropyLoss().validate((0, 5), LABELS[:0])
    nn.MSELoss().validate((6, 5), normal(6, 5))
    nn.BCEWithLogitsLoss().validate((6,), np.ones(6, bool))


def test_options():
    with pytest.raises(ConfigError, match="CrossEntropyLoss: label_smoothing must be between 0 and 1, got 2"):
        nn.CrossEntropyLoss(label_smoothing=2)
    with pytest.raises(ConfigError, match="ignore_index must be a whole number, got None"):
        nn.CrossEntropyLoss(ignore_index=None)
    assert repr(nn.CrossEntropyLoss(label_smoothing=0.1)) == "CrossEntropyLoss(label_smoothing=0.1)"


def test_a_loss_may_look_at_whole_samples_unless_it_says_otherwise():
    assert nn.Loss.acts_on == "sample"
    for loss in (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss, nn.sharding.VocabParallelCrossEntropyLoss):
        assert loss.acts_on == "position"


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss()], ids=repr)
def test_targets_of_every_format_are_compared_by_their_values_or_refused(loss):
    x = normal(4, 3).astype("float32")
    labels = np.array([0, 1, 1, 0]) if isinstance(loss, nn.CrossEntropyLoss) else np.arange(8).reshape(4, 2) % 2

    def run(target):
        trainer = fsdpx.distribute(nn.Linear(3, 2), loss=loss, optimizer=optim.SGD(lr=0.1), seed=1)
        return trainer.evaluate(x, target), trainer.step(x, target), trainer.parameters()["weight"].tolist()

    wanted = run(labels)
    for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64", ">i4", "bool", "float64"):
        if isinstance(loss, nn.CrossEntropyLoss) and kind in ("bool", "float64"):
            with pytest.raises(DataError, match=r"labels must be whole numbers, got (bool|float32)"):
                run(labels.astype(kind))
        else:
            assert run(labels.astype(kind)) == wanted, kind
    with pytest.raises(DataError, match=r"wants (labels|a target).* got \(4, (1|2, 1)\)"):
        run(labels[..., None])
