"""Ranks that make different calls: named at once on all of them, without a guard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.errors import DataError, DesyncError

X, Y = np.arange(24.0).reshape(4, 6), np.array([0, 1, 2, 0])


def trainer(comm: Communicator, **options: Any) -> Any:
    model = nn.Chain(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    return model.as_distributed(loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), comm=comm, **options)


CALLS: dict[str, Callable[[Any, Path], object]] = {
    "step": lambda t, to: t.step(X, Y),
    "accumulate": lambda t, to: t.accumulate(X, Y),
    "evaluate": lambda t, to: t.evaluate(X, Y),
    "predict": lambda t, to: t.predict(X),
    "forward": lambda t, to: t.forward(X),
    "update": lambda t, to: t.update(),
    "gradients": lambda t, to: t.gradients(),
    "parameters": lambda t, to: t.parameters(),
    "load_parameters": lambda t, to: t.load_parameters({}),
    "load_weights": lambda t, to: t.load_weights(to),
    "save": lambda t, to: t.save(to / "saved"),
    "wait_saved": lambda t, to: t.host.wait_saved(),
    "load": lambda t, to: t.load(to),
    "early stopping": lambda t, to: t.host.most(np.zeros(2), "early stopping"),
    "many values": lambda t, to: t.host.most(np.zeros(20), "many values"),
    "resume": lambda t, to: t.host.alone("resume", lambda: 1),
    "close": lambda t, to: t.close(),
}


def told(size: int, act: Callable[[Communicator], object]) -> set[str]:
    def run(comm: Communicator) -> str:
        try:
            act(comm)
        except DesyncError as error:
            return str(error)
        return "no error"

    return set(spawn(run, size, timeout=60))


@pytest.mark.parametrize("other", ["step", "save"])
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_calls_something_else_is_named_on_all(tmp_path: Path, call: str, other: str) -> None:
    if call == other:
        return

    def act(comm: Communicator) -> None:
        t = trainer(comm, strategy="ddp")
        if "accumulate" in (call, other) or call in ("update", "gradients"):
            t.accumulate(X, Y)
        CALLS[call if comm.rank == 1 else other](t, tmp_path)

    assert told(3, act) == {
        f"ranks called different methods: ranks 0, 2: {other}; rank 1: {call}. All ranks make the same calls, in the "
        "same order"
    }


def test_a_gradient_of_the_caller(tmp_path: Path) -> None:
    def act(comm: Communicator) -> None:
        t = trainer(comm)
        dy = np.ones_like(t.forward(X))
        t.backward(dy) if comm.rank else t.parameters()

    (text,) = told(2, act)
    assert "rank 0: parameters; rank 1: backward." in text


def test_another_trainer_on_one_rank() -> None:
    def act(comm: Communicator) -> None:
        t = trainer(comm)
        trainer(comm) if comm.rank else t.step(X, Y)

    (text,) = told(2, act)
    assert "rank 0: step; rank 1: distribute." in text


@pytest.mark.parametrize("mesh", [Mesh(pipe=2), Mesh(tensor=1, shard=2)])
def test_the_same_calls_on_other_meshes(mesh: Mesh) -> None:
    def act(comm: Communicator) -> None:
        t = trainer(comm, mesh=mesh)
        t.step(X, Y)
        t.evaluate(X, Y) if comm.rank else t.step(X, Y)

    (text,) = told(2, act)
    assert "rank 0: step; rank 1: evaluate." in text


def test_idle_ranks_of_an_elastic_trainer_are_told() -> None:
    def act(comm: Communicator) -> None:
        t = trainer(comm, mesh=Mesh(pipe=2), elastic=True)
        t.step(X, Y)
        t.step(X, Y) if t.host.trains else t.evaluate(X, Y)

    with pytest.raises(DesyncError, match="ranks called different methods: rank 0: step; rank 2: evaluate"):
        spawn(act, 3)


def test_a_good_batch_against_a_bad_one_is_still_the_error_of_the_batch() -> None:
    def act(comm: Communicator) -> None:
        t = trainer(comm)
        t.step(X, Y + 7) if comm.rank == 1 else t.save("nowhere")

    with pytest.raises(DataError, match="rank 1: CrossEntropy"):
        spawn(act, 3)


def test_the_largest_of_few_and_of_many_values() -> None:
    def run(comm: Communicator) -> list[Any]:
        t = trainer(comm)
        few = t.host.most(np.array([comm.rank - 5.5, -comm.rank]), "few")
        whole = t.host.most(np.array([2**60 + comm.rank]), "whole")
        many = t.host.most(np.arange(20.0) * (-1) ** comm.rank, "many")
        return [few.tolist(), whole.tolist(), many.tolist()]

    for found in spawn(run, 3):
        assert found == [[-3.5, 0.0], [2**60 + 2], np.arange(20.0).tolist()]
