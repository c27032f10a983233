"""One run of a program: the context of its operations, and where its values lie: memory of slots, and named views of
flat buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fsdpx.core.comm.calls import Transfer
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.desync_check import grouped
from fsdpx.core.comm.mesh import REPLICA
from fsdpx.core.engine.slab_plan import agreed, plan, scratch_nbytes
from fsdpx.core.engine.stage_messages import StageMessages
from fsdpx.core.program import KINDS, SLOTS, Action, Program, Slot, Stage
from fsdpx.core.state.flat_parameters import Page
from fsdpx.core.state.gradients import Gradient
from fsdpx.core.state.ledger import Key, local_gradient
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Feed, Microbatch
from fsdpx.core.state.train_state import Scaler, Tie, TrainState
from fsdpx.core.state.units import Layout, Unit
from fsdpx.errors import ConfigError
from fsdpx.nn.cache import Cache
from fsdpx.nn.gradient_accumulation import Entries, GradientEntry, Gradients
from fsdpx.nn.layer import Env, Parameters, dotted, time_of

__all__ = [
    "GradientScale", "Mean", "Operation", "ProgramRun", "Values", "Views", "Workspace", "Worlds", "demand_alike",
    "microbatch_of", "number_of", "words",
]  # fmt: skip


class Views:
    """Caches views by buffer: buffers are the same objects in every step, so the steady state makes no views.

    generation: of the arena's slab. frozen: parameters whose gradients layers do not see. own: by unit, the other
    parameters that no other unit uses."""

    def __init__(self, layout: Layout, generation: int, frozen: frozenset[str] = frozenset()) -> None:
        self.generation, self.frozen = generation, frozen
        self._still = frozenset(n for p in layout.pages for n in (f.name for f in p.fields if f.source in frozen))
        self._leaves: dict[int, tuple[Any, list[Any]]] = {}
        self._pages: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}
        self._entries: dict[tuple[int, int], tuple[Any, Entries]] = {}
        self._params: dict[tuple[int, ...], tuple[Any, list[Parameters]]] = {}
        self._grads: dict[tuple[int, ...], tuple[Any, list[Gradients]]] = {}
        self._names = [
            [[(local, layout.held(dotted(n.path, local))) for local in n.layer.specs()] for n in unit.nodes]
            for unit in layout.units
        ]

        users = Counter(full for unit in self._names for full in {full for node in unit for _, full in node})
        alone = {full for full, count in users.items() if count == 1} - self._still
        self.own = [{full for node in unit for _, full in node if full in alone} for unit in self._names]

    def leaves(self, buffer: Any, size: int) -> list[Any]:
        """A buffer cut into pieces of `size` elements."""
        cached = self._leaves.get(id(buffer))
        if cached is None:
            made = [buffer[i : i + size] for i in range(0, max(buffer.size, 1), max(size, 1))]
            cached = self._leaves[id(buffer)] = (buffer, made)
        return cached[1]

    def page(self, page: Page, buffer: Any) -> dict[str, Any]:
        """Parameter name -> view of its elements of `buffer`, in its shape."""
        key = (page.index, id(buffer))  # pages of one size can have one buffer in turn
        cached = self._pages.get(key)
        if cached is None:
            cached = self._pages[key] = (buffer, page.named(buffer))  # holding the buffer keeps its id taken
        return cached[1]

    def entries(self, page: Page, buffer: Any) -> Entries:
        """Parameter name -> gradient in `buffer`: for all that add into it, tied layers included, the same objects."""
        key = (page.index, id(buffer))
        cached = self._entries.get(key)
        if cached is None:
            made = Entries(self.page(page, buffer))
            cached = self._entries[key] = (buffer, made)
        return cached[1]

    def params(self, unit: int, pages: Sequence[Mapping[str, Any]]) -> list[Parameters]:
        """Per node of a unit: local name -> array. pages: name -> array each, and the running statistics, if any."""
        key = (unit, *map(id, pages))
        cached = self._params.get(key)
        if cached is None:
            made = [Parameters(arrays) for arrays in self._per_node(unit, pages)]
            cached = self._params[key] = (tuple(pages), made)  # holding the pages keeps their ids taken
        return cached[1]

    def grads(self, unit: int, pages: Sequence[dict[str, GradientEntry]]) -> list[Gradients]:
        """Per node of a unit: local name -> gradient, trainable parameters only."""
        key = (unit, *map(id, pages))
        cached = self._grads.get(key)
        if cached is None:
            seen = [{name: e for name, e in page.items() if name not in self._still} for page in pages]
            made = [Gradients(entries) for entries in self._per_node(unit, seen)]
            cached = self._grads[key] = (tuple(pages), made)
        return cached[1]

    def _per_node(self, unit: int, pages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        known: dict[str, Any] = {}
        for views in pages:
            known.update(views)
        return [{local: known[full] for local, full in names if full in known} for names in self._names[unit]]


@dataclass(frozen=True)
class Mean:
    """The loss of the global batch: total / weight, nan in a program without one. shared: the weight of all gradients
    that were added up, 0 where no sample came. rate: the learning rate, on which ranks agreed in the same message; 0
    in a program without an update."""

    total: float
    weight: float
    shared: float
    rate: float = 0.0

    @property
    def each(self) -> float:
        """The divisor of gradients."""
        return self.shared or 1.0

    @property
    def value(self) -> float:
        return self.total / (self.weight or 1.0)


@dataclass(frozen=True)
class GradientScale:
    """The factor of every gradient in the update. norm: global gradient norm before clipping, nan if it was
    not asked for. skip: gradients overflowed, nothing is updated. rate: this step's learning rate. scaler: the loss
    scale from the next step on."""

    factor: float
    norm: float
    skip: bool
    rate: float
    scaler: Scaler


class Workspace:
    """Buffers for one program on one rank: full parameters and gradients that live for a use, and scratch, per page."""

    def __init__(self, state: TrainState, program: Program) -> None:
        self.state, self.program = state, program
        self.place = state.placement
        self.plan = agreed(state, plan(state, program))
        self.births: Counter[Slot] = Counter()
        self.words: dict[Action, str] = {}
        pages, ledger = self.place.pages, state.ledger  # looked up once: what is kept stays where it is
        self._full = {p: ledger.array("full", p) for p in pages}
        parts = {p: row for p in pages if (row := ledger.rows.get(Key("part", p)))}
        self._part = {p: ledger.array("part", p) for p, row in parts.items() if not row.passing}
        self._grads = {p: ledger.rows[Key("grad", p)] for p in self.place.stage.trained}
        self._local = {s.at for s in program.begins | program.ends if s.kind == "grad"}
        self._scratch: dict[tuple[str, int], int] = {}
        self._nothing: dict[str, Any] = {}  # scratch without elements, by kind

    @cached_property
    def messages(self) -> StageMessages:
        """What travels between stages of a pipe."""
        return StageMessages(self.place, self.program.microbatches)

    def enter(self) -> None:
        """Before each run: grow the slab if need be."""
        self.births.clear()
        self._nothing.clear()
        self.state.arena.lend(self.plan)

    def buffer(self, kind: str, page: int, size: int, dtype: Any) -> Any:
        """The buffer of the next life of that kind for a page: lives come in the order of the program."""
        slot = Slot(kind, page)
        life = slot, self.births[slot]
        self.births[slot] += 1
        return self.state.arena.view(self.plan.offsets[life], size, dtype)

    def full(self, page: int) -> Any:
        """Memory for the full parameters of a page, kept or lent."""
        kept = self._full[page]
        if kept is not None:
            return kept
        return self.buffer("full", page, self.place.pages[page].size, self.place.formats.compute)

    def part(self, page: int) -> Any:
        """Where the reduced gradient of a page is kept until its update."""
        kept = self._part.get(page)
        return self.state.passing(Key("part", page)) if kept is None else kept

    def gradient(self, page: int, views: Views) -> Gradient:
        """A blank full gradient of a page, kept or lent."""
        place, row = self.place, self._grads[page]
        if row.kept:
            buffer = self.state.ledger.arrays[row.key]
        elif page in self._local:
            buffer = self.state.local_gradient(local_gradient(place, page))
        else:
            buffer = self.buffer("grad", page, row.elements, row.dtype)
        shared = self.state.arena.memory is not None
        return place.accumulation.gradient(buffer, lambda b: views.leaves(b, row.span.size), at_home=shared)

    def scratch(self, kind: str, page: int) -> Any:
        """Short-lived memory of an action: bytes, or elements of the gradients' format."""
        if (kept := self.state.ledger.array(kind, page)) is not None:
            return kept
        nbytes = self._scratch.get((kind, page))
        if nbytes is None:
            nbytes = self._scratch[kind, page] = scratch_nbytes(self.state, Slot(kind, page))
        dtype = np.dtype("uint8") if SLOTS[kind].raw else self.place.formats.gradients
        if nbytes:
            return self.buffer(kind, page, nbytes // dtype.itemsize, dtype)
        if kind not in self._nothing:  # of the slab: in windows or not, as the scratch of other ranks
            arena = self.state.arena
            made = self.place.xp.empty((0,), dtype=dtype) if arena.slab is None else arena.view(0, 0, dtype)
            self._nothing[kind] = made
        return self._nothing[kind]


Values = tuple[Any, ...]


class Worlds:
    """The environment that layers see, one `Env` for the model and one per node, made once: only the moment moves, and
    the time where sequences may be cut."""

    def __init__(self, state: TrainState) -> None:
        place, self.seed, self.moment = state.placement, state.seed, state.moment
        self._root = Env(place.xp, place.axes, state.random, recompute=place.options.recompute.cores)
        self._units, self._made = place.layout.units, dict[tuple[bool, bool], tuple[Env, list[list[Env]]]]()

    def of(
        self, training: bool, recomputing: bool, inputs: Sequence[Any], cache: Cache | None = None
    ) -> tuple[Env, list[list[Env]]]:
        """The environment of the model as a whole, and those of the nodes of each unit.

        recomputing: the forward is made again for backward. inputs: the arrays that the model gets."""
        time = time_of(inputs) if self._root.mesh.tensor.size > 1 else None
        if time != self._root.time or cache is not self._root.cache:
            self._root = replace(self._root, time=time, cache=cache)
            self._made.clear()
        if (training, recomputing) not in self._made:
            root = replace(self._root, training=training, recomputing=recomputing)
            self._made[training, recomputing] = root, [[root.at(n.path) for n in u.nodes] for u in self._units]
        return self._made[training, recomputing]


@dataclass
class ProgramRun:
    """place: what is fixed. feed: what this run was given. units: of the layout, as they run. ties: by their first
    page. step, scaler: number of updates
    made, and the loss scale, as they were when it began. missed: parameter -> updates that it has missed. issue: takes
    transfers that no slot holds, and the action that began them; the run waits for them at its end."""

    place: Placement
    feed: Feed
    workspace: Workspace
    views: Views
    worlds: Worlds
    units: Sequence[Unit]
    ties: dict[int, Tie]
    step: int
    scaler: Scaler
    missed: Mapping[str, int]
    issue: Callable[[Action, Transfer], None]

    @property
    def stage(self) -> Stage:
        """The model as the program sees it."""
        return self.workspace.program.stage

    @property
    def updates(self) -> bool:
        """Whether the program ends with an update of parameters."""
        return KINDS[self.workspace.program.kind].updates

    @property
    def together(self) -> Communicator:
        """The ranks whose losses and gradients are one: all of them where nothing is trained."""
        axes = self.place.axes
        return axes.world if self.workspace.program.kind == "evaluate" else axes.group

    def batch(self, action: Action) -> Microbatch | None:
        """The microbatch that an action is about; None if this rank has no samples in it."""
        return self.feed.batch[microbatch_of(action)]

    def worlds_at(self, batch: Microbatch, recomputing: bool = False) -> tuple[Env, list[list[Env]]]:
        """The world at this microbatch, as the loss sees it, and as each node of each unit does."""
        self.worlds.moment.step, self.worlds.moment.row = self.step, batch.row + self.place.first_sample(batch)
        return self.worlds.of(self.feed.training, recomputing, batch.inputs, self.feed.cache)


Operation = Callable[[ProgramRun, Action, Values, Values, Values], Values]
"""(run, action, taken, read, added) -> values given, then values added into, all in the order of the table."""


def microbatch_of(action: Action) -> int:
    assert action.mb is not None
    return action.mb


def number_of(action: Action) -> int:
    """The number of the unit, page or edge that an action works on."""
    assert action.unit is not None
    return action.unit


def demand_alike(run: ProgramRun, comm: Communicator, rows: list[list[float]], names: Mapping[int, str]) -> None:
    """ConfigError on all ranks of `comm` where some say otherwise of this step. rows: what each of them told, in their
    order. names: of the numbers there that must be alike."""
    if len(rows) == 1 or not comm.has_peers:
        return
    for at, name in names.items():
        first = rows[0][at]
        if any(row[at] != first for row in rows) and len({*(values := [repr(row[at]) for row in rows])}) > 1:
            axes = run.place.axes
            ranks = range(axes.world.size) if comm is axes.world else axes.mesh.line(axes.coordinates, REPLICA)
            raise ConfigError(
                f"ranks differ in the {name} of step {run.step + 1}: {grouped(dict(zip(ranks, values, strict=True)))}. "
                "A schedule is a function of the step alone, which gives all ranks the same number; it must not ask "
                "for the rank, the clock or chance"
            )


def words(run: ProgramRun, action: Action) -> str:
    """An action and its page as text, for errors; made once."""
    known = run.workspace.words
    if action not in known:
        known[action] = f"{action} {run.place.name(number_of(action))}"
    return known[action]
