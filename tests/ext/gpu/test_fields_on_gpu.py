"""Fields over grids of ranks on a GPU, and on the stand-in: the same losses as on the host, and what each format is off
by."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import test_rollouts
import test_scalars
from grids import even, grid_at, part, place_of, random_cuts
from on_gpu import PLACES
from stand_in import Cupy
from test_space import MODELS, wanted

from fsdpx import nn, optim, spawn

LOSSES: dict[str, Callable[[], nn.Loss]] = {
    "relative": nn.RelativeL2, "vrmse": nn.VRMSE, "boundary": nn.BoundaryRMSE, "band": lambda: nn.BandRMSE(1, 3),
    "conserved": nn.ConservedRMSE, "most": nn.MaxError, "spectrum": nn.SpectrumRMSE,
    "h1": lambda: nn.RelativeH1(periodic=True, weights=np.arange(96.0).reshape(12, 8) % 4 / 4),
    "weighed": lambda: nn.RMSE(weights=np.arange(96.0).reshape(12, 8) % 4 / 4),
    "gradient": lambda: nn.PhysicsLoss(nn.MSELoss(), nn.FieldGradient(spacing=0.1, periodic=True), 0.1),
    "laplacian": lambda: nn.PhysicsLoss(nn.MSELoss(), nn.FieldLaplacian(spacing=0.3), 0.1),
}  # fmt: skip


PLAIN = "a convolution"
"""Beside which a loss can be looked at: what it does does not depend on the model."""
CASES = MODELS | {PLAIN: (lambda: nn.Conv2d(2, 3, 3, padding=1), (24, 16), [(2, 2)])}


@pytest.fixture(params=PLACES)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where arrays of device="cuda" lie."""
    if request.param == "stand-in":
        Cupy().install(monkeypatch)
    return request.param


def trained(comm: Any, name: str, dims: Any, cuts: Any, loss: str, precision: str, device: str) -> list[float]:
    """Return the loss of a step and the sum of squares of the prediction after it."""
    make, shape, _ = CASES[name]
    fields = np.random.default_rng(1).standard_normal((2, *shape, 2))
    place, grid = place_of(comm.rank, dims), grid_at(comm, dims, cuts)
    options: dict[str, Any] = {"domain": grid, "comm": comm, "precision": precision, "device": device}
    trainer = make().as_distributed(loss=LOSSES.get(loss, nn.MSELoss)(), optimizer=optim.SGD(lr=1e-2), **options)
    outputs = trainer.inspect.placement.sample_layout.outputs
    x, target = part(fields, cuts, place, 1), part(wanted(outputs.shape), outputs.cuts, place, 1)
    found_loss, found = trainer.step(x, target), trainer.predict(x)
    found = found.get() if hasattr(found, "get") else found
    return [found_loss, sum(comm.all_gather_value(float((np.asarray(found, np.float64) ** 2).sum())))]


def found(device: str, name: str, dims: tuple[int, ...], cuts: Any, loss: str, precision: str) -> list[float]:
    return spawn(lambda comm: trained(comm, name, dims, cuts, loss, precision, device), int(np.prod(dims)))[0]


on_the_host = lru_cache(partial(found, "cpu"))


def both(bound: float, name: str, dims: Any, cuts: Any, device="cuda", loss="", precision="float64") -> None:
    """What ranks find on a device, beside the host; 16 bits beside float32."""
    want = on_the_host(name, dims, cuts, loss, "float32" if precision == "bf16" else precision)
    got = found(device, name, dims, cuts, loss, precision)
    np.testing.assert_allclose(got, want, rtol=bound, err_msg=f"{name} {dims} {cuts} {device} {precision}")


@pytest.mark.parametrize("name", MODELS)
def test_parts_train_on_a_gpu_as_on_the_host(gpu: str, name: str) -> None:
    """In two parts along each dim that is cut, even and uneven by turns; test_space.py has all grids of each model, on
    the host."""
    _, shape, grids = MODELS[name]
    dims = tuple(min(count, 2) for count in grids[0])
    both(1e-10, name, dims, (even, random_cuts)[list(MODELS).index(name) % 2](shape, dims))


@pytest.mark.filterwarnings("ignore:fsdpx. dim . is :RuntimeWarning")  # paddings and ghost cells of all kinds meet
@pytest.mark.parametrize("of", ["scalars", "rollouts"])
def test_scalars_and_rollouts_on_a_gpu(gpu: str, of: str) -> None:
    """Layers with scalars, and a rollout with noise and ghost cells, on uneven parts: losses and updated
    parameters equal those on the host."""
    module, loss = (test_scalars, "losses") if of == "scalars" else (test_rollouts, "loss")
    run = test_scalars.trained if of == "scalars" else partial(test_rollouts.trained, kind="noise", ghosts=1)
    cuts = random_cuts(module.SHAPE, (2, 1))
    given = {"dims": (2, 1), "cuts": cuts}
    got, want = (spawn(lambda comm, d=d: run(comm, device=d, **given), 2)[0][0] for d in ("cuda", "cpu"))
    for name in (loss, *(name for name in want if "." in name)):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-10, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_formats_of_fewer_bits(gpu: str, name: str) -> None:
    """16 bits, also on the host, and, for every other model, float32, which uses the same kernels as float64."""
    _, shape, _ = MODELS[name]
    dims = (2, *[1] * (len(shape) - 1))
    place = name, dims, even(shape, dims)
    both(2e-2, *place, device="cpu", precision="bf16")
    for precision, bound in (("bf16", 2e-2), ("float32", 2e-4))[: 2 - list(MODELS).index(name) % 2]:
        both(bound, *place, precision=precision)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_fields_on_a_gpu(gpu: str, loss: str) -> None:
    _, shape, (dims,) = CASES[PLAIN]
    both(1e-7, PLAIN, dims, even(shape, dims), loss=loss)
