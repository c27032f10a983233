"""compile: from the choices of a step to its program, and the program itself as a value."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from fsdpx.program.passes import compute, offload, one_by_one, page, recompute, reduce, reduce_carried
from fsdpx.program.pipeline import Slots, Stage, expand
from fsdpx.program.verbs import Action, Slot

__all__ = ["KINDS", "Outer", "Program", "Request", "Rounds", "compile"]


@dataclass(frozen=True)
class Outer:
    """What a step of local training does beside its update, by pages.

    deltas: their outer gradients are sent. steps: these have arrived, and the outer optimiser steps. adopts: its result
    has arrived, and the replica goes on from there. summing, coming: pages whose outer gradients, or whose new outer
    parameters, are under way when the step begins."""

    deltas: frozenset[int] = frozenset()
    steps: frozenset[int] = frozenset()
    adopts: frozenset[int] = frozenset()
    summing: frozenset[int] = frozenset()
    coming: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rounds:
    """every: steps from one outer gradient of a page to its next. fragments: pages that travel together, each at its
    own time of a round. delay: steps that a fragment may be under way: its outer gradient for the first half of them,
    its new parameters for the rest."""

    every: int
    fragments: tuple[frozenset[int], ...]
    delay: int = 0

    @property
    def half(self) -> int:
        """Steps for which outer gradients are under way."""
        return self.delay // 2

    def first(self, fragment: int) -> int:
        """The step after which a fragment sets out for the first time; the last one at the end of a round."""
        return -(-self.every * (fragment + 1) // len(self.fragments))

    def at(self, step: int) -> Outer:
        """What step `step`, counted from 1, does."""
        found: dict[str, set[int]] = {name: set() for name in Outer.__dataclass_fields__}
        for number, pages in enumerate(self.fragments):
            since = step - self.first(number)
            lag = since % self.every if since >= 0 else -1
            for name, now in (
                ("deltas", lag == 0),
                ("steps", lag == self.half),
                ("adopts", lag == self.delay),
                ("summing", 0 < lag <= self.half),
                ("coming", self.half < lag <= self.delay),
            ):
                found[name] |= pages if now else set()
        return Outer(**{name: frozenset(pages) for name, pages in found.items()})

    def fragment(self, page: int) -> int:
        """The fragment of a page."""
        return next(number for number, pages in enumerate(self.fragments) if page in pages)

    def number(self, page: int, step: int) -> int:
        """The number, counted from 1, of the outer step that a page makes in step `step`."""
        return (step - self.half - self.first(self.fragment(page))) // self.every + 1


@dataclass(frozen=True)
class ProgramKind:
    """about: what a program of this kind does. ops: its verbs in the order of the schedule, or one of them for all
    microbatches. loss: the verb that closes a forward. results: kinds of the slots that the caller collects. apart: no
    other rank takes part."""

    about: str
    ops: str
    loss: str | None = None
    results: tuple[str, ...] = ()
    updates: bool = False
    apart: bool = False


KINDS = {
    "step": ProgramKind("forward, backward, reduce and update", "FB", "LOSS", ("mean", "scale"), updates=True),
    "accumulate": ProgramKind(
        "forward and backward; gradients are added up as the placement says", "FB", "LOSS", ("mean",)
    ),
    "local": ProgramKind("forward and backward; gradients stay local (no_sync)", "FB", "LOSS", ("mean",)),
    "push": ProgramKind(
        "a step at this rank's own speed, on parameters of all ranks", "FB", "LOSS", ("mean", "scale"), True, True
    ),
    "mix": ProgramKind(
        "the same on a model of its own, which others are drawn to", "FB", "LOSS", ("mean", "scale"), True, True
    ),
    "update": ProgramKind("reduce what is still local, then update", "", results=("mean", "scale"), updates=True),
    "evaluate": ProgramKind("forward and the mean loss", "E", "SCORE", ("mean", "weight")),
    "predict": ProgramKind("forward only, nothing kept", "E", results=("act",)),
    "forward": ProgramKind("forward, kept for a backward of the caller", "F", results=("act",)),
    "backward": ProgramKind("backward from the caller's gradients to those of the inputs", "B", results=("dact",)),
}


@dataclass(frozen=True)
class Request:
    """What a program is compiled from.

    kind: one of KINDS. keep_full: full parameters live from their first gather to their update, else only while used.
    reduce_each: reduce every microbatch's gradients at once, else when all are added up. ahead: see Sharding.
    resident: pages whose full parameters are there already. grads, parts: pages that carry full (local) or
    reduced (sharded) gradients from earlier programs. weighed: an earlier program left its share of the loss weight.
    order: forwards and backwards of this rank's stages, None for one microbatch after the other. recompute: units that
    run forward again before their backward. commit: all ranks agree that a step has succeeded before it updates.
    scales: the verbs that find the scale of all updates: SCALE, or NORM where the norm of all gradients is wanted.
    outer: replicas train by themselves, and what of
    it this step does when they meet."""

    kind: str
    stage: Stage
    microbatches: int = 1
    keep_full: bool = False
    reduce_each: bool = True
    ahead: int = 1
    resident: frozenset[int] = frozenset()
    grads: frozenset[int] = frozenset()
    parts: frozenset[int] = frozenset()
    weighed: bool = False
    order: tuple[Action, ...] | None = None
    recompute: frozenset[int] = frozenset()
    commit: bool = False
    scales: tuple[str, ...] = ("SCALE",)
    outer: Outer | None = None


@dataclass(frozen=True)
class Program:
    """A flat list of actions, the same text on every rank of a stage. begins, ends: slots filled before and after."""

    kind: str
    actions: tuple[Action, ...]
    stage: Stage
    microbatches: int
    begins: frozenset[Slot]
    ends: frozenset[Slot]
    results: tuple[Slot, ...] = field(default=())  # those of `ends` that the caller collects

    def __str__(self) -> str:
        return textwrap.fill(" ".join(map(str, self.actions)), 110, break_long_words=False)

    @cached_property
    def slots(self) -> tuple[Slots, ...]:
        return tuple(expand(a, self.stage, self.microbatches) for a in self.actions)


@lru_cache(maxsize=8)  # ranks that are threads ask for the same, and so does each rank of a pipe for all the others
def compile(request: Request) -> Program:
    stage, kind = request.stage, KINDS[request.kind]
    actions = recompute(_compute(request), request.recompute & stage.backward if kind.ops == "FB" else ())
    if kind.apart:
        return _program(request, _apart(actions, request))
    actions = page(actions, stage, request.ahead, request.keep_full, sorted(request.resident))
    if _reduces(request):
        actions = reduce(actions, stage, request.reduce_each, request.ahead, _joins(request) if kind.updates else "")
    actions += _update(actions, request) if kind.updates else []
    actions = offload(actions, stage, request.microbatches, request.ahead)
    return _program(request, actions)


def _program(request: Request, actions: list[Action]) -> Program:
    begins, ends, results = _begins(request), _ends(request), _results(request)
    microbatches = request.microbatches if KINDS[request.kind].ops else 0
    return Program(request.kind, tuple(actions), request.stage, microbatches, begins, ends, results)


def _apart(actions: list[Action], request: Request) -> list[Action]:
    """A step of a rank at its own speed: all parameters as they are now, compute, and what it has found."""
    stage = request.stage
    pages = [a.unit for a in page(actions, stage, 0, keep=True) if a.op == "GATHER"]
    tail = [Action("ALONE"), *(Action("FREE", p) for p in pages)]
    for p in reversed(stage.trained):
        tail += [Action("PUSH", p), *([Action("MIX", p)] if request.kind == "mix" else [])]
    tail += [Action("TICK")] if request.kind == "push" else []
    return [*(Action("PULL", p) for p in pages), *actions, *tail]


def _compute(request: Request) -> list[Action]:
    kind, stage = KINDS[request.kind], request.stage
    order = request.order or one_by_one(request.microbatches) if kind.ops == "FB" else _through(kind.ops, request)
    seeds = [Action("SEED", None, m) for m in range(request.microbatches)] if kind.ops == "B" and stage.scores else []
    actions = [*seeds, *compute(order, stage, kind.loss)]
    given = (kind.updates and "NORM" in request.scales) or kind.apart  # by NORM or ALONE
    return _with_mean(actions, stage, kind.loss) if kind.loss and not given else actions


def _with_mean(actions: list[Action], stage: Stage, loss: str) -> list[Action]:
    """The one message about the loss: issued as soon as its numbers are there, on its way during backward. In a pipe at
    the end, since ranks know them at different times, and collectives come in one order."""
    last = max((i for i, a in enumerate(actions) if a.op == loss), default=len(actions) - 1)
    at = len(actions) if stage.edges else last + 1
    return [*actions[:at], Action("MEAN"), *actions[at:]]


def _through(op: str, request: Request) -> list[Action]:
    """Each microbatch through all stages of this rank, one after the other."""
    numbers = [number for number, _ in request.stage.parts][:: -1 if op == "B" else 1]
    return [Action(op, s, m) for m in range(request.microbatches if op else 0) for s in numbers]


def _reduces(request: Request) -> bool:
    """Whether gradients are reduced while this program runs."""
    return request.kind == "step" or (request.kind in ("accumulate", "backward") and request.reduce_each)


def _joins(request: Request) -> str:
    """What makes a part the whole gradient: the sum over replicas, or nothing where these train by themselves."""
    return "JOIN" if request.outer is None else "OWN"


def _update(actions: list[Action], request: Request) -> list[Action]:
    """The tail of a program that updates; what other programs left is reduced first."""
    stage, tail, outer = request.stage, list[Action](), request.outer or Outer()
    if request.kind == "update":
        joins = (Action(_joins(request), p) for p in stage.trained)
        tail = [*reduce_carried(sorted(request.grads), request.ahead), *joins]
    tail += [Action("TIE", p) for p in stage.ties]
    given = [Action("MEAN")] if request.kind == "update" and "NORM" not in request.scales else []
    tail += [*given, *map(Action, request.scales)]
    tail += [Action("COMMIT")] if Slot("agreed") in _results(request) else []
    tail += [Action("SHARE")] if outer.deltas else []
    last: dict[int | None, str] = dict.fromkeys(request.resident, "GATHER")
    last |= {a.unit: a.op for a in actions if a.op in ("GATHER", "FREE")}
    for p in reversed(stage.trained):
        tail += [*([Action("FREE", p)] if last.get(p) == "GATHER" else []), Action("UPDATE", p)]
        tail += [Action("DELTA", p)] if p in outer.deltas else []
    for op, pages in (("OUTER", outer.steps), ("ADOPT", outer.adopts)):
        tail += [Action(op, p) for p in reversed(stage.trained) if p in pages]
    return tail


def _of(kind: str, numbers: Iterable[int]) -> set[Slot]:
    return {Slot(kind, n) for n in numbers}


def _lasting(stage: Stage) -> set[Slot]:
    """The slots that are filled before and after every program."""
    trained, here = set(stage.trained), set(stage.here)
    kept = _of("memory", stage.coded & trained) | _of("stats", stage.moving & here)
    found = _of("shard", stage.pages) | _of("slots", trained) | kept
    stored = {record: Slot("stored", number) for number, record in enumerate(stage.records)}
    return {stored.get(slot, slot) for slot in found}


def _begins(request: Request) -> frozenset[Slot]:
    stage = request.stage
    slots = _lasting(stage) | _of("full", request.resident) | _of("grad", request.grads) | _of("part", request.parts)
    slots |= {Slot("weight")} if request.weighed else set()
    if request.outer is not None:
        slots |= _meeting(request, request.outer.summing, request.outer.coming)
    if request.kind == "backward":
        slots |= _saved(request)
        slots |= {Slot("seed", None, m) for m in range(request.microbatches)} if stage.scores else set()
    return frozenset(slots)


def _meeting(request: Request, summing: frozenset[int], coming: frozenset[int]) -> set[Slot]:
    """The slots that replicas training by themselves keep, and those under way between them."""
    trained = frozenset(request.stage.trained)
    kept = _of("outer", trained) | _of("velocity", trained) | {Slot("trained")}
    return kept | _of("delta", summing & trained) | _of("next", coming & trained)


def _ends(request: Request) -> frozenset[Slot]:
    """The slots that must be left, from the meaning of the kind alone: not from the list that `compile` made."""
    stage, kind = request.stage, KINDS[request.kind]
    slots = _lasting(stage) | set(_results(request))
    if request.keep_full:
        units = [u for u in stage.here if kind.ops and (kind.ops != "B" or u in stage.backward)]
        touched = request.resident.union(*(stage.units[u].pages for u in units))
        slots |= _of("full", (p for p in touched if not (kind.updates and stage.trainable[p])))
    if (outer := request.outer) is not None:
        summing, coming = outer.summing | outer.deltas, outer.coming | outer.steps
        slots |= _meeting(request, summing - outer.steps, coming - outer.adopts)
    if kind.updates:
        return frozenset(slots)
    if "B" in kind.ops:
        slots |= _of("part" if _reduces(request) else "grad", stage.trained)
    slots |= _of("part", request.parts) | _of("grad", () if _reduces(request) else request.grads)
    slots |= {Slot("weight")} if request.weighed or ("B" in kind.ops and stage.scores) else set()
    slots |= _saved(request) if kind.ops == "F" else set()
    return frozenset(slots)


def _saved(request: Request) -> set[Slot]:
    """The slots that a forward leaves for a backward of the caller."""
    units = (u for u in request.stage.here if u in request.stage.backward)
    return {Slot("saved", u, m) for u in units for m in range(request.microbatches)}


def _results(request: Request) -> tuple[Slot, ...]:
    stage, kinds = request.stage, KINDS[request.kind].results
    if kinds == ("act",):
        outputs = stage.outputs if stage.scores else ()
        return tuple(Slot("act", v, m) for m in range(request.microbatches) for v in outputs)
    if kinds == ("dact",):
        wanted = [v for v in stage.used if v not in stage.constant]
        return tuple(Slot("dact", v, m) for m in range(request.microbatches) for v in wanted)
    if request.outer is not None and request.outer.deltas:
        kinds = (*kinds, "share")
    slots = tuple(Slot(kind) for kind in kinds if kind != "weight" or stage.scores)
    return (*slots, Slot("agreed")) if request.commit and request.kind == "step" else slots
