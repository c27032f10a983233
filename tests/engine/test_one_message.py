"""What all ranks tell each other in a step is one message: losses, weights and, where it is wanted, the norm."""

from typing import Any

import numpy as np
import pytest
from models import CASES, make, part

from fsdpx import Mesh, Precision, nn, spawn
from fsdpx.comm import Communicator
from fsdpx.comm.communicator import DONE
from fsdpx.program import Action, Slot

FP16 = Precision(param="float16", loss_scale="dynamic")
CHOICES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (3, {"microbatches": 2}),
    "clipped": (3, {"microbatches": 2, "clip_norm": 0.1}),
    "chunks": (2, {"chunks": 4}),
    "chunks-clipped": (2, {"chunks": 4, "clip_norm": 0.1}),
    "pipe": (2, {"mesh": Mesh(pipe=2), "microbatches": 2}),
    "pipe-clipped": (2, {"mesh": Mesh(pipe=2), "microbatches": 2, "clip_norm": 0.1}),
    "tensor-clipped": (2, {"mesh": Mesh(tensor=2), "tensor_plan": {"0": nn.Column, "2": nn.Row}, "clip_norm": 0.1}),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_exchange_of_all_ranks_in_a_step(choice: str, strategy: str) -> None:
    ranks, options = CHOICES[choice]

    def run(comm: Communicator) -> tuple[int, dict[str, int]]:
        trainer = make(comm, "mlp", strategy, **options)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 12)
        mine = slice(None) if "mesh" in options else part(comm, 12)
        trainer.step(x[mine], y[mine])
        trainer.reset()
        trainer.step(x[mine], y[mine])
        report = trainer.report()
        return report.traffic["world", "all_gather"].calls, {op: row[2] for op, row in report.times.items()}

    for calls, times in spawn(run, ranks):
        assert calls == 1 + 1  # ranks agree on the batch; the message of the step
        told = {op: times.get(op, 0) for op in ("MEAN", "SCALE", "NORM")}
        assert told == ({"MEAN": 0, "SCALE": 0, "NORM": 1} if "clip" in choice else {"MEAN": 1, "SCALE": 1, "NORM": 0})


def test_the_message_is_on_its_way_during_backward() -> None:
    """Nobody waits for it before all gradients are there."""

    def run(comm: Communicator) -> list[bool]:
        trainer = make(comm, "mlp", "fsdp", group_bytes=0)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 12)
        waited: list[bool] = []

        def look(action: Action) -> None:
            if action.op in ("MEAN", "B"):
                mean = trainer.engine.state.store[Slot("mean")]
                waited.append(not (hasattr(mean, "handle") and mean.handle is not DONE))

        trainer.engine.observers.append(look)
        trainer.step(x[part(comm, 12)], y[part(comm, 12)])
        return waited

    for waited in spawn(run, 2):
        assert len(waited) > 2
        assert not any(waited)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_gradients_of_several_calls_are_weighed_together(clip_norm: float | None) -> None:
    """The weight of an accumulation goes with the message of the step, or with that of the update."""

    def run(comm: Communicator, how: str) -> str:
        trainer = make(comm, "mlp", "fsdp", precision="float64", clip_norm=clip_norm)
        for seed in range(2):
            x, y = CASES["mlp"].batch(np.random.default_rng(seed), 12)
            for half in (slice(0, 4), slice(4, 12)) if how != "whole" else (slice(None),):
                last = half.stop in (12, None) and how != "update"
                mine = part(comm, len(x[half]))
                (trainer.step if last else trainer.accumulate)(x[half][mine], y[half][mine])
            if how == "update":
                trainer.update()
                assert np.isnan(trainer.last.loss)
        return trainer.parameters()

    whole = spawn(lambda comm: run(comm, "whole"), 1)[0]
    for how in ("step", "update"):
        got = spawn(lambda comm: run(comm, how), 2)[0]  # noqa: B023
        assert all(np.allclose(got[name], whole[name], rtol=1e-12) for name in whole), how


def test_an_overflow_is_seen_in_the_same_message() -> None:
    def run(comm: Communicator) -> tuple[bool, int]:
        trainer = make(comm, "mlp", "fsdp", precision=FP16)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 12)
        mine = part(comm, 12)
        trainer.step(x[mine], y[mine])
        trainer.reset()
        trainer.step(x[mine], y[mine])
        return trainer.report().traffic["world", "all_gather"].calls, trainer.report().times["NORM"][2]

    assert spawn(run, 2) == [(2, 1)] * 2
