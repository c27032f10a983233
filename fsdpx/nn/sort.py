"""A model as the list of its leaf layers in execution order: what the program is compiled from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fsdpx import shapes as xp
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.random import Random
from fsdpx.comm.mesh import Axes, alone
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.container import Container, input_names
from fsdpx.nn.init import Init
from fsdpx.nn.layer import Env, Layer, Params, Spec, dotted, time_of
from fsdpx.nn.ties import canonical

__all__ = ["CALLS_NUMPY", "Node", "Sorted", "calls_numpy", "infer", "shapes", "sort", "specs_of"]


@dataclass(frozen=True)
class Node:
    """One leaf: `layer` reads the values `inputs` and returns value `output`; its parameters are named `path.name`."""

    path: str
    layer: Layer
    inputs: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Sorted:
    """Leaves in execution order over numbered values: first the model's inputs, then one value per node.

    ties: alias -> canonical name. frozen: canonical names of parameters that containers freeze. initial: canonical
    name -> how a parameter begins, where a container says it."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[int, ...]
    ties: dict[str, str]
    frozen: frozenset[str] = frozenset()
    initial: Mapping[str, Init] = field(default_factory=dict)


def sort(model: Layer, at: str = "", units: bool = False) -> Sorted:
    """The leaves of `model`: every container that is not a `unit` is opened; a single layer is a node with path "".

    at: the path of `model`. units: open them as well."""
    inputs = input_names(model)
    nodes: list[Node] = []
    ties: dict[str, str] = {}
    frozen: set[str] = set()
    initial: dict[str, Init] = {}

    def visit(layer: Layer, path: str, values: Sequence[int]) -> list[int]:
        if not isinstance(layer, Container) or (layer.unit and not units):
            nodes.append(Node(path, layer, tuple(values), len(inputs) + len(nodes)))
            return [nodes[-1].output]
        ties.update({dotted(path, alias): dotted(path, name) for alias, name in layer.ties.items()})
        frozen.update(dotted(path, name) for name, spec in layer.specs().items() if not spec.trainable)
        for name, init in layer.initial.items():
            initial.setdefault(dotted(path, name), init)
        here = dict(zip(layer.inputs, values, strict=True))
        for step in layer.steps:
            given = visit(step.layer, dotted(path, step.name), [here[source] for source in step.sources])
            here.update(zip(step.gives, given, strict=True))
        return [here[output] for output in layer.outputs]

    outputs = visit(model, at, range(len(inputs)))
    ends = {alias: canonical(ties, alias) for alias in ties}
    return Sorted(tuple(nodes), inputs, tuple(outputs), ends, frozenset(frozen - ends.keys()), initial)


def specs_of(model: Sorted) -> dict[str, Spec]:
    """Canonical dotted name -> `Spec`, in execution order, without aliases; frozen parameters are not trainable."""
    specs = {}
    for node in model.nodes:
        for name, spec in node.layer.specs().items():
            full = dotted(node.path, name)
            if full not in model.ties:
                trainable, init = spec.trainable and full not in model.frozen, model.initial.get(full, spec.init)
                same = trainable == spec.trainable and init is spec.init
                specs[full] = spec if same else replace(spec, trainable=trainable, init=init)
    return specs


def infer(model: Sorted, inputs: Sequence[Any], dtype: Any = "float32", axes: Axes | None = None) -> list[Any]:
    """The shape-only outputs of a model, as this rank holds them, from one shape-only array per input.

    dtype: of the parameters. axes: the connected mesh of this rank, for models that are cut over a tensor axis; None:
    one rank. ShapeError with the path of the layer that does not fit, what it got and from where, and what it wants;
    ConfigError with that of a layer that calls numpy itself, or returns another format."""
    values = shapes(model, inputs, dtype, axes=axes)
    return [values[i] for i in model.outputs]


def shapes(
    model: Sorted, inputs: Sequence[Any], dtype: Any = "float32", training: bool = True, axes: Axes | None = None
) -> list[Any]:
    """As `infer`, but all values, in their numbering."""
    if len(inputs) != len(model.inputs):
        raise ShapeError(f"the model takes {len(model.inputs)} inputs ({', '.join(model.inputs)}), got {len(inputs)}")
    axes = axes or alone()
    env = Env(xp, axes, Random(0), training, time=time_of(inputs))
    real = dtype_of(dtype) if isinstance(dtype, str) else dtype
    values = list(inputs)
    for node in model.nodes:
        p = {
            name: xp.ShapeArray(spec.local(axes.tensor.rank, axes.tensor.size), real)
            for name, spec in node.layer.specs().items()
        }
        x = [values[i] for i in node.inputs]
        try:
            y, wrong, cause = _shape(env, node, p, x, real)
        except (ValueError, IndexError) as error:
            raise ShapeError(_misfit(model, node, values, error)) from error
        if wrong:
            if isinstance(node.layer, Container):  # one of those inside is to blame
                shapes(sort(node.layer, node.path, units=True), x, dtype, training, axes)
            raise ConfigError(f"layer {node.path!r} {node.layer!r} {wrong}") from cause
        values.append(y)
    return values


def _shape(env: Env, node: Node, p: Params, x: Sequence[Any], dtype: Any) -> tuple[Any, str, Exception | None]:
    """What a node returns; what is wrong with it; what was raised."""
    try:
        y = node.layer.result(env.at(node.path), p, x[0] if len(x) == 1 else tuple(x))
    except Exception as error:
        if calls_numpy(error):
            return None, f"{CALLS_NUMPY} ({error})", error
        error.add_note(f"in forward of layer {node.path!r} {node.layer!r}")
        raise
    if y.dtype.kind != "f" or y.dtype in (dtype, *(part.dtype for part in x)):
        return y, "", None
    cure = "make constants Python floats, and arrays by env.xp with dtype=x.dtype"
    return y, f"returns {y.dtype} where the model computes in {np.dtype(dtype)}: {cure}", None


CALLS_NUMPY = (
    "calls numpy itself: use env.xp, which is numpy, cupy or, when shapes are followed through the model before "
    "anything is computed, arrays without data"
)


def calls_numpy(error: Exception) -> bool:
    """Whether this is what a function of numpy says to an array without data."""
    return isinstance(error, TypeError) and "ShapeArray" in str(error)


def _misfit(model: Sorted, node: Node, values: Sequence[Any], error: Exception) -> str:
    got = [f"{tuple(values[i].shape)} {values[i].dtype} from {_source(model, i)}" for i in node.inputs]
    return f"layer {node.path!r} {node.layer!r} does not fit: {error}. It got {'; '.join(got)}"


def _source(model: Sorted, value: int) -> str:
    if value < len(model.inputs):
        return f"the model's input {model.inputs[value]!r}"
    node = model.nodes[value - len(model.inputs)]
    return f"layer {node.path!r} {node.layer!r}"
