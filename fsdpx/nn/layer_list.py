"""Convert a model to the list of its leaf layers in execution order. Training steps are compiled from this list."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.errors import ConfigError
from fsdpx.nn.container import ChildCall, Container, list_input_names, make_unused_name
from fsdpx.nn.gradient_accumulation import has_integer_dtype
from fsdpx.nn.init import Init
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, join_path
from fsdpx.nn.tied_parameters import get_canonical_name

__all__ = [
    "NUMBERS", "AsNumbers", "LayerList", "Node", "choose_dtype_word", "find_dtypes_read_by_inputs",
    "insert_integer_casts", "linearize", "parameter_specs",
]  # fmt: skip

NUMBERS = frozenset({"numbers"})
TAKES_WORDS = {"numbers", "exact", "indices", "given"}


@dataclass(frozen=True)
class Node:
    """One layer in a `LayerList`.

    Parameters
    ----------
    path : dotted path of the layer; its parameters are named `path.name`
    layer : a leaf layer, or a container whose parameters are gathered together (an FSDP unit)
    inputs : ids of the values that the layer reads
    outputs : ids of the values that the layer returns
    """

    path: str
    layer: Layer
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class LayerList:
    """The leaf layers of a model in execution order. The id of a value is its index in the list of all values: first
    the model's inputs, then the results of each node.

    Parameters
    ----------
    nodes : the leaf layers
    inputs : names of the model's inputs
    outputs : ids of the values that the model returns
    ties : dict that maps aliases of tied parameters to canonical names
    frozen : canonical names of the parameters that containers freeze
    initial : initializers by canonical parameter name, for each parameter whose own initializer a container replaces
    takes : the dtype that the model expects for each input, as a value of `Layer.takes` other than "passed"
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[int, ...]
    ties: dict[str, str]
    frozen: frozenset[str] = frozenset()
    initial: Mapping[str, Init] = field(default_factory=dict)
    takes: tuple[str, ...] = ()

    def find_node_of_value(self, value: int) -> Node:
        """Return the node that computes the value with the id `value`. The value must not be an input of the model."""
        return next(node for node in self.nodes if value in node.outputs)


def linearize(model: Layer, at: str = "", units: bool = False) -> LayerList:
    """Return the leaf layers of `model` in execution order. A container is replaced with its children, unless its class
    sets `unit`. A model that is a single layer becomes one node with the path "".

    All paths begin with `at`, the path of `model`. If `units` is true, even containers that set `unit` are replaced
    with their children."""
    inputs = list_input_names(model)
    nodes: list[Node] = []
    ids = itertools.count(len(inputs))
    ties: dict[str, str] = {}
    frozen: set[str] = set()
    initial: dict[str, Init] = {}

    def visit_layer(layer: Layer, path: str, values: Sequence[int]) -> list[int]:
        if not isinstance(layer, Container) or (layer.unit and not units):
            nodes.append(Node(path, layer, tuple(values), tuple(itertools.islice(ids, layer.n_outputs))))
            return list(nodes[-1].outputs)
        ties.update({join_path(path, alias): join_path(path, name) for alias, name in layer.ties.items()})
        frozen.update(join_path(path, name) for name, spec in layer.specs().items() if not spec.trainable)
        for name, init in layer.initial.items():
            initial.setdefault(join_path(path, name), init)
        here = dict(zip(layer.inputs, values, strict=True))
        for step in layer.steps:
            given = visit_layer(step.layer, join_path(path, step.name), [here[source] for source in step.sources])
            here.update(zip(step.gives, given, strict=True))
        return [here[output] for output in layer.outputs]

    outputs = visit_layer(model, at, range(len(inputs)))
    ends = {alias: get_canonical_name(ties, alias) for alias in ties}
    wants = _find_dtypes_read_by_layers(((n.layer, n.inputs, n.outputs) for n in reversed(nodes)), outputs)
    takes = tuple(choose_dtype_word(wants[v]) for v in range(len(inputs)))
    return LayerList(tuple(nodes), inputs, tuple(outputs), ends, frozenset(frozen - ends.keys()), initial, takes)


def find_dtypes_read_by_inputs(layer: Layer, count: int, wanted: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """For each of a layer's `count` inputs, return the set of dtypes in which the input is read. A dtype is given as a
    value of `Layer.takes`, such as "indices". The set has several elements if the children of a container read the same
    input in different dtypes.

    `wanted` contains one such set for each result of the layer: the dtypes in which later layers read the result. If
    `Layer.takes` is "passed" for an input, this input gets the same set as the layer's first result."""
    if isinstance(layer, Container):
        wants = _resolve_container_words(layer, wanted)
        return [wants[name] for name in layer.inputs]
    words = (layer.takes,) * count if isinstance(layer.takes, str) else tuple(layer.takes)
    if len(words) != count or not TAKES_WORDS.union({"passed"}).issuperset(words):
        choices = ", ".join(map(repr, sorted(TAKES_WORDS | {"passed"})))
        raise ConfigError(f"{layer!r}: takes = {layer.takes!r} must be one of {choices}, or one for each input")
    return [wanted[0] if word == "passed" else frozenset({word}) for word in words]


def _resolve_container_words(layer: Container, wanted: Sequence[frozenset[str]]) -> dict[Any, frozenset[str]]:
    return _find_dtypes_read_by_layers(
        ((s.layer, s.sources, s.gives) for s in reversed(layer.steps)), layer.outputs, wanted
    )


def _find_dtypes_read_by_layers(
    steps: Iterable[tuple[Layer, Sequence[Any], Sequence[Any]]],
    outputs: Sequence[Any],
    wanted: Sequence[frozenset[str]] = (),
) -> dict[Any, frozenset[str]]:
    """For each value, return the set of dtypes in which layers read the value. A dtype is given as a value of
    `Layer.takes`, such as "indices".

    `steps` contains tuples (layer, values read, values returned), from the last layer to the first. `wanted` contains,
    for each output, the set of dtypes in which later layers read the output."""
    wants: dict[Any, frozenset[str]] = defaultdict(frozenset)
    for name, words in zip(outputs, wanted or [NUMBERS] * len(outputs), strict=True):
        wants[name] |= words
    for layer, sources, gives in steps:
        for source, words in zip(
            sources, find_dtypes_read_by_inputs(layer, len(sources), [wants[name] for name in gives]), strict=True
        ):
            wants[source] |= words
    return wants


def choose_dtype_word(words: frozenset[str]) -> str:
    """Choose the dtype in which the model takes an input, if several layers read this input in different dtypes.
    `words` contains these dtypes, as values of `Layer.takes`; return one of these values."""
    return next((word for word in ("indices", "given", "exact") if word in words), "numbers")


class AsNumbers(Layer):
    """Casts an input to the dtype in which the model computes. This layer is needed if some layers compute with an
    input while others read it as "indices" or "exact" (see `Layer.takes`). The cast is inserted before the layers that
    compute. `takes` is the word, such as "indices", that the other layers declare. If `dtype` is None, the input is
    cast to `LayerContext.dtype`."""

    acts_on = "element"

    def __init__(self, dtype: Any, takes: str) -> None:
        self.dtype, self.takes = None if dtype is None else np.dtype(dtype), takes

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return x.astype(self.dtype or env.dtype or x.dtype, copy=False), has_integer_dtype(x)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array | None, Any]:
        return None if saved else dy, ()


def insert_integer_casts(model: Layer, dtype: Any) -> Layer:
    """Return `model` with layers inserted that cast inputs to `dtype`, or to `LayerContext.dtype` if `dtype` is None.
    An input needs a cast if some layers compute with it while others read it as "indices" or "exact" (see
    `Layer.takes`)."""
    if not isinstance(model, Container):
        return model
    wanted = [NUMBERS] * len(model.outputs)
    wants = _resolve_container_words(model, wanted)
    whole = {name for name in model.inputs if wants[name] > NUMBERS}
    return _insert_casts_in_container(model, whole, wanted, dtype)[0] if whole else model


def _insert_casts_in_container(
    layer: Container, whole: set[str], wanted: Sequence[frozenset[str]], dtype: Any
) -> tuple[Container, list[bool]]:
    """Return the container with casts to `dtype` inserted, and a list that says whether each output is an integer
    array.

    `whole` holds the names of the values that are integers. This function adds the names of all results that are
    integers. `wanted` has the same form as in `find_dtypes_read_by_inputs`."""
    wants, numbered_names, steps = _resolve_container_words(layer, wanted), dict[str, str](), list[ChildCall]()
    for step in layer.steps:
        inner, below, sources = step.layer, [wants[name] for name in step.gives], list(step.sources)
        for i, words in enumerate(find_dtypes_read_by_inputs(inner, len(sources), below)):
            if sources[i] in whole and words == NUMBERS:
                if sources[i] not in numbered_names:
                    name = numbered_names[sources[i]] = make_unused_name(
                        layer, f"{sources[i].replace('.', '_')}_numbers"
                    )
                    word = choose_dtype_word(wants[sources[i]])
                    steps.append(ChildCall(name, AsNumbers(dtype, word), (sources[i],), (name,)))
                sources[i] = numbered_names[sources[i]]
        given = [source in whole for source in sources]
        if isinstance(inner, Container) and any(given):
            names = {name for name, one in zip(inner.inputs, given, strict=True) if one}
            inner, gives = _insert_casts_in_container(inner, names, below, dtype)
        else:
            gives = [inner.takes == "passed" and any(given)] * len(step.gives)
        whole |= {name for name, one in zip(step.gives, gives, strict=True) if one}
        steps.append(ChildCall(step.name, inner, tuple(sources), step.gives))
    changed = any(new.layer is not old.layer for new, old in zip(steps, layer.steps, strict=False))
    return layer.with_steps(steps) if numbered_names or changed else layer, [name in whole for name in layer.outputs]


def parameter_specs(model: LayerList) -> dict[str, ParameterSpec]:
    """Return the `ParameterSpec` of every parameter by canonical dotted name, in execution order, without aliases. The
    specs of frozen parameters have `trainable=False`."""
    specs = {}
    for node in model.nodes:
        for name, spec in node.layer.specs().items():
            full = join_path(node.path, name)
            if full not in model.ties:
                trainable, init = spec.trainable and full not in model.frozen, model.initial.get(full, spec.init)
                same = trainable == spec.trainable and init is spec.init
                specs[full] = spec if same else replace(spec, trainable=trainable, init=init)
    return specs
