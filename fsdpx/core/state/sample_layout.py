"""The distribution of samples over ranks: each sample is on one data rank, unless a `domain` shards it over several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.mesh import Mesh, MeshAxes, SampleGroups
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Layer
from fsdpx.nn.losses import Loss
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["UNSHARDED", "CompleteSamples", "Domain", "SampleLayout"]

Shape = tuple[int, ...]


class SampleLayout(Protocol):
    """The interface through which a placement handles samples that may be sharded over ranks."""

    @property
    def has_complete_samples(self) -> bool:
        """True if each data rank has its own complete samples."""

    @property
    def has_one_group(self) -> bool:
        """True if all ranks work on the same samples. If so, a rank in predict waits only for the ranks with the other
        parts of its samples."""

    def has_sample_dim(self, given: Any) -> bool:
        """Return whether an array that a caller passes has a samples dim."""

    def count_rows_per_group(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the number of samples of each group of data ranks that work on the same samples. rows: number of
        samples of each data rank."""

    def require_equal_sample_counts(self, rows: Sequence[int]) -> None:
        """Raise DataError unless data ranks that work on the same samples have the same number of samples."""

    def describe_array(self, array: Any) -> str:
        """Return text with the properties of a batch array that must be equal on all ranks."""

    def describe_sharding_mistake(self, x: Any) -> str:
        """Return text that says how the samples seem to be sharded wrongly, judged by the first input `x`; "" if no
        mistake is found. May be collective."""

    def full_shape(self, shape: Shape) -> Shape:
        """Return the shape that an input would have in one process."""

    def part_shape(self, shape: Shape) -> Shape:
        """Return the shape of this rank's part of an output, given its shape in one process."""

    def to_model_inputs(self, arrays: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        """Convert the caller's inputs to the inputs that the model reads. Raise DataError if they do not have the shape
        of this rank's part."""

    def to_model_output(self, array: Any, name: str) -> Any:
        """Convert an array of the caller that belongs to the model's output, such as a target or an output gradient, to
        the layout of that output."""

    def to_caller_layout(self, array: Any, batched: bool) -> Any:
        """Convert an array of the model to the caller's layout. batched: whether the caller's arrays have a samples
        dim."""

    def drop_target_of_other_ranks(self, y: Any) -> Any:
        """Return the caller's target without the part that belongs to other ranks."""

    def bind_loss(self, loss: Loss) -> Loss:
        """Return the loss for outputs in this layout."""

    def get_output_domain(self) -> Domain:
        """Return the domain that shards the model's output. Raise ConfigError if the output is not sharded."""


@dataclass(frozen=True)
class CompleteSamples:
    """The layout in which each data rank has its own complete samples."""

    has_complete_samples: ClassVar = True
    has_one_group: ClassVar = False

    def has_sample_dim(self, given: Any) -> bool:
        return True

    def count_rows_per_group(self, rows: Sequence[int]) -> Sequence[int]:
        return rows

    def require_equal_sample_counts(self, rows: Sequence[int]) -> None:
        return

    def describe_array(self, array: Any) -> str:
        return f"{array.dtype}{list(array.shape[1:])}"

    def describe_sharding_mistake(self, x: Any) -> str:
        return ""

    def full_shape(self, shape: Shape) -> Shape:
        return shape

    def part_shape(self, shape: Shape) -> Shape:
        return tuple(shape)

    def to_model_inputs(self, arrays: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        return arrays

    def to_model_output(self, array: Any, name: str) -> Any:
        return array

    def to_caller_layout(self, array: Any, batched: bool) -> Any:
        return array

    def drop_target_of_other_ranks(self, y: Any) -> Any:
        return y

    def bind_loss(self, loss: Loss) -> Loss:
        return loss

    def get_output_domain(self) -> Domain:
        raise ConfigError("output_grid: this trainer has whole samples: give distribute a grid of fields, domain=")


class Domain(ABC):
    """Base class for descriptions of how each sample is sharded over ranks, for the argument `domain` of `distribute`.
    `fsdpx.Grid` is such a class. Ranks compare the `repr` of their domains.

    Attributes
    ----------
    dims : number of ranks along each sharded dim
    excluded : the name under which the table in core/trainer/option_rules.py lists the options that cannot be combined
        with this domain
    """

    dims: tuple[int, ...]
    excluded: ClassVar[str] = "`domain`"

    @property
    @abstractmethod
    def comm(self) -> Any:
        """The communicator of the ranks of the domain; None in a dry run."""

    @property
    @abstractmethod
    def local_shape(self) -> tuple[int, ...]:
        """The number of cells of this rank's part along each dim."""

    @property
    @abstractmethod
    def offsets(self) -> tuple[int, ...]:
        """The index of this rank's first cell in the full sample, along each dim."""

    @property
    @abstractmethod
    def joined_partition(self) -> FieldPartition | None:
        """The partition for one process, if its model differs from that of a rank; otherwise None."""

    @abstractmethod
    def take_local(self, array: Any) -> Any:
        """Return this rank's part of an array of full samples."""

    @abstractmethod
    def gather(self, array: Any) -> Any:
        """Return the full array from the parts of all ranks, on every rank. Collective."""

    def all_gather_sample_groups(self, mesh: Mesh, world: Communicator) -> SampleGroups | None:
        """Return which data ranks have parts of the same samples; None if each has its own complete samples.
        Collective.

        Raise ConfigError or MeshError if these groups do not fit the mesh.
        """
        return None

    @abstractmethod
    def shard_model(self, model: Layer, parts: FieldPartition | None = None) -> tuple[Layer, FieldPartition]:
        """Return the model that each rank runs, and the partition of its output. parts: partition of the inputs; None:
        the partition of this domain.

        Raise ConfigError for layers that cannot work on a part of a sample.
        """

    def make_unsharded_model(self, model: Layer) -> Layer:
        """Return the model that one process would run."""
        return model if self.joined_partition is None else self.shard_model(model, self.joined_partition)[0]

    @abstractmethod
    def make_sample_layout(self, model: Layer, axes: MeshAxes) -> SampleLayout:
        """Return how samples of this model are distributed over the ranks of a mesh."""


class UnshardedDomain(Domain):
    """The domain that is used without the option `domain`: samples are not sharded."""

    dims, excluded, local_shape, offsets, comm, joined_partition = (), "nothing", (), (), None, None

    def __repr__(self) -> str:
        return "None"

    def take_local(self, array: Any) -> Any:
        return array

    def gather(self, array: Any) -> Any:
        return array

    def all_gather_sample_groups(self, mesh: Mesh, world: Communicator) -> SampleGroups | None:
        if dims := mesh.domain:
            raise ConfigError(
                f"Mesh(domain={dims}): which cells each rank has is not known; give domain=fsdpx.Grid(comm, "
                f"u.shape[:{len(dims)}], dims={dims}) as well"
            )
        return None

    def shard_model(self, model: Layer, parts: FieldPartition | None = None) -> tuple[Layer, FieldPartition]:
        return model, FieldPartition.on_one_rank(())

    def make_sample_layout(self, model: Layer, axes: MeshAxes) -> SampleLayout:
        return CompleteSamples()


UNSHARDED = UnshardedDomain()
