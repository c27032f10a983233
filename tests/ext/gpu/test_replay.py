"""Steps as graphs: the same bits as without, and what cannot be recorded computes as usual and says why."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import models
import numpy as np
import pytest
from on_gpu import PLACES
from stand_in import Cublas, Cupy, ndarray

from fsdpx import LocalSGD, Mesh, Precision, nn, optim, spawn
from fsdpx.core.engine.observer import Observer
from fsdpx.errors import ConfigError, NumericsError
from fsdpx.ext.gpu import gemm, replay
from fsdpx.ext.gpu.replay import CudaGraphObserver


@pytest.fixture(autouse=True)
def _stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu"):
        return
    Cupy().install(monkeypatch)
    library = gemm.CublasLibrary(Cublas())
    monkeypatch.setattr(gemm, "_load_cublas_library", lambda: library)


class Trained(NamedTuple):
    """What a rank has trained. reasons: why something was not recorded."""

    losses: list[float]
    parameters: dict[str, Any]
    launches: int
    reasons: list[str]


rows, text = partial(models.rows, n=4), partial(models.tokens, n=4)


def fields(random: np.random.Generator) -> Any:
    return random.standard_normal((2, 2, 8, 4)), random.standard_normal((2, 3, 8, 4))


def mlp() -> nn.Layer:
    first = nn.Linear(12, 8), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(8)
    return nn.Sequential(*first, nn.Linear(8, 6), nn.Linear(6, 5))


def gpt() -> nn.Layer:
    return nn.GPT(31, 8, 1, 2, 8, tie=False)


def fourier() -> nn.Layer:
    """Layers with tables of their own: matrices of Fourier modes, and sparse ones."""
    resized = nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d((8, 4))
    return nn.Sequential(nn.FNO(2, 3, (3, 3), 4, 1), *resized)


def volumes() -> nn.Layer:
    """Layers whose weights are added up once."""
    weights = np.linspace(0.5, 2.0, 32).reshape(8, 4)
    norms = nn.GroupNorm(2, 4, weights=weights), nn.InstanceNorm(4, weights=np.tile(weights, (4, 1, 1)))
    return nn.Sequential(nn.Conv2d(2, 4, 1), *norms, nn.GlobalMean(weights), nn.Linear(4, 5))


def find_observer(engine: Any) -> Any:
    return next((one for one in engine.observers if isinstance(one, CudaGraphObserver)), None)


def train(comm: Any, replayed: bool, model: Any, batch: Any = rows, steps=4, look: Any = None, **options) -> Trained:
    loss = nn.CrossEntropyLoss() if batch is text else nn.MSELoss()
    chosen = {"optimizer": optim.AdamW(lr=0.01), "group_bytes": 0, "seed": 3, "precision": "float64", **options}
    trainer = model().as_distributed(loss=loss, comm=comm, replay=replayed, device="cuda", **chosen)
    observer = find_observer(trainer.inspect.engine)
    losses, place = [], trainer.inspect.placement.axes.data.rank
    for step in range(steps):
        if look is not None:
            look(trainer, step)
        losses.append(trainer.step(*batch(np.random.default_rng((place, step)))))
    found = (0, []) if observer is None else (observer.launches, [*observer.reasons])
    return Trained(losses, trainer.parameters(), *found)


def both(size: int, *given: Any, **options: Any) -> list[Trained]:
    """What ranks have trained with replay, after comparing it with what they train without."""
    want, got = (spawn(lambda comm, r=replayed: train(comm, r, *given, **options), size) for replayed in (False, True))
    for one, other in zip(got, want, strict=True):
        assert one.losses == other.losses
        for name, array in other.parameters.items():
            np.testing.assert_array_equal(one.parameters[name], array, err_msg=name)
    return got


CASES: dict[str, tuple[int, Any, Any, dict[str, Any]]] = {
    "mlp": (1, mlp, rows, {}),
    "float32": (1, mlp, rows, {"precision": "float32"}),
    "unet": (1, lambda: nn.UNet(2, 3, 2, 4, 1, "circular", "group", "silu"), fields, {}),
    "fourier": (1, fourier, fields, {}),
    "volumes": (1, volumes, lambda random: (random.standard_normal((2, 2, 8, 4)), random.standard_normal((2, 5))), {}),
    "norms": (1, models.norms, rows, {"group_bytes": 1 << 20, "microbatches": 2}),
    "gpt": (1, gpt, text, {"optimizer": optim.SGD(lr=optim.schedules.Linear(0.1, 4))}),
    "scaled": (1, mlp, rows, {"precision": Precision(loss_scale="dynamic", growth_interval=1, initial_scale=4.0)}),
    "ddp": (2, mlp, rows, {"strategy": "ddp", "clip_norm": 0.1}),
    "zero2": (2, mlp, rows, {"strategy": "zero2", "microbatches": 2}),
    "fsdp": (3, mlp, rows, {"strategy": "fsdp", "microbatches": 2, "recompute": "all"}),
    "pipe": (2, mlp, rows, {"mesh": Mesh(pipe=2), "microbatches": 4}),
    "zb-h1": (2, mlp, rows, {"mesh": Mesh(pipe=2), "microbatches": 4, "schedule": "zb-h1"}),
    "diloco": (2, mlp, rows, {"strategy": "diloco"}),
    "chunks": (2, mlp, rows, {"reproducible_chunks": 4}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_steps_have_the_bits_of_steps_without(case: str, place: str) -> None:
    size, model, batch, options = CASES[case]
    for one in both(size, model, batch, **options):
        assert one.launches
        assert [why for why in one.reasons if "unit 'embed'" not in why] == []


class Reading(nn.Layer):
    """Halves what it gets if its sum is positive."""

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        factor = 0.5 if float(x.sum()) > 0 else 1.0
        return x * factor, factor

    def backward_input(self, env: Any, p: Any, saved: Any, dy: Any) -> Any:
        return dy * saved, ()


class Drawing(models.Same):
    """Adds random numbers that the host makes."""

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        return x + env.random.uniform(env.xp, x.shape).astype(x.dtype), ()


class Rolling(models.Same):
    """Adds one number that the host draws."""

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        return x + float(env.random.get_number_range((1,)).make_fractions(np)[0]), ()


class Failing(nn.Layer):
    """Computes forward, but reads values backward."""

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        return x * 2.0, x

    def backward_input(self, env: Any, p: Any, saved: Any, dy: Any) -> Any:
        return dy * (2.0 if bool((saved == saved).all()) else 0.0), ()


CUTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "units": ({}, [40]),
    "one unit": ({"group_bytes": 1 << 20}, [24]),
    "pipe": ({"mesh": Mesh(pipe=2), "schedule": "zb-h1"}, [80, 120]),
}
"""How layers are put into units, and how many graphs each rank then launches."""


@pytest.mark.parametrize(
    ("layer", "why", "cuts"),
    [
        (Reading, "float: the stream is capturing", ["units", "one unit"]),
        (Drawing, "an array is copied from the host", ["units", "pipe"]),
        (Rolling, "its random numbers are made on the host", ["units", "pipe"]),
        (Failing, "bool: the stream is capturing", ["units", "one unit", "pipe"]),
    ],
)
def test_layers_that_read_values_compute_as_usual(layer: type[nn.Layer], why: str, cuts: list[str]) -> None:
    """The layers before and behind are replayed: the second step finds that there is such a layer, the third which one,
    the fourth records what is before and behind it, and the last two launch that."""

    def between() -> nn.Layer:
        behind = nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 5)
        return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.ReLU(), layer(), *behind)

    for cut in cuts:
        options, launches = CUTS[cut]
        found = both(len(launches), between, rows, steps=6, **options)
        reasons = [one for rank in found for one in rank.reasons]
        assert [why in one and one.startswith("unit '3'") for one in reasons] == [True], cut
        more = 2 * len(launches) * (layer is Failing)  # forward passes that were recorded before the backward failed
        assert sum(rank.launches for rank in found) == sum(launches) + more, cut


def growing(random: np.random.Generator) -> Any:
    """Batches of 3, 4 or 5 rows."""
    return models.rows(random, int(random.integers(3, 6)))


def test_each_shape_is_recorded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    (got,) = both(1, mlp, growing, steps=12)
    assert got.launches == 8 * (12 - 3)
    assert got.reasons == []
    monkeypatch.setattr(replay, "MAX_RECORDINGS", 2)
    (got,) = both(1, mlp, growing, steps=12)
    assert got.launches
    assert got.reasons == ["there are more than 2 shapes of batches: pad them to a few"]


class Wrapping(Observer):
    """Replaces all units by equal ones."""

    def wrap_units(self, units: Any) -> Any:
        return [dataclasses.replace(unit) for unit in units]


@pytest.mark.parametrize(("first", "launches"), [(1, 0), (3, 2 * 8)])
def test_units_that_an_observer_replaces_compute_as_usual(first: int, launches: int) -> None:
    def wrap(trainer: Any, step: int) -> None:
        if step == first:
            trainer.inspect.engine.add_observer(Wrapping())

    (got,) = both(1, mlp, look=wrap, steps=5)
    assert got.launches == launches
    assert {why.partition(": ")[2] for why in got.reasons} == {"an observer has replaced its layers"}


def test_parameters_that_are_frozen_later() -> None:
    """Other programs run from then on, at first one that still gathers the frozen parameters."""
    (got,) = both(1, mlp, look=lambda trainer, step: trainer.freeze("0.*") if step == 3 else None, steps=7)
    assert got.reasons == []
    assert got.launches == 2 * 8 + 2 * 7


def evaluate(trainer: Any, step: int) -> None:
    """Other programs, a larger one too, and gradients that accumulate over calls."""
    x, y = rows(np.random.default_rng(step))
    trainer.evaluate(np.tile(x, (5, 1)), np.tile(y, (5, 1)))
    trainer.predict(x)
    if step % 2:
        trainer.accumulate(x, y)


def test_other_programs_between_steps() -> None:
    (got,) = both(1, mlp, rows, look=evaluate, steps=8)
    assert got.reasons == []
    assert got.launches >= 8 * 4


BY_COLUMNS: dict[str, Any] = {
    "model": lambda: nn.Sequential(nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 5)),
    "tensor_plan": {"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel},
}


@pytest.mark.parametrize(
    ("size", "options", "why"),
    [
        (1, {"check_finite": True}, "check_finite reads the output of every layer"),
        (2, {"mesh": Mesh(tensor=2), **BY_COLUMNS}, "its layers communicate over the tensor axis"),
        (2, {"strategy": LocalSGD(sync_every=1)}, "its program has "),
    ],
)
def test_programs_that_are_not_recorded(size: int, options: dict[str, Any], why: str) -> None:
    for got in both(size, **{"model": mlp} | options):
        assert got.launches == 0
        assert [one.startswith(why) for one in got.reasons] == [True]


def test_layers_that_communicate_compute_as_usual() -> None:
    for got in both(2, models.norms, rows, strategy="ddp"):
        assert [why.partition(": ")[2] for why in got.reasons] == ["its layers communicate"]
        assert got.launches


class Breaking(Observer):
    """Breaks off the backward pass of a step."""

    def on_action_begin(self, words: str, now: float) -> None:
        if words.startswith("B1"):
            raise ValueError("broken")


def test_steps_that_fail() -> None:
    """A step that fails while it is recorded is recorded anew, and no graph is left of it."""

    def fail(trainer: Any, step: int) -> None:
        x, y = rows(np.random.default_rng(step))
        if step == 1:
            seen = trainer.inspect.engine.add_observer(Breaking())
            with pytest.raises(ValueError, match="broken"):
                trainer.step(x, y)
            trainer.inspect.engine.remove_observers(seen)
        if step == 4:
            with pytest.raises(NumericsError):
                trainer.step(x, y * np.nan)

    (got,) = both(1, mlp, rows, look=fail, steps=6)
    assert got.reasons == []
    assert got.launches == 6 + 8 * 4 + 8


def move(trainer: Any, step: int) -> None:
    if step == 3:
        trainer.inspect.engine.state.arena.generation += 1


def test_buffers_that_have_moved_are_recorded_anew() -> None:
    (got,) = both(1, mlp, rows, look=move, steps=6)
    assert got.launches == 8 + 8 + 8 + 8


class Sent(Observer):
    """Looks where the values lie that actions return."""

    def __init__(self, recordings: Any) -> None:
        self.recordings, self.found = recordings, set[tuple[str, bool]]()

    def on_action_end(self, planned: Any, begin: Any, ready: Any, end: Any, nbytes: Any, values: Any) -> None:
        name = str(planned.action).partition(".")[0]
        at = [one.data.ptr for one in values if isinstance(one, ndarray)]
        self.found |= {(name, one.memory.has_address(ptr)) for one in self.recordings.values() for ptr in at}


def test_what_is_sent_is_not_in_the_memory_of_graphs() -> None:
    """There, a later graph may write before it has been sent."""

    def run(comm: Any) -> set[tuple[str, bool]]:
        found: list[Sent] = []

        def look(trainer: Any, step: int) -> None:
            if step == 1:
                found.append(Sent(find_observer(trainer.inspect.engine).recordings))
                trainer.inspect.engine.add_observer(found[0])

        train(comm, True, mlp, look=look, mesh=Mesh(pipe=2))
        return {one for one in found[0].found if one[0][0] in "FB"}

    first, second = spawn(run, 2)
    assert first == {("F0", True), ("F1", False), ("B1", True)}
    assert second == {("F2", True), ("F3", True), ("B3", True), ("B2", False)}


def test_only_gpus_replay() -> None:
    with pytest.raises(ConfigError, match="replay=True: only device='cuda' records graphs, not 'cpu'"):
        mlp().as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), replay=True)
