"""The sample layout for models on meshes: a sample holds values of all nodes, and each rank has the values of its own
nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.comm.mesh import MeshAxes
from fsdpx.core.state.sample_layout import Domain
from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.fields.multi_output import adapt_loss_to_output_shardings
from fsdpx.ext.fields.split_samples import SplitSamples
from fsdpx.ext.meshes.local_graph import LocalGraph, MeshPartition
from fsdpx.nn.gradient_accumulation import has_integer_dtype
from fsdpx.nn.losses import Loss
from fsdpx.nn.shard_specs import FieldPartition, Kind

__all__ = ["NodeSamples", "PartitionedNodes"]


class PartitionedNodes(Protocol):
    """Protocol with the attributes of a `Partition` that `NodeSamples` uses."""

    dims: tuple[int, ...]
    total_edges: int

    @property
    def graph(self) -> LocalGraph: ...

    @property
    def total_nodes(self) -> int: ...

    @property
    def row_counts(self) -> tuple[int, int]: ...

    def take_owned_rows(self, array: Any) -> Any: ...


@dataclass(frozen=True)
class NodeSamples(SplitSamples):
    """The sample layout of a `Partition`. Inputs of the model are node values (samples, nodes, features), edge values
    (samples, edges, features) or scalars (samples, n).

    Attributes
    ----------
    partition : the mesh
    input_kinds, output_kinds : how each input and output of the model is distributed: a `MeshPartition`, or
        `Replicated` for scalars
    axes : the communicators of the device mesh on this rank
    graphs : this rank's parts of all meshes on which layers compute: those of `partition` and of coarser meshes
    """

    partition: PartitionedNodes
    input_kinds: tuple[Kind, ...]
    output_kinds: tuple[Kind, ...]
    axes: MeshAxes
    graphs: tuple[LocalGraph, ...]

    whole = "mesh"

    @property
    def has_one_group(self) -> bool:
        return self.partition.dims[0] == self.axes.world.size

    @property
    def domain_version(self) -> int:
        return sum(graph.replacement_count for graph in self.graphs)

    def has_sample_dim(self, inputs: Sequence[Any]) -> bool:
        return self.get_first_split_input(inputs).ndim > 2

    def describe_array(self, array: Any) -> str:
        """Return a description of the array's dtype and number of features. Ranks compare their descriptions, which
        must be equal."""
        return f"{array.dtype} of {list(array.shape[2:])} features"

    def gather_sharding_warning(self, inputs: Sequence[Any], targets: Sequence[Any], samples: int | None) -> str:
        """Compare the arguments of the ranks that hold the parts of one mesh. Return a warning if they pass different
        scalars, otherwise "". Raise DataError if they pass different samples. Collective."""
        if getattr(inputs[0], "holds_no_data", False):
            return ""
        return self.all_gather_and_check_scalars(inputs, targets, samples, None)[1]

    def compute_full_input_shape(self, shape: tuple[int, ...], index: int) -> tuple[int, ...]:
        kind = self.input_kinds[index]
        if not isinstance(kind, MeshPartition):
            return shape
        of_edges = kind.kind == "edges"
        return (shape[0], self.partition.total_edges if of_edges else self.partition.total_nodes, *shape[2:])

    def compute_part_shapes(
        self, shape: tuple[int, ...], kind: FieldPartition
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        assert isinstance(kind, MeshPartition)
        return (shape[0], *kind.shape, *shape[2:]), (shape[0], kind.graph.nodes, *shape[2:])

    def to_model_inputs(self, arrays: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        called = [f"input {name!r}" if len(names) > 1 else "the input" for name in names]
        batched = self.has_sample_dim(arrays)
        return [
            self._to_model_layout(a, kind, text)
            if isinstance(kind, MeshPartition)
            else self.convert_caller_scalars_for_model(a, text, batched)
            for a, text, kind in zip(arrays, called, self.input_kinds, strict=True)
        ]

    def to_model_output(self, array: Any, name: str, index: int, batched: bool) -> Any:
        """Return a target, prediction or gradient in the model's layout: (samples, nodes, features) for node values,
        (samples, n) for scalars, or (samples, nodes) for integer labels. The caller may pass labels as (nodes,) or
        (samples, nodes). An integer array with two dims is either labels (samples, nodes) or one sample (nodes,
        features). The shape alone does not always tell which, because the number of samples may equal the number of
        nodes. If the caller's arrays have a sample dim (`batched`), the array is taken as labels."""
        kind = self.output_kinds[index]
        if not isinstance(kind, MeshPartition):
            return self.convert_caller_scalars_for_model(array, name, batched)
        rows = self._get_row_counts_without_and_with_ghosts(kind)
        with_samples = array.ndim == 2 and (batched or array.shape[0] not in rows)
        if has_integer_dtype(array) and (array.ndim == 1 or with_samples):
            if array.shape[-1] not in rows:
                raise self._make_shape_error(array, name, kind)
            labels = array if array.ndim == 2 else array[None]
            return self._take_owned_rows(labels[..., None], kind)[..., 0]
        return self._to_model_layout(array, kind, name)

    def to_caller_layout(self, array: Any, batched: bool) -> Any:
        return array if batched else array[0]

    def take_local_target(self, y: Any, index: int) -> Any:
        return y

    def bind_loss(self, loss: Loss) -> Loss:
        return adapt_loss_to_output_shardings(loss, self.output_kinds)

    def get_output_domain(self) -> Domain | tuple[Domain | None, ...]:
        assert isinstance(self.partition, Domain)
        graphs = {kind.graph for kind in self.output_kinds if isinstance(kind, MeshPartition)}
        if graphs - {self.partition.graph}:
            raise ConfigError("output_grid: an output has values of a coarser mesh, the `coarse` of its MeshLevel")
        found = tuple(self.partition if isinstance(kind, MeshPartition) else None for kind in self.output_kinds)
        if found == (None,):
            raise ConfigError("output_grid: the model's outputs are scalars, which every rank holds in full")
        return found if len(found) > 1 else self.partition

    def _to_model_layout(self, array: Any, kind: MeshPartition, name: str) -> Any:
        whole = array[:, None] if array.ndim == 1 else array
        if whole.ndim not in (2, 3) or whole.shape[-2] not in self._get_row_counts_without_and_with_ghosts(kind):
            raise self._make_shape_error(array, name, kind)
        return self._take_owned_rows(whole if whole.ndim == 3 else whole[None], kind)

    def _get_row_counts_without_and_with_ghosts(self, kind: MeshPartition) -> tuple[int, int]:
        """Return the number of rows that an array has without ghosts, and the number with ghosts. Arrays of edge
        values, and arrays of node values on a coarser mesh, have no rows for ghosts."""
        if kind.graph is self.partition.graph and kind.kind == "nodes":
            return self.partition.row_counts
        rows = kind.graph.edges if kind.kind == "edges" else kind.graph.nodes
        return rows, rows

    def _take_owned_rows(self, array: Any, kind: MeshPartition) -> Any:
        owned, both = self._get_row_counts_without_and_with_ghosts(kind)
        return array if owned == both else self.partition.take_owned_rows(array)

    def _make_shape_error(self, array: Any, name: str, kind: MeshPartition) -> DataError:
        owned, both = self._get_row_counts_without_and_with_ghosts(kind)
        if kind.kind == "edges":
            return DataError(
                f"{name} has shape {tuple(array.shape)}, but this rank has {self.partition.graph.edges} edges: give "
                "(edges, features) or (samples, edges, features), as Partition.exchange_edges returns them"
            )
        if array.shape[-2:][:1] == kind.shape and kind.graph is self.partition.graph:
            return DataError(
                f"{name} has shape {tuple(array.shape)}: these are all {kind.shape[0]} nodes of the mesh, of which "
                f"this rank has {owned}: give its part, Partition.take_local(array)"
            )
        ghosts = f", or {both} with the ghosts" if both != owned else ""
        per_node = next((array.size // n for n in (both, owned) if array.ndim == 1 and n and array.size % n == 0), 0)
        reshape = f"; of {per_node} values for each node in turn, as array.reshape(-1, {per_node})" if per_node else ""
        return DataError(
            f"{name} has shape {tuple(array.shape)}, but this rank has {owned} nodes{ghosts}: give (nodes, features) "
            f"or (samples, nodes, features){reshape}"
        )
