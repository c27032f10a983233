"""Losses of fields: formulas, parts, weights of cells, and what is NaN where nothing counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grids import PARTITIONS, cuts_of, env_of, even, grid_at, noise, part, uneven
from layers_on_parts import demand_loss_of_whole
from trainings import demand_like_alone, demand_refused, make_trainer

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.array.kernels.memory_order import channels_last, put_channels_first
from fsdpx.core.comm import Communicator
from fsdpx.errors import DataError, ShapeError
from fsdpx.nn.shard_specs import FieldPartition
from fsdpx.testing import LossContract, assert_close

SHAPE = 9, 11
VOLUME = 6, 5, 7


LAND = noise(*SHAPE, seed=7) > -0.8
AREA = np.round(np.abs(noise(3, *SHAPE, seed=8)) * 8) / 8 * LAND  # the same in float32
LOSSES: dict[str, Callable[..., nn.Loss]] = {
    "mse": nn.MSELoss, "relative": nn.RelativeL2, "eps": lambda **o: nn.RelativeL2(0.1, **o), "rmse": nn.RMSE,
    "vrmse": nn.VRMSE, "conserved": nn.ConservedRMSE, "most": nn.MaxError,
    "h1": nn.RelativeH1, "h1 periodic": lambda **o: nn.RelativeH1(0.3, 0.5, True, 4, 0.1, **o),
    "spectrum": nn.SpectrumRMSE, "log spectrum": lambda **o: nn.SpectrumRMSE(1, 4, True, 1e-3, **o),
    "crps": lambda **o: nn.CRPS(2, **o), "standard crps": lambda **o: nn.CRPS(3, fair=False, **o),
    "almost fair crps": lambda **o: nn.CRPS(4, 0.95, **o), "one member": lambda **o: nn.CRPS(1, False, **o),
}  # fmt: skip
MEMBERS = {"crps": 2, "standard crps": 3, "almost fair crps": 4}
"""Number of members, of losses that compare an ensemble with the target."""
PLAIN = {name: make() for name, make in LOSSES.items()} | {
    "boundary": nn.BoundaryRMSE(), "low": nn.BandRMSE(0, 2), "middle": nn.BandRMSE(2, 3.5), "high": nn.BandRMSE(3.5),
}  # fmt: skip


def fields(name: str, samples: int, *cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and targets of three channels."""
    y, target = noise(samples, 3 * MEMBERS.get(name, 1), *cells), noise(samples, 3, *cells, seed=1)
    return (y, target) if name in MEMBERS else (y, target + 5)


def axes(a: np.ndarray) -> tuple[int, ...]:
    return tuple(range(2, a.ndim))


def wavenumbers(a: np.ndarray) -> np.ndarray:
    """The length of each mode's wave vector."""
    return np.sqrt(sum(k**2 for k in np.meshgrid(*[np.fft.fftfreq(n, 1 / n) for n in a.shape[2:]], indexing="ij")))


def band(e: np.ndarray, low: float, high: float) -> np.ndarray:
    """By an FFT."""
    length = wavenumbers(e)
    modes = np.fft.fftn(e, axes=axes(e)) * ((length >= low) & (length < high))
    return np.fft.ifftn(modes, axes=axes(e)).real


def ends(e: np.ndarray) -> np.ndarray:
    """The cells at each end of each dim, as PDEBench adds them up."""
    faces = [np.take(e, i, axis=d).reshape(*e.shape[:2], -1) for d in axes(e) for i in (0, -1)]
    return np.concatenate(faces, axis=2)


def root(e: np.ndarray) -> float:
    return float(np.sqrt((e.reshape(*e.shape[:2], -1) ** 2).mean(axis=2)).mean())


def h1(a: np.ndarray, weight: float, spacing: float, periodic: bool, order: int) -> np.ndarray:
    """By differences that neuraloperator's H1Loss has for order 2."""
    grad = 0
    for d in axes(a):
        slope = (np.roll(a, -1, d) - np.roll(a, 1, d)) / 2
        if order == 4:
            slope = (np.roll(a, 2, d) - 8 * np.roll(a, 1, d) + 8 * np.roll(a, -1, d) - np.roll(a, -2, d)) / 12
        if not periodic:
            b, s = np.moveaxis(a, d, 0), np.moveaxis(slope, d, 0)  # a view
            s[0] = (-11 * b[0] + 18 * b[1] - 9 * b[2] + 2 * b[3]) / 6
            s[-1] = (11 * b[-1] - 18 * b[-2] + 9 * b[-3] - 2 * b[-4]) / 6
        grad = grad + (slope / spacing) ** 2
    return np.sqrt((a**2).reshape(len(a), -1).sum(1) + weight * np.asarray(grad).reshape(len(a), -1).sum(1))


def spectrum(a: np.ndarray) -> np.ndarray:
    """Amplitudes by wavenumber, from all modes of a complex FFT."""
    length = np.rint(wavenumbers(a)).astype(int)
    power = np.abs(np.fft.fftn(a, axes=axes(a), norm="forward")) ** 2
    return np.sqrt(np.stack([power[..., length == j].sum(-1) for j in range(length.max() + 1)], -1))


def crps(y: np.ndarray, t: np.ndarray, fair: float) -> float:
    """From all pairs of members."""
    x = y.reshape(len(t), -1, *t.shape[1:])
    m = x.shape[1]
    pairs = np.abs(x[:, :, None] - x[:, None]).sum((1, 2)) / 2
    share = fair / (m * max(m - 1, 1)) + (1 - fair) / m**2
    return float((np.abs(x - t[:, None]).mean(1) - share * pairs).mean())


def log_ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.log((a + 1e-3) / (b + 1e-3))


def norms(a: np.ndarray) -> np.ndarray:
    """Of each sample."""
    return np.linalg.norm(a.reshape(len(a), -1), axis=1)


FORMULAS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mse": lambda e, t: (e**2).mean(),
    "relative": lambda e, t: (norms(e) / norms(t)).mean(),
    "eps": lambda e, t: (norms(e) / (norms(t) + 0.1)).mean(),
    "rmse": lambda e, t: root(e),
    "vrmse": lambda e, t: np.sqrt((e**2).mean(axes(e)) / (t.var(axes(e), ddof=1) + 1e-7)).mean(),
    "conserved": lambda e, t: np.abs(e.mean(axes(e))).mean(),
    "most": lambda e, t: np.abs(e).reshape(len(e), -1).max(axis=1).mean(),
    "boundary": lambda e, t: root(ends(e)),
    "h1": lambda e, t: (h1(e, 1.0, 1.0, False, 2) / h1(t, 1.0, 1.0, False, 2)).mean(),
    "h1 periodic": lambda e, t: (h1(e, 0.3, 0.5, True, 4) / (h1(t, 0.3, 0.5, True, 4) + 0.1)).mean(),
    "spectrum": lambda e, t: np.linalg.norm(spectrum(t + e) - spectrum(t), axis=-1).mean(),
    "log spectrum": lambda e, t: np.sqrt((log_ratio(spectrum(t + e), spectrum(t))[..., 1:4] ** 2).mean(-1)).mean(),
    "one member": lambda e, t: np.abs(e).mean(),
    "low": lambda e, t: root(band(e, 0, 2)),
    "middle": lambda e, t: root(band(e, 2, 3.5)),
    "high": lambda e, t: root(band(e, 3.5, np.inf)),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("cells", [SHAPE, VOLUME, (8, 12), (10,)])
def test_losses_are_their_formulas(name: str, cells: tuple[int, ...]) -> None:
    y, target = fields(name, 2, *cells)
    total, weight, _ = PLAIN[name].forward(env_of(None), y, target)
    fair = getattr(PLAIN[name], "fair", 0.0)
    want = crps(y, target, fair) if name in MEMBERS else FORMULAS[name](y - target, target)
    assert total / weight == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("dims", "seed"), PARTITIONS, ids=str)
def test_losses_of_parts_are_those_of_the_whole(name: str, dims: tuple[int, ...], seed: int) -> None:
    """Values and gradients; parts of any sizes, some of them empty."""
    y, target = fields(name, 2, *(SHAPE if len(dims) == 2 else VOLUME))
    demand_loss_of_whole(PLAIN[name], y, target, dims, seed)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("how", ["mask", "area", "nan"])
def test_what_counts_nothing_may_be_nan(name: str, how: str) -> None:
    """Values and gradients are those of the cells that count, on one rank and on several."""
    y, target = fields(name, 2, *SHAPE)
    w = (AREA if how == "area" else LAND) * np.ones((3, 1, 1))
    bad = target.copy()
    bad[:, w == 0] = np.nan
    of_members = np.tile(w, (MEMBERS.get(name, 1), 1, 1))
    worse = y if how == "nan" else np.where(of_members > 0, y, np.inf)

    def made(parts: FieldPartition, place: list[int]) -> nn.Loss:
        if how == "nan":
            return LOSSES[name](skipna=True)
        given = AREA if how == "area" else LAND
        return LOSSES[name](weights=part(given, parts.cuts, place, given.ndim - 2))

    total, weight, dy = demand_loss_of_whole(made, worse, bad, *PARTITIONS[3 if how == "area" else 2])
    for a in (total, weight, dy):
        assert np.isfinite(a).all()
    assert not dy[:, of_members == 0].any()
    if name in ("mse", "rmse", "conserved"):
        e, c = y - target, (2, 3)
        by_hand = {
            "mse": (w * e * e).sum() / (w.sum() * 2),
            "rmse": np.sqrt((w * e * e).sum(c) / w.sum((1, 2))).mean(),
            "conserved": np.abs((w * e).sum(c) / w.sum((1, 2))).mean(),
        }[name]
        assert total / weight == pytest.approx(by_hand, rel=1e-12)


def test_a_sample_of_which_nothing_is_known_counts_nothing() -> None:
    for name in LOSSES:
        y, target = fields(name, 2, *SHAPE)
        target[1] = np.nan
        loss, one = LOSSES[name](skipna=True), LOSSES[name]()
        total, weight, saved = loss.forward(env_of(None), y, target)
        want = one.forward(env_of(None), y[:1], target[:1])
        assert (total, weight) == pytest.approx(want[:2], rel=1e-12)
        assert not loss.backward(env_of(None), saved, 1.0)[1].any()


class TestContract(LossContract):
    """Each of them."""

    @pytest.fixture(
        params=[
            *PLAIN.items(), ("l2", nn.RelativeL2(weights=LAND)), ("mse", nn.MSELoss(weights=AREA, skipna=True)),
            ("h1", nn.RelativeH1(weights=AREA)), ("spectrum", nn.SpectrumRMSE(weights=AREA)),
            ("crps", nn.CRPS(2, weights=LAND)),
            ("physics", nn.PhysicsLoss(nn.RelativeL2(), nn.FieldDivergence(0.5, (False, True), 4), 0.3)),
            ("physics", nn.PhysicsLoss(nn.MSELoss(), nn.FieldCurl())),
        ],
        autouse=True,
    )  # fmt: skip
    def case(self, request: Any) -> None:
        self.name, self.loss = request.param
        self.channels = 2 if self.name == "physics" else 3  # one for each dim of vectors

    def make(self) -> nn.Loss:
        return self.loss

    def outputs(self) -> np.ndarray:
        return self.draw_normal(4, self.channels * MEMBERS.get(self.name, 1), *SHAPE)

    def target(self) -> np.ndarray:
        return self.draw_normal(4, self.channels, *SHAPE, seed=1) + 2.0


def test_nothing_cancels_in_the_variance_of_a_target() -> None:
    """300 +- 0.01 in float32."""
    target = (300 + 0.01 * noise(1, 1, 64, 64)).astype(np.float32)
    y = target + np.float32(0.01)
    total, _, _ = nn.VRMSE().forward(env_of(None), y, target)
    wide = target.astype(np.float64)
    want = np.sqrt(((y - wide) ** 2).mean() / (wide.var(ddof=1) + 1e-7))
    assert total == pytest.approx(float(want), rel=1e-5)


def fitted(comm: Communicator, dims: tuple[int, int] | None, **options: Any) -> Any:
    """The metrics of one validation."""
    whole, mask = np.random.default_rng(0).standard_normal((4, 8, 12, 2)), np.arange(96).reshape(8, 12) % 5 > 0
    if dims is None:
        grid, u = None, np.moveaxis(whole, -1, 1)
    else:
        grid = fsdpx.Grid(comm, (8 // dims[0], 12 // dims[1]), dims=dims)
        u, mask = grid.take_local(whole), grid.take_local(mask)
    trainer = make_trainer(nn.Conv2d(2, 2, 3, padding=1), grid, loss=nn.RelativeL2(weights=mask))
    batches = [(u[:3], u[:3] ** 2), (u[3:], u[3:] ** 2)]
    metrics = options or {
        "vrmse": nn.VRMSE(weights=mask), "low": nn.BandRMSE(0, 3), "edge": nn.BoundaryRMSE(), "most": nn.MaxError(),
        "sum": lambda y, t: (float((y - t).sum()), y.size),
    }  # fmt: skip
    history = trainer.fit(batches, validation=batches, metrics=metrics, epochs=1, progress=False)
    return history.losses, history.metrics


def test_metrics_of_parts_are_those_of_the_whole() -> None:
    want, *found = *spawn(fitted, 1, None), *spawn(fitted, 4, (2, 2))
    for got in found:
        assert_close(got, want, 1e-11)


def test_targets_of_metrics_may_bring_ghost_cells() -> None:
    """As a dataset gives them that reads ghost cells with the part."""

    def run(comm: Communicator) -> Any:
        grid = fsdpx.Grid(comm, (3, 5), dims=(2, 1), ghosts=1)
        trainer = make_trainer(nn.Conv2d(1, 1, 3, padding=1), grid, optimizer=optim.SGD(lr=0.0))
        u = np.random.default_rng(comm.rank).standard_normal((5, 7, 1))
        metrics: dict[str, Any] = {"root": nn.RMSE(), "own": lambda y, t: (float(((y - t) ** 2).sum()), y.size)}
        for target in (u, grid.without_ghosts(u)):
            history = trainer.fit([(u, u)], validation=[(u, target)], metrics=metrics, progress=False)
            found = {name: values[-1][1] for name, values in history.metrics.items()}
            assert found == pytest.approx({"root": history.losses[-1] ** 0.5, "own": history.losses[-1]})
        return found

    assert len({str(found) for found in spawn(run, 2)}) == 1


def test_metrics_that_cannot_be_are_refused_on_all_ranks() -> None:
    """A mean over samples of which each rank has a part; weights that fit on one rank alone."""
    message = "metric 'bad': with domain= a rank has parts of samples: return (sum, count) over its cells"
    demand_refused(lambda comm: fitted(comm, (1, 2), bad=lambda y, t: np.zeros(len(y))), message)
    message = "weights of shape (8, 7) do not fit"
    demand_refused(lambda comm: fitted(comm, (1, 2), bad=nn.RMSE(weights=np.ones((8, 6 + comm.rank)))), message)


def test_a_band_without_any_wave_has_no_gradient() -> None:
    """What is left of the error is rounding, which a root would make large."""
    env, (y, target) = env_of(None), np.random.default_rng(0).standard_normal((2, 1, 2, 16, 16))
    for band in (nn.BandRMSE(12), nn.BandRMSE(12, 20)):
        total, _, saved = band.forward(env, y, target)
        assert total == 0.0
        assert not band.backward(env, saved, 1.0).any()
    assert nn.BandRMSE(11).forward(env, y, target)[0] > 0.0  # the corner, of length 8 sqrt(2)


def test_weights_of_another_shape_are_refused_on_all_ranks() -> None:
    def run(comm: Communicator) -> None:
        loss, u = nn.RelativeL2(weights=np.ones((4, 3 + comm.rank))), np.ones((4, 3, 1))
        make_trainer(nn.Conv2d(1, 1, 1), fsdpx.Grid(comm, (4, 3), dims=(1, 2)), loss=loss, precision=None).step(u, u)

    message = "rank 1: RelativeL2(weights=<an array>): weights of shape (4, 4) do not fit: this rank's part"
    demand_refused(run, message)


def test_what_is_not_there_does_not_spread() -> None:
    """Land is NaN in inputs and targets: weights are those of a sea that is alone, on one rank and on several."""
    sea = np.arange(48).reshape(6, 8) % 7 > 1
    u = np.where(sea[..., None], noise(6, 8, 2), np.nan)

    def run(comm: Communicator, *cut: Any) -> Any:
        grid = grid_at(comm, *cut)
        mine, x = grid.take_local(sea), grid.take_local(u)
        net = nn.Sequential(nn.FillNaN(), nn.Conv2d(2, 4, 3, padding=1), nn.Mask(mine), nn.Tanh(), nn.Conv2d(4, 2, 1))
        trainer = make_trainer(net, grid, loss=nn.MSELoss(weights=mine))
        return [trainer.step(x, x * 2) for _ in range(3)], trainer.parameters()

    losses, _ = demand_like_alone(run, (6, 8), [((2, 2), even((6, 8), (2, 2)))])
    assert np.isfinite(losses).all()


def test_a_mask_of_another_shape() -> None:
    with pytest.raises(ShapeError, match=r"Mask\(0.0\): the mask has \(2, 3\) cells, and this rank's part \(2, 4\)"):
        nn.Mask(np.ones((2, 3))).forward(env_of(None), {}, noise(1, 1, 2, 4))


def test_outputs_without_cells_or_channels() -> None:
    y, message = noise(2, 5), r"wants \(samples, channels, \*cells\), got \(2, 5\)|FieldGradient.*wants"
    for loss in (nn.SpectrumRMSE(), nn.RelativeH1()):
        with pytest.raises(ShapeError, match=message):
            loss.forward(env_of(None), y, y)
    with pytest.raises(DataError, match=r"CRPS\(2\) wants outputs \(samples, .*, got \(4,\)"):
        nn.CRPS(2).validate((4,), np.ones(4))


def test_a_part_without_modes_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy may refuse to count the elements of an empty array."""

    def count(index: np.ndarray, *rest: Any) -> np.ndarray:
        assert index.size
        return counted(index, *rest)

    counted = np.bincount
    monkeypatch.setattr(np, "bincount", count)
    y, target = noise(1, 2, 4, 4), noise(1, 2, 4, 4, seed=1)

    def run(comm: Communicator) -> Any:
        loss = nn.SpectrumRMSE().bind_partition(cuts_of((4, 4), (1, 4), 0))
        mine = (slice(None), slice(None), slice(None), slice(comm.rank, comm.rank + 1))
        total, weight, saved = loss.forward(env_of(comm, (1, 4)), y[mine], target[mine])
        loss.backward(env_of(comm, (1, 4)), saved, 1.0)
        return total, weight

    found = np.sum(spawn(run, 4), axis=0)
    np.testing.assert_allclose(found, nn.SpectrumRMSE().forward(env_of(None), y, target)[:2], rtol=1e-12)


def test_sums_and_nothing_else_travel() -> None:
    """24 bytes for each sample of RelativeL2; of a band the modes below its end, whatever the field."""

    def run(comm: Communicator, loss: nn.Loss, n: int) -> int:
        env, y = env_of(comm, (2, 2)), noise(3, 2, n // 2, n // 2)
        loss.bind_partition(cuts_of((n, n), (2, 2), 0)).forward(env, y, 2 * y)
        return sum(count.bytes for (axis, _), count in env.mesh.counters.table.items() if axis == "domain")

    def sent(loss: nn.Loss, n: int) -> int:
        return sum(spawn(lambda comm: run(comm, loss, n), 4))

    assert sent(nn.RelativeL2(), 8) == 2 * 3 * 24 * 3  # an all-reduce over N ranks sends 2 (N - 1) n bytes
    assert sent(nn.BandRMSE(0, 3), 8) == sent(nn.BandRMSE(0, 3), 64)
    both = 2 * 3 * 2 * 64 * 64 * 8  # output and target; along each dim, half of them leave their rank twice
    assert sent(nn.SpectrumRMSE(), 64) == pytest.approx(2 * both, rel=0.1)


def test_ensembles_train_alike_on_any_parts() -> None:
    """Two steps with three members, and masked cells whose targets are NaN."""
    u, target = noise(*SHAPE, 2), np.where(LAND[..., None], noise(*SHAPE, 2, seed=1), np.nan)

    def run(comm: Communicator, *cut: Any) -> Any:
        grid = grid_at(comm, *cut)
        net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 6, 3, padding=1))
        loss = nn.CRPS(3, weights=grid.take_local(LAND)) + 0.1 * nn.CRPS(3, fair=0.5, skipna=True)
        trainer = make_trainer(net, grid, loss=loss, optimizer=optim.SGD(lr=0.5))
        x, y = grid.take_local(u), grid.take_local(target)
        return [trainer.step(x, y) for _ in range(2)]

    first, second = demand_like_alone(run, SHAPE, uneven(SHAPE, (2, 2), (1, 5)))
    assert second < first


def test_the_spectrum_does_not_see_shifts() -> None:
    """And its error is at most that of the field, with weights as well."""
    env, u = env_of(None), noise(1, 2, 8, 6)
    assert nn.SpectrumRMSE().forward(env, np.roll(u, (3, 1), (2, 3)), u)[0] < 1e-14
    for weights in (None, noise(8, 6, seed=3) ** 2):
        spectra, cells = (
            make(weights=weights).forward(env, noise(1, 2, 8, 6, seed=1), u)[0] for make in (nn.SpectrumRMSE, nn.RMSE)
        )
        assert 0 < spectra <= cells


def test_a_loss_is_a_metric_of_any_model() -> None:
    """Over samples of several ranks, as the validation loss is."""

    def run(comm: Communicator) -> Any:
        x, y = noise(5, 4)[comm.rank :: 2], np.arange(5)[comm.rank :: 2] % 3
        trainer = make_trainer(nn.Linear(4, 3), None, comm=comm, loss=nn.CrossEntropyLoss())
        metrics = {"same": nn.CrossEntropyLoss(), "smooth": nn.CrossEntropyLoss(label_smoothing=0.5)}
        history = trainer.fit([(x, y)], validation=[(x, y)], metrics=metrics, progress=False)
        return history.validation[-1][1], {name: values[-1][1] for name, values in history.metrics.items()}

    for loss, metrics in spawn(run, 2):
        assert metrics["same"] == pytest.approx(loss, rel=1e-12)
        assert metrics["smooth"] > loss


@pytest.mark.parametrize("name", ["relative_l2", "rmse", "vrmse", "relative_h1", "spectrum", "crps"])
@pytest.mark.parametrize("cells", [(12,), (9, 12), (6, 5, 8)], ids=str)
def test_losses_and_gradients_are_those_of_pytorch(name: str, cells: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    import torch_losses

    ours = {"relative_l2": nn.RelativeL2(), "rmse": nn.RMSE(), "vrmse": nn.VRMSE(), "relative_h1": nn.RelativeH1()}
    ours |= {"spectrum": nn.SpectrumRMSE(), "crps": nn.CRPS(3)}
    theirs = torch_losses.make_spectrum_rmse() if name == "spectrum" else getattr(torch_losses, name)
    y, target = noise(4, 6 if name == "crps" else 2, *cells), noise(4, 2, *cells, seed=1)
    there = torch.tensor(y, requires_grad=True)
    want = theirs(there, torch.tensor(target))
    want.backward()
    total, weight, saved = ours[name].forward(env_of(None), y, target)
    assert total / weight == pytest.approx(want.item(), rel=1e-12)
    dy = ours[name].backward(env_of(None), saved, 1.0 / weight)
    np.testing.assert_allclose(dy, there.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("cells", [(9, 11), (80, 80)], ids=str)
@pytest.mark.parametrize("name", ["relative", "rmse", "vrmse", "h1", "spectrum"])
def test_any_memory_order_and_flags_of_arrays(name: str, cells: tuple[int, ...]) -> None:
    """Read-only targets give the bits of others, and fields with channels last in memory their values."""
    loss, results = LOSSES[name](), []
    arrays = [a.astype(np.float32) for a in fields(name, 2, *cells)]
    locked = arrays[1].copy()
    locked.flags.writeable = False
    for y, target in (arrays, (arrays[0], locked), *([channels_last(np, arrays[0]), a] for a in (arrays[1], locked))):
        total, weight, dy = loss.forward_and_backward(env_of(None), y, target, 0.5)
        assert loss.forward(env_of(None), y, target)[:2] == (total, weight)
        results.append((total, weight, np.ascontiguousarray(dy)))
    for one, other in (results[:2], results[2:]):
        assert one[:2] == other[:2]
        np.testing.assert_array_equal(one[2], other[2])
    assert results[2][0] == pytest.approx(results[0][0], rel=1e-6)
    np.testing.assert_allclose(results[2][2], results[0][2], rtol=1e-4, atol=1e-8)


def test_a_field_with_an_infinite_error_has_an_infinite_loss() -> None:
    for name in ("relative", "rmse"):
        for cells in ((3, 4), (80, 80)):
            y, target = (a.astype(np.float32) for a in fields(name, 2, *cells))
            y[1, 2, 1, 1] = np.inf
            for array in (y, channels_last(np, y)):
                assert LOSSES[name]().forward(env_of(None), array, target)[0] == np.inf


def test_a_subclass_of_relative_l2_may_sum_over_other_dims() -> None:
    class OfChannels(nn.RelativeL2):
        def _get_reduced_dims(self, y: np.ndarray) -> tuple[int, ...]:
            return axes(y)

    for cells in ((3, 4), (80, 80)):
        y, target = fields("relative", 2, *cells)
        want = norms((y - target).reshape(6, -1)) / norms(target.reshape(6, -1))
        assert OfChannels().forward(env_of(None), y, target)[:2] == (pytest.approx(want.sum(), rel=1e-12), 6.0)


def test_channels_first() -> None:
    for shape in ((2, 3, 4, 5), (1, 8, 70), (2, 19, 150), (1, 33, 5), (0, 3, 4), (2, 1, 6), (2, 5)):
        x = noise(*shape).astype(np.float32)
        last = channels_last(np, x) if len(shape) > 2 else x
        for array in (x, last, x[::-1], x.astype(np.float16)):
            got = put_channels_first(np, array)
            np.testing.assert_array_equal(got, array, strict=True)
            assert got is array or got.flags.c_contiguous
        assert put_channels_first(np, last).flags.c_contiguous


def test_in_a_pipeline_no_bit_depends_on_the_memory_order_of_targets() -> None:
    x, target = (a.astype(np.float32) for a in fields("mse", 2, 70, 80))

    def train(comm: Communicator, loss: nn.Loss) -> Any:
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 3, 1))
        mesh = fsdpx.Mesh(shard=1, pipe=2)
        trainer = make_trainer(model, None, loss=loss, mesh=mesh, comm=comm, precision=None)
        parameters, found = trainer.parameters(), set()
        for turned in (target, channels_last(np, target), np.frombuffer(target.tobytes(), "f4").reshape(target.shape)):
            trainer.load_parameters(parameters)
            found.add((trainer.step(x, turned), trainer.evaluate(x, turned)))
        return found

    for loss in (nn.MSELoss(), nn.HuberLoss(), nn.RelativeL2(), nn.RMSE(), nn.RelativeH1(), nn.SpectrumRMSE()):
        (found,) = spawn(train, 2, loss)[0]
        assert np.isfinite(found).all(), loss
