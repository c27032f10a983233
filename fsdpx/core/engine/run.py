"""One run of a program: the context passed to its operations, the memory for its values, and views of the parameters in
flat buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.desync_check import format_calls_by_rank
from fsdpx.core.comm.mesh import AXES_OF_ONE_REPLICA
from fsdpx.core.engine.stage_messages import StageMessages
from fsdpx.core.engine.temporary_memory_plan import (
    agree_on_temporary_memory_plan,
    count_action_scratch_bytes,
    plan_temporary_buffer_offsets,
)
from fsdpx.core.program import PROGRAM_KINDS, SLOTS, Action, Program, Slot, Stage
from fsdpx.core.state.flat_parameters import Page
from fsdpx.core.state.gradients import Gradient
from fsdpx.core.state.ledger import LedgerKey, make_unsharded_gradient_row
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
    "UnitFunctions",
    "Values",
    "Workspace",
    "format_action_label",
    "get_action_target",
    "get_microbatch_number",
    "require_same_scheduled_values",
]  # fmt: skip


class BufferViews:
    """Cache of the views of parameters and gradients in flat buffers. Every step uses the same buffers, so new views
    are created only in the first steps.

    Attributes
    ----------
    generation : the value of the arena's attribute `generation`, which counts the reallocations of the arena (allocator
        of large buffers); the views are valid until it changes
    frozen : parameters whose gradients are hidden from layers
    own : for each unit (group of layers), the trainable parameters that no other unit uses
    """

    def __init__(self, layout: ModelLayout, generation: int, frozen: frozenset[str] = frozenset()) -> None:
        self.generation, self.frozen = generation, frozen
        self._still = frozenset(n for p in layout.pages for n in (f.name for f in p.fields if f.source in frozen))
        self._leaves: dict[tuple[int, int], tuple[Any, list[Any]]] = {}
        self._pages: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}
        self._entries: dict[tuple[int, int], tuple[Any, GradientEntries]] = {}
        self._params: dict[tuple[int, ...], tuple[Any, list[Parameters]]] = {}
        self._grads: dict[tuple[int, ...], tuple[Any, list[Gradients]]] = {}
        self._names = [
            [
                [(local, layout.get_name_in_page(join_path(n.path, local))) for local in n.layer.specs()]
                for n in unit.nodes
            ]
            for unit in layout.units
        ]

        users = Counter(full for unit in self._names for full in {full for node in unit for _, full in node})
        alone = {full for full, count in users.items() if count == 1} - self._still
        self.own = [{full for node in unit for _, full in node if full in alone} for unit in self._names]

    def view_as_consecutive_blocks(self, buffer: Any, size: int) -> list[Any]:
        """Split a buffer into consecutive blocks of `size` elements, and return views of them."""
        key = (id(buffer), size)
        cached = self._leaves.get(key)
        if cached is None:
            leaf_views = [buffer[i : i + size] for i in range(0, max(buffer.size, 1), max(size, 1))]
            cached = self._leaves[key] = (buffer, leaf_views)
        return cached[1]

    def view_parameters(self, page: Page, buffer: Any) -> dict[str, Any]:
        """Return a dict that maps each parameter name to a view of `buffer` in the parameter's shape. `buffer` holds
        the elements of a page (flat parameter buffer)."""
        # the page is part of the key, because pages of equal size may take turns using one buffer
        key = (page.index, id(buffer))
        cached = self._pages.get(key)
        if cached is None:
            # store the buffer too, because its id stays unique only while it is alive
            cached = self._pages[key] = (buffer, page.view_parameters_by_name(buffer))
        return cached[1]

    def get_gradient_entries(self, page: Page, buffer: Any) -> GradientEntries:
        """Return a dict that maps each parameter name to its gradient in `buffer`. Layers that share a tied parameter
        get the same `GradientEntry` object."""
        key = (page.index, id(buffer))
        cached = self._entries.get(key)
        if cached is None:
            page_entries = GradientEntries(self.view_parameters(page, buffer))
            cached = self._entries[key] = (buffer, page_entries)
        return cached[1]

    def view_unit_parameters(self, unit: int, pages: Sequence[Mapping[str, Any]]) -> list[Parameters]:
        """Return, for each node (layer call) of a unit (group of layers), a dict that maps parameter names within the
        layer to arrays. `pages` is a list of dicts whose keys are full names and whose values are arrays. The first
        dicts are for the unit's pages (flat parameter buffers), and the others are for its running statistics."""
        key = (unit, *map(id, pages))
        cached = self._params.get(key)
        if cached is None:
            node_parameters = [Parameters(arrays) for arrays in self._split_per_node(unit, pages)]
            cached = self._params[key] = (tuple(pages), node_parameters)  # store `pages` too, to keep their ids unique
        return cached[1]

    def view_unit_gradients(self, unit: int, pages: Sequence[dict[str, GradientEntry]]) -> list[Gradients]:
        """Return, for each node (layer call) of a unit (group of layers), a dict whose keys are the parameter names
        within the layer and whose values are gradients. Only trainable parameters are included."""
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
    """The mean loss of the global batch, total / weight. It is nan in a program without a loss.

    Attributes
    ----------
    total, weight : sums of loss and loss weight over all samples
    shared : total loss weight of all accumulated gradients, by which their sum is divided; 0 if there were no samples
    rate : the learning rate, which is 0 in a program without an update; ranks send it with the loss to check that all
        ranks have the same rate
    """

    total: float
    weight: float
    shared: float
    rate: float = 0.0

    @property
    def gradient_divisor(self) -> float:
        """The number by which summed gradients are divided to get the gradient of the mean loss."""
        return self.shared or 1.0

    @property
    def value(self) -> float:
        return self.total / (self.weight or 1.0)


@dataclass(frozen=True)
class GradientScale:
    """How gradients are scaled in an update, and whether the update is skipped.

    Attributes
    ----------
    factor : factor by which every gradient is multiplied
    norm : global gradient norm before clipping; nan if it was not computed
    skip : whether the update is skipped because gradients overflowed
    rate : this step's learning rate
    scaler : the loss scale from the next step on
    """

    factor: float
    norm: float
    skip: bool
    rate: float
    scaler: LossScaler


class Workspace:
    """The buffers of one program on one rank: temporary memory, and full parameters and gradients that are allocated
    only while they are in use."""

    def __init__(self, state: TrainState, program: Program) -> None:
        self.state, self.program = state, program
        self.placement = state.placement
        self.plan = agree_on_temporary_memory_plan(state, plan_temporary_buffer_offsets(state, program))
        self.births: Counter[Slot] = Counter()
        self.words: dict[Action, str] = {}
        # arrays that are kept between steps never move, so they need to be looked up only once
        pages, ledger = self.placement.pages, state.ledger
        self._full = {p: ledger.get_array("full", p) for p in pages}
        parts = {p: row for p in pages if (row := ledger.rows.get(LedgerKey("part", p)))}
        self._part = {p: ledger.get_array("part", p) for p, row in parts.items() if not row.is_freed_by_update}
        self._grads = {p: ledger.rows[LedgerKey("grad", p)] for p in self.placement.stage.trained_pages}
        self._local = {s.at for s in program.begins | program.ends if s.kind == "grad"}
        self._scratch: dict[tuple[str, int], int] = {}
        self._nothing: dict[str, Any] = {}  # a buffer of 0 bytes for each kind of scratch buffer

    @cached_property
    def stage_messages(self) -> StageMessages:
        """The messages between pipeline stages that are planned for this program."""
        return StageMessages(self.placement, self.program.microbatches)

    def grow_slab_for_run(self) -> None:
        """Enlarge the slab (block of memory for short-lived buffers) if this program needs a larger one. Call this
        before each run."""
        self.births.clear()
        self._nothing.clear()
        self.state.arena.grow_slab(self.plan)

    def take_next_temporary_buffer(self, kind: str, page: int, size: int, dtype: Any) -> Any:
        """Return the part of the slab (memory for short-lived buffers) that is reserved for the next use of a buffer.

        A buffer is identified by its `kind`, such as "full", and the index of its page (flat parameter buffer). Buffers
        must be taken in program order."""
        slot = Slot(kind, page)
        life = slot, self.births[slot]
        self.births[slot] += 1
        return self.state.arena.view_slab(self.plan.offsets[life], size, dtype)

    def get_full_parameter_buffer(self, page: int) -> Any:
        """Return the memory for the gathered parameters of a page (flat parameter buffer). It is either kept between
        steps or part of the slab (memory for short-lived buffers)."""
        kept = self._full[page]
        if kept is not None:
            return kept
        return self.take_next_temporary_buffer(
            "full", page, self.placement.pages[page].size, self.placement.formats.compute
        )

    def get_shard_gradient(self, page: int) -> Any:
        """Return the array that holds this rank's reduced gradient shard of a page (flat parameter buffer) until the
        update."""
        kept = self._part.get(page)
        return self.state.get_or_allocate_until_update(LedgerKey("part", page)) if kept is None else kept

    def create_gradient(self, page: int, views: BufferViews) -> Gradient:
        """Return an empty accumulator for the unsharded gradient of a page (flat parameter buffer), in memory that is
        kept between steps or in the slab (memory for short-lived buffers)."""
        place, row = self.placement, self._grads[page]
        if row.is_kept:
            buffer = self.state.ledger.arrays[row.key]
        elif page in self._local:
            buffer = self.state.get_or_create_local_gradient(make_unsharded_gradient_row(place, page))
        else:
            buffer = self.take_next_temporary_buffer("grad", page, row.elements, row.dtype)
        shared = self.state.arena.memory is not None
        return place.accumulation.create_gradient(
            buffer, lambda b: views.view_as_consecutive_blocks(b, row.span.size), keep_offset=shared
        )

    def take_next_scratch_buffer(self, kind: str, page: int) -> Any:
        """Return temporary memory of this kind for an action on a page (flat parameter buffer). Its dtype is uint8 for
        raw data, and otherwise the dtype of gradients."""
        if (kept := self.state.ledger.get_array(kind, page)) is not None:
            return kept
        nbytes = self._scratch.get((kind, page))
        if nbytes is None:
            nbytes = self._scratch[kind, page] = count_action_scratch_bytes(self.state, Slot(kind, page))
        dtype = np.dtype("uint8") if SLOTS[kind].raw else self.placement.formats.gradients
        if nbytes:
            return self.take_next_temporary_buffer(kind, page, nbytes // dtype.itemsize, dtype)
        # use an empty view of the slab if there is one: a buffer must be in shared memory on all ranks or on none
        if kind not in self._nothing:
            arena = self.state.arena
            buffer = self.placement.xp.empty((0,), dtype=dtype) if arena.slab is None else arena.view_slab(0, 0, dtype)
            self._nothing[kind] = buffer
        return self._nothing[kind]


Values = tuple[Any, ...]


class LayerContextCache:
    """Cache of the contexts that are passed to layers: one `LayerContext` for the model and one per node (layer call).
    The contexts are created once. Later, only their position in training (step and sample) changes. If sequences may be
    sharded, the sequence length can change too."""

    def __init__(self, state: TrainState) -> None:
        place, self.seed, self.moment = state.placement, state.seed, state.moment
        cores, dtype = place.options.recompute.cores, place.formats.compute
        anywhere = place.axes.pipe.size > 1 or place.options.reproducible_chunks is not None
        self._root = LayerContext(
            place.xp, place.axes, state.random, recompute=cores, dtype=dtype, ignores_memory_order=anywhere
        )
        self._units, self._made = (
            place.layout.units,
            dict[tuple[bool, bool], tuple[LayerContext, list[list[LayerContext]]]](),
        )

    def get_contexts(
        self, training: bool, recomputing: bool, inputs: Sequence[Any], cache: KeyValueCache | None = None
    ) -> tuple[LayerContext, list[list[LayerContext]]]:
        """Return the context of the model, and for each unit (group of layers) the contexts of its nodes (layer
        calls).

        `recomputing` is true if the forward pass is repeated during the backward pass. `inputs` holds the input arrays
        of the model."""
        time = find_sequence_length(inputs) if self._root.mesh.tensor.size > 1 else None
        if time != self._root.time or cache is not self._root.cache:
            self._root = replace(self._root, time=time, cache=cache)
            self._made.clear()
        if (training, recomputing) not in self._made:
            root = replace(self._root, training=training, recomputing=recomputing)
            self._made[training, recomputing] = root, [[root.child(n.path) for n in u.nodes] for u in self._units]
        return self._made[training, recomputing]


class UnitFunctions(NamedTuple):
    """The functions that run the layers of a unit (group of layers). Observers may replace them.

    Attributes
    ----------
    forward, backward, backward_input, backward_params : functions with the arguments of `run_unit_forward`,
        `run_unit_backward`, `run_unit_backward_input` and `run_unit_backward_params` in `compute_verbs`
    """

    forward: Callable[..., list[Any]]
    backward: Callable[..., None]
    backward_input: Callable[..., list[Any]]
    backward_params: Callable[..., None]


@dataclass
class ProgramRun:
    """The context of one run of a program, passed to each of its operations.

    Attributes
    ----------
    placement : the fixed data of this rank
    feed : inputs of this run
    units : the units (groups of layers) of the model, possibly wrapped by observers
    functions : the functions that run the layers of a unit, possibly wrapped by observers
    ties : each `TieGroup`, by the index of its first page (flat parameter buffer)
    step, scaler : number of updates before this run, and the loss scale when the run began
    missed : for each parameter name, the number of updates that the parameter missed while it was frozen
    track_transfer : function (action, transfer) that registers a transfer for which no later action waits, such as a
        send; `action` is the action that started it. At its end, the run waits for all registered transfers
    """

    placement: Placement
    feed: StepInputs
    workspace: Workspace
    views: BufferViews
    contexts: LayerContextCache
    units: Sequence[Unit]
    functions: UnitFunctions
    ties: dict[int, TieGroup]
    step: int
    scaler: LossScaler
    missed: Mapping[str, int]
    track_transfer: Callable[[Action, TimedTransfer], None]

    @property
    def stage(self) -> Stage:
        """This rank's pipeline stage, as it was when the program was compiled. Parameters frozen or unfrozen since then
        do not change it."""
        return self.workspace.program.stage

    @property
    def has_update(self) -> bool:
        """True if the program ends with an update of the parameters."""
        return PROGRAM_KINDS[self.workspace.program.kind].updates

    @property
    def sync_group(self) -> Communicator:
        """Communicator of the ranks whose losses and gradients are summed. For "evaluate", these are all ranks."""
        axes = self.placement.axes
        return axes.world if self.workspace.program.kind == "evaluate" else axes.group

    def get_microbatch(self, action: Action) -> Microbatch | None:
        """Return the microbatch of an action, or None if this rank has no samples in it."""
        return self.feed.batch[get_microbatch_number(action)]

    def get_layer_contexts_of_microbatch(
        self, batch: Microbatch, recomputing: bool = False
    ) -> tuple[LayerContext, list[list[LayerContext]]]:
        """Return the layer contexts for a microbatch: one for the loss, and one for each node (layer call) of each unit
        (group of layers)."""
        self.contexts.moment.step, self.contexts.moment.row = (
            self.step,
            batch.row + self.placement.get_sample_offset_on_tensor_axis(batch),
        )
        return self.contexts.get_contexts(self.feed.training, recomputing, batch.inputs, self.feed.cache)


Operation = Callable[[ProgramRun, Action, Values, Values, Values], Values]
"""Function (run, action, taken, read, added) that performs an action. It returns the new values of the slots (named
values) that the action fills, followed by the new values of the slots that it adds to. Both are in the order of the
table of verbs."""


def get_microbatch_number(action: Action) -> int:
    assert action.mb is not None
    return action.mb


def get_action_target(action: Action) -> int:
    """Return the ID (an integer) of the target of an action. The target is a unit (group of layers), a page (flat
    parameter buffer) or a message."""
    assert action.unit is not None
    return action.unit


def require_same_scheduled_values(
    run: ProgramRun, comm: Communicator, rows: list[list[float]], names: Mapping[int, str]
) -> None:
    """Raise ConfigError on all ranks of `comm` if their scheduled values for this step, such as the learning rate,
    differ. `rows` holds one list of numbers per rank. `names` maps the index of each scheduled value in these lists to
    the name of the value."""
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
    """Return a phrase for error messages that names an action and the parameters that it works on. The result is
    cached."""
    known = run.workspace.words
    if action not in known:
        known[action] = f"{action} {run.placement.format_page_name(get_action_target(action))}"
    return known[action]
