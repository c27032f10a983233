"""Converts a model of a whole mesh to the model that each rank runs on its part, and determines whether each input
consists of node values, edge values or scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from fsdpx.errors import ConfigError
from fsdpx.ext.fields.over_parts import PartitionedModel, TakesScalars, require_all_fields_or_all_scalars
from fsdpx.ext.fields.rollout import Rollout
from fsdpx.nn.container import Container, list_input_names
from fsdpx.nn.layer import Array, Layer, LayerContext, Params
from fsdpx.nn.shard_specs import Kind, Replicated, bind_partition
from fsdpx.nn.tensor_plan import Redistribution, ShardingWalk

__all__ = ["TakesRows", "partition_mesh_model"]


class TakesRows:
    """Base class for layers that read node or edge values on a mesh, and may convert node values to edge values or vice
    versa."""

    reads: ClassVar[tuple[str, ...]] = ("nodes",)
    """For each input, what its rows stand for: "nodes" (with or without ghosts) or "edges"."""
    gives: ClassVar[str] = "nodes"
    """What the rows of the result are: "nodes", "ghosts" (nodes with ghosts) or "edges"."""


def partition_mesh_model(model: Layer, nodes: Any) -> PartitionedModel:
    """Convert a model of a whole mesh to the model that each rank runs on its part. `nodes` is the `MeshPartition` of
    node values. Does not communicate.

    Outputs may also be node values of a coarser mesh. Raises ConfigError if a layer cannot run on a part (the message
    names the path of the first such layer), or if an output contains neither node values nor scalars."""
    inputs = _find_model_input_distributions(model, nodes)
    walk = ShardingWalk(1, None, {}, (require_all_fields_or_all_scalars, _plan_ghost_drops))
    made, outputs = walk.shard_layer(model, "", inputs)
    if any(getattr(kind, "kind", "nodes") != "nodes" for kind in outputs):
        found = ", ".join(map(str, outputs))
        raise ConfigError(f"domain=: {type(model).__name__} gives {found}: outputs must be values of nodes, or scalars")
    return PartitionedModel(made, tuple(inputs), tuple(outputs))


class DropGhosts(Layer):
    """Removes the rows of ghosts: (samples, nodes + ghosts, features) -> (samples, nodes, features)."""

    parts: Any = None
    """The `MeshPartition` of the input. It differs between ranks, so it cannot be a constructor argument: a layer's
    repr shows all constructor arguments, and the reprs must be equal on all ranks."""

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return env.xp.ascontiguousarray(x[:, : self.parts.graph.nodes]), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx = env.xp.zeros((dy.shape[0], self.parts.graph.row_count, dy.shape[2]), dtype=dy.dtype)
        dx[:, : dy.shape[1]] = dy
        return dx, ()


def _plan_ghost_drops(reader: Layer, kinds: Sequence[Any]) -> list[Redistribution | None]:
    """Return one entry per input of `reader`: a redistribution that drops the ghost rows, or None if the input keeps
    all rows. A layer such as a sum needs inputs with the same rows, so if some inputs have ghosts and others do not,
    the ghosts are dropped."""
    takes = isinstance(reader, TakesRows) or (isinstance(reader, Container) and not reader.fixed)
    rows = [getattr(kind, "kind", "") for kind in kinds]
    if takes or "nodes" not in rows:
        return [None] * len(kinds)
    return [
        Redistribution("own", bind_partition(DropGhosts(), kind), kind.of_kind("nodes")) if name == "ghosts" else None
        for kind, name in zip(kinds, rows, strict=True)
    ]


def _find_model_input_distributions(model: Layer, nodes: Any) -> list[Kind]:
    """Return how each input of a model is distributed. `nodes` describes how node values are distributed.

    Each value in a model is of one kind: node values, edge values or scalars. The inputs and outputs of a layer are of
    the same kind, unless the layer changes the kind, as `Aggregate` does. Values whose kind remains unknown are treated
    as node values. If all inputs would be scalars under these rules, they are all treated as node values; sharding the
    model then raises an error, which names the layer that cannot run on a part."""
    values = _Values()
    inputs = [values.add() for _ in list_input_names(model)]
    values.record_kinds_of_layer(model, inputs, nodes)
    found = [values.get_kind(one) for one in inputs]
    if all(kind == "scalars" for kind in found):
        return [nodes] * len(found)
    return [Replicated() if kind == "scalars" else nodes.of_kind(kind) for kind in found]


class _Values:
    """Groups the values in a model into sets of the same kind: node values, edge values or scalars. Each value has an
    integer ID, starting at 0. This is a disjoint-set data structure."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._kinds: dict[int, str] = {}

    def add(self, kind: str = "") -> int:
        """Add a new value and return its integer ID. `kind` is "nodes", "edges" or "scalars", or "" if it is unknown
        which of these the value holds."""
        self._parents.append(len(self._parents))
        self.set_kind(self._parents[-1], kind)
        return self._parents[-1]

    def get_kind(self, value: int) -> str:
        return self._kinds.get(self._find_representative(value), "nodes")

    def set_kind(self, value: int, kind: str) -> None:
        """Set the kind of a value ("nodes", "edges" or "scalars"), unless it is already known. `value` is the ID."""
        if kind:
            self._kinds.setdefault(self._find_representative(value), kind)

    def record_same_kind(self, values: Sequence[int]) -> int:
        """Record that all of `values` hold the same kind of data (node values, edge values or scalars). Return the ID
        of one of them, which represents all."""
        first = self._find_representative(values[0])
        for other in map(self._find_representative, values[1:]):
            if other != first:
                self._parents[other] = first
                self.set_kind(first, self._kinds.pop(other, ""))
        return first

    def record_kinds_of_layer(self, layer: Layer, given: Sequence[int], nodes: Any) -> list[int]:
        """Record whether the inputs and outputs of a layer are node values, edge values or scalars, as far as the layer
        determines this. `given` are the integer IDs of the inputs. Return the IDs of the outputs."""
        if isinstance(layer, Container):
            known = dict(zip(layer.inputs, given, strict=True))
            for step in layer.steps:
                results = self.record_kinds_of_layer(step.layer, [known[source] for source in step.sources], nodes)
                known.update(zip(step.gives, results, strict=True))
            return [known[name] for name in layer.outputs]
        if isinstance(layer, Rollout):
            layer.require_ghost_cells(nodes)
            results = self.record_kinds_of_layer(layer.net, given, nodes)
            return [self.record_same_kind(pair) for pair in zip(given, results, strict=False)]
        if isinstance(layer, TakesRows):
            for value, rows in zip(given, layer.reads, strict=True):
                self.set_kind(value, rows)
            return [self.add("edges" if layer.gives == "edges" else "nodes")]
        scalars = layer.scalar_inputs if isinstance(layer, TakesScalars) else ()
        if getattr(layer, "gives_scalars", False):
            return [self.add("scalars")]
        unchanged = nodes.can_run_unchanged(layer) or nodes.can_run_bound(layer)
        for i, value in enumerate(given):
            if i in scalars or not unchanged:
                self.set_kind(value, "scalars")
        rest = [value for i, value in enumerate(given) if i not in scalars]
        return [self.record_same_kind(rest) if rest else self.add()]

    def _find_representative(self, value: int) -> int:
        while self._parents[value] != value:
            value = self._parents[value]
        return value
