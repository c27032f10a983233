"""Layers that contain other layers: Sequential, Residual and Composite. Each subclass of Composite defines a graph of
layer calls."""

from __future__ import annotations

import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any

from fsdpx.core.array import kernels
from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.name_hints import parse_patterns, require_pattern_matches
from fsdpx.core.program import find_values_without_gradient
from fsdpx.errors import ConfigError
from fsdpx.nn.init import Init
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, collect_specs, group_arrays_by_child
from fsdpx.nn.shape import Add, Multiply
from fsdpx.nn.tied_parameters import resolve_ties_to_canonical_names

__all__ = [
    "ChildCall",
    "ComposeValue",
    "Composite",
    "Container",
    "Residual",
    "Sequential",
    "make_steps_of_chain",
    "make_unused_name",
    "map_saved",
    "require_valid_child_name",
    "unwrap_single",
]  # fmt: skip


@dataclass(frozen=True)
class ChildCall:
    """One step of a container. The step calls `layer`. `sources` contains the names of the values that the layer takes,
    and `gives` the names of the values that the layer returns."""

    name: str
    layer: Layer
    sources: tuple[str, ...]
    gives: tuple[str, ...]


class RecomputePlaceholder:
    """Placeholder for the result of a cheap step (a call of a layer with `cheap = True`). The placeholder is saved for
    the backward pass instead of the result. The result is recomputed when the backward pass needs it.

    The placeholder stands for the result of step number `step` of the container `owner`. During the forward pass,
    results are identified by their Python ids. The placeholder holds the result as `y`, because Python could otherwise
    free it and give its id to a later array."""

    __slots__ = ("owner", "step", "y")

    def __init__(self, owner: Container, step: int, y: Any) -> None:
        self.owner, self.step, self.y = owner, step, y


class Container(Layer):
    """Base class for layers that contain other layers. A container is a list of steps in execution order. Each step
    calls a child layer, which reads and returns named values.

    Parameters
    ----------
    steps : the child layers, with the names of the values that they read and return
    inputs, outputs : names of the container's inputs and outputs
    ties : dict that maps aliases of shared parameters to canonical names
    frozen : name patterns (fnmatch) of parameters that are not trained
    """

    unit = False
    """Whether `linearize` keeps the container as a single node instead of replacing the container with its children.
    The parameters of a single node are gathered together."""

    fixed = False
    """Whether `forward` accesses steps by index. If so, no steps may be inserted."""

    initial: Mapping[str, Init] = MappingProxyType({})
    """Initializers by parameter name, used instead of the initializers of the layers. For example, they can read values
    from a file; see `fsdpx.models`."""

    def __init__(
        self,
        steps: Sequence[ChildCall],
        inputs: Sequence[str],
        outputs: Sequence[str],
        ties: Mapping[str, str] | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        self.steps = tuple(steps)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.n_inputs = len(self.inputs)
        self.n_outputs = len(self.outputs)
        self.collective = any(step.layer.collective for step in self.steps)
        self._last = _list_values_to_free_after_each_step(self.steps, self.outputs)
        if not isinstance(ties, Mapping | None):
            raise ConfigError(f"{type(self).__name__}(ties={ties!r}): a dict from name to name is needed")
        self._specs, self.ties = self._collect_specs_and_ties(dict(ties or {}), frozen)

    def specs(self) -> dict[str, ParameterSpec]:
        given = {
            name: replace(self._specs[name], init=init) for name, init in self.initial.items() if name in self._specs
        }
        return self._specs | given

    def children(self) -> dict[str, Layer]:
        return {step.name: step.layer for step in self.steps}

    def with_steps(self, steps: Sequence[ChildCall], outputs: Sequence[str] | None = None) -> Container:
        """Return a copy of the container with the given steps. The new steps must have the same parameters as the old
        ones, but may shard them differently over the tensor axis."""
        new = copy(self)
        new.steps = tuple(steps)
        new.outputs = self.outputs if outputs is None else tuple(outputs)
        new.collective = any(step.layer.collective for step in new.steps)
        new._last = _list_values_to_free_after_each_step(new.steps, new.outputs)
        fresh = collect_specs(new.children().items())
        assert fresh.keys() == self._specs.keys() | self.ties.keys(), "with_steps: other parameters"
        assert all(fresh[name].shape == spec.shape for name, spec in self._specs.items()), "with_steps: other shapes"
        new._specs = {name: replace(fresh[name], trainable=spec.trainable) for name, spec in self._specs.items()}
        return new

    def with_layers(self, layers: Mapping[str, Layer]) -> Container:
        """Return a copy of the container in which each step runs the layer that `layers` contains under the name of the
        step. The new layers may have additional parameters. Frozen parameters stay frozen."""
        new = copy(self)
        new.steps = tuple(replace(step, layer=layers[step.name]) for step in self.steps)
        new.collective = any(step.layer.collective for step in new.steps)
        fresh = {name: spec for name, spec in collect_specs(new.children().items()).items() if name not in self.ties}
        kept = {name for name, spec in self._specs.items() if not spec.trainable}
        new._specs = {
            name: replace(spec, trainable=spec.trainable and name not in kept) for name, spec in fresh.items()
        }
        return new

    def with_frozen_except_suffixes(self, trained: tuple[str, ...]) -> Container:
        """Return a copy of the container in which only parameters whose names end in one of the suffixes `trained` are
        trained."""
        new = copy(self)
        new._specs = {n: s if n.endswith(trained) else replace(s, trainable=False) for n, s in self._specs.items()}
        return new

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Any, Any]:
        parts, keeps = self._group_arrays_by_child(p), env.cache is None
        values = dict(zip(self.inputs, _as_tuple(x, len(self.inputs)), strict=True))
        saved: list[Any] = []
        recomputed: dict[int, RecomputePlaceholder] = {}
        for step, last in zip(self.steps, self._last, strict=True):
            sources, gives = step.sources, step.gives
            read = values[sources[0]] if len(sources) == 1 else tuple([values[source] for source in sources])
            y, held = step.layer.forward(env.child(step.name), parts.get(step.name, {}), read)
            if keeps:
                if recomputed and any(id(values[source]) in recomputed for source in sources):
                    held = map_saved(held, lambda part: recomputed.get(id(part), part))
                saved.append(held)
                if step.layer.cheap:  # later steps save a placeholder instead of y; the backward pass recomputes y
                    recomputed[id(y)] = RecomputePlaceholder(self, len(saved) - 1, y)
            for name in last:
                del values[name]
            if len(gives) == 1 and y.__class__ is not tuple:  # a fast path, since most layers return one array
                values[gives[0]] = y
            else:
                values.update(zip(gives, _as_tuple(y, len(gives)), strict=True))
        for placeholder in recomputed.values():
            placeholder.y = None
        return unwrap_single([values[name] for name in self.outputs]), tuple(saved)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Any) -> Any:
        """Run the backward pass of each step, in reverse order. The values that a step needs for its parameter
        gradients are freed as soon as the backward pass of this step has run."""
        parts, into = self._group_arrays_by_child(p), self._group_arrays_by_child(g)

        def backward_step(step: ChildCall, held: Any, dy: Any) -> Any:
            name = step.name
            return step.layer.backward(env.child(name), parts.get(name, {}), into.get(name, {}), held, dy)

        return self._run_backward_steps(env, parts, backward_step, saved, dy)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Any) -> None:
        """Run the backward pass only as far back as the first step with trained parameters. Earlier steps are skipped.
        If a step has trained parameters, but its inputs need no gradient, the layer's `backward_leaf` runs instead of
        `backward`."""
        parts, into = self._group_arrays_by_child(p), self._group_arrays_by_child(g)
        constant = find_values_without_gradient(
            (((step.name,), step.sources, step.gives) for step in self.steps), into, self.inputs
        )

        def backward_step(step: ChildCall, held: Any, dy: Any) -> Any:
            name = step.name
            given = env.child(name), parts.get(name, {}), into.get(name, {}), held, dy
            if not constant.issuperset(step.sources):
                return step.layer.backward(*given)
            step.layer.backward_leaf(*given)
            return unwrap_single([None] * len(step.sources))

        self._run_backward_steps(env, parts, backward_step, saved, dy, constant)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Any) -> tuple[Any, Any]:
        parts, kept = self._group_arrays_by_child(p), dict[str, Any]()

        def backward_step(step: ChildCall, held: Any, dy: Any) -> Any:
            dx, kept[step.name] = step.layer.backward_input(env.child(step.name), parts.get(step.name, {}), held, dy)
            return dx

        return self._run_backward_steps(env, parts, backward_step, saved, dy), kept

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        parts = self._group_arrays_by_child(g)
        for step in self.steps:
            if step.name in parts and step.name in kept:
                step.layer.backward_params(env.child(step.name), parts[step.name], kept[step.name])

    def _run_backward_steps(
        self,
        env: LayerContext,
        parts: Mapping[str, Any],
        backward_step: Callable[[ChildCall, Any, Any], Any],
        saved: Any,
        dy: Any,
        constant: Collection[str] = (),
    ) -> Any:
        """Run the backward pass of the steps in reverse order, and return the gradients of the container's inputs. The
        gradient is None for an input that no gradient flows to.

        `parts` are the parameters, grouped by child layer. `backward_step(step, saved, dy)` returns the gradients of a
        step's inputs. A step is skipped if no output depends on its results, or if all of its results are in
        `constant`, the names of values that need no gradient."""
        whole = partial(self._recompute_if_placeholder, env, parts, saved)
        given_here = zip(self.outputs, _as_tuple(dy, len(self.outputs)), strict=True)
        grads = {name: part for name, part in given_here if name not in constant}
        for step, held in zip(reversed(self.steps), reversed(saved), strict=True):
            given = [grads.pop(name, None) for name in step.gives]
            if all(part is None for part in given):
                continue
            dx = backward_step(step, map_saved(held, whole), unwrap_single(given))
            for name, part in zip(step.sources, _as_tuple(dx, len(step.sources)), strict=True):
                if name not in constant:
                    grads[name] = _add_optional(grads.get(name), part)
        return unwrap_single([grads.get(name) for name in self.inputs])

    def _recompute_if_placeholder(self, env: LayerContext, parts: Mapping[str, Any], saved: Any, part: Any) -> Any:
        """If `part` is a `RecomputePlaceholder` of this container, return the recomputed result. Otherwise, return
        `part` itself. `parts` are the parameters, grouped by child layer.

        This function calls itself. It is a method and not a closure, because a closure that calls itself forms a
        reference cycle. The cycle would keep `saved` alive until the garbage collector runs."""
        if not isinstance(part, RecomputePlaceholder) or part.owner is not self:
            return part
        step, whole = self.steps[part.step], partial(self._recompute_if_placeholder, env, parts, saved)
        return step.layer.recompute(env.child(step.name), parts.get(step.name, {}), map_saved(saved[part.step], whole))

    def _collect_specs_and_ties(
        self, ties: dict[str, str], frozen: Sequence[str]
    ) -> tuple[dict[str, ParameterSpec], dict[str, str]]:
        specs = collect_specs(self.children().items())
        ties = resolve_ties_to_canonical_names(type(self).__name__, ties, specs)
        free = {name: spec for name, spec in specs.items() if name not in ties}
        frozen = parse_patterns("frozen", frozen)
        require_pattern_matches(f"{type(self).__name__}(frozen=)", frozen, free)
        for name, spec in free.items():
            if any(fnmatchcase(name, pattern) for pattern in frozen):
                free[name] = replace(spec, trainable=False)
        return free, ties

    def _group_arrays_by_child(self, arrays: Params) -> Mapping[str, Params]:
        return group_arrays_by_child(arrays, self.ties)


class Sequential(Container):
    """Runs layers in order, each on the result of the previous one, like `torch.nn.Sequential`.

    A layer that is passed twice becomes two layers with separate parameters, unless these parameters are tied. Raises
    ConfigError for an invalid or duplicate name, for a layer with the wrong number of inputs, and for a tie or a frozen
    pattern that matches no parameter.

    Parameters
    ----------
    layers : layers, which are named "0", "1", ..., or dicts that map names to layers
    ties : dict that maps aliases of shared parameters to canonical names, e.g. `{"head.weight": "embed.weight"}`
    frozen : name patterns (fnmatch) of parameters that are not trained, e.g. `["0.*"]`
    """

    def __init__(
        self, *layers: Layer | Mapping[str, Layer], ties: Mapping[str, str] | None = None, frozen: Sequence[str] = ()
    ) -> None:
        named = _name_layers(type(self).__name__, layers)
        inputs = list_input_names(named[0][1])
        steps: list[ChildCall] = []
        values = inputs
        for name, layer in named:
            if layer.n_inputs not in (None, len(values)):
                raise ConfigError(
                    f"Sequential: layer {name!r} {layer!r} takes {layer.n_inputs} inputs, but gets {len(values)}"
                )
            gives = list_child_output_names(name, layer)
            steps.append(ChildCall(name, layer, values, gives))
            values = gives
        super().__init__(steps, inputs, values, ties, frozen)

    def __repr__(self) -> str:
        plain = all(step.name == str(i) for i, step in enumerate(self.steps))
        return f"Sequential({', '.join(repr(s.layer) if plain else f'{s.name}={s.layer!r}' for s in self.steps)})"


class Residual(Container):
    """Residual connection: y = x + body(x) (He et al. 2015). The layer is one FSDP unit: its parameters are
    all-gathered together.

    Parameters
    ----------
    body : a layer with one input and one output of the same shape; its parameters are named `body.*`
    """

    unit = True

    def __init__(self, body: Layer) -> None:
        require_layer("Residual", "body", body)
        if (body.n_inputs, body.n_outputs) != (1, 1):
            raise ConfigError(f"Residual: the body must take one input and give one output, got {body!r}")
        self.body = body
        steps = [ChildCall("body", body, ("x",), ("body",)), ChildCall("add", Add(), ("x", "body"), ("add",))]
        super().__init__(steps, ("x",), ("add",))


def make_steps_of_chain(
    layers: Mapping[str, Layer], source: str = "x", shared: Sequence[str] = ()
) -> tuple[list[ChildCall], tuple[str, ...], tuple[str, ...]]:
    """Connect `layers` in a chain that starts at the value `source`. Return the steps, the names of the chain's inputs,
    and a tuple with the name of the last layer's result.

    `shared` names extra inputs, such as an attention mask. Every layer with several inputs takes the previous layer's
    result as its first input, and the shared inputs as its other inputs."""
    steps, value = [], source
    for name, layer in layers.items():
        steps.append(ChildCall(name, layer, (value, *(shared if layer.n_inputs != 1 else ())), (name,)))
        value = name
    return steps, (source, *shared), (value,)


def require_valid_child_name(owner: str, name: object) -> str:
    """Return `name`. Raise ConfigError unless `name` can be a part of a dotted path: a nonempty string without dots.
    The message begins with `owner`."""
    if not isinstance(name, str) or not name or "." in name:
        raise ConfigError(f"{owner}: {name!r} is no name for a layer; use text that is not empty and has no dot")
    return name


def require_layer(owner: str, name: str, layer: object) -> Layer:
    """Return `layer`. Raise ConfigError unless `layer` is an instance of `Layer` (not a class). The message begins with
    `owner`."""
    if isinstance(layer, type) and issubclass(layer, Layer):
        raise ConfigError(f"{owner}: {name!r} is the class {layer.__name__}; write {layer.__name__}(...)")
    if not isinstance(layer, Layer):
        raise ConfigError(f"{owner}: {name!r} must be a Layer, got {type(layer).__name__}")
    return layer


def make_unused_name(layer: Container, name: str) -> str:
    """Return a name that no step or value in the container has: `name`, with as many underscores appended as needed."""
    taken = {*layer.inputs, *(word for step in layer.steps for word in (step.name, *step.gives))}
    while name in taken:
        name += "_"
    return name


def list_input_names(layer: Layer) -> tuple[str, ...]:
    """Return the names of a model's inputs. A model that is not a container can declare names
    (`Layer.get_declared_input_names`). If it declares none, a single input is named "x", and several inputs are named
    "x0", "x1", ..."""
    if isinstance(layer, Container):
        return layer.inputs
    if names := layer.get_declared_input_names():
        return names
    if layer.n_inputs is None:
        raise ConfigError(f"{layer!r} takes any number of inputs; put it in a Graph, which names them")
    return ("x",) if layer.n_inputs == 1 else tuple(f"x{i}" for i in range(layer.n_inputs))


def list_output_names(layer: Layer) -> tuple[str, ...]:
    """Return the names of a model's outputs. For a model that is not a container, return the result of
    `Layer.get_declared_output_names`."""
    return layer.outputs if isinstance(layer, Container) else layer.get_declared_output_names()


def list_child_output_names(name: str, layer: Layer) -> tuple[str, ...]:
    """Return the names of the values that the child layer `name` returns: `name` itself, or, if it has several outputs,
    `name.output` for each output."""
    return (name,) if layer.n_outputs == 1 else tuple(f"{name}.{output}" for output in list_output_names(layer))


def _name_layers(owner: str, layers: Sequence[Any]) -> list[tuple[str, Layer]]:
    named: list[tuple[str, Any]] = []
    for layer in layers:
        named.extend(layer.items() if isinstance(layer, Mapping) else [(str(len(named)), layer)])
    if not named:
        raise ConfigError(f"{owner}: there must be at least one layer")
    names = [require_valid_child_name(owner, name) for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{owner}: duplicate layer names {', '.join(map(repr, twice))}")
    return [(name, require_layer(owner, name, layer)) for name, layer in named]


def _list_values_to_free_after_each_step(steps: Sequence[ChildCall], outputs: Sequence[str]) -> list[list[str]]:
    """For each step, return the names of the values that are read for the last time in this step. These values can be
    freed after the step. The container's outputs are never among these values."""
    seen, last = set(outputs), []
    for step in reversed(steps):
        fresh = [name for name in dict.fromkeys(step.sources) if name not in seen]
        seen.update(fresh)
        last.append(fresh)
    return last[::-1]


def map_saved(held: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to each element of `held`, a layer's saved values, and return the results in tuples nested in
    the same way."""
    return tuple([map_saved(part, function) for part in held]) if type(held) is tuple else function(held)


def unwrap_single(values: Sequence[Any]) -> Any:
    """Return the only element of `values` if there is exactly one, else a tuple of all elements."""
    return values[0] if len(values) == 1 else tuple(values)


def _as_tuple(value: Any, count: int) -> tuple[Any, ...]:
    return (value,) if count == 1 and not isinstance(value, tuple) else tuple(value)


def _add_optional(a: Array | None, b: Array | None) -> Array | None:
    return b if a is None else a if b is None else kernels.add(namespace_of(a), a, b)


WORKS = "compose works on its arguments and on what layers give"


def _make_operator_that_raises(sign: str) -> Any:
    """Return a method for an operator such as "-" that raises ConfigError, because symbolic values do not support
    it."""

    def refuse_operator(self: ComposeValue, *others: Any) -> Any:
        raise self.make_unsupported_error(f"has no {sign}")

    return refuse_operator


class ComposeValue:
    """A symbolic value without data. Inside `Composite.compose`, layers take and return symbolic values.

    `a + b` means `Add()(a, b)`, and `a * b` means `Multiply()(a, b)`."""

    __slots__ = ("name", "tracing")

    def __init__(self, trace: ComposeTrace, name: str) -> None:
        self.tracing, self.name = trace, name

    def __repr__(self) -> str:
        return f"the value {self.name!r} of {self.tracing.owner}"

    def __add__(self, other: Any) -> Any:
        return Add()(self, other)

    def __mul__(self, other: Any) -> Any:
        return Multiply()(self, other)

    # if the left operand is a number, Python calls these methods; Add and Multiply then raise an error
    __radd__, __rmul__ = __add__, __mul__
    __sub__ = __rsub__ = __neg__ = _make_operator_that_raises("-")
    __truediv__ = __rtruediv__ = _make_operator_that_raises("/")
    __pow__ = __rpow__ = _make_operator_that_raises("**")
    __matmul__ = __rmatmul__ = _make_operator_that_raises("@")
    __lt__, __le__, __gt__, __ge__ = map(_make_operator_that_raises, ("<", "<=", ">", ">="))
    __getitem__, __iter__, __len__ = (
        _make_operator_that_raises("[]"),
        _make_operator_that_raises("parts"),
        _make_operator_that_raises("length"),
    )

    def __getattr__(self, name: str) -> Any:
        # Python and libraries look up methods such as `__array__`, and expect AttributeError if they are missing
        if name.startswith("_"):
            raise AttributeError(name)
        raise self.make_unsupported_error(f"has no {name}")

    def __array_ufunc__(self, ufunc: Any, method: str, *x: Any, **options: Any) -> Any:
        raise self.make_unsupported_error(f"is given to np.{ufunc.__name__}")

    def __array_function__(self, function: Any, types: Any, x: Any, options: Any) -> Any:
        raise self.make_unsupported_error(f"is given to np.{function.__name__}")

    def make_unsupported_error(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.tracing.owner}: the value {self.name!r} {what}; {WORKS}, with layers, + and *: for another "
            "function of each element use nn.Lambda, for other shapes, sums and parts a layer"
        )


class ComposeTrace:
    """Records the layer calls made by `Composite.compose` as the steps of a container.

    `owner` is the name of the composite layer, and `named` contains the layers that are attributes of the composite. A
    second call of a layer is recorded as another step, whose parameters are tied to those of the first step."""

    def __init__(self, owner: str, named: dict[str, Layer], inputs: tuple[str, ...]) -> None:
        self.owner, self.steps, self.ties = owner, list[ChildCall](), dict[str, str]()
        self.inputs = [ComposeValue(self, name) for name in inputs]
        self._named, self._taken = named, {*named, *inputs}

    def record_layer_call(self, layer: Layer, x: tuple[Any, ...]) -> Any:
        """Add a step that calls `layer` on the symbolic values `x`. Return the result of the call: a symbolic value, or
        a tuple of symbolic values."""
        for value in x:
            self.get_value_name(value, f"{layer!r} gets")
        if layer.n_inputs not in (None, len(x)):
            raise ConfigError(f"{self.owner}: {layer!r} takes {layer.n_inputs} inputs, but gets {len(x)}")
        name = self._name_step(layer)
        step = ChildCall(name, layer, tuple(value.name for value in x), list_child_output_names(name, layer))
        self.steps.append(step)
        values = tuple(ComposeValue(self, gives) for gives in step.gives)
        return values[0] if len(values) == 1 else values

    def get_value_name(self, value: Any, who: str) -> str:
        """Return the name of a symbolic value. Raise ConfigError if `value` comes from the `compose` of another layer
        or is not symbolic; the message begins with `who`, such as "compose returns"."""
        if not isinstance(value, ComposeValue) or value.tracing is not self:
            raise ConfigError(
                f"{self.owner}: {who} {value!r}; {WORKS}: for a number or a function of numpy use nn.Lambda"
            )
        return value.name

    def _name_step(self, layer: Layer) -> str:
        first = next((name for name, known in self._named.items() if known is layer), None)
        if first is None and layer.specs():
            raise ConfigError(
                f"{self.owner}: {layer!r} has parameters, but no name: make it an attribute in __init__, "
                "self.name = ..., and call that; of a list each by setattr(self, f'name_{i}', ...), or as one "
                "nn.Sequential"
            )
        if first is not None and all(step.layer is not layer for step in self.steps):
            return first
        name = base = first or type(layer).__name__.lower()
        number = 1
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        if first is not None:
            if any(spec.state for spec in layer.specs().values()):
                raise ConfigError(f"{self.owner}: {layer!r} has running statistics, so compose can call it only once")
            self.ties |= {f"{name}.{parameter}": f"{first}.{parameter}" for parameter in layer.specs()}
        return name


class ComposingMeta(ABCMeta):
    """Metaclass of `Composite`. It runs `compose` after the constructor of the layer, even if a subclass defines its
    own constructor."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        layer = super().__call__(*args, **options)
        layer._init_container_by_tracing_compose()
        return layer


class Composite(Container, metaclass=ComposingMeta):
    """Base class for custom layers that are built from other layers:

        class GatedMLP(nn.Composite):
            def __init__(self, d_model, d_hidden):
                self.gate = nn.Linear(d_model, d_hidden)
                self.up = nn.Linear(d_model, d_hidden)
                self.down = nn.Linear(d_hidden, d_model)

            def compose(self, x):
                return self.down(nn.SiLU()(self.gate(x)) * self.up(x))

    `compose` runs once, when the layer is constructed. The recorded calls form a graph, and its backward pass calls the
    backward methods of the layers. Parameters are named after attributes (`gate.weight`). Raises ConfigError if a
    called layer has parameters but is not an attribute, if a layer attribute is never called, or if `compose` applies
    operations other than layer calls, + and * to values."""

    reads: tuple[str, ...] = ()
    """Names of the inputs. Usually, the names are taken from the signature of `compose`. Set this attribute only if the
    signature is `compose(self, *x)` and the number of inputs depends on arguments of `__init__`."""

    def __init__(self) -> None:
        """Do nothing. A constructor of a subclass need not call this one: the steps of the container are set later,
        when `compose` runs."""

    @abstractmethod
    def compose(self, *x: Any) -> Any:
        """Define the layer: call layers on values, add or multiply values, and return the resulting value or a tuple of
        values. There is one argument per input."""

    def _init_container_by_tracing_compose(self) -> None:
        owner = type(self).__name__
        if taken := sorted({"steps", "inputs", "outputs", "ties"} & vars(self).keys()):
            raise ConfigError(f"{owner}: {taken[0]!r} is an attribute that every container has; choose another name")
        inputs: Mapping[str, Any] = inspect.signature(self.compose).parameters
        if self.reads:
            inputs = dict.fromkeys(self.reads)
        elif not inputs or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in inputs.values()):
            raise ConfigError(f"{owner}: compose takes one argument by name for each input, compose(self, x)")
        named = {
            require_valid_child_name(owner, name): child
            for name, child in vars(self).items()
            if isinstance(child, Layer)
        }
        trace = ComposeTrace(owner, named, tuple(inputs))
        traced_outputs = self.compose(*trace.inputs)
        outputs = [
            trace.get_value_name(value, "compose returns")
            for value in (traced_outputs if isinstance(traced_outputs, tuple) else (traced_outputs,))
        ]
        called = [step.layer for step in trace.steps]
        for name, child in named.items():
            if all(child is not layer for layer in called):
                raise ConfigError(f"{owner}: compose never calls self.{name}, {child!r}: call it, or leave it out")
        Container.__init__(self, trace.steps, tuple(inputs), outputs, trace.ties)
