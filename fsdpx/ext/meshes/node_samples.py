"""The sample layout in which each sample is a value on the nodes of a mesh, and each rank has those of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fsdpx.core.comm.mesh import MeshAxes
from fsdpx.core.state.sample_layout import Domain
from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.fields.losses import BandRMSE, BoundaryRMSE
from fsdpx.ext.fields.physics import PhysicsLoss
from fsdpx.nn.gradient_accumulation import has_integer_dtype
from fsdpx.nn.layer import Array, LayerContext
from fsdpx.nn.losses import CellWeights, Loss
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["NodeLoss", "NodeSamples", "PartitionedNodes"]


class PartitionedNodes(Protocol):
    """What a sample layout needs to know of a `Partition`."""

    dims: tuple[int, ...]

    @property
    def partition(self) -> FieldPartition: ...

    @property
    def total_nodes(self) -> int: ...

    @property
    def local_shape(self) -> tuple[int, ...]: ...

    @property
    def row_counts(self) -> tuple[int, int]: ...

    def take_owned_rows(self, array: Any) -> Any: ...


@dataclass(frozen=True)
class NodeSamples:
    """The sample layout of a `Partition`: the model reads (samples, nodes, features).

    Attributes
    ----------
    partition : the mesh
    axes : the communicators of the ranks
    """

    partition: PartitionedNodes
    axes: MeshAxes

    has_complete_samples: ClassVar = False

    @property
    def has_one_group(self) -> bool:
        return self.partition.dims[0] == self.axes.world.size

    def has_sample_dim(self, inputs: Sequence[Any]) -> bool:
        return inputs[0].ndim > 2

    def count_samples_per_group(self, rows: Sequence[int]) -> Sequence[int]:
        return [rows[member[0]] for member in self.axes.ranks_sharing_samples]

    def require_equal_sample_counts(self, rows: Sequence[int]) -> None:
        for member in self.axes.ranks_sharing_samples:
            odd = next((rank for rank in member if rows[rank] != rows[member[0]]), None)
            if odd is not None:
                raise DataError(
                    f"data rank {member[0]} has {rows[member[0]]} samples, and data rank {odd}, which has another part "
                    f"of the same mesh, {rows[odd]}"
                )

    def describe_array(self, array: Any) -> str:
        """Return the dtype and the number of features as text, which must be equal on all ranks."""
        return f"{array.dtype} of {list(array.shape[2:])} features"

    def describe_sharding_mistake(self, inputs: Sequence[Any]) -> str:
        return ""

    def compute_full_input_shape(self, shape: tuple[int, ...], index: int) -> tuple[int, ...]:
        return (shape[0], self.partition.total_nodes, *shape[2:])

    def compute_local_output_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
        return [(shape[0], *self.partition.local_shape, *shape[2:]) for shape in shapes]

    def to_model_inputs(self, arrays: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        called = [f"input {name!r}" if len(names) > 1 else "the input" for name in names]
        return [self._to_model_layout(a, name) for a, name in zip(arrays, called, strict=True)]

    def to_model_output(self, array: Any, name: str, index: int, batched: bool) -> Any:
        """Return a target, prediction or gradient as (samples, nodes, features), or integer labels (nodes,) or
        (samples, nodes) as (samples, nodes)."""
        rows = self.partition.row_counts
        if has_integer_dtype(array) and (array.ndim == 1 or (array.ndim == 2 and array.shape[0] not in rows)):
            if array.shape[-1] not in rows:
                raise self._make_shape_error(array, name)
            labels = array if array.ndim == 2 else array[None]
            return self.partition.take_owned_rows(labels[..., None])[..., 0]
        return self._to_model_layout(array, name)

    def to_model_output_gradients(self, arrays: Sequence[Any], batched: bool) -> Sequence[Any]:
        return [self.to_model_output(array, "dy", index, batched) for index, array in enumerate(arrays)]

    def to_caller_layout(self, array: Any, batched: bool) -> Any:
        return array if batched else array[0]

    def to_caller_input_gradients(self, arrays: Sequence[Any], batched: bool) -> Sequence[Any]:
        return [None if array is None else self.to_caller_layout(array, batched) for array in arrays]

    def take_local_target(self, y: Any, index: int) -> Any:
        return y

    def bind_loss(self, loss: Loss) -> Loss:
        """Return the loss for this rank's nodes. A loss of fields, and one with weights, reads the features as
        channels and the nodes as the cells of a field."""
        if isinstance(loss, BandRMSE | BoundaryRMSE | PhysicsLoss):
            raise ConfigError(f"{loss!r} needs the cells of a grid, and cannot be computed on a mesh")
        of_fields = type(loss).bind_partition is not Loss.bind_partition
        if not of_fields and not isinstance(getattr(loss, "weights", None), CellWeights):
            return loss
        return NodeLoss(loss.bind_partition(FieldPartition(self.partition.partition.cuts)))

    def get_output_domain(self) -> Domain:
        assert isinstance(self.partition, Domain)
        return self.partition

    def _to_model_layout(self, array: Any, name: str) -> Any:
        whole = array[:, None] if array.ndim == 1 else array
        if whole.ndim not in (2, 3) or whole.shape[-2] not in self.partition.row_counts:
            raise self._make_shape_error(array, name)
        return self.partition.take_owned_rows(whole if whole.ndim == 3 else whole[None])

    def _make_shape_error(self, array: Any, name: str) -> DataError:
        owned, both = self.partition.row_counts
        ghosts = f", or {both} with the ghosts" if both != owned else ""
        per_node = next((array.size // n for n in (both, owned) if array.ndim == 1 and n and array.size % n == 0), 0)
        reshape = f"; of {per_node} values for each node in turn, as array.reshape(-1, {per_node})" if per_node else ""
        return DataError(
            f"{name} has shape {tuple(array.shape)}, but this rank has {owned} nodes{ghosts}: give (nodes, features) "
            f"or (samples, nodes, features){reshape}"
        )


class NodeLoss(Loss):
    """Computes a loss of fields (samples, channels, cells) on values (samples, nodes, features) of nodes."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.kernel_names, self.partial = loss.kernel_names, loss.partial

    def forward(self, env: LayerContext, y: Array, target: Array) -> tuple[float, float, Any]:
        return self.loss.forward(env, _swap(y), _swap(target))

    def backward(self, env: LayerContext, saved: Any, seed: float) -> Array:
        return env.xp.ascontiguousarray(_swap(self.loss.backward(env, saved, seed)))

    def validate(self, shape: tuple[int, ...], target: Array) -> None:
        if len(shape) != 3 or target.ndim != 3:
            raise DataError(f"{self.loss!r} compares (samples, nodes, features), got {shape} and {target.shape}")
        self.loss.validate((shape[0], shape[2], shape[1]), _swap(target))


def _swap(values: Array) -> Array:
    """Return a view with nodes last instead of features, or the inverse."""
    return values.transpose(0, 2, 1)
