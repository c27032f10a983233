"""The step that a plan is asked about: on which ranks it runs, which of them do the same, and one rank of each kind run
on shapes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from fsdpx import nn, optim
from fsdpx.core.array.namespace import parse_dtype as dtype_of
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.array.shapes.array import measure_memory
from fsdpx.core.array.shapes.flop_counter import count_work
from fsdpx.core.base.config import Precision, normalize_half_name
from fsdpx.core.base.config import resolve_precision as formats_of
from fsdpx.core.base.name_hints import require_known
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.mesh import Mesh, MeshCoordinates
from fsdpx.core.engine.activations import HeapRecorder
from fsdpx.core.program import SCHEDULES, VERBS, Action, Program, compile
from fsdpx.core.state.accumulation import choose_microbatches
from fsdpx.core.state.gradients import count_rows_of
from fsdpx.core.trainer.call_runner import FixedRanks
from fsdpx.core.trainer.distribute import make_session
from fsdpx.core.trainer.recipe import OPTIONS, Recipe, TrainingChoices, adapt_foreign
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import ConfigError
from fsdpx.ext.fields.grid import LETTERS, Grid
from fsdpx.plan.costing import ActionCost, ActionCostRecorder
from fsdpx.plan.machine import Machine
from fsdpx.plan.peak import MemoryPeak, peak_of
from fsdpx.plan.time_model import MeshLines, StepTimes

__all__ = [
    "CONTROL",
    "Batch",
    "RankClass",
    "RankDryRun",
    "WorldStep",
    "check_positive_int",
    "get_grid_dims",
    "known_action",
    "make_world_step",
    "parse_batch",
    "require_words",
]  # fmt: skip

LOSSES = nn.MSELoss(), nn.CrossEntropyLoss()
"""If none is given: of targets that are numbers, and of whole ones."""
Batch = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each input, then of the targets."""
CONTROL = "world"
"""Messages of a few numbers about losses go over this axis; they are not counted, their latency is."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same. rank: one of them. peak: when it holds most memory, what, and whose. traffic: (axis,
    call) -> (calls, bytes) of a step."""

    rank: int
    place: MeshCoordinates
    peak: MemoryPeak
    traffic: Mapping[tuple[str, str], tuple[int, int]]

    @property
    def memory(self) -> dict[str, int]:
        """Kind -> bytes at the step's peak."""
        return self.peak.memory

    @property
    def nbytes(self) -> int:
        """Memory in all."""
        return self.peak.nbytes


class RankDryRun(NamedTuple):
    """One rank's dry run: its class, its costs by action, and its programs of other numbers of microbatches. alive:
    bytes of activations, at most in each action and after it."""

    found: RankClass
    costs: dict[Action, ActionCost]
    alive: list[tuple[int, int]]
    session: Any
    programs: dict[int, Program]

    def get_program(self, microbatches: int) -> Program:
        """The program of this rank for another number of equal microbatches."""
        if microbatches not in self.programs:
            request = self.session.make_request("step", microbatches, fresh=True)
            self.programs[microbatches] = compile(request)
        return self.programs[microbatches]

    def count_actions(self, microbatches: int) -> Counter[Action]:
        """How often each action is in that program, later microbatches as the last one that ran."""
        return Counter(known_action(action, min(self.programs)) for action in self.get_program(microbatches).actions)


@dataclass(frozen=True)
class WorldStep:
    """A step of the whole world. grid: of the first field, where ranks have parts of fields."""

    model: nn.Layer
    batch: Batch
    mesh: Mesh
    microbatches: int
    options: dict[str, Any]
    grid: Grid | None = None

    @property
    def member_count(self) -> int:
        """How many data ranks, or grids of them, have different samples."""
        return self.mesh.width_of("data") // prod(self.mesh.domain)

    @classmethod
    def from_options(cls, model: nn.Layer, batch: Batch, ranks: int, options: dict[str, Any]) -> WorldStep:
        """With the mesh and the microbatches that these options mean."""
        mesh = (options["mesh"] or Mesh()).fill_from_strategy(options["strategy"], ranks)
        grid = _make_grid(options.get("domain") or mesh.domain, batch, mesh)
        mesh = mesh if grid is None else replace(mesh, domain=grid.dims)
        chunks, samples = options.get("reproducible_chunks"), batch[0][0][0]
        if chunks is not None and samples % chunks:
            raise ConfigError(f"reproducible_chunks={chunks}: a global batch of {samples} samples does not divide")
        return cls(model, batch, mesh, choose_microbatches(options["microbatches"], chunks, mesh), options, grid)

    @property
    def sample_count(self) -> int:
        return int(self.batch[0][0][0])

    def sample_bytes(self, at: int) -> int:
        """Bytes of one sample on a rank, inputs and targets."""
        return sum(dtype_of(dtype).itemsize * prod(shape[1:]) for shape, dtype in self._batch_of_rank(at))

    def _batch_of_rank(self, at: int) -> Batch:
        """Shape and dtype of the batch, of fields the part of one of the busiest ranks of a grid."""
        if self.grid is None:
            return self.batch
        grid, (*inputs, (y, b)) = self.grid.as_rank(self.grid.busiest_ranks[-1 if at else 0]), self.batch
        return *((grid.local_array_shape(x, ghosts=True), a) for x, a in inputs), (grid.local_array_shape(y), b)

    @property
    def face_shares(self) -> tuple[float, ...]:
        """By dim of the grid, its share of what a rank exchanges with its neighbours."""
        if self.grid is None:
            return ()
        own = self.grid.as_rank(self.grid.busiest_ranks[0]).local_shape
        sizes = [(width > 1) / max(n, 1) for n, width in zip(own, self.grid.dims, strict=True)]
        return tuple(size / (sum(sizes) or 1.0) for size in sizes)

    def rows_of_member(self, member: int) -> int:
        """Samples of a data rank, or of a grid of them; the last one has most."""
        return count_rows_of(self.sample_count, member, self.member_count, self.options.get("reproducible_chunks"))

    @property
    def empty_microbatch_text(self) -> str:
        """Which microbatches have no samples; "" where each has some."""
        most, m = self.rows_of_member(self.member_count - 1), self.microbatches
        words = f"microbatches={m}: a data rank has {most} samples at most, and the others take their time without any"
        return words if most < m else ""

    @property
    def _steady(self) -> int | None:
        """See `NamedSchedule`."""
        chosen = self.options["schedule"]
        found = SCHEDULES.get(chosen) if isinstance(chosen, str) else None
        return None if found is None else found.steady

    @property
    def has_equal_microbatches(self) -> bool:
        """Whether all microbatches take the same, but for those at the beginning and the end."""
        known = self.mesh.width_of("pipe") == 1 or self._steady is not None
        equal = (
            self.sample_count % self.member_count == 0
            and self.sample_count // self.member_count % self.microbatches == 0
        )
        return known and equal and self.options.get("reproducible_chunks") is None

    def count_simulated(self) -> tuple[int, int]:
        """How many microbatches are simulated, and how many more take the same time once more: as many as the pipe has
        ranks, the longest way around which a rank waits for itself. All of them, and 0, where they differ or are few.
        """
        m, pipe = self.microbatches, self.mesh.width_of("pipe")
        enough = self._steady * pipe + 1 if pipe > 1 and self._steady is not None and self.has_equal_microbatches else 2
        return (enough + (m - enough) % pipe, pipe) if self.has_equal_microbatches and m > enough + pipe else (m, 0)

    def count_needed(self) -> int:
        """How many microbatches show memory and costs of all: a few more than a rank of the pipe begins before it ends
        one, of an interleaved schedule a multiple of its ranks. All that are simulated where records lie on disk."""
        most, pipe = self.count_simulated()[0], self.mesh.width_of("pipe")
        if not self.has_equal_microbatches or pipe == 1 or self.options.get("offload") is not None:
            return most
        return min(most, 3 * pipe if self.options["schedule"] == "interleaved" else pipe + 4)

    def run_member(self, member: int, microbatches: int, at: int = 0) -> Iterator[RankDryRun]:
        """The dry runs of one data rank, by rank of the pipe. at: which of the busiest ranks of a grid."""
        rows = self.rows_of_member(member)
        if microbatches < self.microbatches:
            rows = rows // self.microbatches * microbatches
        for place in self._iterate_coordinates(member, at):
            found = self._run_rank(place, rows, microbatches, at)
            self._tell_more(found.costs, max(self.count_simulated()[0] - microbatches, 0))
            yield found

    def _iterate_coordinates(self, member: int, at: int) -> Iterator[MeshCoordinates]:
        data_rank, shard = member * prod(self.mesh.domain), self.mesh.width_of("shard")
        data_rank += 0 if self.grid is None else self.grid.busiest_ranks[at]
        for pipe in range(self.mesh.width_of("pipe")):
            yield MeshCoordinates(pipe, data_rank // shard, data_rank % shard, 0)

    def make_step_times(self, machine: Machine) -> StepTimes:
        """What actions and calls take there. ConfigError where it has too few ranks."""
        lines = MeshLines(self.mesh, machine, self.face_shares)
        lines.require_ranks()
        return StepTimes(lines, normalize_half_name(formats_of(self.options["precision"]).compute))

    def _tell_more(self, costs: dict[Action, ActionCost], microbatches: int) -> None:
        """Ranks tell all others two numbers of each microbatch at the end of a step: also of so many more."""
        more = microbatches * 2 * 8 * (self.mesh.size - 1)
        for action in [a for a in costs if "loss:all" in VERBS[a.op].takes] if more else ():
            calls = [(axis, call, n, sent + more * (axis == CONTROL)) for axis, call, n, sent in costs[action].calls]
            costs[action] = replace(costs[action], calls=tuple(calls))

    def _make_trainer(self, rank: int, microbatches: int, at: int) -> Trainer:
        options = self.options | {"microbatches": microbatches, "device": "shape"}
        options |= {} if self.grid is None else {"domain": self.grid.as_rank(self.grid.busiest_ranks[at])}
        comm = FakeCommunicator(rank, self.mesh.size)
        return Trainer(FixedRanks(make_session(Recipe(TrainingChoices(self.model)).with_options(options), comm)))

    def _run_rank(self, place: MeshCoordinates, rows: int, microbatches: int, at: int) -> RankDryRun:
        costing = ActionCostRecorder()
        with count_work() as costing.work, measure_memory() as meter:
            trainer = self._make_trainer(self.mesh.rank_of(place), microbatches, at)
            trainer.inspect.reset_counters()
            costing.watch_trainer(trainer, meter)
            watch = HeapRecorder(trainer.inspect.engine, meter)
            *x, y = (ShapeArray((rows, *shape[1:]), dtype_of(dtype)) for shape, dtype in self._batch_of_rank(at))
            trainer.step(tuple(x) if len(x) > 1 else x[0], y)
        counters, program = costing.counters, trainer.inspect.engine.last_program
        traffic = {(axis, call): (calls, nbytes) for axis, call, calls, nbytes in counters if axis != CONTROL}
        assert program is not None
        found = RankClass(self.mesh.rank_of(place), place, peak_of(trainer.inspect.engine, watch), traffic)
        return RankDryRun(
            found, dict(costing.costs), watch.activation_bytes_by_action, trainer._session, {microbatches: program}
        )


def make_world_step(
    model: nn.Layer, batch: tuple[Any, ...], ranks: int, gpu: bool, options: Mapping[str, Any]
) -> WorldStep:
    """The step that these options of `predict` ask for, on machines that are GPUs or not."""
    pairs, chosen = parse_batch(batch), dict(options)
    model, chosen["loss"] = adapt_foreign(model, chosen.get("loss"))
    chosen = _complete_options(pairs, gpu, chosen)
    Recipe(TrainingChoices(model)).with_options(
        {name: value for name, value in chosen.items() if name != "domain"}
    )  # checks them
    return WorldStep.from_options(model, pairs, check_positive_int("ranks", ranks), chosen)


def _complete_options(batch: Any, gpu: bool, options: dict[str, Any]) -> dict[str, Any]:
    """All options of the dry runs."""
    for name in ("comm", "device", "backend"):
        if name in options:
            raise ConfigError(f"predict decides {name} itself")
    require_known("predict", options, OPTIONS)
    require_words(options)
    if options["loss"] is None:
        options["loss"] = LOSSES[dtype_of(batch[-1][1]).kind in "iu"]
    defaults = {
        "optimizer": optim.AdamW(), "tune": False, "strategy": "ddp",
        "mesh": None, "microbatches": None, "schedule": "1f1b", "recompute": None, "precision": None,
    }  # fmt: skip
    chosen = defaults | options
    if gpu and normalize_half_name(chosen["precision"]) == "float16":
        chosen["precision"] = Precision("float16", loss_scale="dynamic")
    return chosen


def _make_grid(space: Any, batch: Batch, mesh: Mesh) -> Grid | None:
    """The grid of the first field. ConfigError where the data axis does not consist of such grids."""
    if not get_grid_dims(space):
        return None
    if not isinstance(space, Grid):
        cells = batch[0][0][2:]
        if len(cells) != len(space):
            wanted = f"samples, channels and {len(space)} dims are wanted"
            raise ConfigError(f"domain={space!r}: inputs of shape {batch[0][0]}, and {wanted}")
        space = Grid.from_shape(cells, space, layout="c" + LETTERS[3 - len(space) :])
    if mesh.width_of("data") % prod(space.dims):
        raise ConfigError(
            f"domain={space.dims}: a field is on {prod(space.dims)} ranks, and the data axis of {mesh} has "
            f"{mesh.width_of('data')}: their number must be a multiple"
        )
    return space


def parse_batch(batch: Any) -> Batch:
    """(shape, dtype) of each input and of the targets, from such pairs or from arrays, several inputs as a tuple; else
    ConfigError."""
    try:
        *inputs, target = batch
        if len(inputs) == 1 and not hasattr(inputs[0], "shape") and not isinstance(inputs[0][1], str):
            (inputs,) = inputs
        given = [(one.shape, str(one.dtype)) if hasattr(one, "shape") else one for one in (*inputs, target)]
        pairs = tuple((tuple(map(int, shape)), dtype) for shape, dtype in given)
        sizes, _ = {shape[0] for shape, _ in pairs}, [dtype_of(dtype) for _, dtype in pairs]
        if inputs and len(sizes) == 1 and min(min(shape) for shape, _ in pairs) > 0:
            return pairs
    except (TypeError, IndexError, ValueError, ConfigError):
        pass
    raise ConfigError(
        f"batch={batch!r}: the shape and dtype of inputs and targets of the global batch are needed, such as "
        "(((64, 1024), 'int64'), ((64, 1024), 'int64'))"
    )


def check_positive_int(name: str, value: Any) -> int:
    """The value of an option that is a whole number, 1 or more; ConfigError for all else."""
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:  # of numbers with a fraction, and of arrays
        found = -1
    if found < 1:
        raise ConfigError(f"{name}={value!r}: a whole number, 1 or more")
    return found


def require_words(options: Mapping[str, Any]) -> None:
    """ConfigError for an option that is an array: they are words, numbers and objects."""
    for name, value in options.items():
        if hasattr(value, "__array__"):
            raise ConfigError(f"{name}={value!r}: no option of a plan is an array")


def get_grid_dims(space: Any) -> tuple[int, ...]:
    """Ranks along each dim of a field; () where it is not cut. ConfigError for what says no such numbers."""
    dims = getattr(space, "dims", () if space is None else space)
    if not isinstance(dims, tuple | list) or not all(hasattr(n, "__index__") and n > 0 for n in dims):
        raise ConfigError(f"domain={space!r}: a fsdpx.Grid is needed, or ranks along each dim, such as (2, 2)")
    return tuple(map(int, dims))


def known_action(action: Action, few: int) -> Action:
    """The last action like this one, of another microbatch, among `few` of them."""
    return action if action.mb is None or action.mb < few else Action(action.op, action.unit, few - 1)
