"""A trainer goes on after an error as if nothing had happened: parameters whole, nothing of the broken step left."""

from typing import Any

import numpy as np
import pytest
from amount import in_full
from bits import bits
from models import CASES, STRATEGIES, make, part, placed

from fsdpx import spawn
from fsdpx.comm import Communicator
from fsdpx.engine import operations
from fsdpx.errors import ConfigError, DataError
from fsdpx.testing import demand_close, difference

KINDS = ("step", "accumulate", "evaluate", "predict", "forward")


def call(trainer: Any, kind: str, x: Any, y: Any) -> Any:
    return getattr(trainer, kind)(x, y) if kind in ("step", "accumulate", "evaluate") else getattr(trainer, kind)(x)


@in_full
@pytest.mark.parametrize(("strategy", "size"), placed([2], [4]))
def test_a_batch_without_targets_leaves_no_trace(strategy: str, size: int) -> None:
    def run(comm: Communicator, bad: bool) -> Any:
        trainer = make(comm, "gpt", strategy, group_bytes=0)
        x, y = CASES["gpt"].batch(np.random.default_rng(0), 6)
        mine = part(comm, 6)
        if bad:
            for kind in ("step", "evaluate", "accumulate"):
                with pytest.raises(DataError, match="no target of the global batch counts"):
                    call(trainer, kind, x[mine], np.full_like(y[mine], -100))
        trainer.step(x[mine], y[mine])
        return trainer.parameters()

    want = spawn(lambda comm: run(comm, False), size)[0]
    for got in spawn(lambda comm: run(comm, True), size):
        demand_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exception_at_any_action_leaves_no_trace(strategy: str, kind: str) -> None:
    """Every action of the program fails once, on all ranks alike; then the trainer steps like a fresh one."""

    class Planned(Exception):
        pass

    def run(comm: Communicator, breaks: bool) -> Any:
        trainer = make(comm, "mlp", strategy, group_bytes=0)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 4)
        mine = part(comm, 4)
        at, broken = 0, breaks
        while broken:
            broken = _break_at(trainer, kind, x[mine], y[mine], at, Planned)
            at += 1
        if breaks and kind in ("step", "accumulate"):
            return None  # the last round ran through and changed the trainer
        trainer.step(x[mine], y[mine])
        return trainer.parameters()

    want = spawn(lambda comm: run(comm, False), 2)[0]
    for got in spawn(lambda comm: run(comm, True), 2):
        if got is not None:
            demand_close(got, want)


def _break_at(trainer: Any, kind: str, x: Any, y: Any, at: int, error: type[Exception]) -> bool:
    """Run `kind` with its action number `at` failing; False when there is no such action."""
    seen = [0]

    def fail(action: Any) -> None:
        seen[0] += 1
        if seen[0] == at + 1:
            raise error(str(action))

    before = trainer.parameters()
    trainer.inspect.engine.observers.append(fail)
    try:
        call(trainer, kind, x, y)
    except error:
        updates = kind == "step" and difference(trainer.parameters(), before) is not None
        assert not {slot.kind for slot in trainer.inspect.engine.state.store} - {"shard", "slots", "stats"}
        return not updates
    finally:
        trainer.inspect.engine.observers.clear()
    return False


def test_accumulated_gradients_survive_a_failed_evaluation() -> None:
    def run(comm: Communicator, bad: bool) -> Any:
        trainer = make(comm, "gpt", "zero2")
        x, y = CASES["gpt"].batch(np.random.default_rng(0), 4)
        trainer.accumulate(x, y)
        if bad:
            with pytest.raises(DataError):
                trainer.evaluate(x, np.full_like(y, -100))
        trainer.step(x, y)
        return bits(trainer)

    assert spawn(lambda comm: run(comm, True), 2) == spawn(lambda comm: run(comm, False), 2)


def test_every_verb_has_an_operation() -> None:
    from fsdpx.program import VERBS

    assert set(operations.OPERATIONS) == set(VERBS)


def test_a_refused_batch_leaves_no_mark() -> None:
    """Whatever comes next begins anew: the three calls, or nothing to update."""

    def run(comm: Communicator) -> None:
        trainer = make(comm, "mlp", "ddp")
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 4)
        with pytest.raises((DataError, ValueError)):
            trainer.step(x[:, :5], y)
        with pytest.raises(ConfigError, match="update: there are no gradients"):
            trainer.update()
        trainer.backward(np.ones_like(trainer.forward(x)))
        trainer.update()
        trainer.forward(x)
        with pytest.raises(DataError, match="dy has shape"):
            trainer.backward(np.ones((4, 3)))
        trainer.step(x, y)

    spawn(run, 2)
