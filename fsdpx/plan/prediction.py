"""`predict` computes the traffic, memory and time of a training step on any number of ranks of any machine. It
simulates the programs that the ranks would run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

from fsdpx import nn
from fsdpx.core.base.config import Precision, Sharding
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.option_names import PrecisionName, ScheduleName, Strategy
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.program import ActionEvent
from fsdpx.core.state.sync_policy import SyncChoice
from fsdpx.errors import warn
from fsdpx.nn.shape_inference import memoizing
from fsdpx.plan.extrapolation import StepDryRuns
from fsdpx.plan.lower_bound import LayerPrediction, predict_cost_by_layer
from fsdpx.plan.machine import Machine
from fsdpx.plan.peak import ACTIVATION_BYTES_PER_GAP_BYTE, MemoryPeak, OptionChange, list_memory_lowering_changes
from fsdpx.plan.world_step import RankClass, WorldStep, make_world_step

__all__ = [
    "Prediction", "disabling_gc", "dry_run_one_rank_per_group", "predict", "predict_from_dry_runs", "predict_step_cost",
]  # fmt: skip

PROCESS_BYTES = 66 << 20
"""Bytes that the interpreter, libraries and MPI use in a process before any training, as measured with CPython 3.11."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time, memory and traffic of a training step.

    Parameters
    ----------
    seconds : time of a step in seconds
    parts : seconds by cause, averaged over the pipeline ranks: "compute"; communication that is not hidden behind
        computation, by mesh axis ("tensor", "shard", "replica", "pipe"); "optimizer"; "bubble", waiting for other
        pipeline ranks; "overhead". Their sum is `seconds`
    classes : groups of ranks that do the same work, see `RankClass`
    mesh, microbatches : mesh and number of microbatches, with defaults filled in
    machine : the machine for which the step was predicted
    step : model, batch and options of the step
    events : start and end of each action on each pipeline rank, for the simulated microbatches
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
        """Bytes of memory that a rank needs (the maximum over all ranks)."""
        return self.worst_class.nbytes

    @property
    def process_memory_bytes(self) -> int:
        """Bytes of the whole process of a rank on a CPU (the maximum over all ranks), including interpreter,
        libraries, MPI, and gaps in the heap between activations.

        The part of this memory that does not depend on the model is assumed to be `PROCESS_BYTES`, a typical value;
        `fsdpx.dry_run` measures this part."""
        return (
            PROCESS_BYTES + self.memory + self.worst_class.memory.get("activations", 0) // ACTIVATION_BYTES_PER_GAP_BYTE
        )

    @property
    def worst_class(self) -> RankClass:
        """The group of ranks that needs the most memory. All ranks in a group do the same work."""
        return max(self.classes, key=lambda one: one.nbytes)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that a rank sends in a step, by mesh axis. For each axis, this is the maximum over all ranks."""
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
        """The moment at which a rank of `worst_class` uses the most memory: the action, and the memory held for each
        unit. `print(prediction.peak)` shows it as a table."""
        return self.worst_class.peak

    @property
    def layers(self) -> dict[str, LayerPrediction]:
        """Predicted cost of each layer on one rank, keyed by path: how many seconds its `forward` and `backward` take
        in a step, and how many bytes of activations it keeps for one microbatch (`nbytes`). The cost of a layer without
        parameters is added to the next layer, and the cost of the loss to the last layer. The time to gather parameters
        and to reduce gradients between ranks is not included."""
        with memoizing(), disabling_gc():
            return predict_cost_by_layer(self.step, self.machine)

    def list_memory_lowering_changes(self) -> list[OptionChange]:
        """Return all changes of a single option that would lower the memory peak, sorted by the new peak. Each change
        contains the new peak and step time.

        Each change requires a separate prediction."""
        step = self.step

        def predict_peak(changes: dict[str, Any]) -> tuple[int, float | None]:
            found = self
            if changes:
                other = WorldStep.from_options(step.model, step.batch, step.mesh.size, step.options | changes)
                found = predict_step_cost(other, self.machine)
            known = "offload" not in changes or self.machine.disk is not None
            return found.memory, found.seconds if known else None

        return list_memory_lowering_changes(
            step.options, step.count_samples_of_group(step.sample_group_count - 1), predict_peak
        )

    @property
    def bubble_share(self) -> float:
        """Fraction of the step time that pipeline ranks spend waiting for each other, averaged over these ranks."""
        return self.parts.get("bubble", 0.0) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.4g}" for name, seconds in self.parts.items() if seconds)
        return f"{self.seconds:.4g} s ({parts}), at most {self.memory / 2**30:.2f} GiB per rank"


def predict(
    model: nn.Layer,
    batch: tuple[Any, ...],
    *,
    ranks: int,
    machine: str | PathLike[str] | Machine,
    mesh: Mesh | None = None,
    strategy: Strategy | Sharding | SyncChoice = "ddp",
    microbatches: int | None = None,
    schedule: ScheduleName | PathLike[str] | Callable[..., Any] = "1f1b",
    recompute: int | str | None = None,
    precision: PrecisionName | Precision | None = None,
    **options: Any,
) -> Prediction:
    """Predict the time, traffic and memory of a training step. The prediction needs neither MPI nor data, and takes a
    fraction of a second.

    In each group of ranks that do the same work, one rank compiles and runs its program on arrays without data, as in
    `fsdpx.dry_run`. A simulator then runs the programs of all pipeline ranks on the machine. If there are many equal
    microbatches, the simulator runs only some of them, since each additional microbatch adds the same amount of time.

    Parameters
    ----------
    model : the model
    batch : ((shape, dtype), (shape, dtype)) of inputs and targets of the global batch. Fields have their full shape:
        samples, channels and cells, or the layout of the given `Grid`. Values on the nodes of an unstructured mesh
        cover all its nodes: samples, nodes and features. Several inputs are given as a tuple of pairs
    ranks : total number of ranks
    machine : a name in `Machine.list_names()`, the path of a machine.toml, or a `Machine`
    mesh, strategy, microbatches, schedule, recompute, precision, options : as for `fsdpx.distribute`; `domain` may also
        be the number of ranks along each dim of a field, such as `(2, 2, 1)`. The default loss is CrossEntropyLoss for
        integer targets, else MSELoss; the default optimizer is AdamW. With precision="fp16", a GPU is assumed to
        compute in 16 bits

    Returns
    -------
    Prediction : seconds by cause, bytes sent by axis, and memory

    Raises
    ------
    ConfigError : if `fsdpx.distribute` would reject the options, or if the mesh has more ranks than the machine
    """
    steps = {"microbatches": microbatches, "schedule": schedule, "recompute": recompute}
    options |= steps | {"strategy": strategy, "mesh": mesh, "precision": precision}
    where = Machine.load(machine)
    step = make_world_step(model, batch, ranks, where.compute.gpu, options)
    found = predict_step_cost(step, where)
    if step.empty_microbatch_warning:
        warn(step.empty_microbatch_warning)
    return found


@contextmanager
def disabling_gc() -> Iterator[None]:
    """Context manager that disables Python's garbage collector, because dry runs create many small objects and free
    few of them."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def dry_run_one_rank_per_group(
    model: nn.Layer, batch: tuple[Any, ...], ranks: int, gpu: bool, **options: Any
) -> StepDryRuns:
    """Run the step on shape-only arrays, for one rank in each group of ranks that do the same work. Return these dry
    runs, from which `predict_from_dry_runs` predicts the step on any machine.

    `gpu` says whether ranks are GPUs; `options` are the same as for `predict`."""
    step = make_world_step(model, batch, ranks, gpu, options)
    return StepDryRuns.from_step(step, step.count_simulated_microbatches_and_period()[0])


def predict_step_cost(step: WorldStep, machine: Machine) -> Prediction:
    """Predict a step on a machine, after running it on shape-only arrays. Raise ConfigError if the machine has too few
    ranks."""
    # if the machine has too few ranks, this call raises an error before the costly dry runs
    step.make_time_model(machine)
    with memoizing(), disabling_gc():
        return predict_from_dry_runs(StepDryRuns.from_step(step, step.count_dry_run_microbatches()), machine)


def predict_from_dry_runs(dry: StepDryRuns, machine: Machine) -> Prediction:
    """Predict the cost of a step on a machine from existing dry runs of the step."""
    step, overhead = dry.step, machine.compute.overhead
    seconds, parts, events = dry.predict_step_time_and_events(step.make_time_model(machine))
    found = (
        seconds + overhead,
        {"overhead": overhead, **parts},
        dry.extrapolate_traffic_and_memory(),
        step.mesh,
        step.microbatches,
    )
    return Prediction(*found, machine, step, events)
