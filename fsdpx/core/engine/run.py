"""One run of a program: the context of its operations, the memory of slots, and named views of flat buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.desync_check import format_calls_by_rank
from fsdpx.core.comm.mesh import AXES_OF_ONE_REPLICA
from fsdpx.core.engine.slab_plan import agree_on_slab_plan, count_scratch_bytes, plan_slab_offsets
from fsdpx.core.engine.stage_messages import StageMessages
from fsdpx.core.program import PROGRAM_KINDS, SLOTS, Action, Program, Slot, Stage
from fsdpx.core.state.flat_parameters import Page
from fsdpx.core.state.gradients import Gradient
from fsdpx.core.state.ledger import LedgerKey, make_local_gradient_row
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Microbatch, StepInputs
from fsdpx.core.state.train_state import LossScaler, TieGroup, TrainState
from fsdpx.core.state.units import ModelLayout, Unit
from fsdpx.errors import ConfigError
from fsdpx.nn.cache import KeyValueCache
from fsdpx.nn.gradient_accumulation import GradientEntries, GradientEntry, Gradients
from fsdpx.nn.layer import LayerContext, Parameters, find_sequence_length, join_path

__all__ = [
    "BufferViews",
    "GradientScale",
    "LayerContextCache",
    "LossMean",
    "Operation",
    "ProgramRun",
    "Values",
    "Workspace",
    "format_action_label",
    "get_action_target",
    "get_microbatch_number",
    "require_same_schedule_values",
]  # fmt: skip


class BufferViews:
    """A cache of views by buffer. Buffers are the same objects in every step, so the views are made only in the first
    steps.

    generation: generation of the arena's slab for which the views are valid. frozen: parameters whose gradients are
    hidden from layers. own: for each unit, its trainable parameters that no other unit uses.
    """

    def __init__(self, layout: ModelLayout, generation: int, frozen: frozenset[str] = frozenset()) -> None:
        self.generation, self.frozen = generation, frozen
        self._still = frozenset(n for p in layout.pages for n in (f.name for f in p.fields if f.source in frozen))
        self._leaves: dict[int, tuple[Any, list[Any]]] = {}
        self._pages: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}
        self._entries: dict[tuple[int, int], tuple[Any, GradientEntries]] = {}
        self._params: dict[tuple[int, ...], tuple[Any, list[Parameters]]] = {}
        self._grads: dict[tuple[int, ...], tuple[Any, list[Gradients]]] = {}
        self._names = [
            [[(local, layout.page_name(join_path(n.path, local))) for local in n.layer.specs()] for n in unit.nodes]
            for unit in layout.units
        ]

        users = Counter(full for unit in self._names for full in {full for node in unit for _, full in node})
        alone = {full for full, count in users.items() if count == 1} - self._still
        self.own = [{full for node in unit for _, full in node if full in alone} for unit in self._names]

    def split_buffer(self, buffer: Any, size: int) -> list[Any]:
        """Return views of the consecutive pieces of `size` elements of a buffer."""
        cached = self._leaves.get(id(buffer))
        if cached is None:
            leaf_views = [buffer[i : i + size] for i in range(0, max(buffer.size, 1), max(size, 1))]
            cached = self._leaves[id(buffer)] = (buffer, leaf_views)
        return cached[1]

    def view_parameters(self, page: Page, buffer: Any) -> dict[str, Any]:
        """Return parameter name -> view of its elements in `buffer`, with the shape of the parameter."""
        key = (page.index, id(buffer))  # pages of equal size can use one buffer alternately
        cached = self._pages.get(key)
        if cached is None:
            # holding the buffer keeps its id unique
            cached = self._pages[key] = (buffer, page.view_parameters_by_name(buffer))
        return cached[1]

    def get_gradient_entries(self, page: Page, buffer: Any) -> GradientEntries:
        """Return parameter name -> gradient in `buffer`. All layers that add into a gradient, including tied ones, get
        the same object."""
        key = (page.index, id(buffer))
        cached = self._entries.get(key)
        if cached is None:
            page_entries = GradientEntries(self.view_parameters(page, buffer))
            cached = self._entries[key] = (buffer, page_entries)
        return cached[1]

    def view_unit_parameters(self, unit: int, pages: Sequence[Mapping[str, Any]]) -> list[Parameters]:
        """Return local name -> array for each node of a unit. pages: name -> array for each page, then for the running
        statistics, if any."""
        key = (unit, *map(id, pages))
        cached = self._params.get(key)
        if cached is None:
            node_parameters = [Parameters(arrays) for arrays in self._split_per_node(unit, pages)]
            cached = self._params[key] = (tuple(pages), node_parameters)  # holding the pages keeps their ids unique
        return cached[1]

    def view_unit_gradients(self, unit: int, pages: Sequence[dict[str, GradientEntry]]) -> list[Gradients]:
        """Return local name -> gradient of the trainable parameters for each node of a unit."""
        key = (unit, *map(id, pages))
        cached = self._grads.get(key)
        if cached is None:
            seen = [{name: e for name, e in page.items() if name not in self._still} for page in pages]
            node_gradients = [Gradients(entries) for entries in self._split_per_node(unit, seen)]
            cached = self._grads[key] = (tuple(pages), node_gradients)
        return cached[1]

    def _split_per_node(self, unit: int, pages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        known: dict[str, Any] = {}
        for views in pages:
            known.update(views)
        return [{local: known[full] for local, full in names if full in known} for names in self._names[unit]]


@dataclass(frozen=True)
class LossMean:
    """The loss of the global batch, total / weight; nan in a program without a loss. shared: the summed weight of all
    gradients, 0 if there were no samples. rate: the learning rate, which ranks compare in the same message; 0 in a
    program without an update."""

    total: float
    weight: float
    shared: float
    rate: float = 0.0

    @property
    def gradient_divisor(self) -> float:
        """The number by which gradients are divided."""
        return self.shared or 1.0

    @property
    def value(self) -> float:
        return self.total / (self.weight or 1.0)


@dataclass(frozen=True)
class GradientScale:
    """The scale of an update.

    Attributes
    ----------
    factor : factor on every gradient
    norm : global gradient norm before clipping, nan if not computed
    skip : whether gradients overflowed, in which case nothing is updated
    rate : this step's learning rate
    scaler : the loss scale from the next step on
    """

    factor: float
    norm: float
    skip: bool
    rate: float
    scaler: LossScaler


class Workspace:
    """The buffers of one program on one rank. Each page has scratch memory, and its full parameters and gradients have
    buffers here if they are allocated only while in use."""

    def __init__(self, state: TrainState, program: Program) -> None:
        self.state, self.program = state, program
        self.placement = state.placement
        self.plan = agree_on_slab_plan(state, plan_slab_offsets(state, program))
        self.births: Counter[Slot] = Counter()
        self.words: dict[Action, str] = {}
        pages, ledger = self.placement.pages, state.ledger  # looked up once, since kept arrays never move
        self._full = {p: ledger.get_array("full", p) for p in pages}
        parts = {p: row for p in pages if (row := ledger.rows.get(LedgerKey("part", p)))}
        self._part = {p: ledger.get_array("part", p) for p, row in parts.items() if not row.is_freed_by_update}
        self._grads = {p: ledger.rows[LedgerKey("grad", p)] for p in self.placement.stage.trained_pages}
        self._local = {s.at for s in program.begins | program.ends if s.kind == "grad"}
        self._scratch: dict[tuple[str, int], int] = {}
        self._nothing: dict[str, Any] = {}  # empty scratch buffers, by kind

    @cached_property
    def stage_messages(self) -> StageMessages:
        """The messages between pipeline stages."""
        return StageMessages(self.placement, self.program.microbatches)

    def grow_slab_for_run(self) -> None:
        """Grow the slab if needed; call it before each run."""
        self.births.clear()
        self._nothing.clear()
        self.state.arena.grow_slab(self.plan)

    def take_next_slab_buffer(self, kind: str, page: int, size: int, dtype: Any) -> Any:
        """Return a view of the slab for the next lifetime of a page's buffer of this kind. The calls must follow the
        order of the program."""
        slot = Slot(kind, page)
        life = slot, self.births[slot]
        self.births[slot] += 1
        return self.state.arena.view_slab(self.plan.offsets[life], size, dtype)

    def get_full_parameter_buffer(self, page: int) -> Any:
        """Return the buffer for the full parameters of a page: its own memory, or a part of the slab."""
        kept = self._full[page]
        if kept is not None:
            return kept
        return self.take_next_slab_buffer("full", page, self.placement.pages[page].size, self.placement.formats.compute)

    def get_shard_gradient(self, page: int) -> Any:
        """Return the array that holds the reduced gradient of a page until its update."""
        kept = self._part.get(page)
        return self.state.get_or_allocate_until_update(LedgerKey("part", page)) if kept is None else kept

    def create_gradient(self, page: int, views: BufferViews) -> Gradient:
        """Return a full gradient of a page to which nothing has been added yet, in its own memory or in a part of the
        slab."""
        place, row = self.placement, self._grads[page]
        if row.is_kept:
            buffer = self.state.ledger.arrays[row.key]
        elif page in self._local:
            buffer = self.state.get_or_create_local_gradient(make_local_gradient_row(place, page))
        else:
            buffer = self.take_next_slab_buffer("grad", page, row.elements, row.dtype)
        shared = self.state.arena.memory is not None
        return place.accumulation.create_gradient(
            buffer, lambda b: views.split_buffer(b, row.span.size), keep_offset=shared
        )

    def get_scratch_buffer(self, kind: str, page: int) -> Any:
        """Return temporary memory for an action, as bytes or as elements in the dtype of gradients."""
        if (kept := self.state.ledger.get_array(kind, page)) is not None:
            return kept
        nbytes = self._scratch.get((kind, page))
        if nbytes is None:
            nbytes = self._scratch[kind, page] = count_scratch_bytes(self.state, Slot(kind, page))
        dtype = np.dtype("uint8") if SLOTS[kind].raw else self.placement.formats.gradients
        if nbytes:
            return self.take_next_slab_buffer(kind, page, nbytes // dtype.itemsize, dtype)
        if kind not in self._nothing:  # in the slab, so that it is in shared memory if the scratch of other ranks is
            arena = self.state.arena
            buffer = self.placement.xp.empty((0,), dtype=dtype) if arena.slab is None else arena.view_slab(0, 0, dtype)
            self._nothing[kind] = buffer
        return self._nothing[kind]


Values = tuple[Any, ...]


class LayerContextCache:
    """A cache of the contexts that layers see: one `LayerContext` for the model and one per node. The contexts are made
    once. Only their training moment changes later, and their sequence length if sequences may be sharded."""

    def __init__(self, state: TrainState) -> None:
        place, self.seed, self.moment = state.placement, state.seed, state.moment
        self._root = LayerContext(place.xp, place.axes, state.random, recompute=place.options.recompute.cores)
        self._units, self._made = (
            place.layout.units,
            dict[tuple[bool, bool], tuple[LayerContext, list[list[LayerContext]]]](),
        )

    def get_contexts(
        self, training: bool, recomputing: bool, inputs: Sequence[Any], cache: KeyValueCache | None = None
    ) -> tuple[LayerContext, list[list[LayerContext]]]:
        """Return the context of the model, and for each unit the contexts of its nodes.

        recomputing: whether a forward runs again for its backward. inputs: the input arrays of the model.
        """
        time = find_sequence_length(inputs) if self._root.mesh.tensor.size > 1 else None
        if time != self._root.time or cache is not self._root.cache:
            self._root = replace(self._root, time=time, cache=cache)
            self._made.clear()
        if (training, recomputing) not in self._made:
            root = replace(self._root, training=training, recomputing=recomputing)
            self._made[training, recomputing] = root, [[root.child(n.path) for n in u.nodes] for u in self._units]
        return self._made[training, recomputing]


@dataclass
class ProgramRun:
    """The context of one run of a program, the first argument of its operations.

    Attributes
    ----------
    placement : the fixed data of this rank
    feed : inputs of this run
    units : the units of the layout, possibly wrapped by observers
    ties : first page of a group of tied pages -> the group
    step, scaler : number of updates made, and the loss scale, when the run began
    missed : parameter -> updates that it has missed
    track_transfer : function that registers a transfer that no slot holds, with the action that issued it; the run
        waits for these transfers when it ends
    """

    placement: Placement
    feed: StepInputs
    workspace: Workspace
    views: BufferViews
    contexts: LayerContextCache
    units: Sequence[Unit]
    ties: dict[int, TieGroup]
    step: int
    scaler: LossScaler
    missed: Mapping[str, int]
    track_transfer: Callable[[Action, TimedTransfer], None]

    @property
    def stage(self) -> Stage:
        """The model as the program sees it."""
        return self.workspace.program.stage

    @property
    def has_update(self) -> bool:
        """True if the program ends with an update of parameters."""
        return PROGRAM_KINDS[self.workspace.program.kind].updates

    @property
    def sync_group(self) -> Communicator:
        """The ranks whose losses and gradients are summed; all ranks in a program that does not train."""
        axes = self.placement.axes
        return axes.world if self.workspace.program.kind == "evaluate" else axes.group

    def get_microbatch(self, action: Action) -> Microbatch | None:
        """Return the microbatch of an action; None if this rank has no samples in it."""
        return self.feed.batch[get_microbatch_number(action)]

    def get_contexts_of_microbatch(
        self, batch: Microbatch, recomputing: bool = False
    ) -> tuple[LayerContext, list[list[LayerContext]]]:
        """Return the contexts for this microbatch: the context of the loss, and for each unit the contexts of its
        nodes."""
        self.contexts.moment.step, self.contexts.moment.row = (
            self.step,
            batch.row + self.placement.get_sample_offset_on_tensor_axis(batch),
        )
        return self.contexts.get_contexts(self.feed.training, recomputing, batch.inputs, self.feed.cache)


Operation = Callable[[ProgramRun, Action, Values, Values, Values], Values]
"""Function (run, action, taken, read, added) -> values given, then values added into, all in the order of the table."""


def get_microbatch_number(action: Action) -> int:
    assert action.mb is not None
    return action.mb


def get_action_target(action: Action) -> int:
    """Return the number of the unit, page or edge on which an action works."""
    assert action.unit is not None
    return action.unit


def require_same_schedule_values(
    run: ProgramRun, comm: Communicator, rows: list[list[float]], names: Mapping[int, str]
) -> None:
    """Raise ConfigError on all ranks of `comm` if their scheduled values of this step differ. rows: one row of numbers
    per rank. names: position in a row -> name of the number there, which must be equal on all ranks."""
    if len(rows) == 1 or not comm.has_peers:
        return
    for position, name in names.items():
        first = rows[0][position]
        if (
            any(row[position] != first for row in rows)
            and len({*(values := [repr(row[position]) for row in rows])}) > 1
        ):
            axes = run.placement.axes
            ranks = (
                range(axes.world.size)
                if comm is axes.world
                else axes.mesh.ranks_along(axes.coordinates, AXES_OF_ONE_REPLICA)
            )
            raise ConfigError(
                f"ranks differ in the {name} of step {run.step + 1}: "
                f"{format_calls_by_rank(dict(zip(ranks, values, strict=True)))}. "
                "A schedule is a function of the step only: it returns the same number on all ranks, and must not "
                "depend on the rank, the time or random numbers"
            )


def format_action_label(run: ProgramRun, action: Action) -> str:
    """Return text that names an action and its page, for errors. Cached."""
    known = run.workspace.words
    if action not in known:
        known[action] = f"{action} {run.placement.format_page_name(get_action_target(action))}"
    return known[action]
