"""compile: from the choices of a step to its program, and the program itself as a value."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from fsdpx.program.action import Action
from fsdpx.program.passes import compute, compute_backward, one_by_one, page, recompute, reduce, reduce_carried
from fsdpx.program.slots import Slot
from fsdpx.program.stage import Slots, Stage, expand

__all__ = ["KINDS", "Program", "Request", "compile"]

KINDS = {
    "step": "forward, backward, reduce and update",
    "accumulate": "forward and backward; gradients are added up as the placement says",
    "local": "forward and backward; gradients stay local (no_sync)",
    "update": "reduce what is still local, then update",
    "evaluate": "forward and the mean loss",
    "predict": "forward only, nothing kept",
    "forward": "forward, kept for a backward of the caller",
    "backward": "backward from the caller's gradients",
}


@dataclass(frozen=True)
class Request:
    """What a program is compiled from.

    kind: one of KINDS. keep_full: full parameters live from their first gather to their update, else only while used.
    reduce_each: reduce every microbatch's gradients at once, else when all are added up. ahead: see Sharding.
    resident: pages whose full parameters are there already. grads, parts: pages that carry full (local) or
    reduced (sharded) gradients from earlier programs. weighed: an earlier program left its share of the loss weight.
    order: forwards and backwards of this rank's stages, None for one microbatch after the other. recompute: units that
    run forward again before their backward. commit: all ranks agree that a step has come through before it updates.
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
    weighed: bool = False
    order: tuple[Action, ...] | None = None
    recompute: frozenset[int] = frozenset()
    commit: bool = False


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


def compile(request: Request) -> Program:
    actions = _finish(_reduced(_paged(_compute(request), request), request), request)
    begins, ends, results = _begins(request), _ends(request), _results(request)
    return Program(request.kind, tuple(actions), request.stage, request.microbatches, begins, ends, results)


def _compute(request: Request) -> list[Action]:
    stage, m = request.stage, range(request.microbatches)
    match request.kind:
        case "step" | "accumulate" | "local":
            order = request.order or one_by_one(len(m))
            return recompute([*compute(order, stage, "LOSS"), Action("MEAN")], request.recompute)
        case "evaluate":
            return [*compute(_through("E", stage, m), stage, "SCORE"), Action("MEAN")]
        case "predict":
            return compute(_through("E", stage, m), stage, None)
        case "forward":
            return compute(_through("F", stage, m), stage, None)
        case "backward":
            return compute_backward(_through("B", stage, m), stage)
        case "update":
            return []
    raise AssertionError(f"no kind of program {request.kind!r}")


def _through(op: str, stage: Stage, microbatches: Iterable[int]) -> list[Action]:
    """Each microbatch through all stages of this rank, one after the other."""
    numbers = [number for number, _ in stage.parts]
    return [Action(op, s, m) for m in microbatches for s in (reversed(numbers) if op == "B" else numbers)]


def _paged(actions: list[Action], request: Request) -> list[Action]:
    return page(actions, request.stage, request.ahead, request.keep_full, sorted(request.resident))


def _reduces(request: Request) -> bool:
    """Whether gradients are reduced while this program runs."""
    return request.kind == "step" or (request.kind in ("accumulate", "backward") and request.reduce_each)


def _reduced(actions: list[Action], request: Request) -> list[Action]:
    join = request.kind == "step"
    return reduce(actions, request.stage, request.reduce_each, request.ahead, join) if _reduces(request) else actions


def _finish(actions: list[Action], request: Request) -> list[Action]:
    if request.kind not in ("step", "update"):
        return actions
    if request.kind == "update":
        actions = reduce_carried(sorted(request.grads), request.ahead)
        actions += [Action("JOIN", p) for p in request.stage.trained]
    resident = _resident_after(actions, request) if request.keep_full else set()
    tail = [*(Action("TIE", p) for p in request.stage.ties), Action("NORM")]
    tail += [Action("COMMIT")] if request.commit and request.kind == "step" else []
    for p in reversed(request.stage.trained):
        tail += [Action("FREE", p)] if p in resident else []
        tail += [Action("UPDATE", p)]
    return actions + tail


def _resident_after(actions: list[Action], request: Request) -> set[int]:
    have = set(request.resident)
    for a in actions:
        if a.unit is not None and a.op in ("GATHER", "FREE"):
            (have.add if a.op == "GATHER" else have.discard)(a.unit)
    return have


def _of(kind: str, numbers: Iterable[int]) -> set[Slot]:
    return {Slot(kind, n) for n in numbers}


def _lasting(stage: Stage) -> set[Slot]:
    """What is there before and after every program."""
    trained, here = set(stage.trained), set(stage.here)
    kept = _of("memory", stage.coded & trained) | _of("stats", stage.moving & here)
    return _of("shard", stage.pages) | _of("slots", trained) | kept


def _saved(request: Request) -> set[Slot]:
    return {Slot("saved", u, m) for u in request.stage.here for m in range(request.microbatches)}


def _begins(request: Request) -> frozenset[Slot]:
    stage = request.stage
    slots = _lasting(stage) | _of("full", request.resident) | _of("grad", request.grads) | _of("part", request.parts)
    slots |= {Slot("weight")} if request.weighed else set()
    if request.kind == "backward":
        slots |= _saved(request)
        slots |= {Slot("seed", None, m) for m in range(request.microbatches)} if stage.scores else set()
    return frozenset(slots)


def _ends(request: Request) -> frozenset[Slot]:
    """What must be left, from the meaning of the kind alone: not from the list that `compile` made."""
    stage, updates = request.stage, request.kind in ("step", "update")
    slots = _lasting(stage)
    if request.keep_full:
        touched = set(request.resident if request.kind == "update" else stage.pages)
        slots |= _of("full", (p for p in touched if not (updates and stage.trainable[p])))
    if request.kind in ("accumulate", "local", "backward"):
        slots |= _of("part" if _reduces(request) else "grad", stage.trained)
        slots |= {Slot("weight")} if stage.scores else set()
    if not _reduces(request) and request.kind != "update":
        slots |= _of("grad", request.grads)
    if not updates:
        slots |= _of("part", request.parts) | ({Slot("weight")} if request.weighed else set())
    if request.kind == "forward":
        slots |= _saved(request)
    return frozenset(slots | set(_results(request)))


def _results(request: Request) -> tuple[Slot, ...]:
    match request.kind:
        case "step":
            return (Slot("mean"), Slot("scale"), *([Slot("agreed")] if request.commit else []))
        case "accumulate" | "local":
            return (Slot("mean"),)
        case "evaluate":
            return (Slot("mean"), Slot("weight")) if request.stage.scores else (Slot("mean"),)
        case "update":
            return (Slot("scale"),)
        case "predict" | "forward":
            outputs = request.stage.outputs if request.stage.scores else ()
            return tuple(Slot("act", v, m) for m in range(request.microbatches) for v in outputs)
    return ()
