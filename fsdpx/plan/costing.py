"""Runs a training step on shape-only arrays (arrays without data), and records the cost of each action, such as the
forward pass of one layer group. Equal layers run only once: later calls reuse the recorded cost, and create new result
arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from fsdpx.core.array.shapes.array import MemoryMeter, ShapeArray, Storage
from fsdpx.core.array.shapes.flop_counter import WorkCount, add_counted_work, counting_work
from fsdpx.core.array.shapes.shape_cache import build_value_from_template, make_template_to_rebuild_value
from fsdpx.core.base.dataclass import dataclass, replace
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
"""(Axis, collective, number of calls, total bytes that this rank sends in these calls)."""

LAYER_MODULES = tuple(f"fsdpx.{name}." for name in ("nn", "ext.fields", "ext.lora", "ext.moe"))
"""Prefixes of modules whose layers are fully described by their attributes."""


@dataclass
class ActionCost:
    """Work and communication of one action of the step.

    Attributes
    ----------
    work : counted matrix products and kernel calls
    calls : communication calls, including calls inside layers
    """

    work: WorkCount
    calls: tuple[Call, ...] = ()


class _LayerResult(NamedTuple):
    """Recorded result and cost of one call of a layer's method.

    Attributes
    ----------
    plan : instructions for rebuilding the return value
    work, calls : work and communication of the call
    inner : peak bytes in use during the call, minus the bytes in use before the call
    flags : for each gradient of the layer, whether it has been written by the end of the call
    """

    plan: Any
    work: WorkCount
    calls: tuple[Call, ...]
    inner: int
    flags: tuple[int, ...]


MAX_MEMOIZED_CALLS = 4096
"""Maximum number of memoized layer calls. If there are more, all memoized calls are dropped before the next step."""
_MEMOIZED: dict[Any, _LayerResult | None] = {}
_LAYER_BY_KEY: dict[Any, tuple[Layer, list[Any]]] = {}
"""For each key, the first layer with this key, and the objects whose Python ids are part of the key. The objects are
kept alive, so that their ids cannot be reused."""
_FIRST_EQUAL: dict[int, tuple[Layer, Layer]] = {}
"""Id of a layer -> (the layer itself, the first layer that is equal to it)."""


class ActionCostRecorder(TimelineRecorder):
    """Observer that records the cost of each action of a shape-only training step, in order. The step adds its work to
    the counter `work`."""

    def __init__(self) -> None:
        super().__init__(1)
        self.costs: list[tuple[Action, ActionCost]] = []
        self.work, self.meter, self.counters = WorkCount(), MemoryMeter(), TrafficCounters()
        self._calls, self._here = TrafficCounters(), frozenset[int]()
        self._known = _MEMOIZED
        if len(_MEMOIZED) > MAX_MEMOIZED_CALLS:
            for known in (_MEMOIZED, _LAYER_BY_KEY, _FIRST_EQUAL):
                known.clear()

    def watch_trainer(self, trainer: Trainer, meter: MemoryMeter) -> None:
        """Record all subsequent actions of the trainer. `meter` measures the memory of the trainer's shape-only
        arrays."""
        place = trainer.inspect.placement
        self.meter, self.counters, self._here = meter, place.axes.counters, frozenset(place.stage.own_units)
        trainer.inspect.engine.add_observer(self)

    def on_program_begin(self, program: Program, state: TrainState) -> None:
        """Discard the costs and counts that were recorded for earlier programs."""
        self.costs.clear()
        self._pop_work_and_calls()

    def wrap_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Wrap each of this rank's layers so that the results of equal layers are reused, and return the units with
        the wrapped layers."""
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
        """Record the cost of this action: all work and communication since the end of the previous action."""
        self.costs.append((planned.action, ActionCost(*self._pop_work_and_calls(nbytes > 0))))

    def on_transfer_complete(self, action: Action, transfer: TimedTransfer) -> None:
        """Ignore the event: a dry run has no transfers in flight."""

    def on_outside_program(self, what: str, begin: float, end: float, nbytes: int) -> None:
        """Ignore the event: work outside of programs takes no time in a dry run."""

    def _pop_work_and_calls(self, moved: bool = True) -> tuple[WorkCount, tuple[Call, ...]]:
        """Return the work and the communication calls that were recorded since this method was last called. If `moved`
        is False, nothing was communicated, and the returned calls are empty."""
        work = self.work.pop_counts()
        if not moved:
            return work, ()
        calls = tuple(self.counters.get_counts_since(self._calls))
        self._calls = self.counters.copy()
        return work, calls

    def run_memoized(
        self, key: tuple[Any, ...], run: Callable[[], Any], arguments: Sequence[Any], flags: _Flags, constants: Any
    ) -> Any:
        """Return the result of `run()`. If an equal call has already run, its result is rebuilt instead, and its work
        is counted again, without calling `run()`. Calls are equal if `key`, the shapes of `arguments` and the state of
        the gradients are equal.

        `flags` tells which gradients of the layer have been written. `constants` is the cache of the `LayerContext`;
        calls that add to it are not memoized."""
        roots: list[Storage] = []
        key = (*key, _make_shape_key((arguments, constants), roots), flags.read_flags())
        made = self._known.get(key)
        if made is None:
            return self._run_and_memoize(key, run, roots, flags, constants) if key not in self._known else run()
        add_counted_work(made.work)
        for axis, verb, calls, nbytes in made.calls:
            self.counters.add_calls(axis, verb, nbytes, calls)
        meter = self.meter
        meter.peak = max(meter.peak, meter.live + made.inner)
        flags.write_flags(made.flags)
        return build_value_from_template(made.plan, roots)

    def _run_and_memoize(
        self, key: Any, run: Callable[[], Any], roots: list[Storage], flags: _Flags, constants: Any
    ) -> Any:
        """Call `run()`, and store the cost of this call under `key`, together with a plan for rebuilding the result.
        If the result cannot be rebuilt, equal calls run again."""
        there, meter, before = len(constants), self.meter, self.counters.copy()
        peak, meter.peak, live = meter.peak, meter.live, meter.live
        with counting_work() as work:
            found = run()
        add_counted_work(work)
        inner, meter.peak = meter.peak - live, max(peak, meter.peak)
        if len(constants) > there:
            return found
        try:
            plan = make_template_to_rebuild_value(found, roots, constants=(RecomputePlaceholder,))
        except TypeError:  # the result holds an object of unknown type and cannot be rebuilt, so do not cache it
            self._known[key] = None
            return found
        calls = tuple(self.counters.get_counts_since(before))
        self._known[key] = _LayerResult(plan, work, calls, inner, flags.read_flags())
        return found


class _Flags:
    """Reads and writes the flags that tell which gradients of a layer have been written."""

    __slots__ = ("_entries",)

    def __init__(self, g: Any = None) -> None:
        self._entries = [] if g is None else list(g.entries.values())

    def read_flags(self) -> tuple[int, ...]:
        return tuple([entry.flags[entry.at] for entry in self._entries])

    def write_flags(self, flags: tuple[int, ...]) -> None:
        for entry, flag in zip(self._entries, flags, strict=True):
            entry.flags[entry.at] = flag


ARGUMENTS = {"forward": "p", "backward": "pg", "backward_leaf": "pg", "backward_input": "p", "backward_params": "g"}
"""For each method of a layer, the arguments that come after the `LayerContext` and before the arrays: p stands for
parameters, and g for gradients."""


class _MemoizedLayer:
    """Wraps a layer so that each method of the layer runs only once for each combination of argument shapes."""

    def __init__(self, layer: Layer, costing: ActionCostRecorder) -> None:
        self._layer, self._costing = _get_first_seen_equal_layer(layer), costing

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._layer, name)
        return partial(self._call_memoized, name, found) if name in ARGUMENTS else found

    def _call_memoized(self, method: str, run: Callable[..., Any], env: Any, *arguments: Any) -> Any:
        """Call a method of the layer through `ActionCostRecorder.run_memoized`. The key contains everything in `env`
        that affects the shapes and costs."""
        own, given = dict(zip(ARGUMENTS[method], arguments, strict=False)), arguments[len(ARGUMENTS[method]) :]
        lines = [(line.rank, line.size) for line in (env.mesh.tensor, env.mesh.data, *env.mesh.domain)]
        key = (id(self._layer), method, env.training, env.recomputing, env.recompute, env.time, *lines)
        parameters = tuple(own["p"].values()) if "p" in own else ()
        return self._costing.run_memoized(
            key, lambda: run(env, *arguments), (given, parameters), _Flags(own.get("g")), env.constants
        )

    def __repr__(self) -> str:
        return repr(self._layer)


def _get_first_seen_equal_layer(layer: Layer) -> Layer:
    """Return the first layer passed to this function that is equal to `layer`; this may be `layer` itself. Equal
    containers must be represented by the same object, because a container recognizes its saved placeholders only if the
    same object made them."""
    if id(layer) not in _FIRST_EQUAL:
        kept: list[Any] = [layer]
        _FIRST_EQUAL[id(layer)] = layer, _LAYER_BY_KEY.setdefault(_make_layer_key(layer, kept), (layer, kept))[0]
    return _FIRST_EQUAL[id(layer)][1]


def _make_layer_key(value: Any, kept: list[Any]) -> Any:
    """Return a hashable key that is equal for layers of the same class with equal attributes.

    Objects with unknown attributes are compared by id. They are appended to `kept`, which keeps them alive so that
    their ids cannot be reused."""
    if value is None or isinstance(value, int | float | str | bytes | type):
        return value
    if isinstance(value, tuple | list):
        return type(value), *[_make_layer_key(one, kept) for one in value]
    if isinstance(value, dict):
        return dict, *[(name, _make_layer_key(one, kept)) for name, one in value.items()]
    if type(value).__module__.startswith(LAYER_MODULES) and hasattr(value, "__dict__"):
        return type(value), *[(name, _make_layer_key(one, kept)) for name, one in vars(value).items()]
    kept.append(value)
    return type(value), id(value)


def _make_shape_key(value: Any, roots: list[Storage]) -> Any:
    """Return a hashable key for nested values. It contains the shapes and dtypes of arrays, and records which arrays
    share memory. The storage of each array is appended to `roots`."""
    kind = type(value)
    if kind is ShapeArray:
        roots.append(value.root)
        return value.shape, value.dtype, roots.index(value.root)
    if isinstance(value, tuple | list):
        return kind, *[_make_shape_key(one, roots) for one in value]
    if isinstance(value, dict):
        return kind, *[(name, _make_shape_key(one, roots)) for name, one in value.items()]
    return value if isinstance(value, int | float | str | bool) else kind
