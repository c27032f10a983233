"""Pipelines: the same result as one process for every schedule, cut and placement; one hash with chunks."""

from typing import Any

import numpy as np
import pytest
from axes import OPTIONS, compare, train
from models import CASES, distance, make, part

import fsdpx
from fsdpx import Mesh
from fsdpx.comm import Communicator

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_process(schedule: str, width: int, strategy: str) -> None:
    compare("deep", Mesh(shard=1, pipe=width), strategy, delays=width, schedule=schedule)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp", "hybrid"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_every_placement_under_a_pipe_equals_one_process(schedule: str, strategy: str) -> None:
    mesh = Mesh(replica=2, shard=2, pipe=2) if strategy == "hybrid" else Mesh(shard=2, pipe=2)
    compare("deep", mesh, strategy, delays=1, schedule=schedule, microbatches=3)


@pytest.mark.parametrize("case", CASES)
def test_every_model_in_two_stages(case: str) -> None:
    """Values that skip stages, layers without parameters, statistics over the batch."""
    microbatches = 1 if case == "norms" else 3
    compare(case, Mesh(shard=2, pipe=2), "fsdp", microbatches=microbatches)


def test_a_value_may_skip_stages() -> None:
    """ "up" is read in the stage after next, and its gradient comes back by the same way."""
    compare("graph", Mesh(shard=1, pipe=4), "ddp", stages=["up", "mid", "act", "sum"], microbatches=2)
    compare("graph", Mesh(shard=1, pipe=2), "ddp", stages=["up", "mid", "act", "sum"], schedule="interleaved")


CHUNKS = [
    (Mesh(shard=1), "ddp", None),
    (Mesh(shard=3), "fsdp", None),
    *((Mesh(shard=1, pipe=2), "ddp", schedule) for schedule in SCHEDULES),
    (Mesh(shard=2, pipe=2), "fsdp", "1f1b"),
    (Mesh(shard=2, pipe=2), "zero1", "zbv"),
    (Mesh(replica=2, shard=1, pipe=3), "ddp", "interleaved"),
    (Mesh(shard=1, pipe=4), "zero2", "zb-h2"),
]


@pytest.mark.parametrize("case", ["deep", "mlp"])
def test_one_hash_with_chunks(case: str) -> None:
    hashes = {}
    for mesh, strategy, schedule in CHUNKS:
        if case == "mlp" and (schedule in ("interleaved", "zbv") or mesh.pipe == 4):
            continue  # five layers are too few stages
        more = {} if schedule is None else {"schedule": schedule}

        def run(comm: Communicator, mesh: Mesh = mesh, strategy: str = strategy, more: Any = more) -> str:
            options = {"chunks": 6, "precision": "float32", **more}
            return train(comm, case, mesh, strategy, sizes=(12, 12, 6), **options)[2].fingerprint()

        hashes[f"{mesh} {strategy} {schedule}"] = set(fsdpx.spawn(run, mesh.size))
    assert len(set.union(*hashes.values())) == 1, hashes


@pytest.mark.parametrize("recompute", ["all", 2, "attention", "40KiB"])
@pytest.mark.parametrize("mesh", [Mesh(shard=2), Mesh(shard=1, pipe=2)])
def test_recompute_changes_no_bit(mesh: Mesh, recompute: Any) -> None:
    def run(comm: Communicator, recompute: Any) -> tuple[str, str]:
        trainer = train(comm, "deep", mesh, "fsdp", recompute=recompute, microbatches=2)[2]
        return trainer.fingerprint(), str(trainer.program)

    plain, again = (fsdpx.spawn(run, 2, choice) for choice in (None, recompute))
    assert plain[0][0] == again[0][0]
    assert ("R" in {word.rstrip("0123456789.") for word in again[0][1].split()}) is (recompute != "attention")


def test_the_other_calls_of_a_trainer() -> None:
    """accumulate, no_sync, gradients, evaluate, predict and the three calls, on a mesh of pipe and data."""

    def run(comm: Communicator, mesh: Mesh) -> Any:
        trainer = make(comm, "deep", "zero2", mesh=mesh, microbatches=2, **OPTIONS)
        x, y = CASES["deep"].batch(np.random.default_rng(5), 8)
        mine = part(trainer.data, 8)
        trainer.accumulate(x[mine][:1], y[mine][:1])
        with trainer.no_sync():
            trainer.accumulate(x[mine][1:], y[mine][1:])
        gradients = trainer.gradients()
        norm = trainer.update()
        outputs = trainer.forward(x[mine])
        trainer.backward(np.ones_like(outputs) / 8)
        trainer.update()
        predicted = trainer.predict(x)
        return gradients, trainer.parameters(), norm, trainer.evaluate(x[mine], y[mine]), predicted

    (want,) = fsdpx.spawn(lambda comm: run(comm, Mesh(shard=1)), 1)
    for got in fsdpx.spawn(lambda comm: run(comm, Mesh(shard=1, pipe=3)), 3):
        for a, b in zip(want[:2], got[:2], strict=True):
            assert distance(a, b) < 1e-12
        np.testing.assert_allclose(got[2:4], want[2:4], rtol=1e-12)
        np.testing.assert_allclose(got[4], want[4], rtol=1e-10, atol=1e-12)
