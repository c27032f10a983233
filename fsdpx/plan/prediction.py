"""predict: bytes, memory and seconds of a step on any ranks of any machine, from the programs that these would run."""

from __future__ import annotations

import gc
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from math import inf, prod
from os import PathLike
from typing import Any, NamedTuple, cast

from fsdpx import nn, optim
from fsdpx.core.array.arena import Life
from fsdpx.core.array.namespace import dtype as dtype_of
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.array.shapes.array import metered
from fsdpx.core.array.shapes.flop_counter import counting
from fsdpx.core.base.config import Precision, half_name
from fsdpx.core.base.config import precision as formats_of
from fsdpx.core.base.name_hints import demand_known
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.mesh import Coordinates, Mesh
from fsdpx.core.engine.activations import HeapWatch
from fsdpx.core.engine.run import lives
from fsdpx.core.program import SLOTS, VERBS, Action, Event, Program, Slot, compile
from fsdpx.core.program.simulator import by_rank, run
from fsdpx.core.program.traffic import filled
from fsdpx.core.program.verbs import partner
from fsdpx.core.state.accumulation import microbatches_of
from fsdpx.core.state.gradients import rows_of
from fsdpx.core.trainer.call_runner import FixedRanks
from fsdpx.core.trainer.out_of_memory import make_session
from fsdpx.core.trainer.recipe import OPTIONS, Recipe, Training, native
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import ConfigError, warn
from fsdpx.ext.fields.grid import LETTERS, Grid
from fsdpx.nn.linearize import keeping
from fsdpx.plan.costing import ActionCost, Costing
from fsdpx.plan.machine import Machine
from fsdpx.plan.peak import PIECES, Change, Peak, lowered, peak_of
from fsdpx.plan.time_model import Lines, StepTimes

__all__ = [
    "Batch", "Dry", "Prediction", "RankClass", "WorldStep", "batch_of", "demand_words", "dims_of", "predict",
    "prepared", "seldom", "step_of", "whole",
]  # fmt: skip

ENOUGH = {"1f1b": 3, "interleaved": 4, "zb-h1": 3}
"""Microbatches for each rank of a pipe until further ones take the same; of the other schedules all run."""
PROCESS = 66 << 20
"""Bytes of a process that has trained nothing: of its own, of libraries and of MPI, as measured with CPython 3.11."""
LOSSES = nn.MSE(), nn.CrossEntropy()
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
    place: Coordinates
    peak: Peak
    traffic: Mapping[tuple[str, str], tuple[int, int]]

    @property
    def memory(self) -> dict[str, int]:
        """Kind -> bytes at the step's peak."""
        return self.peak.memory

    @property
    def nbytes(self) -> int:
        """Memory in all."""
        return self.peak.nbytes


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
    events: tuple[Event, ...] = field(repr=False, default=())

    @property
    def memory(self) -> int:
        """Bytes of a rank of the class with most."""
        return self.worst.nbytes

    @property
    def process(self) -> int:
        """Bytes of the whole process of such a rank, if it is no GPU: also interpreter, libraries, MPI, and what lies
        free between activations. `fsdpx.dry_run` measures them where it runs."""
        return PROCESS + self.memory + self.worst.memory.get("activations", 0) // PIECES

    @property
    def worst(self) -> RankClass:
        """The class with most memory."""
        return max(self.classes, key=lambda one: one.nbytes)

    @property
    def bytes(self) -> dict[str, int]:
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
    def peak(self) -> Peak:
        """When a rank of the class with most memory holds it, what, and whose. Printed, a table."""
        return self.worst.peak

    def lowered(self) -> list[Change]:
        """Which single choices would lower the peak, to how many bytes and at what time of a step, most first. Each is
        a prediction of its own."""
        step = self.step

        def count(changes: dict[str, Any]) -> tuple[int, float | None]:
            found = self
            if changes:
                other = WorldStep.of(step.model, step.batch, step.mesh.size, step.options | changes)
                found = other.on(self.machine)
            known = "offload" not in changes or self.machine.disk is not None
            return found.memory, found.seconds if known else None

        return lowered(step.options, step.rows(step.members - 1), count)

    @property
    def bubble(self) -> float:
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
    machine : a name in `Machine.names()`, the path of a machine.toml, or a `Machine`
    mesh, strategy, microbatches, schedule, recompute, precision, options : as for `fsdpx.distribute`, `space` also as
        the numbers of ranks along each dim of a field, `(2, 2, 1)`; by default the
        loss is CrossEntropy for targets of whole numbers, else MSE, and the optimiser AdamW. "fp16" on a GPU computes
        in 16 bits

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
    step = step_of(model, batch, ranks, where.compute.gpu, options)
    found = step.on(where)
    if step.blank:
        warn(step.blank)
    return found


@contextmanager
def seldom() -> Iterator[None]:
    """Python looks for garbage after the block only: dry runs make many small objects, and drop few."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def prepared(model: nn.Layer, batch: tuple[Any, ...], ranks: int, gpu: bool, **options: Any) -> Dry:
    """The dry runs of a step, for `Dry.on` and `Dry.held`. gpu: of machines that are GPUs. options: those of
    `predict`."""
    step = step_of(model, batch, ranks, gpu, options)
    return Dry.of(step, step.simulated()[0])


def step_of(model: nn.Layer, batch: tuple[Any, ...], ranks: int, gpu: bool, options: Mapping[str, Any]) -> WorldStep:
    """The step that these options of `predict` ask for, on machines that are GPUs or not."""
    pairs, chosen = batch_of(batch), dict(options)
    model, chosen["loss"] = native(model, chosen.get("loss"))
    chosen = _options(pairs, gpu, chosen)
    Recipe(Training(model)).changed({name: value for name, value in chosen.items() if name != "space"})  # checks them
    return WorldStep.of(model, pairs, whole("ranks", ranks), chosen)


def whole(name: str, value: Any) -> int:
    """The value of an option that is a whole number, 1 or more; ConfigError for all else."""
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:  # of numbers with a fraction, and of arrays
        found = -1
    if found < 1:
        raise ConfigError(f"{name}={value!r}: a whole number, 1 or more")
    return found


def demand_words(options: Mapping[str, Any]) -> None:
    """ConfigError for an option that is an array: they are words, numbers and objects."""
    for name, value in options.items():
        if hasattr(value, "__array__"):
            raise ConfigError(f"{name}={value!r}: no option of a plan is an array")


def dims_of(space: Any) -> tuple[int, ...]:
    """Ranks along each dim of a field; () where it is not cut. ConfigError for what says no such numbers."""
    dims = getattr(space, "dims", () if space is None else space)
    if not isinstance(dims, tuple | list) or not all(hasattr(n, "__index__") and n > 0 for n in dims):
        raise ConfigError(f"space={space!r}: a fsdpx.Grid is needed, or ranks along each dim, such as (2, 2)")
    return tuple(map(int, dims))


def _grid(space: Any, batch: Batch, mesh: Mesh) -> Grid | None:
    """The grid of the first field. ConfigError where the data axis does not consist of such grids."""
    if not dims_of(space):
        return None
    if not isinstance(space, Grid):
        cells = batch[0][0][2:]
        if len(cells) != len(space):
            wanted = f"samples, channels and {len(space)} dims are wanted"
            raise ConfigError(f"space={space!r}: inputs of shape {batch[0][0]}, and {wanted}")
        space = Grid.even(cells, space, layout="c" + LETTERS[3 - len(space) :])
    if mesh.width("data") % prod(space.dims):
        raise ConfigError(
            f"space={space.dims}: a field is on {prod(space.dims)} ranks, and the data axis of {mesh} has "
            f"{mesh.width('data')}: their number must be a multiple"
        )
    return space


def _options(batch: Any, gpu: bool, options: dict[str, Any]) -> dict[str, Any]:
    """All options of the dry runs."""
    for name in ("comm", "device", "backend"):
        if name in options:
            raise ConfigError(f"predict decides {name} itself")
    demand_known("predict", options, OPTIONS)
    demand_words(options)
    if options["loss"] is None:
        options["loss"] = LOSSES[dtype_of(batch[-1][1]).kind in "iu"]
    defaults = {
        "optimizer": optim.AdamW(), "tune": False, "strategy": "ddp",
        "mesh": None, "microbatches": None, "schedule": "1f1b", "recompute": None, "precision": None,
    }  # fmt: skip
    chosen = defaults | options
    if gpu and half_name(chosen["precision"]) == "float16":
        chosen["precision"] = Precision("float16", loss_scale="dynamic")
    return chosen


def batch_of(batch: Any) -> Batch:
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


class _Run(NamedTuple):
    """One rank's dry run: its class, its costs by action, and its programs of other numbers of microbatches. alive:
    bytes of activations, at most in each action and after it."""

    found: RankClass
    costs: dict[Action, ActionCost]
    alive: list[tuple[int, int]]
    session: Any
    programs: dict[int, Program]

    def program(self, microbatches: int) -> Program:
        """The program of this rank for another number of equal microbatches."""
        if microbatches not in self.programs:
            request = self.session.request("step", microbatches, fresh=True)
            self.programs[microbatches] = compile(request)
        return self.programs[microbatches]

    def count_actions(self, microbatches: int) -> Counter[Action]:
        """How often each action is in that program, later microbatches as the last one that ran."""
        return Counter(_known(action, min(self.programs)) for action in self.program(microbatches).actions)


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
    def members(self) -> int:
        """How many data ranks, or grids of them, have different samples."""
        return self.mesh.width("data") // prod(self.mesh.space)

    @classmethod
    def of(cls, model: nn.Layer, batch: Batch, ranks: int, options: dict[str, Any]) -> WorldStep:
        """With the mesh and the microbatches that these options mean."""
        mesh = (options["mesh"] or Mesh()).filled(options["strategy"], ranks)
        grid = _grid(options.get("space") or mesh.space, batch, mesh)
        mesh = mesh if grid is None else replace(mesh, space=grid.dims)
        chunks, samples = options.get("chunks"), batch[0][0][0]
        if chunks is not None and samples % chunks:
            raise ConfigError(f"chunks={chunks}: a global batch of {samples} samples does not divide")
        return cls(model, batch, mesh, microbatches_of(options["microbatches"], chunks, mesh), options, grid)

    @property
    def samples(self) -> int:
        return int(self.batch[0][0][0])

    def sample_bytes(self, at: int) -> int:
        """Bytes of one sample on a rank, inputs and targets."""
        return sum(dtype_of(dtype).itemsize * prod(shape[1:]) for shape, dtype in self._part(at))

    def _part(self, at: int) -> Batch:
        """Shape and dtype of the batch, of fields the part of one of the busiest ranks of a grid."""
        if self.grid is None:
            return self.batch
        grid, (*inputs, (y, b)) = self.grid.seen_by(self.grid.busiest[-1 if at else 0]), self.batch
        return *((grid.part(x, ghosts=True), a) for x, a in inputs), (grid.part(y), b)

    @property
    def faces(self) -> tuple[float, ...]:
        """By dim of the grid, its share of what a rank exchanges with its neighbours."""
        if self.grid is None:
            return ()
        own = self.grid.seen_by(self.grid.busiest[0]).own
        sizes = [(width > 1) / max(n, 1) for n, width in zip(own, self.grid.dims, strict=True)]
        return tuple(size / (sum(sizes) or 1.0) for size in sizes)

    def rows(self, member: int) -> int:
        """Samples of a data rank, or of a grid of them; the last one has most."""
        return rows_of(self.samples, member, self.members, self.options.get("chunks"))

    @property
    def blank(self) -> str:
        """Which microbatches have no samples; "" where each has some."""
        most, m = self.rows(self.members - 1), self.microbatches
        words = f"microbatches={m}: a data rank has {most} samples at most, and the others take their time without any"
        return words if most < m else ""

    @property
    def alike(self) -> bool:
        """Whether all microbatches take the same, but for those at the beginning and the end."""
        known = self.mesh.width("pipe") == 1 or self.options["schedule"] in (*ENOUGH,)
        equal = self.samples % self.members == 0 and self.samples // self.members % self.microbatches == 0
        return known and equal and self.options.get("chunks") is None

    def simulated(self) -> tuple[int, int]:
        """How many microbatches are simulated, and how many more take the same time once more: as many as the pipe has
        ranks, the longest way around which a rank waits for itself. All of them, and 0, where they differ or are few.
        """
        m, pipe = self.microbatches, self.mesh.width("pipe")
        enough = ENOUGH[self.options["schedule"]] * pipe + 1 if pipe > 1 and self.alike else 2
        return (enough + (m - enough) % pipe, pipe) if self.alike and m > enough + pipe else (m, 0)

    def few(self) -> int:
        """How many microbatches show memory and costs of all: a few more than a rank of the pipe begins before it ends
        one, of an interleaved schedule a multiple of its ranks. All that are simulated where records lie on disk."""
        most, pipe = self.simulated()[0], self.mesh.width("pipe")
        if not self.alike or pipe == 1 or self.options.get("offload") is not None:
            return most
        return min(most, 3 * pipe if self.options["schedule"] == "interleaved" else pipe + 4)

    def runs(self, member: int, microbatches: int, at: int = 0) -> Iterator[_Run]:
        """The dry runs of one data rank, by rank of the pipe. at: which of the busiest ranks of a grid."""
        rows = self.rows(member)
        if microbatches < self.microbatches:
            rows = rows // self.microbatches * microbatches
        for place in self._places(member, at):
            found = self._run(place, rows, microbatches, at)
            self._tell_more(found.costs, max(self.simulated()[0] - microbatches, 0))
            yield found

    def _places(self, member: int, at: int) -> Iterator[Coordinates]:
        data_rank, shard = member * prod(self.mesh.space), self.mesh.width("shard")
        data_rank += 0 if self.grid is None else self.grid.busiest[at]
        for pipe in range(self.mesh.width("pipe")):
            yield Coordinates(pipe, data_rank // shard, data_rank % shard, 0)

    def on(self, machine: Machine) -> Prediction:
        """The prediction for a machine."""
        self.times(machine)  # refuses a machine with too few ranks before anything runs
        with keeping(), seldom():
            return Dry.of(self, self.few()).on(machine)

    def times(self, machine: Machine) -> StepTimes:
        """What actions and calls take there. ConfigError where it has too few ranks."""
        lines = Lines(self.mesh, machine, self.faces)
        lines.demand_ranks()
        return StepTimes(lines, half_name(formats_of(self.options["precision"]).compute))

    def _tell_more(self, costs: dict[Action, ActionCost], microbatches: int) -> None:
        """Ranks tell all others two numbers of each microbatch at the end of a step: also of so many more."""
        more = microbatches * 2 * 8 * (self.mesh.size - 1)
        for action in [a for a in costs if "loss:all" in VERBS[a.op].takes] if more else ():
            calls = [(axis, call, n, sent + more * (axis == CONTROL)) for axis, call, n, sent in costs[action].calls]
            costs[action] = replace(costs[action], calls=tuple(calls))

    def _trainer(self, rank: int, microbatches: int, at: int) -> Trainer:
        options = self.options | {"microbatches": microbatches, "device": "shape"}
        options |= {} if self.grid is None else {"space": self.grid.seen_by(self.grid.busiest[at])}
        comm = FakeCommunicator(rank, self.mesh.size)
        return Trainer(FixedRanks(make_session(Recipe(Training(self.model)).changed(options), comm)))

    def _run(self, place: Coordinates, rows: int, microbatches: int, at: int) -> _Run:
        costing = Costing()
        with counting() as costing.work, metered() as meter:
            trainer = self._trainer(self.mesh.rank(place), microbatches, at)
            trainer.inspect.reset()
            costing.watch(trainer, meter)
            watch = HeapWatch(trainer.inspect.engine, meter)
            *x, y = (ShapeArray((rows, *shape[1:]), dtype_of(dtype)) for shape, dtype in self._part(at))
            trainer.step(tuple(x) if len(x) > 1 else x[0], y)
        counters, program = costing.counters, trainer.inspect.engine.ran
        traffic = {(axis, call): (calls, nbytes) for axis, call, calls, nbytes in counters if axis != CONTROL}
        assert program is not None
        found = RankClass(self.mesh.rank(place), place, peak_of(trainer.inspect.engine, watch), traffic)
        return _Run(found, dict(costing.costs), watch.each, trainer._session, {microbatches: program})


@dataclass(frozen=True)
class Dry:
    """The dry runs of a step, which any machine can be asked about. runs: of the data rank with most samples, by rank
    of the pipe; others: of the one with fewest, and of another busy rank of a grid. ran: their microbatches. few, each:
    see `WorldStep.simulated`."""

    step: WorldStep
    runs: list[_Run]
    others: list[_Run]
    ran: int
    few: int
    each: int

    @classmethod
    def of(cls, step: WorldStep, ran: int) -> Dry:
        """Runs with so many microbatches, at least `step.few()`: with all of them where a few do not tell the rest."""
        found = cls._of(step, ran, *step.simulated())
        return found if found._is_even() else cls._of(step, step.microbatches, step.microbatches, 0)

    @classmethod
    def _of(cls, step: WorldStep, ran: int, few: int, each: int) -> Dry:
        last, runs, others = step.members - 1, list[_Run](), list[_Run]()
        if step.rows(0) < step.rows(last) and (step.rows(0) or step.options.get("chunks") is None):
            others += step.runs(0, ran)
        runs += step.runs(last, ran)
        if step.grid is not None and len(step.grid.busiest) > 1:
            others += step.runs(last, ran, 1)
        return cls(step, runs, others, ran, few, each)

    def _is_even(self) -> bool:
        """Whether the whole programs consist of what ran, and grow by the same actions with each further microbatch."""
        m, few, each = self.step.microbatches, self.few, self.each
        times = (m - few) // each if each else 0
        for one in () if self.ran == m else self.runs:
            counts, whole = one.count_actions(few), one.count_actions(m)
            more = one.count_actions(few + each) if each else counts
            grown = {action: counts[action] + (n - counts[action]) * times for action, n in more.items()}
            if whole != grown or not whole.keys() <= one.costs.keys():
                return False
        return True

    def on(self, machine: Machine) -> Prediction:
        """The same step on a machine."""
        step, few, each, clock = self.step, self.few, self.each, _Clock(self.runs, self.step.times(machine))
        seconds, rows_few = clock.timed(few)
        parts = clock.mean_parts(rows_few, seconds)
        rows = step.samples // step.members // step.microbatches * (step.microbatches - self.ran)
        busy = (self.others, step.sample_bytes(1)), (self.runs, step.sample_bytes(0))
        classes = [self._whole(run, rows * nbytes) for some, nbytes in busy for run in some]
        if each:
            times = (step.microbatches - few) // each
            more, rows_more = clock.timed(few + each)
            bigger = clock.mean_parts(rows_more, more)
            seconds += (more - seconds) * times
            parts = {name: parts[name] + (bigger[name] - parts[name]) * times for name in parts}
        overhead, events = machine.compute.overhead, tuple(event for row in rows_few for event in row)
        parts = {"overhead": overhead, **parts}
        found = seconds + overhead, parts, tuple(classes), step.mesh, step.microbatches, machine, step, events
        return Prediction(*found)

    def _whole(self, run: _Run, nbytes: int) -> RankClass:
        """The class of a run with all microbatches: what the actions of its whole program move. nbytes: of the batch
        that is added."""
        if self.ran == self.step.microbatches:
            return run.found
        traffic, more = dict(run.found.traffic), run.count_actions(self.step.microbatches)
        more.subtract(run.count_actions(self.ran))
        for action, times in more.items():
            for axis, call, calls, moved in run.costs[action].calls if times else ():
                if axis != CONTROL:
                    before = traffic[axis, call]
                    traffic[axis, call] = before[0] + calls * times, before[1] + moved * times
        return replace(run.found, peak=run.found.peak.larger(nbytes), traffic=traffic)

    def held(self, prediction: Prediction) -> list[dict[str, list[tuple[float, int]]]]:
        """What lies in memory while `prediction.events` run, by rank of the pipe: kind -> (seconds, bytes from then
        on). Buffers that programs lend count while they are filled, activations as they are at most in each action.
        Of dry runs that made all of these events."""
        rows = by_rank(prediction.events)
        return [_held(run, self.few, rows[rank]) for rank, run in enumerate(self.runs)]


def _held(run: _Run, microbatches: int, row: list[Event]) -> dict[str, list[tuple[float, int]]]:
    state, program = run.session.state, run.programs[microbatches]
    changes: dict[str, list[tuple[float, int]]] = {kind: [(0.0, n)] for kind, n in state.ledger.nbytes().items()}
    passing = {one.key.page: one.nbytes for one in state.ledger if one.passing}  # of the heap, where activations lie
    parts = [Life(one.slot, one.start, one.stop, passing[one.slot.at]) for one in filled(program)
             if one.slot.kind == "part" and one.slot.at in passing]  # fmt: skip
    changes.setdefault("gradients", []).append((0.0, -sum(passing.values())))
    for life in (*lives(state, program), *parts):
        own = changes.setdefault(SLOTS[cast(Slot, life.name).kind].memory, [])
        own += [(row[life.start].start, life.nbytes), (row[life.stop].end, -life.nbytes)]
    free, now = 0.0, 0
    own = changes["activations"] = []
    for event, alive in zip(row, run.alive, strict=True):
        times = (free, free) if VERBS[event.action.op].moves else (event.start, event.end)
        for free, nbytes in zip(times, alive, strict=True):
            own.append((free, nbytes - now))
            now = nbytes
    return {kind: _curve(some) for kind, some in changes.items()}


def _curve(changes: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """One point for each moment: what is freed then comes before what is taken."""
    changes.sort()
    now = accumulate(nbytes for _, nbytes in changes)
    return list(dict(zip((time for time, _ in changes), now, strict=True)).items())


def _known(action: Action, few: int) -> Action:
    return action if action.mb is None or action.mb < few else Action(action.op, action.unit, few - 1)


# -- time --------------------------------------------------------------------------------------------------------------


class Price(NamedTuple):
    """Seconds of computing, and of moving by axis."""

    own: float
    moving: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """In all."""
        return self.own + sum(self.moving.values())


class _Clock:
    """How long the programs of dry runs take. timing: of their machine."""

    def __init__(self, runs: list[_Run], timing: StepTimes) -> None:
        self.runs, self._timing = runs, timing
        self._few = min(min(run.programs) for run in runs)
        self._stage = next(iter(runs[0].programs.values())).stage
        self._known = cache(self._found)  # each price is asked for once

    def price(self, rank: int, action: Action) -> Price:
        """What an action costs, by rank of the pipe."""
        return self._known(rank, _known(action, self._few))

    def _found(self, rank: int, action: Action) -> Price:
        cost, verb = self.runs[rank].costs[action], VERBS[action.op]
        if verb.receives:
            return Price(0.0, {})
        if verb.sends:
            edge = self._stage.edge(action)
            sender, receiver = (self.runs[at].found.rank for at in (edge.sender, edge.receiver))
            nbytes = sum(nbytes for _, _, _, nbytes in cost.calls)
            return Price(0.0, {"pipe": self._timing.message(sender, receiver, nbytes)})
        return Price(*self._timing.price(cost))

    def timed(self, microbatches: int) -> tuple[float, list[list[Event]]]:
        """Seconds of a step, and what happens when on each rank of the pipe."""
        rows = run(
            [one.program(microbatches) for one in self.runs], lambda rank, action: self.price(rank, action).seconds
        )
        return max(event.end for row in rows for event in row), rows

    def mean_parts(self, rows: list[list[Event]], end: float) -> dict[str, float]:
        """The parts of a step in the mean of the ranks of the pipe."""
        ways = [(partial(self.price, rank), partial(self._way, rank)) for rank in range(len(rows))]
        shares = [_parts(row, end, *both) for row, both in zip(rows, ways, strict=True)]
        names = dict.fromkeys(name for share in shares for name in share)
        return {name: sum(share.get(name, 0.0) for share in shares) / len(shares) for name in names}

    def _way(self, rank: int, action: Action) -> Any:
        """How long what an action moves is under way, without waiting for other ranks of the pipe."""
        verb = VERBS[action.op]
        if not verb.receives:
            return self.price(rank, action).seconds if verb.meets else inf
        sent = Action(partner(action.op), action.unit, action.mb)
        return self.price(self._stage.edge(sent).sender, sent).seconds


def _parts(
    row: list[Event], end: float, price: Callable[[Action], Price], way: Callable[[Action], float]
) -> dict[str, float]:
    """The seconds of one rank by what it did or waited for. way: see `_Clock._way`."""
    parts = {"compute": 0.0, "optimiser": 0.0}

    def add(name: str, seconds: float) -> None:
        parts[name] = parts.get(name, 0.0) + seconds

    free, moving = 0.0, dict[float, Action]()
    for event in row:
        action, verb = event.action, VERBS[event.action.op]
        if verb.moves:
            moving[event.end] = action
            continue
        gap, cause = event.start - free, moving.get(event.start)
        if gap > 0 and cause is not None:
            travel = min(way(cause), gap)
            add(VERBS[cause.op].moves[0].axis, travel)
            gap -= travel
        add("bubble", max(gap, 0.0))
        own, moved = price(action)
        add("optimiser" if action.op == "UPDATE" else "compute", own)
        for axis, seconds in moved.items():
            add(axis, seconds)
        free = event.end
    add("bubble", end - free)
    return parts
