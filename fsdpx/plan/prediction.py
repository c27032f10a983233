"""predict: bytes, memory and seconds of a step on any ranks of any machine, from the programs that these would run."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from fsdpx import nn
from fsdpx.core.base.config import Precision
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.program import ActionEvent
from fsdpx.errors import warn
from fsdpx.nn.linearize import memoize_inside
from fsdpx.plan.extrapolation import StepDryRuns
from fsdpx.plan.machine import Machine
from fsdpx.plan.peak import PIECES, MemoryPeak, OptionChange, list_lowering_changes
from fsdpx.plan.world_step import RankClass, WorldStep, make_world_step

__all__ = ["Prediction", "disable_gc", "dry_run_classes", "predict", "predict_runs", "predict_step"]

PROCESS_BYTES = 66 << 20
"""Bytes of a process that has trained nothing: of its own, of libraries and of MPI, as measured with CPython 3.11."""


@dataclass(frozen=True)
class Prediction:
    """What a step takes.

    Parameters
    ----------
    seconds : of a step
    parts : what they consist of, in the mean of the ranks of a pipe: "compute"; by axis what communication is not
        hidden behind computing, "tensor", "shard", "replica", "pipe"; "optimiser"; "bubble", waiting for other ranks of
        the pipe; "overhead". Their sum is `seconds`
    classes : of equal ranks
    mesh, microbatches : as they are filled in
    events : when each action of each rank of the pipe runs, of as many microbatches as were simulated
    step : what was asked for
    """

    seconds: float
    parts: Mapping[str, float]
    classes: tuple[RankClass, ...]
    mesh: Mesh
    microbatches: int
    machine: Machine
    step: WorldStep = field(repr=False)
    events: tuple[ActionEvent, ...] = field(repr=False, default=())

    @property
    def memory(self) -> int:
        """Bytes of a rank of the class with most."""
        return self.worst_class.nbytes

    @property
    def process_bytes(self) -> int:
        """Bytes of the whole process of such a rank, if it is no GPU: also interpreter, libraries, MPI, and what lies
        free between activations. `fsdpx.dry_run` measures them where it runs."""
        return PROCESS_BYTES + self.memory + self.worst_class.memory.get("activations", 0) // PIECES

    @property
    def worst_class(self) -> RankClass:
        """The class with most memory."""
        return max(self.classes, key=lambda one: one.nbytes)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Axis -> bytes that a rank sends in a step, of the class that sends most."""
        found: dict[str, int] = {}
        for one in self.classes:
            sent: dict[str, int] = {}
            for (axis, call), (_, nbytes) in one.traffic.items():
                if call not in ("recv", "read", "write"):
                    sent[axis] = sent.get(axis, 0) + nbytes
            found |= {axis: max(nbytes, found.get(axis, 0)) for axis, nbytes in sent.items()}
        return found

    @property
    def peak(self) -> MemoryPeak:
        """When a rank of the class with most memory holds it, what, and whose. Printed, a table."""
        return self.worst_class.peak

    def list_lowering_changes(self) -> list[OptionChange]:
        """Which single choices would lower the peak, to how many bytes and at what time of a step, most first. Each is
        a prediction of its own."""
        step = self.step

        def count_peak(changes: dict[str, Any]) -> tuple[int, float | None]:
            found = self
            if changes:
                other = WorldStep.from_options(step.model, step.batch, step.mesh.size, step.options | changes)
                found = predict_step(other, self.machine)
            known = "offload" not in changes or self.machine.disk is not None
            return found.memory, found.seconds if known else None

        return list_lowering_changes(step.options, step.rows_of_member(step.member_count - 1), count_peak)

    @property
    def bubble_share(self) -> float:
        """Share of the step in which the ranks of a pipe wait for each other."""
        return self.parts.get("bubble", 0.0) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.4g}" for name, seconds in self.parts.items() if seconds)
        return f"{self.seconds:.4g} s ({parts}), {self.memory / 2**30:.2f} GiB of a rank at most"


def predict(
    model: nn.Layer,
    batch: tuple[Any, ...],
    *,
    ranks: int,
    machine: str | PathLike[str] | Machine,
    mesh: Mesh | None = None,
    strategy: Any = "ddp",
    microbatches: int | None = None,
    schedule: Any = "1f1b",
    recompute: Any = None,
    precision: str | Precision | None = None,
    **options: Any,
) -> Prediction:
    """How long a step takes, what it moves and what memory it needs. No MPI, no data; in a fraction of a second.

    One rank of each class of equal ranks compiles and runs its program on shapes, as `fsdpx.dry_run` does. A simulator
    then runs the programs of all ranks of a pipe on the machine. Of many equal microbatches as many run as it takes
    until each one more takes the same.

    Parameters
    ----------
    model : the model
    batch : ((shape, dtype), (shape, dtype)) of inputs and targets of the whole global batch, of fields whole ones:
        samples, channels and cells, or in the layout of the `Grid` that is given; several inputs are a tuple of pairs
    ranks : of the world
    machine : a name in `Machine.list_names()`, the path of a machine.toml, or a `Machine`
    mesh, strategy, microbatches, schedule, recompute, precision, options : as for `fsdpx.distribute`, `domain` also as
        the numbers of ranks along each dim of a field, `(2, 2, 1)`; by default the
        loss is CrossEntropyLoss for targets of whole numbers, else MSELoss, and the optimiser AdamW. "fp16" on a GPU
        computes in 16 bits

    Returns
    -------
    Prediction : seconds and their parts, bytes by axis, memory

    Raises
    ------
    ConfigError : what `fsdpx.distribute` would refuse; a mesh that the machine has no level for
    """
    steps = {"microbatches": microbatches, "schedule": schedule, "recompute": recompute}
    options |= steps | {"strategy": strategy, "mesh": mesh, "precision": precision}
    where = Machine.load(machine)
    step = make_world_step(model, batch, ranks, where.compute.gpu, options)
    found = predict_step(step, where)
    if step.empty_microbatch_text:
        warn(step.empty_microbatch_text)
    return found


@contextmanager
def disable_gc() -> Iterator[None]:
    """Python looks for garbage after the block only: dry runs make many small objects, and drop few."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def dry_run_classes(model: nn.Layer, batch: tuple[Any, ...], ranks: int, gpu: bool, **options: Any) -> StepDryRuns:
    """The dry runs of a step, for `predict_runs` and `StepDryRuns.memory_curves`. gpu: of machines that are GPUs.
    options: those of `predict`."""
    step = make_world_step(model, batch, ranks, gpu, options)
    return StepDryRuns.from_step(step, step.count_simulated()[0])


def predict_step(step: WorldStep, machine: Machine) -> Prediction:
    """The prediction of a step on a machine. ConfigError where it has too few ranks."""
    step.make_step_times(machine)  # refuses it before anything runs
    with memoize_inside(), disable_gc():
        return predict_runs(StepDryRuns.from_step(step, step.count_needed()), machine)


def predict_runs(dry: StepDryRuns, machine: Machine) -> Prediction:
    """The same from dry runs."""
    step, overhead = dry.step, machine.compute.overhead
    seconds, parts, events = dry.extrapolate_step(step.make_step_times(machine))
    found = seconds + overhead, {"overhead": overhead, **parts}, dry.rank_classes(), step.mesh, step.microbatches
    return Prediction(*found, machine, step, events)
