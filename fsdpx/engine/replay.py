"""Forward and backward of units as CUDA graphs: what they launch is captured once, and launched again in later steps.

A step as a whole is no graph: the host reads losses, and calls MPI. But what a unit computes for a microbatch is the
same in each step, as long as shapes and addresses are. When a program runs a second time in a row on batches of the
same shapes, the work of each of its actions is captured in the order of the program; from the third time on it is
replayed. Work that a graph must not hold runs as usual, node by node: work that draws random numbers, communicates with
other ranks, takes numbers from the host or shows the host some, and code that does not declare that it always does the
same."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fsdpx.array.kernels import choice
from fsdpx.comm.calls import Call, Handle
from fsdpx.comm.communicator import Wrapper
from fsdpx.cuda.devices import is_on_gpu
from fsdpx.cuda.graphs import GraphMemory
from fsdpx.engine import compute
from fsdpx.engine.lines import Stacks
from fsdpx.layout.units import Unit
from fsdpx.nn.container import Recomputed
from fsdpx.nn.gradients import GradientEntry, Gradients
from fsdpx.nn.layer import Env, Layer
from fsdpx.program import Action
from fsdpx.state.feed import Feed

__all__ = ["ProgramGraphs", "Replay", "Uncapturable", "restless"]

MOST, TURNS = 2, 8
"""Recordings of one program that are kept, one for each shape of batches, and that are made in all: a program whose
buffers move again and again is not worth recording."""
AXES = ("world", "replica", "shard", "data", "pipe", "tensor", "group")
METHODS = ("forward", "recompute", "backward", "backward_leaf", "backward_input", "backward_params")
BRINGS = ("array", "asarray", "ascontiguousarray", "asanyarray", "concatenate", "stack", "hstack", "vstack")
"""Functions that bring numbers from the host, unless they are given an array of the GPU; so do those that join several
arrays, for which CuPy brings their addresses."""
KEPT_OF = {"B": "F", "I": "F", "W": "I"}
"""Verb -> the verb that must have been captured before, to have left its results in place; R stands for F."""


class Uncapturable(Exception):
    """Raised by work that a graph must not hold; its text says why."""


# -- which layers ------------------------------------------------------------------------------------------------------


def restless(layer: Layer) -> str | None:
    """Why the code of a layer, or of one inside it, may do something else each time; None: it always does the same.
    The layers of fsdpx say no if so; any other class says `replays = True` for the methods it defines."""
    for name in METHODS:
        of = next(kind for kind in type(layer).__mro__ if name in vars(kind))
        declared = vars(of).get("replays")
        if not (of.__module__.startswith("fsdpx.nn.") if declared is None else declared):
            return f"{of.__name__}.{name} does not say that it always does the same (replays = True)"
    return next((why for child in layer.children().values() if (why := restless(child))), None)


class _Silent(Wrapper):
    """Ranks do not communicate in a graph."""

    def issue(self, call: Call) -> Handle:
        raise Uncapturable("speaks with other ranks")

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        raise Uncapturable("speaks with other ranks")

    def all_gather_object(self, obj: Any) -> list[Any]:
        raise Uncapturable("speaks with other ranks")


class _Random:
    """Random numbers, which differ in each step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def at(self, name: str) -> _Random:
        return _Random(f"{self.path}.{name}" if self.path and name else self.path or name)

    def __getattr__(self, name: str) -> Any:
        raise Uncapturable("draws random numbers")


class _Counters:
    """Counters of the host, which change in each step."""

    def __getattr__(self, name: str) -> Any:
        raise Uncapturable("counts on the host")


class _Namespace:
    """Functions of arrays, without those that bring numbers from the host: a graph would look for them there again."""

    def __init__(self, xp: Any) -> None:
        self._xp, self.__name__ = xp, xp.__name__

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._xp, name)
        return partial(_without_host, found) if name in BRINGS else found


def _without_host(function: Callable[..., Any], value: Any, *more: Any, **options: Any) -> Any:
    if not is_on_gpu(value):
        raise Uncapturable("takes numbers from the host")
    return function(value, *more, **options)


def _still(env: Env) -> Env:
    """The same environment, in which everything raises that a graph would not repeat."""
    silent: dict[str, Any] = {axis: _Silent(getattr(env.mesh, axis)) for axis in AXES}
    random: Any = _Random(env.random.path)
    counters: Any = _Counters()
    return replace(env, xp=_Namespace(env.xp), mesh=replace(env.mesh, **silent, counters=counters), random=random)


# -- what an action computes -------------------------------------------------------------------------------------------


@dataclass
class Work:
    """An action's call of `fsdpx.engine.compute`, to be run for some of the nodes. body: (unit, envs, params, grads,
    held, flows) -> what is kept, per node. flows: value -> array, taken and given. backwards: last node first.
    kept: what is left per node for a later action, as far as it has run."""

    unit: Unit
    envs: Sequence[Env]
    params: Sequence[Any]
    grads: Sequence[Any]
    held: list[Any] | None
    flows: dict[int, Any]
    body: Callable[..., list[Any] | None]
    backwards: bool
    kept: list[Any] = field(default_factory=list)

    def of(self, part: CapturedPart) -> dict[int, Any]:
        """The values that a part of the nodes reads, taken out where it uses them up."""
        flows = self.flows
        if self.backwards:
            return {v: flows.pop(v) for v in (*part.made, *part.reads) if v in flows}
        return {v: flows[v] for v in part.reads}

    def give(self, part: CapturedPart, flows: Mapping[int, Any]) -> None:
        """The results of a part: gradients, or outputs that later nodes or units read."""
        self.flows.update(flows if self.backwards else {v: flows[v] for v in part.outputs})

    def keep(self, part: CapturedPart, kept: list[Any] | None) -> None:
        if kept is not None:
            self.kept[part.start : part.stop] = kept

    def run(self, part: CapturedPart, envs: Sequence[Env], flows: dict[int, Any], held: Any) -> list[Any] | None:
        return self.body(part.unit, envs, part.params, part.grads, held, flows)


class CapturedPart:
    """Some nodes of a unit, one after the other, cut once: views by list stay the same. made: their values. reads: what
    they read beside these. outputs: what is read outside of them. graph: of their work."""

    def __init__(self, work: Work, start: int, stop: int) -> None:
        unit, here = work.unit, slice(start, stop)
        self.start, self.stop = start, stop
        whole = stop - start == len(unit.nodes)
        cut = replace(unit, nodes=unit.nodes[here], trains=unit.trains[here])
        self.unit = unit if whole else cut
        self.params, self.grads = (work.params, work.grads) if whole else (work.params[here], work.grads[here])
        later = {*unit.outputs, *(v for node in unit.nodes[stop:] for v in node.inputs)}
        self.made = {node.output: None for node in self.unit.nodes}
        self.reads = {v: None for node in self.unit.nodes for v in node.inputs if v not in self.made}
        self.outputs = [v for v in self.made if v in later]
        self.graph: CapturedGraph | None = None


@dataclass
class CapturedGraph:
    """A part as a graph. takes: value -> the array that it reads, by itself or, if in `copied`, as a copy. held: the
    arrays of what an earlier action kept. gives, kept: what it leaves. flags: which gradients were written before, and
    then."""

    graph: Any
    takes: dict[int, Any]
    copied: frozenset[int]
    held: list[Any]
    gives: dict[int, Any]
    kept: Any
    entries: list[GradientEntry]
    flags: tuple[bytes, bytes]

    def fits(self, flows: Mapping[int, Any], held: Any) -> bool:
        if flows.keys() != self.takes.keys() or _flags(self.entries) != self.flags[0]:
            return False
        for v, array in flows.items():
            wanted = self.takes[v]
            if v in self.copied:
                if (array.shape, array.dtype, array.strides) != (wanted.shape, wanted.dtype, wanted.strides):
                    return False
            elif array is not wanted:
                return False
        leaves = _leaves(held)
        return len(leaves) == len(self.held) and all(a is b for a, b in zip(leaves, self.held, strict=True))

    def launch(self, flows: Mapping[int, Any]) -> None:
        for v in self.copied:
            self.takes[v][...] = flows[v]
        self.graph.launch()
        for entry, flag in zip(self.entries, self.flags[1], strict=True):
            entry.flags[entry.at] = flag


@dataclass
class ReplayPlan:
    """The parts of an action, in the order in which they run. params, grads: of which arrays they are views."""

    params: Any
    grads: Any
    parts: list[CapturedPart]


# -- programs ----------------------------------------------------------------------------------------------------------


class ProgramGraphs:
    """The graphs of one program for batches of one shape. whole: every action was there. stale: buffers have moved."""

    def __init__(self, views: Any, refused: dict[tuple[str, str], str]) -> None:
        self.views, self.refused = views, refused
        self.memory = GraphMemory()
        self.whole = self.stale = False
        self._plans: dict[Action, ReplayPlan] = {}
        self._left: set[tuple[str, int | None, int | None, int]] = set()  # verb, unit, microbatch, node: captured
        self._layers: dict[str, str | None] = {}

    def body(self, action: Action, body: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement for a function of `fsdpx.engine.compute` in this action."""
        return partial(getattr(self, f"_{body.__name__}"), action)

    def _forward(
        self,
        action: Action,
        unit: Unit,
        envs: Sequence[Env],
        params: Any,
        values: dict[int, Any],
        keep: bool,
        stacks: Stacks,
        constant: Any,
    ) -> list[Any]:
        def body(unit: Unit, envs: Any, params: Any, grads: Any, held: Any, flows: dict[int, Any]) -> list[Any]:
            return compute.forward(unit, envs, params, flows, keep, stacks, constant)

        work = Work(unit, envs, params, (), None, values, body, False, [None] * len(unit.nodes))
        self._run(action, work)
        return work.kept

    def _backward(
        self,
        action: Action,
        unit: Unit,
        envs: Sequence[Env],
        params: Any,
        grads: Any,
        saved: list[Any],
        dvalues: dict[int, Any],
        stacks: Stacks,
        constant: Any,
    ) -> None:
        def body(unit: Unit, envs: Any, params: Any, grads: Any, held: Any, flows: dict[int, Any]) -> None:
            compute.backward(unit, envs, params, grads, held, flows, stacks, constant)

        self._run(action, Work(unit, envs, params, grads, saved, dvalues, body, True))

    def _backward_input(
        self,
        action: Action,
        unit: Unit,
        envs: Sequence[Env],
        params: Any,
        saved: list[Any],
        dvalues: dict[int, Any],
        constant: Any,
    ) -> list[Any]:
        def body(unit: Unit, envs: Any, params: Any, grads: Any, held: Any, flows: dict[int, Any]) -> list[Any]:
            return compute.backward_input(unit, envs, params, held, flows, constant)

        work = Work(unit, envs, params, (), saved, dvalues, body, True, [None] * len(unit.nodes))
        self._run(action, work)
        return work.kept

    def _backward_params(self, action: Action, unit: Unit, envs: Sequence[Env], grads: Any, kept: list[Any]) -> None:
        def body(unit: Unit, envs: Any, params: Any, grads: Any, held: Any, flows: dict[int, Any]) -> None:
            compute.backward_params(unit, envs, grads, held)

        self._run(action, Work(unit, envs, (), grads, kept, {}, body, True))

    def _run(self, action: Action, work: Work) -> None:
        if not self.whole:
            self._plans[action] = ReplayPlan(work.params, work.grads, self._record(action, work))
            return
        plan = self._plans.get(action)
        if plan is None or plan.params is not work.params or plan.grads is not work.grads:
            self.stale, parts = True, [CapturedPart(work, 0, len(work.unit.nodes))]
        else:
            parts = plan.parts
        for part in parts:
            self._replay(part, work)

    def _replay(self, part: CapturedPart, work: Work) -> None:
        flows, held = work.of(part), _cut(work.held, part)
        graph = part.graph
        if graph is None or not graph.fits(flows, held):
            self.stale = self.stale or graph is not None
            self._eagerly(part, work, flows, held)
            return
        graph.launch(flows)
        work.give(part, graph.gives)
        work.keep(part, _mapped(graph.kept, _same))

    def _eagerly(self, part: CapturedPart, work: Work, flows: dict[int, Any], held: Any) -> None:
        kept = work.run(part, work.envs[part.start : part.stop], flows, held)
        work.give(part, flows)
        work.keep(part, kept)

    # -- the run that is recorded --------------------------------------------------------------------------------------

    def _record(self, action: Action, work: Work) -> list[CapturedPart]:
        """Run the action and capture what is possible: a node that raises in a capture runs as usual, and the rest of
        its part is tried again without it."""
        done: list[CapturedPart] = []
        count = len(work.unit.nodes)
        order = range(count - 1, -1, -1) if work.backwards else range(count)
        at = 0
        while at < count:
            still = self._capturable(action, work, order[at])
            end = at + 1
            while end < count and self._capturable(action, work, order[end]) == still:
                end += 1
            first, last = sorted((order[at], order[end - 1]))
            part = CapturedPart(work, first, last + 1)
            flows, held = work.of(part), _cut(work.held, part)
            if not still:
                self._eagerly(part, work, flows, held)
            elif not self._capture(action, part, work, flows, held):
                continue  # with other nodes
            done.append(part)
            at = end
        return done

    def _capturable(self, action: Action, work: Work, i: int) -> bool:
        node = work.unit.nodes[i]
        if node.path not in self._layers:
            self._layers[node.path] = restless(node.layer)
        if (why := self._layers[node.path]) is not None:
            self.refused[action.op, node.path] = why
        needs = KEPT_OF.get(action.op)
        if needs is not None and (needs, action.unit, action.mb, i) not in self._left:
            return False
        return (action.op, node.path) not in self.refused

    def _capture(self, action: Action, part: CapturedPart, work: Work, flows: dict[int, Any], held: Any) -> bool:
        """Capture and launch a part. If that fails nothing has run: False, its arrays are put back, and the nodes to
        blame are noted. The arrays are held until then, or the next capture might use their memory."""
        memory, entries, before = self.memory, _entries(part.grads), _flags(_entries(part.grads))
        spare, given = held, dict(flows)
        try:
            held, wanted = _mapped(spare, _same), _leaves(_mapped(spare, memory.lasting))
            takes, copied = self._taken(part, flows)
            envs = [_still(env) for env in work.envs[part.start : part.stop]]
            graph, kept = memory.captured(lambda: work.run(part, envs, flows, held))
            gives = flows if work.backwards else {v: flows[v] for v in part.outputs}
            lasting = {v: memory.lasting(a) for v, a in gives.items()}, _mapped(kept, memory.lasting)
        except Exception as error:
            self._blame(action, part, error)
            traceback.clear_frames(error.__traceback__)  # they hold arrays, in a circle that is found late
            for entry, flag in zip(entries, before, strict=True):
                entry.flags[entry.at] = flag
            if work.held is not None:
                work.held[part.start : part.stop] = spare
            if work.backwards:
                work.flows.update(given)
            return False
        made = part.graph = CapturedGraph(graph, takes, copied, wanted, *lasting, entries, (before, _flags(entries)))
        made.launch(given)
        work.give(part, gives)
        work.keep(part, kept)
        verb = "F" if action.op == "R" else action.op
        self._left.update((verb, action.unit, action.mb, i) for i in range(part.start, part.stop))
        return True

    def _taken(self, part: CapturedPart, flows: dict[int, Any]) -> tuple[dict[int, Any], frozenset[int]]:
        """The arrays that the graph reads, by value, and which are copies; those stand in `flows` from then on."""
        takes, copied = {}, []
        for v, array in flows.items():
            if self.memory.owns(array):
                takes[v] = self.memory.lasting(array)
                continue
            copy = self.memory.like(array) if is_on_gpu(array) else None
            if copy is None:
                node = next(n for n in part.unit.nodes if v in (*n.inputs, n.output))
                error = Uncapturable("reads an array with gaps")
                error.add_note(f"of layer {node.path!r} {node.layer!r}")
                raise error
            flows[v], takes[v] = copy, self.memory.lasting(copy)
            copied.append(v)
        return takes, frozenset(copied)

    def _blame(self, action: Action, part: CapturedPart, error: Exception) -> None:
        """The node that the error names, else all of them."""
        notes = " ".join(getattr(error, "__notes__", ()))
        named = [node.path for node in part.unit.nodes if f"of layer {node.path!r} " in notes]
        for path in named or [node.path for node in part.unit.nodes]:
            self.refused[action.op, path] = " ".join(str(error).split()) or type(error).__name__


class Replay:
    """The graphs of one program, for batches of several shapes."""

    def __init__(self) -> None:
        self.now: ProgramGraphs | None = None
        self.refused: dict[tuple[str, str], str] = {}
        self._graphs: dict[Any, ProgramGraphs] = {}
        self._before: Any = None
        self._turns = 0

    def begin(self, views: Any, feed: Feed) -> ProgramGraphs | None:
        """The graphs that this run is captured in, or replayed from; None: it runs as usual."""
        known = {key: one for key, one in self._graphs.items() if one.whole and not one.stale}
        self._graphs = {key: one for key, one in known.items() if one.views is views}
        key = choice.active, feed.training, tuple(None if b is None else _shapes(b.inputs) for b in feed.batch)
        repeated, self._before = self._before == key, key
        self.now = self._graphs.get(key)
        if self.now is None and repeated and len(self._graphs) < MOST and self._turns < TURNS:
            self._turns += 1
            self.now = self._graphs[key] = ProgramGraphs(views, self.refused)
        return self.now

    def end(self) -> None:
        """The run has completed."""
        if self.now is not None:
            self.now.whole = True

    def reasons(self) -> dict[str, str]:
        """The layers that are not captured, and why: path of a layer -> reason."""
        return {path: why for (_, path), why in self.refused.items()}


# -- values in the order of their structure ----------------------------------------------------------------------------


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure, its arrays changed; lists and dicts are new ones, as backward empties them."""
    kind = type(value)
    if is_on_gpu(value):
        return change(value)
    if kind is list:
        return [_mapped(part, change) for part in value]
    if kind is dict:
        return {name: _mapped(part, change) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = [_mapped(part, change) for part in value]
        return kind(*parts) if hasattr(value, "_fields") else tuple(parts)
    if value is None or kind in (bool, int, float, str, object, Recomputed) or isinstance(value, np.dtype):
        return value
    raise Uncapturable(f"keeps {kind.__name__} for backward")


def _leaves(value: Any) -> list[Any]:
    """Its arrays."""
    found: list[Any] = []
    _mapped(value, found.append)
    return found


def _same(array: Any) -> Any:
    return array


def _cut(held: list[Any] | None, part: CapturedPart) -> list[Any] | None:
    """The data kept for these nodes; taken out, so that it lives no longer than they need it."""
    if held is None:
        return None
    mine = held[part.start : part.stop]
    held[part.start : part.stop] = [None] * len(mine)
    return mine


def _entries(grads: Sequence[Any]) -> list[GradientEntry]:
    """All gradients of these nodes, each once."""
    found = {id(e): e for g in grads if isinstance(g, Gradients) for e in g.entries.values()}
    return list(found.values())


def _flags(entries: Sequence[GradientEntry]) -> bytes:
    return bytes(e.flags[e.at] for e in entries)


def _shapes(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), str(x.dtype)) for x in inputs)
