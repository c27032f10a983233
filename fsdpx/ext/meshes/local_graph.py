"""The part of a graph that one rank holds, and the partition of node or edge values over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fsdpx.core.base.dataclass import dataclass, fields, replace
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.over_parts import PartitionedModel
from fsdpx.ext.meshes.kernels import segment_sum
from fsdpx.ext.meshes.node_loss import bind_loss_to_local_nodes
from fsdpx.ext.meshes.over_mesh import TakesRows, partition_mesh_model
from fsdpx.nn.layer import Array, Layer, LayerContext, ShardedLayer
from fsdpx.nn.losses import Loss
from fsdpx.nn.shard_specs import FieldPartition, ShardingContext, bind_partition

__all__ = ["GraphLayer", "LocalGraph", "MeshPartition", "PartSizes", "require_node_features"]


class PartSizes(NamedTuple):
    """Sizes of one rank's part of a graph.

    Attributes
    ----------
    nodes, ghosts, edges : number of owned nodes, ghosts and edges on the rank
    sends : (receiving rank, number of rows) for each message with values of the receiving rank's ghosts
    receives : (sending rank, number of rows) for each message with values of this rank's ghosts
    """

    nodes: int
    ghosts: int
    edges: int
    sends: Sequence[tuple[int, int]] = ()
    receives: Sequence[tuple[int, int]] = ()

    @property
    def exchanged(self) -> int:
        """Number of rows that the rank sends, in the forward and backward passes together, for one exchange of node
        values."""
        return self.ghosts + sum(rows for _, rows in self.sends)


@dataclass(eq=False)
class LocalGraph:
    """One rank's part of a graph: the nodes that it owns, its ghosts (copies of other ranks' nodes), and all edges
    whose receivers it owns.

    Arrays of node values hold the rows of owned nodes first, followed by the rows of ghosts. Edges are sorted by
    receiver, then by the global number of the sender, so that edge values are summed in the same order for any
    partition.

    Attributes
    ----------
    nodes, ghosts, edges : number of owned nodes, ghosts and edges on the rank
    numbers : global number of each row, (nodes + ghosts,)
    senders, receivers : row of the sender and of the receiver of each edge, (edges,)
    offsets : the incoming edges of node i are the edges offsets[i] to offsets[i + 1] - 1
    sender_order, sender_offsets : indices of the edges, sorted by sender; and the offsets in this order at which each
        row's outgoing edges begin
    sorted_receivers : the receivers of the edges in `sender_order`
    edge_features : features of the edges, the same for all samples, (edges, features) in float64
    sends : (receiving rank, owned rows) for each message with values of the receiving rank's ghosts
    receives : (sending rank, first, stop) for each message with the values of this rank's ghosts first to stop - 1.
        Ghosts are numbered from 0
    slots : largest number of incoming edges of any node in the whole graph
    replacement_count : how many times the graph has been replaced
    """

    nodes: int
    ghosts: int
    edges: int
    numbers: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    offsets: np.ndarray
    sender_order: np.ndarray
    sender_offsets: np.ndarray
    sorted_receivers: np.ndarray
    edge_features: np.ndarray
    sends: Sequence[tuple[int, np.ndarray]] = ()
    receives: Sequence[tuple[int, int, int]] = ()
    slots: int = 0
    replacement_count: int = 0

    @classmethod
    def from_part_sizes_without_data(cls, part: PartSizes, edge_features: int) -> LocalGraph:
        """Return a graph that has only sizes and no data, for computing shapes."""
        none, starts = np.zeros(0, np.int64), np.cumsum([0, *(rows for _, rows in part.receives)]).tolist()
        sends = tuple((rank, np.broadcast_to(np.int64(0), rows)) for rank, rows in part.sends)
        receives = tuple((rank, *ends) for (rank, _), *ends in zip(part.receives, starts, starts[1:], strict=False))
        features = np.zeros((0, edge_features))
        return cls(*part[:3], none, none, none, none, none, none, none, features, sends, receives)

    def copy_attributes_from(self, other: LocalGraph) -> None:
        """Copy all attributes of `other` to this graph, so that layers that reference this graph use the new data."""
        count = self.replacement_count + 1
        vars(self).clear()
        vars(self).update((one.name, getattr(other, one.name)) for one in fields(other))
        self.replacement_count = count

    @property
    def sizes(self) -> PartSizes:
        """The numbers of nodes, ghosts and edges of this part, and the sizes of its messages."""
        sends = tuple((rank, int(rows.size)) for rank, rows in self.sends)
        receives = tuple((rank, stop - first) for rank, first, stop in self.receives)
        return PartSizes(int(self.nodes), int(self.ghosts), int(self.edges), sends, receives)

    @property
    def row_count(self) -> int:
        """Total number of owned nodes and ghosts."""
        return self.nodes + self.ghosts

    @cached_property
    def edge_slots(self) -> np.ndarray:
        """An integer ID for each edge. The ID does not depend on the partition: it is the global number of the edge's
        receiver times `slots` (the largest number of incoming edges of any node in the whole graph), plus the edge's
        position among the receiver's incoming edges."""
        inside = np.arange(self.receivers.size) - self.offsets[self.receivers]
        return self.numbers[self.receivers] * self.slots + inside

    @cached_property
    def max_in_degree(self) -> int:
        """Largest number of incoming edges of any node."""
        return int(np.diff(self.offsets).max(initial=0))

    @cached_property
    def max_out_degree(self) -> int:
        """Largest number of outgoing edges of any row, counting only edges of this rank."""
        return int(np.diff(self.sender_offsets).max(initial=0))

    def gather_senders(self, env: LayerContext, x: Array) -> Array:
        """Gather the row of x (samples, rows, features) at each edge's sender, and return (samples, edges,
        features)."""
        return self._gather_rows(env, x, "senders")

    def gather_receivers(self, env: LayerContext, x: Array) -> Array:
        """Gather the row of x (samples, rows, features) at each edge's receiver, and return (samples, edges,
        features)."""
        return self._gather_rows(env, x, "receivers")

    def sum_at_receivers(self, env: LayerContext, values: Array) -> Array:
        """Sum edge values (samples, edges, features) over each node's incoming edges, and return (samples, nodes,
        features)."""
        if has_no_data(env):
            return env.xp.empty((values.shape[0], self.nodes, *values.shape[2:]), dtype=values.dtype)
        return segment_sum(env.xp, values, self.get_attribute_on_device(env, "offsets"), None, self.max_in_degree)

    def sum_at_senders(self, env: LayerContext, values: Array) -> Array:
        """Sum edge values (samples, edges, features) over each row's outgoing edges, and return (samples, rows,
        features)."""
        if has_no_data(env):
            return env.xp.empty((values.shape[0], self.row_count, *values.shape[2:]), dtype=values.dtype)
        order = self.get_attribute_on_device(env, "sender_order")
        return segment_sum(
            env.xp, values, self.get_attribute_on_device(env, "sender_offsets"), order, self.max_out_degree
        )

    def sum_features_of_senders(self, env: LayerContext, x: Array) -> Array:
        """Return the sum of x (samples, rows, features) over the senders of each node's incoming edges."""
        if has_no_data(env):
            return env.xp.empty((x.shape[0], self.nodes, x.shape[2]), dtype=x.dtype)
        senders = self.get_attribute_on_device(env, "senders")
        return segment_sum(env.xp, x, self.get_attribute_on_device(env, "offsets"), senders, self.max_in_degree)

    def sum_receiver_values_per_sender(self, env: LayerContext, x: Array) -> Array:
        """Return the sum of x (samples, nodes, features) over the receivers of each row's outgoing edges. This is the
        adjoint of `sum_features_of_senders`."""
        if has_no_data(env):
            return env.xp.empty((x.shape[0], self.row_count, x.shape[2]), dtype=x.dtype)
        offsets = self.get_attribute_on_device(env, "sender_offsets")
        return segment_sum(
            env.xp, x, offsets, self.get_attribute_on_device(env, "sorted_receivers"), self.max_out_degree
        )

    def compute_inverse_in_degrees(self, env: LayerContext, dtype: Any) -> Array:
        """Return 1 / (number of incoming edges) for each node, or 0 for a node without incoming edges. The result has
        shape (nodes, 1)."""
        offsets = self.get_attribute_on_device(env, "offsets")
        count = (offsets[1:] - offsets[:-1])[:, None]
        return env.xp.where(count > 0, 1.0 / env.xp.maximum(count, 1), 0.0).astype(dtype)

    def get_attribute_on_device(self, env: LayerContext, name: str, dtype: Any = None) -> Array:
        """Return the array attribute `name`, copied to the device of `env` and cast to `dtype` if given. Copies are
        cached."""
        array = getattr(self, name)
        if env.xp is np and dtype in (None, array.dtype):
            return array
        key = "graph", id(self), name, None if dtype is None else np.dtype(dtype).str
        if (cached := env.constants.get(key)) is None or cached[0] is not array:  # the graph may have been replaced
            cached = env.constants[key] = array, env.xp.asarray(array if dtype is None else array.astype(dtype))
        return cached[1]

    def _gather_rows(self, env: LayerContext, x: Array, name: str) -> Array:
        if has_no_data(env):
            return env.xp.empty((x.shape[0], self.edges, *x.shape[2:]), dtype=x.dtype)
        return env.xp.take(x, self.get_attribute_on_device(env, name), axis=1)


NO_GRAPH = LocalGraph.from_part_sizes_without_data(PartSizes(0, 0, 0), 0)


@dataclass(frozen=True)
class MeshPartition(FieldPartition):
    """Describes how an array (samples, rows, features) of a model is distributed over the ranks that hold a mesh.

    Parameters
    ----------
    graph : this rank's part of the mesh
    kind : what the rows are: "nodes" (the nodes that each rank owns), "ghosts" (owned nodes, followed by ghosts) or
        "edges" (the rank's edges)
    """

    graph: LocalGraph = NO_GRAPH
    kind: str = "nodes"

    has_cells: ClassVar = False
    PHRASES: ClassVar = {"nodes": "the nodes", "ghosts": "the nodes and ghosts", "edges": "the edges"}

    def __str__(self) -> str:
        return f"{self.PHRASES[self.kind]} of a part of a mesh of {self.shape[0]} nodes"

    def of_kind(self, kind: str) -> MeshPartition:
        """Return the partition of an array on the same mesh whose rows are of another kind: "nodes", "ghosts" or
        "edges"."""
        return replace(self, kind=kind)

    def can_run_unchanged(self, layer: Any) -> bool:
        return layer.acts_on in ("element", "position") and not (layer.needs_all_positions() or layer.looks_up)

    def explain_unsupported_layer(self, layer: Any) -> str:
        if layer.acts_on not in ("element", "position"):
            return super().explain_unsupported_layer(layer)
        if layer.looks_up:
            return "its result has a dim more than values of nodes: use nn.OneHot and nn.Linear instead"
        return "needs all rows of a sample, or their order (Layer.needs_all_positions), which depends on the partition"

    def can_run_bound(self, layer: Any) -> bool:
        return self.kind in getattr(layer, "rows_of_mesh", ())

    @classmethod
    def to_channels_first(cls, array: Any) -> Any:
        return array.transpose(0, 2, 1)

    def bind_loss(self, loss: Loss) -> Loss:
        return bind_loss_to_local_nodes(loss, self.cuts)

    def partition_model(self, model: Layer) -> PartitionedModel:
        """Return the model that each rank runs on its part of the mesh. This `MeshPartition` describes how node values
        are distributed."""
        return partition_mesh_model(model, self)

    def get_random_numbers(self, random: Any, shape: tuple[int, ...], lines: Sequence[Any]) -> Any:
        """Return random numbers for this rank's nodes or edges. They depend only on global numbers, not on the
        partition."""
        if self.kind == "edges":
            return random.get_numbers_for_rows_of_array(shape, self.graph.edge_slots, self.shape[0] * self.graph.slots)
        return random.get_numbers_for_rows_of_array(shape, self.graph.numbers[: shape[1]], self.shape[0])


class GraphLayer(Layer, TakesRows):
    """Base class for layers that read values of nodes or edges, and that need access to the graph of the mesh."""

    parts: MeshPartition | None = None
    """Distribution of the first input; None unless the model runs on a mesh."""

    @property
    def graph(self) -> LocalGraph:
        """This rank's part of the mesh. Raises ConfigError if the model does not run on a mesh."""
        if self.parts is None:
            raise ConfigError(f"{self!r} needs a mesh: pass domain=fsdpx.Partition(...)")
        return self.parts.graph

    @property
    def has_ghosts(self) -> bool:
        """Whether the first input also has rows for ghosts."""
        return self.parts is not None and self.parts.kind == "ghosts"

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        request.require_no_tensor_plan_mark(self)
        location = f"{request.path!r} {self!r}"
        for wanted, kind in zip(self.reads, request.kinds, strict=True):
            if not isinstance(kind, MeshPartition):
                raise ConfigError(f"{location} reads {kind}, and needs a mesh: pass domain=fsdpx.Partition")
            if kind.kind not in (("nodes", "ghosts") if wanted == "nodes" else (wanted,)):
                raise ConfigError(f"{location} reads {kind}, and needs values of {wanted}")
        first = request.kinds[0]
        assert isinstance(first, MeshPartition)
        return ShardedLayer(bind_partition(self, first), first.of_kind(self.gives))


def has_no_data(env: LayerContext) -> bool:
    """Return whether arrays have shapes and dtypes but no data, as in a dry run."""
    return bool(getattr(env.xp, "holds_no_data", False))


def require_node_features(layer: Any, x: Array, rows: int, features: int | None = None) -> None:
    """Raise ShapeError unless `x` is (samples, rows, features). `features=None` allows any number of features."""
    if x.ndim != 3 or x.shape[1] != rows or features not in (None, x.shape[2]):
        wanted = "features" if features is None else features
        raise ShapeError(f"{layer!r} wants an input of shape (samples, {rows}, {wanted}), got {tuple(x.shape)}")
