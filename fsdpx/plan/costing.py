"""What the actions of a dry run cost. Equal layers are followed once: what they gave then is made of new arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

from fsdpx.core.array.shapes.array import MemoryMeter, ShapeArray, Storage
from fsdpx.core.array.shapes.flop_counter import WorkCount, count_work, repeat_work
from fsdpx.core.array.shapes.shape_cache import build_from_plan, make_plan
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.comm.communicator import TrafficCounters
from fsdpx.core.program import Action, Program
from fsdpx.core.state.train_state import TrainState
from fsdpx.core.state.units import Unit
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.ext.observe.recording import TimelineRecorder
from fsdpx.nn.container import RecomputePlaceholder
from fsdpx.nn.layer import Layer

__all__ = ["ActionCost", "ActionCostRecorder"]

Call = tuple[str, str, int, int]
"""Axis, collective, calls, bytes that this rank sends in all of them."""

LAYERS = tuple(f"fsdpx.{name}." for name in ("nn", "ext.fields", "ext.lora", "ext.moe"))
"""Where layers are whose attributes say all that they compute."""


@dataclass
class ActionCost:
    """What one action computes and moves. calls: those inside of layers among them."""

    work: WorkCount
    calls: tuple[Call, ...] = ()


class _LayerResult(NamedTuple):
    """What a part of a layer did once. plan: how to make its result; inner: bytes that were alive in it at most beyond
    those before; flags: which gradients are written after it."""

    plan: Any
    work: WorkCount
    calls: tuple[Call, ...]
    inner: int
    flags: tuple[int, ...]


MAX_KNOWN_CALLS = 4096
"""Calls of layers that are remembered; when there are more, all are forgotten before the next step."""
_KNOWN: dict[Any, _LayerResult | None] = {}
_ALIKE: dict[Any, tuple[Layer, list[Any]]] = {}
"""By what tells a layer from others: the first such layer, and objects that must live as long as it is known."""
_FIRST: dict[int, tuple[Layer, Layer]] = {}
"""By identity: a layer, and the first one like it."""


class ActionCostRecorder(TimelineRecorder):
    """Notes the cost of each action of the next program, in its order. work: what is counted into."""

    def __init__(self) -> None:
        super().__init__(1)
        self.costs: list[tuple[Action, ActionCost]] = []
        self.work, self.meter, self.counters = WorkCount(), MemoryMeter(), TrafficCounters()
        self._calls, self._here = TrafficCounters(), frozenset[int]()
        self._known = _KNOWN
        if len(_KNOWN) > MAX_KNOWN_CALLS:
            for known in (_KNOWN, _ALIKE, _FIRST):
                known.clear()

    def watch_trainer(self, trainer: Trainer, meter: MemoryMeter) -> None:
        """From now on note what this trainer does. meter: of its arrays."""
        place = trainer.inspect.placement
        self.meter, self.counters, self._here = meter, place.axes.counters, frozenset(place.stage.own_units)
        trainer.inspect.engine.add_observer(self)

    def on_program_begin(self, program: Program, state: TrainState) -> None:
        """The program begins: what came before it counts nothing."""
        self.costs.clear()
        self._take_counts()

    def wrap_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """The same units, with layers that remember."""
        if len(self._units) < len(units):
            for unit in units:
                nodes = (
                    unit.nodes
                    if unit.index not in self._here
                    else tuple(replace(n, layer=cast(Layer, _MemoizedLayer(n.layer, self))) for n in unit.nodes)
                )
                self._units.append(replace(unit, nodes=nodes))
        return self._units

    def on_action_end(
        self, planned: Any, begin: float, ready: float, end: float, nbytes: int, values: Sequence[Any]
    ) -> None:
        """An action came to its end."""
        self.costs.append((planned.action, ActionCost(*self._take_counts(nbytes > 0))))

    def on_transfer_complete(self, action: Action, transfer: TimedTransfer) -> None:
        """Nothing is under way in a dry run."""

    def on_outside_program(self, what: str, begin: float, end: float, nbytes: int) -> None:
        """What is beside programs takes no time here."""

    def _take_counts(self, moved: bool = True) -> tuple[WorkCount, tuple[Call, ...]]:
        """Work and calls since the last look."""
        work = self.work.take_counts()
        if not moved:
            return work, ()
        calls = tuple(self.counters.counts_since(self._calls))
        self._calls = self.counters.copy()
        return work, calls

    # -- layers --------------------------------------------------------------------------------------------------------

    def follow_once(
        self, key: tuple[Any, ...], run: Callable[[], Any], given: Sequence[Any], flags: _Flags, constants: Any
    ) -> Any:
        """`run()`, or what it gave when it had the same key, of the arrays in `given`. constants: see `LayerContext`; a
        call that makes one is not remembered."""
        roots: list[Storage] = []
        key = (*key, _describe_shapes((given, constants), roots), flags.read_flags())
        made = self._known.get(key)
        if made is None:
            return self._follow_first(key, run, roots, flags, constants) if key not in self._known else run()
        repeat_work(made.work)
        for axis, verb, calls, nbytes in made.calls:
            self.counters.add_calls(axis, verb, nbytes, calls)
        meter = self.meter
        meter.peak = max(meter.peak, meter.live + made.inner)
        flags.write_flags(made.flags)
        return build_from_plan(made.plan, roots)

    def _follow_first(
        self, key: Any, run: Callable[[], Any], roots: list[Storage], flags: _Flags, constants: Any
    ) -> Any:
        there, meter, before = len(constants), self.meter, self.counters.copy()
        peak, meter.peak, live = meter.peak, meter.live, meter.live
        with count_work() as work:
            found = run()
        repeat_work(work)
        inner, meter.peak = meter.peak - live, max(peak, meter.peak)
        if len(constants) > there:
            return found
        try:
            plan = make_plan(found, roots, constants=(RecomputePlaceholder,))
        except TypeError:  # it gives something that is not known here
            self._known[key] = None
            return found
        calls = tuple(self.counters.counts_since(before))
        self._known[key] = _LayerResult(plan, work, calls, inner, flags.read_flags())
        return found


class _Flags:
    """Which gradients of a layer are written."""

    __slots__ = ("_entries",)

    def __init__(self, g: Any = None) -> None:
        self._entries = [] if g is None else list(g.entries.values())

    def read_flags(self) -> tuple[int, ...]:
        return tuple([entry.flags[entry.at] for entry in self._entries])

    def write_flags(self, flags: tuple[int, ...]) -> None:
        for entry, flag in zip(self._entries, flags, strict=True):
            entry.flags[entry.at] = flag


TAKES = {"forward": "p", "backward": "pg", "backward_leaf": "pg", "backward_input": "p", "backward_params": "g"}
"""What a part of a layer takes behind its Env: parameters, gradients; then arrays."""


class _MemoizedLayer:
    """The layer of a node, each part of which is followed once for arguments of the same shapes."""

    def __init__(self, layer: Layer, costing: ActionCostRecorder) -> None:
        self._layer, self._costing = _find_first_equal(layer), costing

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._layer, name)
        return partial(self._call_once, name, found) if name in TAKES else found

    def _call_once(self, what: str, run: Callable[..., Any], env: Any, *arguments: Any) -> Any:
        own, given = dict(zip(TAKES[what], arguments, strict=False)), arguments[len(TAKES[what]) :]
        lines = [(line.rank, line.size) for line in (env.mesh.tensor, env.mesh.data, *env.mesh.domain)]
        key = (id(self._layer), what, env.training, env.recomputing, env.recompute, env.time, *lines)
        parameters = tuple(own["p"].values()) if "p" in own else ()
        return self._costing.follow_once(
            key, lambda: run(env, *arguments), (given, parameters), _Flags(own.get("g")), env.constants
        )

    def __repr__(self) -> str:
        return repr(self._layer)


def _find_first_equal(layer: Layer) -> Layer:
    """The first layer that computes the same: what a container saved is known by the container."""
    if id(layer) not in _FIRST:
        kept: list[Any] = [layer]
        _FIRST[id(layer)] = layer, _ALIKE.setdefault(_make_signature(layer, kept), (layer, kept))[0]
    return _FIRST[id(layer)][1]


def _make_signature(value: Any, kept: list[Any]) -> Any:
    """What tells a layer, or a part of one, from others: its attributes. Objects that have none are added to `kept`,
    and told apart by which they are."""
    if value is None or isinstance(value, int | float | str | bytes | type):
        return value
    if isinstance(value, tuple | list):
        return type(value), *[_make_signature(one, kept) for one in value]
    if isinstance(value, dict):
        return dict, *[(name, _make_signature(one, kept)) for name, one in value.items()]
    if type(value).__module__.startswith(LAYERS) and hasattr(value, "__dict__"):
        return type(value), *[(name, _make_signature(one, kept)) for name, one in vars(value).items()]
    kept.append(value)
    return type(value), id(value)


def _describe_shapes(value: Any, roots: list[Storage]) -> Any:
    """What tells the shapes in `value` from others, and which arrays share memory; the root of each is added to
    `roots`."""
    kind = type(value)
    if kind is ShapeArray:
        roots.append(value.root)
        return value.shape, value.dtype, roots.index(value.root)
    if isinstance(value, tuple | list):
        return kind, *[_describe_shapes(one, roots) for one in value]
    if isinstance(value, dict):
        return kind, *[(name, _describe_shapes(one, roots)) for name, one in value.items()]
    return value if isinstance(value, int | float | str | bool) else kind
