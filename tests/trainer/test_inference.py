"""A trainer without loss or optimiser: it predicts, holds parameters alone, and says what is missing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from models import mlp

from fsdpx import EMA, Trainer, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.engine.engine import Engine
from fsdpx.errors import ConfigError, DataError, FsdpxError

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_predicts_as_a_trainer_that_trains(strategy: str) -> None:
    def run(comm: Communicator) -> tuple[Any, Any, dict[str, int]]:
        whole = mlp().as_distributed(loss=nn.MSE(), optimizer=optim.AdamW(), comm=comm, strategy=strategy)
        alone = mlp().as_distributed(comm=comm, strategy=strategy)
        return whole.predict(X), alone.predict(X), alone.report().memory

    for want, got, memory in spawn(run, 2):
        np.testing.assert_array_equal(got, want)
        assert set(memory) <= {"parameters", "working set"}  # no gradients, no state of an optimiser


@pytest.mark.parametrize(
    ("call", "use", "without"),
    [
        ("step", lambda t: t.step(X, X), "loss and optimizer"),
        ("accumulate", lambda t: t.accumulate(X, X), "loss and optimizer"),
        ("fit", lambda t: t.fit([]), "loss and optimizer"),
        ("evaluate", lambda t: t.evaluate(X, X), "loss"),
        ("update", lambda t: t.update(), "optimizer"),
    ],
)
def test_calls_that_need_more_say_what_is_missing(call: str, use: Callable[[Trainer], Any], without: str) -> None:
    with pytest.raises(ConfigError, match=rf"{call}: this trainer was made without {without}, .*distribute\("):
        use(nn.Linear(12, 12).as_distributed())


def test_evaluates_with_a_loss_and_goes_back_to_the_inputs() -> None:
    model = nn.Linear(12, 12)
    want = model.as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1))
    alone = model.as_distributed(loss=nn.MSE())
    assert alone.evaluate(X, X) == want.evaluate(X, X)
    alone.forward(X), want.forward(X)
    np.testing.assert_array_equal(alone.backward(X), want.backward(X))
    with pytest.raises(ConfigError, match="step: this trainer was made without optimizer"):
        alone.step(X, X)


def test_a_model_without_parameters_and_an_average_of_nothing() -> None:
    np.testing.assert_array_equal(nn.ReLU().as_distributed().predict(X), np.maximum(X, 0))
    with pytest.raises(ConfigError, match="without an optimizer nothing moves"):
        nn.Linear(12, 12).as_distributed(average=EMA(0.9))


def test_one_rank_exchanges_nothing_and_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What repeated predictions of one shape must not do again."""
    trainer = nn.Linear(12, 12).as_distributed()
    trainer.predict(X)
    before = trainer.predict(X)  # as every later one: memory that programs share is planned for those that have run
    for name in ("fsdpx.trainer.session.infer", "fsdpx.trainer.session.Request", "fsdpx.trainer.batch.exchange"):
        monkeypatch.setattr(name, None)
    np.testing.assert_array_equal(trainer.predict(X), before)


def test_an_error_of_one_rank_names_it_and_freezing_is_seen() -> None:
    trainer = nn.Linear(12, 12).as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1))
    before = trainer.predict(X)
    with pytest.raises(DataError, match="rank 0: "):
        trainer.predict(np.float32(1))
    trainer.step(X, X)
    assert (trainer.predict(X) != before).any()


def test_small_batches_run_their_layers_alone_and_give_the_bits_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on; what changes parameters in any way is seen, and where more than layers has to run, the
    program does."""
    net = nn.Chain(nn.Linear(6, 8), nn.BatchNorm(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    rng, runs = np.random.default_rng(1), []
    x, y = rng.standard_normal((4, 6), np.float32), rng.standard_normal((4, 2), np.float32)
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda self, *rest: (runs.append(1), run(self, *rest))[1])
    trainer = net.as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), average=EMA(0.5))

    def program(x: np.ndarray) -> np.ndarray:
        trainer._session.engine.direct.clear()
        return trainer.predict(x)

    def alike(batch: np.ndarray) -> None:
        whole = program(batch)
        runs.clear()
        np.testing.assert_array_equal(trainer.predict(batch), whole)
        assert not runs

    alike(x)
    trainer.step(x, y)
    alike(x)
    values = {name: value + 1 for name, value in trainer.parameters().items()}
    before = trainer.predict(x)
    trainer.load_parameters(values)
    assert (trainer.predict(x) != before).any()
    alike(x)
    trainer.accumulate(x, y)
    alike(x)
    trainer.update()
    alike(x[:1])
    alike(x[1:])
    alike(x[:, ::-1])
    assert (trainer.predict(x) != trainer.predict(x, with_="average")).any()
    assert trainer.predict(x.astype("f8")).dtype == np.float32
    bad = nn.Chain(nn.Embedding(3, 2)).as_distributed()
    bad.predict(np.array([[1]]))
    for _ in range(2):
        with pytest.raises(FsdpxError, match="3"):
            bad.predict(np.array([[3]]))
    trainer.close()
    with pytest.raises(ConfigError, match="closed"):
        trainer.predict(x)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"check_finite": True}])
def test_where_more_than_layers_has_to_run_the_program_does(options: dict[str, Any]) -> None:
    trainer = nn.Linear(3, 2).as_distributed(**options)
    x = np.ones((1, 3), np.float32)
    first = trainer.predict(x)
    assert set(trainer._session.engine.direct.values()) <= {None}
    np.testing.assert_array_equal(trainer.predict(x), first)
