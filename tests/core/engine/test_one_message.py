"""What ranks tell each other in a step is one message; programs are walked as they say."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from amount import pairs
from models import CASES, make, own_part, part, report_a_second_step
from rates import LATE, rated
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, Precision, nn, optim, spawn
from fsdpx.core.comm.communicator import COMPLETED
from fsdpx.core.program import Slot

PLAN = {"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel}
CHOICES = {
    "plain": (3, {"microbatches": 2}),
    "clipped": (3, {"microbatches": 2, "clip_norm": 0.1}),
    "reproducible_chunks": (2, {"reproducible_chunks": 4}),
    "chunks-clipped": (2, {"reproducible_chunks": 4, "clip_norm": 0.1}),
    "pipe": (2, {"mesh": Mesh(pipe=2), "microbatches": 2}),
    "pipe-clipped": (2, {"mesh": Mesh(pipe=2), "microbatches": 2, "clip_norm": 0.1}),
    "tensor-clipped": (2, {"mesh": Mesh(tensor=2), "tensor_plan": PLAN, "clip_norm": 0.1}),
}


@pytest.mark.parametrize(
    ("choice", "strategy"), [*pairs(CHOICES, ["ddp", "fsdp"]), ("plain", "fsdp"), ("clipped", "ddp")]
)
def test_one_exchange_of_all_ranks_in_a_step(choice, strategy):
    ranks, options = CHOICES[choice]

    def run(comm):
        report = report_a_second_step(make(comm, "mlp", strategy, **options))
        return report.traffic["world", "all_gather"].calls, {op: row[2] for op, row in report.times.items()}

    for calls, times in spawn(run, ranks):
        assert calls == 1 + 1  # ranks agree on the batch; the message of the step
        told = {op: times.get(op, 0) for op in ("MEAN", "SCALE", "NORM")}
        assert told == ({"MEAN": 0, "SCALE": 0, "NORM": 1} if "clip" in choice else {"MEAN": 1, "SCALE": 1, "NORM": 0})


@on_ranks(2)
def test_the_message_is_on_its_way_during_backward(comm):
    """Nobody waits for it before all gradients are there."""
    trainer, waited = make(comm, "mlp", "fsdp", group_bytes=0), []

    def look(action):
        if action.op in ("MEAN", "B"):
            mean = trainer.inspect.engine.state.store[Slot("mean")]
            waited.append(not (hasattr(mean, "handle") and mean.handle is not COMPLETED))

    trainer.inspect.engine.add_observer(look)
    trainer.step(*own_part(comm, "mlp", 12))
    assert len(waited) > 2
    assert not any(waited)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_gradients_of_several_calls_are_weighed_together(clip_norm):
    """The weight of an accumulation goes with the message of the step, or with that of the update."""

    def run(comm, how):
        trainer = make(comm, "mlp", "fsdp", precision="float64", clip_norm=clip_norm)
        for seed in range(2):
            x, y = CASES["mlp"].batch(np.random.default_rng(seed), 12)
            for rows in (range(4), range(4, 12)) if how != "whole" else (range(12),):
                mine = rows[part(comm, len(rows))]
                (trainer.step if 11 in rows and how != "update" else trainer.accumulate)(x[mine], y[mine])
            if how == "update":
                trainer.update()
                assert np.isnan(trainer.inspect.last_update.loss)
        return trainer.parameters()

    whole = spawn(run, 1, "whole")[0]
    for how in ("step", "update"):
        got = spawn(run, 2, how)[0]
        assert all(np.allclose(got[name], whole[name], rtol=1e-12) for name in whole), how


@on_ranks(2)
def test_an_overflow_is_seen_in_the_same_message(comm):
    trainer = make(comm, "mlp", "fsdp", precision=Precision(param="float16", loss_scale="dynamic"))
    report = report_a_second_step(trainer)
    assert (report.traffic["world", "all_gather"].calls, report.times["NORM"][2]) == (2, 1)


@pytest.mark.parametrize(
    ("choice", "how"),
    [
        ("plain", "step"), ("plain", "accumulate"), ("clipped", "step"), ("clipped", "accumulate"),
        ("pipe", "accumulate"), ("pipe-clipped", "step"), ("tensor-clipped", "step"),
    ],
)  # fmt: skip
def test_rates_that_differ_are_an_error_before_the_update(choice, how):
    ranks, options = CHOICES[choice]
    found = spawn(lambda comm: rated(comm, lambda step: 0.125 * (1 + (step > 2)), how, **options), ranks)
    assert {steps for steps, _ in found} == {2}
    (text,) = {text for _, text in found}
    assert text.startswith(LATE.format("rank 0" if ranks == 2 else "ranks 0, 2"))


def test_a_rate_that_is_none_on_one_rank_is_an_error_on_all():
    for steps, text in spawn(lambda comm: rated(comm, lambda step: 0.125 if step < 3 else -1.0), 2):
        assert steps == 2
        assert text.startswith("ranks differ in the learning rate of step 3: rank 0: 0.125; rank 1: nan.")


ROOT = Path(fsdpx.__file__).parent
STEP, GATHER, DISTRIBUTE = 49, 8, 72
"""Upper bounds, which only fall, but for the files of targets of several outputs (decision 40), of dataclasses (46) and
of shapes that are inferred (33)."""


class Walk:
    """The files of fsdpx of which something is called; those within a GATHER, too."""

    def __init__(self):
        self.files = set()
        self.gather = set()
        self._gathering = 0

    def __call__(self, frame, event, _):
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT):
            return
        name = str(path.relative_to(ROOT))
        operation = name == "core/engine/operations.py" and frame.f_code.co_name == "start_all_gather_page"
        if event == "call":
            self._gathering += operation
            self.files.add(name)
            if self._gathering:
                self.gather.add(name)
        elif event == "return":
            self._gathering -= operation

    def of(self, do):
        sys.setprofile(self)
        try:
            return do()
        finally:
            sys.setprofile(None)


def walked(comm):
    """A steady step, and `distribute` where kernels are compiled already."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW(lr=1e-3), "group_bytes": 0}
    made = partial(fsdpx.distribute, model, comm=comm, **options)
    made()
    made_again, step = Walk(), Walk()
    trainer = made_again.of(made)
    x, y = np.ones((4, 64), np.float32), np.zeros(4, np.int64)
    for _ in range(3):
        trainer.step(x, y)
    step.of(lambda: trainer.step(x, y))
    return step, made_again


def test_a_step_and_distribute_are_short_walks():
    (step, made), (other, _) = spawn(walked, 2)
    files = step.files | other.files  # the rank that comes last adds up for both
    assert "core/comm/reduction.py" in files
    assert len(files) <= STEP, sorted(files)
    assert 0 < len(step.gather) <= GATHER, sorted(step.gather)
    assert len(made.files) <= DISTRIBUTE, sorted(made.files)
