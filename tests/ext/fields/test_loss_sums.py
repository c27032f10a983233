"""Weighted sums of losses: values, parts of fields, any split of a batch, metrics and text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grids import PARTITIONS, env_of, grid_at, noise, random_cuts
from layers_on_parts import demand_loss_of_whole
from trainings import make_trainer

import fsdpx
from fsdpx import nn, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.meshes.node_loss import NodeLoss
from fsdpx.nn.sequence import ShardedBatchLoss, ShardedSequenceLoss
from fsdpx.testing import LossContract

CELLS = 7, 6
SUMS: dict[str, nn.Loss] = {
    "elements": 0.5 * nn.MSELoss() + nn.L1Loss(),
    "fields": nn.RelativeL2() + 2 * nn.VRMSE() + 0.1 * nn.HuberLoss(0.5),
    "nested": 3 * (nn.MaxError() + 0.5 * nn.MSELoss()) + nn.PhysicsLoss(nn.L1Loss(), nn.FieldLaplacian()),
    "surrogates": nn.RelativeH1(0.5) + 0.1 * nn.SpectrumRMSE(1) + 0.5 * nn.CRPS(1, False),
    "missing": nn.RMSE(skipna=True) + 0.5 * nn.L1Loss(skipna=True),
}


def fields(name: str, samples: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and targets. The share of missing values differs between targets."""
    y, target = noise(samples, 3, *CELLS), noise(samples, 3, *CELLS, seed=1) + 2
    if name == "missing":
        target[0, :, :3] = np.nan
        target[1, 0] = np.nan
        target[2] = np.nan
    return y, target


def by_hand(name: str, y: np.ndarray, target: np.ndarray) -> float:
    """The mean of each term, one by one."""
    if name == "missing":  # samples without targets do not count
        one = nn.RMSE(skipna=True), nn.L1Loss(skipna=True)
        known = [s for s in range(len(y)) if not np.isnan(target[s]).all()]
        values = [[mean(loss, y[s : s + 1], target[s : s + 1]) for loss in one] for s in known]
        return float(np.mean([a + 0.5 * b for a, b in values]))
    return sum(factor * mean(loss, y, target) for factor, loss in SUMS[name].terms)  # type: ignore[attr-defined]


def mean(loss: nn.Loss, y: np.ndarray, target: np.ndarray) -> float:
    total, weight, _ = loss.forward(env_of(None), y, target)
    return total / weight


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_the_sum_of_the_means_on_any_parts(name: str) -> None:
    y, target = fields(name)
    assert mean(SUMS[name], y, target) == pytest.approx(by_hand(name, y, target), rel=1e-12)
    for dims, seed in [one for one in PARTITIONS if len(one[0]) == 2]:
        demand_loss_of_whole(SUMS[name], y, target, dims, seed)


class TestContract(LossContract):
    """Each of them."""

    @pytest.fixture(params=SUMS, autouse=True)
    def case(self, request: Any) -> None:
        self.name = request.param

    def make(self) -> nn.Loss:
        return SUMS[self.name]

    def outputs(self) -> np.ndarray:
        return fields(self.name)[0]

    def target(self) -> np.ndarray:
        return fields(self.name)[1]

    def test_repr_shows_the_configuration(self) -> None:
        """What `test_how_sums_print` shows for all."""

    def test_arguments_are_not_modified(self) -> None:
        y, target = fields(self.name)
        self._backward((y,), target, 0.5)
        np.testing.assert_array_equal(y, fields(self.name)[0])
        np.testing.assert_array_equal(target, fields(self.name)[1])


def test_how_sums_print() -> None:
    assert repr(SUMS["elements"]) == "0.5 * MSELoss() + L1Loss()"
    physics = nn.PhysicsLoss(nn.L1Loss(), nn.FieldLaplacian())
    assert repr(SUMS["nested"]) == f"3.0 * MaxError() + 1.5 * MSELoss() + {physics!r}"
    assert repr(np.float64(2) * nn.MSELoss()) == repr(nn.MSELoss() * 2) == "2.0 * MSELoss()"
    assert (SUMS["elements"].acts_on, SUMS["fields"].acts_on) == ("position", "sample")
    assert repr(sum([nn.MSELoss(), nn.L1Loss()])) == "MSELoss() + L1Loss()"
    two = nn.MultiOutputLoss(nn.MSELoss(), nn.L1Loss(), loss_weights=(2, 3))
    assert repr(0.5 * two) == repr(two * 0.5) == "MultiOutputLoss(MSELoss(), L1Loss(), loss_weights=(1.0, 1.5))"


def test_losses_around_others_say_whether_targets_may_be_nan() -> None:
    """Otherwise, an error about NaN would name the target."""
    for skipna in (False, True):
        loss = nn.L1Loss(skipna=skipna)
        around = [2 * loss, nn.PhysicsLoss(loss, nn.Tanh()), nn.MultiOutputLoss(loss), NodeLoss(loss)]
        around += [ShardedBatchLoss(loss), ShardedSequenceLoss(loss, 2)]
        assert {one.skipna for one in around} == {skipna}
        assert {one.counts for one in around[-3:]} == {loss.counts}


def losses(comm: Communicator, name: str, dims: Any = None, **options: Any) -> Any:
    """Return the losses of two steps on four samples, the validation loss and two metrics."""
    (x, target), grid = fields(name), None
    if dims is not None:
        grid = grid_at(comm, dims, random_cuts(CELLS, dims), layout="cyx")
        x, target = grid.take_local(x), grid.take_local(target)
    elif comm.size == 2 and "mesh" not in options:  # batches of three samples and of one
        x, target = (a[:3] if comm.rank == 0 else a[3:] for a in (x, target))
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    trainer = make_trainer(net, grid, loss=SUMS[name], comm=comm, **options)
    first = trainer.step(x, target)
    metrics = {"sum": SUMS[name], "twice": 2 * SUMS[name]}
    history = trainer.fit([(x, target)], validation=[(x, target)], metrics=metrics, progress=False)
    last = {n: values[-1][1] for n, values in history.metrics.items()}
    return [first, *history.losses], history.validation[-1][1], last


SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "microbatches": (1, {"microbatches": 4}),
    "ranks": (2, {}),
    "stages": (2, {"mesh": fsdpx.Mesh(pipe=2), "microbatches": 2}),
    "parts": (4, {"dims": (2, 2), "microbatches": 2}),
}


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("elements", ("microbatches", "ranks", "stages")),
        ("fields", ("ranks", "parts")),
        ("nested", ("ranks", "stages")),
        ("surrogates", ("microbatches", "parts")),
        ("missing", tuple(SPLITS)),
    ],
)
def test_a_sum_does_not_depend_on_how_samples_are_split(name: str, splits: tuple[str, ...]) -> None:
    """Split over ranks, microbatches, pipeline stages and parts of fields. As a metric, the sum equals the validation
    loss."""
    ((want, last, metrics),) = spawn(lambda comm: losses(comm, name), 1)
    assert metrics == pytest.approx({"sum": last, "twice": 2 * last}, rel=1e-12)
    for split in splits:
        ranks, options = SPLITS[split]
        for got, validation, values in spawn(lambda comm, given=options: losses(comm, name, **given), ranks):
            np.testing.assert_allclose(got, want, rtol=1e-12, err_msg=split)
            assert validation == pytest.approx(last, rel=1e-12), split
            assert values == pytest.approx(metrics, rel=1e-12), split


def test_labels_that_are_ignored_leave_each_sample_its_share() -> None:
    """Classes of tokens, one sample with fewer tokens, compared with PyTorch."""
    torch = pytest.importorskip("torch")
    y, labels = noise(3, 4, 5), np.array([[1, 2, 0, 4], [-100, 3, -100, -100], [0, 0, -100, 1]])
    loss = nn.CrossEntropyLoss() + 0.5 * nn.CrossEntropyLoss(label_smoothing=0.1)
    total, weight, saved = loss.forward(env_of(None), y, labels)
    there = torch.tensor(y, requires_grad=True)
    terms = [
        factor * torch.nn.functional.cross_entropy(there[s], torch.tensor(labels[s]), label_smoothing=smoothing)
        for s in range(3)
        for factor, smoothing in ((1.0, 0.0), (0.5, 0.1))
    ]
    want = sum(terms) / 3
    want.backward()
    assert total / weight == pytest.approx(want.item(), rel=1e-12)
    np.testing.assert_allclose(loss.backward(env_of(None), saved, 1 / weight), there.grad.numpy(), rtol=1e-11)


class OfTwo(nn.Loss):
    """Compares the sum of two outputs."""

    def forward(self, env: Any, y: Any, target: np.ndarray) -> tuple[float, float, Any]:
        return nn.MSELoss().forward(env, y[0] + y[1], target)

    def backward(self, env: Any, saved: Any, seed: float) -> Any:
        return (nn.MSELoss().backward(env, saved, seed),) * 2

    def validate(self, shape: Any, target: np.ndarray) -> None:
        nn.MSELoss().validate(shape[0], target)


def test_losses_of_several_outputs_add_up() -> None:
    y, target = (noise(3, 4), noise(3, 4, seed=1)), noise(3, 4, seed=2)
    loss = OfTwo() + 2 * OfTwo()
    loss.validate(((3, 4), (3, 4)), target)
    total, weight, saved = loss.forward(env_of(None), y, target)
    one, elements, _ = nn.MSELoss().forward(env_of(None), y[0] + y[1], target)
    assert total / weight == pytest.approx(3 * one / elements, rel=1e-12)
    for dy in loss.backward(env_of(None), saved, 1 / weight):
        np.testing.assert_allclose(dy, 6 * (y[0] + y[1] - target) / elements, rtol=1e-12)


def test_what_cannot_be_added() -> None:
    for call in (lambda: nn.MSELoss() + 1, lambda: nn.MSELoss() * "2", lambda: nn.MSELoss() * nn.L1Loss()):
        with pytest.raises(TypeError, match=r"unsupported operand|can't multiply"):
            call()
    with pytest.raises(ConfigError, match=r"must be finite, got nan for MSELoss\(\)"):
        float("nan") * nn.MSELoss()
    with pytest.raises(DataError, match=r"L1Loss\(\) wants a target of the output's shape"):
        (nn.L1Loss() + nn.MSELoss()).validate((2, 3), np.zeros((3, 2)))
