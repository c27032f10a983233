"""A container whose layers form a directed acyclic graph, with several inputs and outputs."""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.nn.container import ChildCall, Container, list_child_output_names, require_layer, require_valid_child_name

__all__ = ["Graph"]


class Graph(Container):
    """A directed acyclic graph of layers, such as `Graph({"up": (Linear(8, 16), "x"), "sum": (Add(), "up", "z")},
    inputs=("x", "z"), outputs=("sum",))`.

    A node runs after the nodes whose results it reads. Otherwise, nodes run in the given order. Several inputs are
    passed as a tuple, and several outputs are returned as a tuple. If a nested Graph has several outputs, each output
    is read as `"name.output"`. A node runs even if nothing reads its result; the gradient of its parameters is then
    zero. Raises ConfigError for a cycle, and for an unknown or duplicate name.

    Parameters
    ----------
    nodes : dict that maps names to (layer, names of the inputs or nodes that the layer reads)
    inputs : names of the model's inputs
    outputs : names of the inputs or nodes whose values are returned
    ties : dict that maps aliases of shared parameters to canonical names, as in `Sequential`
    frozen : name patterns (fnmatch) of parameters that are not trained
    """

    def __init__(
        self,
        nodes: Mapping[str, tuple[Any, ...]],
        inputs: Sequence[str] = ("x",),
        outputs: Sequence[str] = (),
        ties: Mapping[str, str] | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        inputs, outputs = _require_unique_value_names("inputs", inputs), _require_unique_value_names("outputs", outputs)
        steps = [_parse_node_into_child_call(name, node) for name, node in nodes.items()]
        names = [*inputs, *(step.name for step in steps)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"Graph: duplicate names {', '.join(map(repr, twice))}: nodes and inputs share one set")
        _require_known_values(steps, inputs, outputs)
        super().__init__(_sort_topologically(steps, inputs), inputs, outputs, ties, frozen)

    def __repr__(self) -> str:
        nodes = "; ".join(f"{s.name} = {s.layer!r}({', '.join(s.sources)})" for s in self.steps)
        return f"Graph({', '.join(self.inputs)} -> {nodes} -> {', '.join(self.outputs)})"


def _require_unique_value_names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names:
        raise ConfigError(f"Graph: {what} must name at least one value")
    if what == "inputs":
        for name in names:
            require_valid_child_name("Graph", name)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"Graph: duplicate {what} {', '.join(map(repr, twice))}")
    return names


def _parse_node_into_child_call(name: str, node: Any) -> ChildCall:
    require_valid_child_name("Graph", name)
    if not isinstance(node, tuple | list) or len(node) < 2 or not all(isinstance(s, str) for s in node[1:]):
        raise ConfigError(f"Graph: node {name!r} must be (layer, 'source', ...), got {node!r}")
    layer = require_layer("Graph", name, node[0])
    if layer.n_inputs not in (None, len(node) - 1):
        raise ConfigError(f"Graph: node {name!r} {layer!r} takes {layer.n_inputs} inputs, but gets {len(node) - 1}")
    return ChildCall(name, layer, tuple(node[1:]), list_child_output_names(name, layer))


def _require_known_values(steps: Sequence[ChildCall], inputs: Sequence[str], outputs: Sequence[str]) -> None:
    values = [*inputs, *(value for step in steps for value in step.gives)]
    reads = [(f"node {step.name!r} reads", source) for step in steps for source in step.sources]
    for reader, name in [*reads, *(("outputs name", name) for name in outputs)]:
        if name not in values:
            raise ConfigError(f"Graph: {reader} {name!r}, which is unknown; there are {', '.join(values)}")


def _sort_topologically(steps: Sequence[ChildCall], inputs: Sequence[str]) -> list[ChildCall]:
    """Return the steps in topological order, by Kahn's algorithm (1962). If several steps are ready because all their
    inputs are available, the first of them in the given order comes next."""
    waiting, ready, ordered = list(steps), set(inputs), []
    while waiting:
        step = next((s for s in waiting if ready.issuperset(s.sources)), None)
        if step is None:
            raise ConfigError(f"Graph: the nodes {_describe_cycle(waiting)} form a cycle")
        waiting.remove(step)
        ordered.append(step)
        ready.update(step.gives)
    return ordered


def _describe_cycle(waiting: Sequence[ChildCall]) -> str:
    source_of = {value: step for step in waiting for value in step.gives}
    walk = [waiting[0]]
    while True:
        before = next(source_of[name] for name in walk[-1].sources if name in source_of)
        if before in walk:
            names = [step.name for step in walk[walk.index(before) :]]
            return " -> ".join(map(repr, [*names[::-1], names[-1]]))
        walk.append(before)
