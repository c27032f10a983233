"""The compiler. It turns the options of a training step into a program: a flat list of actions such as F (forward),
GATHER (all-gather of parameters) and UPDATE.

An action runs a verb (a kind of operation) on a unit (layers whose parameters are gathered together) or on a page (a
flat buffer that holds several parameters). It reads and writes slots (named buffers).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable
from functools import cached_property, lru_cache

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.program.passes import (
    expand_stages_to_units,
    insert_gathers,
    insert_recompute,
    insert_reduces,
    make_leftover_reduces,
    order_sequentially,
)
from fsdpx.core.program.pipeline import ActionSlots, Stage, get_buffer_slots_of_action
from fsdpx.core.program.step_choices import StepChoices
from fsdpx.core.program.verbs import Action, Slot

__all__ = ["PASSES", "PROGRAM_KINDS", "Program", "ProgramKind", "ProgramRequest", "SyncRules", "compile"]


@dataclass(frozen=True)
class ProgramKind:
    """A kind of program, such as a full training step or an evaluation.

    Attributes
    ----------
    about : text that says what the program does
    ops : compute operations: "FB" if the program follows a schedule of forward and backward actions; otherwise the one
        operation that runs for all microbatches, or "" if there is none
    loss : operation that ends the forward pass of a microbatch, such as LOSS
    results : kinds of the slots (named buffers) that the caller reads at the end
    updates : whether the program ends with an update of parameters
    compile_without_peers : for programs without communication, the function that makes the full program from its
        compute actions; None if the program is compiled by the usual passes
    """

    about: str
    ops: str
    loss: str | None = None
    results: tuple[str, ...] = ()
    updates: bool = False
    compile_without_peers: Callable[[list[Action], ProgramRequest], list[Action]] | None = None


PROGRAM_KINDS = {
    "step": ProgramKind("forward, backward, reduce and update", "FB", "LOSS", ("mean", "scale"), updates=True),
    "accumulate": ProgramKind(
        "forward and backward; gradients are accumulated as the placement says", "FB", "LOSS", ("mean",)
    ),
    "local": ProgramKind("forward and backward; gradients stay local (no_sync)", "FB", "LOSS", ("mean",)),
    "update": ProgramKind("reduce what is still local, then update", "", results=("mean", "scale"), updates=True),
    "evaluate": ProgramKind("forward and the mean loss", "E", "SCORE", ("mean", "weight")),
    "predict": ProgramKind("forward only, nothing kept", "E", results=("act",)),
    "forward": ProgramKind("forward, kept for a backward of the caller", "F", results=("act",)),
    "backward": ProgramKind("backward from the caller's gradients to those of the inputs", "B", results=("dact",)),
}
"""Kinds of programs by name. Extensions add kinds."""


@dataclass(frozen=True)
class SyncRules:
    """How ranks synchronize parameters in a step, in addition to summing gradients. A step without rules only sums
    gradients.

    A page is a flat buffer of several parameters, and a slot is a named buffer of a program.

    Attributes
    ----------
    before : operations that run before the first update
    after : (operation, pages) pairs: after the update of each of these pages, the operation runs for that page
    rest : (operation, pages) pairs: after all updates, the operation runs for each of these pages
    kept : kinds of slots that are filled both before and after the step; there is one slot of each kind per trained
        page
    begins, ends : additional slots that are filled before the step (`begins`) or after it (`ends`)
    results : kinds of slots that the caller reads at the end
    """

    before: tuple[str, ...] = ()
    after: tuple[tuple[str, frozenset[int]], ...] = ()
    rest: tuple[tuple[str, frozenset[int]], ...] = ()
    kept: tuple[str, ...] = ()
    begins: frozenset[Slot] = frozenset()
    ends: frozenset[Slot] = frozenset()
    results: tuple[str, ...] = ()

    def list_slots_filled_for_trained_pages(self, filled: frozenset[Slot], trained: Collection[int]) -> set[Slot]:
        """Return the slots (named buffers) that are filled before or after a program. The program trains the pages
        (flat parameter buffers) in `trained`. To get the slots that are filled before the program, pass the attribute
        `begins` as the argument `filled`. To get the slots that are filled after the program, pass the attribute
        `ends`."""
        return {s for s in filled if s.at is None or s.at in trained}.union(
            *(_make_slots(kind, trained) for kind in self.kept)
        )


@dataclass(frozen=True)
class ProgramRequest:
    """The input of `compile`: the kind of program, a stage of the model, and the options of the step.

    A page is a flat buffer that holds several parameters; a unit is a group of layers whose pages are gathered
    together.

    Parameters
    ----------
    kind : a key of `PROGRAM_KINDS`, such as "step"
    stage : the part of the model on this pipeline rank
    microbatches : number of microbatches that this rank runs
    keep_full : whether gathered parameters are kept from their first all-gather to their update; if False (default),
        they are kept only while they are used
    reduce_each : whether the gradients of every microbatch are reduced immediately (default); if False, only their sum
        is reduced
    ahead : number of pages that are gathered in advance, and maximum number of pending reduces
    resident : pages whose full parameters are already gathered
    grads, parts : pages that have unreduced gradients (`grads`) or reduced gradient shards (`parts`) from earlier
        programs
    has_loss_weight : whether earlier programs have already added to the loss weight (the number by which gradients are
        divided)
    order : forward and backward actions of this rank's stages, in execution order; if None (default), each microbatch
        runs forward and backward before the next one
    recompute : units whose forward pass runs again before their backward pass (activation checkpointing)
    scales : operations that compute the factor that scales all updates: SCALE, or NORM if the norm of all gradients is
        needed; also COMMIT if all ranks must agree before the update that the step has succeeded
    sync : how ranks synchronize parameters in a step that updates
    choices : options of the step
    """

    kind: str
    stage: Stage
    microbatches: int = 1
    keep_full: bool = False
    reduce_each: bool = True
    ahead: int = 1
    resident: frozenset[int] = frozenset()
    grads: frozenset[int] = frozenset()
    parts: frozenset[int] = frozenset()
    has_loss_weight: bool = False
    order: tuple[Action, ...] | None = None
    recompute: frozenset[int] = frozenset()
    scales: tuple[str, ...] = ("SCALE",)
    sync: SyncRules = SyncRules()
    choices: StepChoices = field(default_factory=StepChoices)


@dataclass(frozen=True)
class Program:
    """A flat list of actions that runs a training step, or a part of it. It is the same on all ranks of a pipeline
    stage.

    Attributes
    ----------
    kind : a key of `PROGRAM_KINDS`
    actions : actions in the order in which they run
    stage : the part of the model to which the program's IDs of units (groups of layers), pages (flat parameter buffers)
        and values (activations) refer
    microbatches : number of microbatches that the program runs; 0 for a program that computes nothing
    begins, ends : slots (named buffers) that are filled before the program (`begins`) or after it (`ends`)
    results : slots that are filled at the end and that the caller reads
    """

    kind: str
    actions: tuple[Action, ...]
    stage: Stage
    microbatches: int
    begins: frozenset[Slot]
    ends: frozenset[Slot]
    results: tuple[Slot, ...] = field(default=())

    def __str__(self) -> str:
        # wrap lines so that they fit into the documentation, whose pages are 88 columns wide
        return textwrap.fill(" ".join(map(str, self.actions)), 86, break_long_words=False)

    @cached_property
    def slots(self) -> tuple[ActionSlots, ...]:
        return tuple(get_buffer_slots_of_action(a, self.stage, self.microbatches) for a in self.actions)


PASSES: list[Callable[[list[Action], ProgramRequest], list[Action]]] = []
"""Passes that extensions run over the actions of a program, in this order. Extensions append their own passes."""


def compile(request: ProgramRequest) -> Program:
    """Compile a request to a program, using the passes that are registered in `PASSES` at the time of the call.

    Parameters
    ----------
    request : kind of program, stage, microbatches and options

    Returns
    -------
    Program : the compiled program; it is cached, so equal requests return the same object
    """
    return _compile_cached(request, tuple(PASSES))


@lru_cache(maxsize=128)  # cached because each pipeline rank compiles the programs of all pipeline ranks
def _compile_cached(
    request: ProgramRequest, passes: tuple[Callable[[list[Action], ProgramRequest], list[Action]], ...]
) -> Program:
    stage, kind = request.stage, PROGRAM_KINDS[request.kind]
    actions = insert_recompute(
        _list_compute_actions(request), request.recompute & stage.units_with_backward if kind.ops == "FB" else ()
    )
    if kind.compile_without_peers is not None:
        return _make_program(request, kind.compile_without_peers(actions, request))
    actions = insert_gathers(actions, stage, request.ahead, request.keep_full, sorted(request.resident))
    if _has_reduce(request):
        joins = kind.updates and stage.needs_join
        actions = insert_reduces(actions, stage, request.reduce_each, request.ahead, joins)
    actions += _make_update_actions(actions, request) if kind.updates else []
    for change in passes:
        actions = change(actions, request)
    return _make_program(request, actions)


def _make_program(request: ProgramRequest, actions: list[Action]) -> Program:
    begins, ends, results = (
        _list_slots_filled_at_begin(request),
        _list_slots_required_at_end(request),
        _list_result_slots(request),
    )
    microbatches = request.microbatches if PROGRAM_KINDS[request.kind].ops else 0
    return Program(request.kind, tuple(actions), request.stage, microbatches, begins, ends, results)


def _list_compute_actions(request: ProgramRequest) -> list[Action]:
    kind, stage = PROGRAM_KINDS[request.kind], request.stage
    order = (
        request.order or order_sequentially(request.microbatches)
        if kind.ops == "FB"
        else _order_microbatches_through_stages(kind.ops, request)
    )
    seeds = [Action("SEED", None, m) for m in range(request.microbatches)] if kind.ops == "B" and stage.has_loss else []
    actions = [*seeds, *expand_stages_to_units(order, stage, kind.loss)]
    given = (
        kind.updates and "NORM" in request.scales
    ) or kind.compile_without_peers is not None  # true if an operation other than MEAN computes the mean loss
    return _insert_loss_all_reduce(actions, stage, kind.loss) if kind.loss and not given else actions


def _insert_loss_all_reduce(actions: list[Action], stage: Stage, loss: str) -> list[Action]:
    """Insert the action MEAN, which averages the loss over ranks, right after the last loss, so that its communication
    overlaps with the backward pass.

    In a pipeline, insert MEAN at the end instead: ranks compute their losses at different times, but must issue
    collectives in the same order."""
    last = max((i for i, a in enumerate(actions) if a.op == loss), default=len(actions) - 1)
    mean_index = len(actions) if stage.edges else last + 1
    return [*actions[:mean_index], Action("MEAN"), *actions[mean_index:]]


def _order_microbatches_through_stages(op: str, request: ProgramRequest) -> list[Action]:
    """Return the actions that run operation `op` for one microbatch after another, each through all stages of this
    rank."""
    numbers = [number for number, _ in request.stage.own_stages][:: -1 if op == "B" else 1]
    return [Action(op, s, m) for m in range(request.microbatches if op else 0) for s in numbers]


def _has_reduce(request: ProgramRequest) -> bool:
    """Return whether the program reduces gradients over ranks."""
    return request.kind == "step" or (request.kind in ("accumulate", "backward") and request.reduce_each)


def _make_update_actions(actions: list[Action], request: ProgramRequest) -> list[Action]:
    """Return the actions that follow the backward pass in a program that updates parameters. They begin with reductions
    of gradients that earlier programs left unreduced."""
    stage, tail, sync = request.stage, list[Action](), request.sync
    if request.kind == "update":
        joins = stage.trained_pages if stage.needs_join else ()
        tail = [*make_leftover_reduces(sorted(request.grads), request.ahead), *(Action("JOIN", p) for p in joins)]
    tail += [Action("TIE", p) for p in stage.page_groups_with_summed_gradients]
    given = [Action("MEAN")] if request.kind == "update" and "NORM" not in request.scales else []
    agrees = Slot("agreed") in _list_result_slots(request)
    tail += [*given, *(Action(op) for op in request.scales if op != "COMMIT" or agrees)]
    tail += map(Action, sync.before)
    last: dict[int | None, str] = dict.fromkeys(request.resident, "GATHER")
    last |= {a.unit: a.op for a in actions if a.op in ("GATHER", "FREE")}
    for p in reversed(stage.trained_pages):
        tail += [*([Action("FREE", p)] if last.get(p) == "GATHER" else []), Action("UPDATE", p)]
        tail += [Action(op, p) for op, pages in sync.after if p in pages]
    return tail + [Action(op, p) for op, pages in sync.rest for p in reversed(stage.trained_pages) if p in pages]


def _make_slots(kind: str, numbers: Iterable[int]) -> set[Slot]:
    return {Slot(kind, n) for n in numbers}


def _list_lasting_slots(stage: Stage) -> set[Slot]:
    """Return the slots (named buffers) that are filled before and after every program, such as parameter shards and
    optimizer state."""
    trained, here = set(stage.trained_pages), set(stage.own_units)
    kept = _make_slots("memory", stage.pages_with_codec_memory & trained) | _make_slots(
        "stats", stage.units_with_statistics & here
    )
    lasting_slots = _make_slots("shard", stage.pages) | _make_slots("slots", trained) | kept
    stored_slots = dict(stage.stored_slots)
    return {stored_slots.get(slot, slot) for slot in lasting_slots}


def _list_slots_filled_at_begin(request: ProgramRequest) -> frozenset[Slot]:
    stage = request.stage
    slots = (
        _list_lasting_slots(stage)
        | _make_slots("full", request.resident)
        | _make_slots("grad", request.grads)
        | _make_slots("part", request.parts)
    )
    slots |= {Slot("weight")} if request.has_loss_weight else set()
    slots |= request.sync.list_slots_filled_for_trained_pages(request.sync.begins, stage.trained_pages)
    if request.kind == "backward":
        slots |= _list_saved_slots(request)
        slots |= {Slot("seed", None, m) for m in range(request.microbatches)} if stage.has_loss else set()
    return frozenset(slots)


def _list_slots_required_at_end(request: ProgramRequest) -> frozenset[Slot]:
    """Return the slots (named buffers) that must be filled at the end. They are derived from the kind of program and
    not from its actions, so that `check` can compare them with the slots that the actions fill."""
    stage, kind = request.stage, PROGRAM_KINDS[request.kind]
    slots = _list_lasting_slots(stage) | set(_list_result_slots(request))
    if request.keep_full:
        units = [u for u in stage.own_units if kind.ops and (kind.ops != "B" or u in stage.units_with_backward)]
        touched = request.resident.union(*(stage.units[u].pages for u in units))
        slots |= _make_slots("full", (p for p in touched if not (kind.updates and stage.trainable[p])))
    slots |= request.sync.list_slots_filled_for_trained_pages(request.sync.ends, stage.trained_pages)
    if kind.updates:
        return frozenset(slots)
    if "B" in kind.ops:
        slots |= _make_slots("part" if _has_reduce(request) else "grad", stage.trained_pages)
    slots |= _make_slots("part", request.parts) | _make_slots("grad", () if _has_reduce(request) else request.grads)
    slots |= {Slot("weight")} if request.has_loss_weight or ("B" in kind.ops and stage.has_loss) else set()
    slots |= _list_saved_slots(request) if kind.ops == "F" else set()
    return frozenset(slots)


def _list_saved_slots(request: ProgramRequest) -> set[Slot]:
    """Return the slots (named buffers) of activations that a "forward" program saves for a later "backward" program."""
    units = (u for u in request.stage.own_units if u in request.stage.units_with_backward)
    return {Slot("saved", u, m) for u in units for m in range(request.microbatches)}


def _list_result_slots(request: ProgramRequest) -> tuple[Slot, ...]:
    stage, kinds = request.stage, PROGRAM_KINDS[request.kind].results
    if kinds == ("act",):
        outputs = stage.outputs if stage.has_loss else ()
        return tuple(Slot("act", v, m) for m in range(request.microbatches) for v in outputs)
    if kinds == ("dact",):
        wanted = [v for v in stage.used_inputs if v not in stage.constant]
        return tuple(Slot("dact", v, m) for m in range(request.microbatches) for v in wanted)
    slots = tuple(Slot(kind) for kind in (*kinds, *request.sync.results) if kind != "weight" or stage.has_loss)
    return (*slots, Slot("agreed")) if "COMMIT" in request.scales and request.kind == "step" else slots
