"""The step to predict: its mesh and batch, the groups of ranks that do the same work, and shape-only runs of one rank
per group."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from fsdpx import nn, optim
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.array.shapes.array import measuring_shape_only_memory
from fsdpx.core.array.shapes.flop_counter import counting_work
from fsdpx.core.base.config import Precision, normalize_half_name
from fsdpx.core.base.config import resolve_precision as formats_of
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.name_hints import require_known_options
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.mesh import Mesh, MeshCoordinates
from fsdpx.core.engine.activations import HeapRecorder
from fsdpx.core.program import SCHEDULES, VERBS, Action, Program, compile
from fsdpx.core.state.accumulation import get_microbatch_count_or_default
from fsdpx.core.state.gradients import count_samples_of_rank
from fsdpx.core.state.sample_layout import UNSHARDED, Domain
from fsdpx.core.trainer.call_runner import FixedRanks
from fsdpx.core.trainer.distribute import make_session
from fsdpx.core.trainer.recipe import OPTIONS, Recipe, TrainingChoices, adapt_foreign_model_and_loss
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import ConfigError
from fsdpx.ext.fields.grid import LETTERS, Grid
from fsdpx.ext.meshes.over_mesh import TakesRows
from fsdpx.nn.layer import iterate_layers
from fsdpx.plan.costing import ActionCost, ActionCostRecorder
from fsdpx.plan.machine import Machine
from fsdpx.plan.peak import MemoryPeak, find_memory_peak
from fsdpx.plan.time_model import MeshOnMachine, StepTimes

__all__ = [
    "CONTROL", "Batch", "RankClass", "RankDryRun", "WorldStep", "find_representative_action",
    "get_batch_shapes_and_dtypes", "get_ranks_per_domain_dim", "make_world_step", "require_no_arrays",
    "require_no_node_mesh_layers", "require_positive_int",
]  # fmt: skip

LOSSES = nn.MSELoss(), nn.CrossEntropyLoss()
"""Default losses, for floating-point targets and for integer targets."""
Batch = tuple[tuple[tuple[int, ...], str], ...]
"""(shape, dtype) of each input, followed by the (shape, dtype) of the targets."""
CONTROL = "world"
"""Axis name under which the small messages about losses are counted. These messages add latency to the step, but
traffic tables omit them."""


@dataclass(frozen=True)
class RankClass:
    """A group of ranks that do the same work, represented by one of them.

    Parameters
    ----------
    rank : global rank ID of the representative rank
    coordinates : mesh coordinates of the representative rank
    peak : the moment of highest memory use, and what the rank holds at that moment
    traffic : (axis, call) -> (number of calls, bytes) in a step
    """

    rank: int
    coordinates: MeshCoordinates
    peak: MemoryPeak
    traffic: Mapping[tuple[str, str], tuple[int, int]]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that a rank holds at its memory peak, by kind of memory. The kind "activations" includes the batch and
        the temporary arrays of the action at the peak, which `DryRun.activations` excludes."""
        return self.peak.memory

    @property
    def nbytes(self) -> int:
        """Total bytes that a rank holds at its memory peak."""
        return self.peak.nbytes


class RankDryRun(NamedTuple):
    """A shape-only run of the step on one rank.

    Attributes
    ----------
    found : traffic and memory peak of the rank
    costs : work and communication of each action
    alive : for each action, the peak bytes of activations during the action, and the bytes of activations after it
    session : the session of the trainer that ran
    programs : number of microbatches -> the rank's program
    """

    found: RankClass
    costs: dict[Action, ActionCost]
    alive: list[tuple[int, int]]
    session: Any
    programs: dict[int, Program]

    def get_program(self, microbatches: int) -> Program:
        """Return this rank's program for the given number of equal microbatches. It is compiled on first use."""
        if microbatches not in self.programs:
            request = self.session.make_program_request("step", microbatches, fresh=True)
            self.programs[microbatches] = compile(request)
        return self.programs[microbatches]

    def count_actions(self, microbatches: int) -> Counter[Action]:
        """Return how often each action occurs in the program for `microbatches` microbatches. If the dry run ran fewer
        microbatches, an action on one of the remaining microbatches is counted as the same operation on the last
        microbatch that ran."""
        return Counter(
            find_representative_action(action, min(self.programs)) for action in self.get_program(microbatches).actions
        )


@dataclass(frozen=True)
class WorldStep:
    """A training step of all ranks: model, global batch, mesh and options. `domain` says how each sample is split over
    ranks; a field is split over a grid of ranks."""

    model: nn.Layer
    batch: Batch
    mesh: Mesh
    microbatches: int
    options: dict[str, Any]
    domain: Domain = UNSHARDED

    @property
    def sample_group_count(self) -> int:
        """Number of groups of ranks that process different samples. A group is one data rank or, if fields are split,
        a grid of data ranks that share a field."""
        return self.mesh.width_of("data") // prod(self.mesh.domain)

    @classmethod
    def from_options(cls, model: nn.Layer, batch: Batch, ranks: int, options: dict[str, Any]) -> WorldStep:
        """Return the step, with the mesh and the number of microbatches derived from the options. Raise ConfigError if
        the options do not fit the number of ranks."""
        mesh = (options["mesh"] or Mesh()).fill_from_strategy(options["strategy"], ranks)
        domain = _resolve_domain_option(options.get("domain") or mesh.domain, model, batch, mesh)
        mesh = replace(mesh, domain=domain.dims)
        chunks, samples = options.get("reproducible_chunks"), batch[0][0][0]
        if chunks is not None and samples % chunks:
            raise ConfigError(f"reproducible_chunks={chunks}: a global batch of {samples} samples does not divide")
        return cls(
            model, batch, mesh, get_microbatch_count_or_default(options["microbatches"], chunks, mesh), options, domain
        )

    @property
    def sample_count(self) -> int:
        """Number of samples of the global batch."""
        return int(self.batch[0][0][0])

    def count_bytes_per_sample(self, representative_index: int) -> int:
        """Return the number of bytes that the inputs and targets of one sample take on a rank. If ranks share samples,
        `representative_index` selects the rank with the most computation (0) or the most communication (1)."""
        batch = self._get_batch_shapes_of_rank(representative_index)
        return sum(parse_dtype(dtype).itemsize * prod(shape[1:]) for shape, dtype in batch)

    def _get_batch_shapes_of_rank(self, representative_index: int) -> Batch:
        """Return the (shape, dtype) of each array of the batch. If ranks share samples, the shapes are taken from the
        rank with the most computation (`representative_index` 0) or the most communication (1)."""
        part = self._get_part(representative_index)
        *shapes, target = [shape for shape, _ in self.batch]
        inputs, target = part.compute_local_shapes(self.model, shapes, target)
        return tuple((shape, dtype) for shape, (_, dtype) in zip((*inputs, target), self.batch, strict=True))

    def _get_part(self, representative_index: int) -> Domain:
        """Return the domain as seen by one rank: the rank with the most computation (`representative_index` 0) or the
        most communication (1)."""
        return self.domain.as_rank(self.domain.busiest_ranks[-1 if representative_index else 0])

    @property
    def halo_byte_shares_by_dim(self) -> tuple[float, ...]:
        """For each dim of the grid, the fraction of a rank's halo bytes that is exchanged along this dim; () if there
        is no grid."""
        own = self._get_part(0).local_shape
        sizes = [(width > 1) / max(n, 1) for n, width in zip(own, self.domain.dims, strict=True)]
        return tuple(size / (sum(sizes) or 1.0) for size in sizes)

    def count_samples_of_group(self, group: int) -> int:
        """Return the number of samples of group number `group` (see `sample_group_count`). The last group has the most
        samples."""
        chunks = self.options.get("reproducible_chunks")
        return count_samples_of_rank(self.sample_count, group, self.sample_group_count, chunks)

    @property
    def empty_microbatch_warning(self) -> str:
        """A warning if there are more microbatches than samples on a data rank, else ""."""
        most, m = self.count_samples_of_group(self.sample_group_count - 1), self.microbatches
        words = f"microbatches={m}: a data rank has {most} samples at most, and the others take their time without any"
        return words if most < m else ""

    @property
    def _min_steady_microbatch_count(self) -> int | None:
        """The value of `NamedSchedule.steady` for the pipeline schedule: from this number of microbatches per pipeline
        rank on, every additional microbatch lengthens the step by the same time. None if the number is unknown, or if
        the schedule is not a named one."""
        chosen = self.options["schedule"]
        found = SCHEDULES.get(chosen) if isinstance(chosen, str) else None
        return None if found is None else found.steady

    @property
    def has_equal_microbatch_durations(self) -> bool:
        """Whether all microbatches take the same time, apart from the first and last microbatches, during which a
        pipeline fills and drains."""
        known = self.mesh.width_of("pipe") == 1 or self._min_steady_microbatch_count is not None
        rows, rest = divmod(self.sample_count, self.sample_group_count)
        equal = rest == 0 and rows % self.microbatches == 0
        return known and equal and self.options.get("reproducible_chunks") is None

    def count_simulated_microbatches_and_period(self) -> tuple[int, int]:
        """Return (simulated, period): it is enough to simulate `simulated` microbatches, because each group of `period`
        additional microbatches adds the same amount of time.

        `period` is the width of the pipeline axis, since the waiting pattern of the pipeline ranks repeats after that
        many microbatches. If microbatches differ, or if there are only a few, `simulated` is the number of all
        microbatches, and `period` is 0."""
        m, pipe = self.microbatches, self.mesh.width_of("pipe")
        enough = (
            self._min_steady_microbatch_count * pipe + 1
            if pipe > 1 and self._min_steady_microbatch_count is not None and self.has_equal_microbatch_durations
            else 2
        )
        return (
            (enough + (m - enough) % pipe, pipe)
            if self.has_equal_microbatch_durations and m > enough + pipe
            else (m, 0)
        )

    def count_dry_run_microbatches(self) -> int:
        """Return the number of microbatches that a dry run needs to determine the memory and costs of all microbatches.

        Usually, the result is slightly more than the number of microbatches that a pipeline rank begins before it
        completes the first one. With an interleaved schedule, the result is a multiple of the pipeline's width. With
        the option `offload`, the result is the number of simulated microbatches."""
        most, pipe = self.count_simulated_microbatches_and_period()[0], self.mesh.width_of("pipe")
        if not self.has_equal_microbatch_durations or pipe == 1 or self.options.get("offload") is not None:
            return most
        return min(most, 3 * pipe if SCHEDULES[self.options["schedule"]].interleaves else pipe + 4)

    def dry_run_pipe_ranks(self, group: int, microbatches: int, representative_index: int = 0) -> Iterator[RankDryRun]:
        """For each position along the pipeline axis, dry-run the step of one rank of group number `group` (see
        `sample_group_count`), using shape-only arrays, and yield the run. If ranks share samples,
        `representative_index` selects the rank with the most computation (0) or the most communication (1)."""
        rows = self.count_samples_of_group(group)
        if microbatches < self.microbatches:
            rows = rows // self.microbatches * microbatches
        for place in self._iterate_mesh_coordinates_along_pipe(group, representative_index):
            found = self._dry_run_rank(place, rows, microbatches, representative_index)
            self._add_step_end_message_costs(
                found.costs, max(self.count_simulated_microbatches_and_period()[0] - microbatches, 0)
            )
            yield found

    def _iterate_mesh_coordinates_along_pipe(self, group: int, representative_index: int) -> Iterator[MeshCoordinates]:
        """For each position along the pipeline axis, yield the mesh coordinates of one rank of group number `group`.
        The coordinate along the tensor axis is always 0."""
        data_rank, shard = group * prod(self.mesh.domain), self.mesh.width_of("shard")
        data_rank += self.domain.busiest_ranks[representative_index]
        for pipe in range(self.mesh.width_of("pipe")):
            yield MeshCoordinates(pipe, data_rank // shard, data_rank % shard, 0)

    def make_time_model(self, machine: Machine) -> StepTimes:
        """Return the time model of this step on a machine. Raise ConfigError if the machine has fewer ranks than the
        mesh."""
        lines = MeshOnMachine(self.mesh, machine, self.halo_byte_shares_by_dim)
        lines.require_room_for_ranks()
        return StepTimes(lines, normalize_half_name(formats_of(self.options["precision"]).compute))

    def _add_step_end_message_costs(self, costs: dict[Action, ActionCost], microbatches: int) -> None:
        """Add to `costs` the bytes sent at the end of the step for `microbatches` microbatches that the dry run left
        out: each rank sends two float64 numbers per microbatch to all other ranks."""
        more = microbatches * 2 * 8 * (self.mesh.size - 1)
        for action in [a for a in costs if "loss:all" in VERBS[a.op].takes] if more else ():
            calls = [(axis, call, n, sent + more * (axis == CONTROL)) for axis, call, n, sent in costs[action].calls]
            costs[action] = replace(costs[action], calls=tuple(calls))

    def _make_dry_run_trainer(self, rank: int, microbatches: int, representative_index: int) -> Trainer:
        """Return a trainer that runs one rank on shape-only arrays. If ranks share samples, `representative_index`
        selects the rank with the most computation (0) or the most communication (1)."""
        options = self.options | {"microbatches": microbatches, "device": "shape"}
        options |= {"domain": self._get_part(representative_index)} if self.domain.dims else {}
        comm = FakeCommunicator(rank, self.mesh.size)
        return Trainer(FixedRanks(make_session(Recipe(TrainingChoices(self.model)).with_options(options), comm)))

    def _dry_run_rank(
        self, coordinates: MeshCoordinates, rows: int, microbatches: int, representative_index: int
    ) -> RankDryRun:
        """Run the step of one rank on shape-only arrays, with `rows` samples. Return the costs, traffic and memory of
        the rank."""
        costing = ActionCostRecorder()
        with counting_work() as costing.work, measuring_shape_only_memory() as meter:
            trainer = self._make_dry_run_trainer(self.mesh.rank_of(coordinates), microbatches, representative_index)
            trainer.inspect.reset_counters()
            costing.watch_trainer(trainer, meter)
            watch = HeapRecorder(trainer.inspect.engine, meter)
            *x, y = (
                ShapeArray((rows, *shape[1:]), parse_dtype(d))
                for shape, d in self._get_batch_shapes_of_rank(representative_index)
            )
            trainer.step(tuple(x) if len(x) > 1 else x[0], y)
        counters, program = costing.counters, trainer.inspect.engine.last_program
        traffic = {(axis, call): (calls, nbytes) for axis, call, calls, nbytes in counters if axis != CONTROL}
        assert program is not None
        peak = find_memory_peak(trainer.inspect.engine, watch)
        found = RankClass(self.mesh.rank_of(coordinates), coordinates, peak, traffic)
        return RankDryRun(
            found, dict(costing.costs), watch.activation_bytes_by_action, trainer._session, {microbatches: program}
        )


def make_world_step(
    model: nn.Layer, batch: tuple[Any, ...], ranks: int, gpu: bool, options: Mapping[str, Any]
) -> WorldStep:
    """Return the step that the arguments of `predict` describe. `gpu` says whether the ranks use GPUs."""
    pairs, chosen = get_batch_shapes_and_dtypes(batch), dict(options)
    model, chosen["loss"] = adapt_foreign_model_and_loss(model, chosen.get("loss"), chosen.get("domain"))
    chosen = _check_and_complete_options(pairs, gpu, chosen)
    Recipe(TrainingChoices(model)).with_options(
        {name: value for name, value in chosen.items() if name != "domain"}
    )  # the result is not needed: this call raises ConfigError for invalid options
    return WorldStep.from_options(model, pairs, require_positive_int("ranks", ranks), chosen)


def _check_and_complete_options(batch: Any, gpu: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Check the options of `predict`, and return them with defaults filled in. Raise ConfigError for an unknown
    option."""
    for name in ("comm", "device", "backend"):
        if name in options:
            raise ConfigError(f"predict decides {name} itself")
    require_known_options("predict", options, OPTIONS)
    require_no_arrays(options)
    if options["loss"] is None:
        options["loss"] = LOSSES[parse_dtype(batch[-1][1]).kind in "iu"]
    defaults = {
        "optimizer": optim.AdamW(), "tune": False, "strategy": "ddp",
        "mesh": None, "microbatches": None, "schedule": "1f1b", "recompute": None, "precision": None,
    }  # fmt: skip
    chosen = defaults | options
    if gpu and normalize_half_name(chosen["precision"]) == "float16":
        chosen["precision"] = Precision("float16", loss_scale="dynamic")
    return chosen


def _resolve_domain_option(space: Any, model: nn.Layer, batch: Batch, mesh: Mesh) -> Domain:
    """Return the domain, which says how samples are split over ranks. If `space` is the number of ranks along each dim,
    the domain is a grid that splits the first field of the batch. Raise ConfigError unless the number of ranks that
    share a sample divides the width of the data axis."""
    if not get_ranks_per_domain_dim(space):
        return UNSHARDED
    if not isinstance(space, Domain):
        require_no_node_mesh_layers(model, space)
        cells = batch[0][0][2:]
        if len(cells) != len(space):
            wanted = f"samples, channels and {len(space)} dims are wanted"
            raise ConfigError(f"domain={space!r}: inputs of shape {batch[0][0]}, and {wanted}")
        space = Grid.from_shape(cells, space, layout="c" + LETTERS[3 - len(space) :])
    if mesh.width_of("data") % prod(space.dims):
        raise ConfigError(
            f"domain={space.dims}: a sample is on {prod(space.dims)} ranks, and the data axis of {mesh} has "
            f"{mesh.width_of('data')}: their number must be a multiple"
        )
    return space


def require_no_node_mesh_layers(model: nn.Layer, space: Any) -> None:
    """Raise ConfigError if a layer of the model needs a mesh of nodes (a `Partition`). The error message names `space`,
    the value of the option `domain`, which does not describe a mesh of nodes."""
    for path, layer in iterate_layers(model):
        if isinstance(layer, TakesRows):
            raise ConfigError(
                f"domain={space!r}: {path!r} {layer!r} needs a mesh, which plans do not divide: pass "
                "domain=fsdpx.Partition.from_graph(...)"
            )


def get_batch_shapes_and_dtypes(batch: Any) -> Batch:
    """Return the (shape, dtype) of each input, followed by the (shape, dtype) of the targets. The batch is given as
    (shape, dtype) pairs or as arrays, and several inputs may be given as a tuple. Raise ConfigError for anything
    else."""
    try:
        *inputs, target = batch
        if len(inputs) == 1 and not hasattr(inputs[0], "shape") and not isinstance(inputs[0][1], str):
            (inputs,) = inputs
        given = [(one.shape, str(one.dtype)) if hasattr(one, "shape") else one for one in (*inputs, target)]
        pairs = tuple((tuple(map(int, shape)), dtype) for shape, dtype in given)
        sizes, _ = {shape[0] for shape, _ in pairs}, [parse_dtype(dtype) for _, dtype in pairs]
        if inputs and len(sizes) == 1 and min(min(shape) for shape, _ in pairs) > 0:
            return pairs
    except (TypeError, IndexError, ValueError, ConfigError):
        pass
    raise ConfigError(
        f"batch={batch!r}: the shape and dtype of inputs and targets of the global batch are needed, such as "
        "(((64, 1024), 'int64'), ((64, 1024), 'int64'))"
    )


def require_positive_int(name: str, value: Any) -> int:
    """Return the value of the option `name` as an int. Raise ConfigError unless it is an integer of at least 1."""
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:  # raised for floats and arrays, which are not integers
        found = -1
    if found < 1:
        raise ConfigError(f"{name}={value!r}: a whole number, 1 or more")
    return found


def require_no_arrays(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if the value of an option is an array, which predictions do not support."""
    for name, value in options.items():
        if hasattr(value, "__array__"):
            raise ConfigError(f"{name}={value!r}: no option of a plan is an array")


def get_ranks_per_domain_dim(space: Any) -> tuple[int, ...]:
    """Return the number of ranks along each dim of a sample for the value `space` of the option `domain`. Return () if
    samples are not split. Raise ConfigError if `space` is neither a `Domain` nor a sequence of positive integers."""
    dims = getattr(space, "dims", () if space is None else space)
    if not isinstance(dims, tuple | list) or not all(hasattr(n, "__index__") and n > 0 for n in dims):
        raise ConfigError(
            f"domain={space!r}: a fsdpx.Grid or fsdpx.Partition is needed, or ranks along each dim, such as (2, 2)"
        )
    return tuple(map(int, dims))


def find_representative_action(action: Action, ran: int) -> Action:
    """Return the action whose cost is used for `action` if only the first `ran` microbatches ran: the action itself, or
    the same operation on the last microbatch that ran."""
    return action if action.mb is None or action.mb < ran else Action(action.op, action.unit, ran - 1)
