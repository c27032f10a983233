"""The distribution of samples over ranks. By default, each sample is on a single data rank. With the option `domain`,
each sample is split over several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.mesh import Mesh, MeshAxes, SampleGroups
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Layer
from fsdpx.nn.losses import Loss
from fsdpx.nn.shard_specs import FieldPartition, Kind, Replicated

__all__ = ["UNSHARDED", "CompleteSamples", "Domain", "SampleLayout"]

Shape = tuple[int, ...]


class SampleLayout(Protocol):
    """Converts batches between the layout of the caller's arrays and the layout that the model uses. A sample may be
    split over several ranks."""

    @property
    def has_complete_samples(self) -> bool:
        """True if each data rank has its own complete samples."""

    @property
    def has_one_group(self) -> bool:
        """True if all ranks work on the same samples. In `predict`, a rank then waits only for its neighbors instead of
        all ranks."""

    @property
    def domain_version(self) -> int:
        """The number of times that the domain has changed, for example through `Partition.replace_edges`."""

    def has_sample_dim(self, inputs: Sequence[Any]) -> bool:
        """Return whether the inputs that the caller passed have a sample dimension."""

    def count_samples_per_group(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the number of samples for each group of data ranks (the ranks of a group work on the same samples).
        `rows` holds the number of samples of each data rank."""

    def require_equal_sample_counts(self, rows: Sequence[int]) -> None:
        """Raise DataError unless data ranks that work on the same samples have the same number of samples. `rows`
        holds the number of samples of each data rank."""

    def describe_array(self, array: Any) -> str:
        """Return a description of the properties of a batch array, such as its dtype, that must be the same on all
        ranks."""

    def gather_sharding_warning(self, inputs: Sequence[Any], targets: Sequence[Any], samples: int | None) -> str:
        """Return a warning if the inputs or targets seem to be wrongly split over the ranks, and "" otherwise.
        `samples` is a digest of the indices of this rank's samples in their dataset, or None if it is not known. Raise
        DataError if ranks that hold parts of the same samples pass different samples. May be collective."""

    def compute_full_input_shape(self, shape: Shape, index: int) -> Shape:
        """Return the shape of input number `index` before it is split, given the shape of this rank's part."""

    def compute_local_output_shapes(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """Return the shape of this rank's part of each output, given the shapes of the unsplit outputs."""

    def to_model_inputs(self, arrays: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        """Convert the caller's inputs to the arrays that the model reads. Raise DataError if the shape of an input does
        not match this rank's part of a batch."""

    def to_model_output(self, array: Any, name: str, index: int, batched: bool) -> Any:
        """Convert one of the caller's arrays, such as a target, to the layout of the model's output number `index`.
        `batched` is True if the caller's arrays have a sample dimension."""

    def to_model_output_gradients(self, arrays: Sequence[Any], batched: bool) -> Sequence[Any]:
        """Convert the caller's output gradients to the gradients from which this rank's backward pass starts. If
        several ranks hold the same full output, the sum of their gradients for this output must equal the caller's
        gradient."""

    def to_caller_layout(self, array: Any, batched: bool) -> Any:
        """Convert an array computed by the model to the layout of the caller's arrays. `batched` is True if the
        caller's arrays have a sample dimension."""

    def all_reduce_caller_input_gradients(self, arrays: Sequence[Any], batched: bool) -> Sequence[Any]:
        """Convert the gradients of the inputs (None for integer inputs) to the layout of the caller's arrays. If
        several ranks hold an input in full, sum their gradients. May be collective."""

    def take_local_target(self, y: Any, index: int) -> Any:
        """Return this rank's part of the caller's target for output number `index`."""

    def bind_loss(self, loss: Loss) -> Loss:
        """Return a version of `loss` that can handle outputs that are split over ranks."""

    def get_output_domain(self) -> Domain | tuple[Domain | None, ...]:
        """Return how the model's output is split over ranks. If the model has several outputs, return a tuple with one
        entry for each output. The entry is None if the output is not split. Raise ConfigError if the model's only
        output is not split."""


@dataclass(frozen=True)
class CompleteSamples:
    """The layout in which each data rank has its own complete samples."""

    has_complete_samples: ClassVar = True
    has_one_group: ClassVar = False
    domain_version: ClassVar = 0

    def has_sample_dim(self, inputs: Sequence[Any]) -> bool:
        return True

    def count_samples_per_group(self, rows: Sequence[int]) -> Sequence[int]:
        return rows

    def require_equal_sample_counts(self, rows: Sequence[int]) -> None:
        return

    def describe_array(self, array: Any) -> str:
        return f"{array.dtype}{list(array.shape[1:])}"

    def gather_sharding_warning(self, inputs: Sequence[Any], targets: Sequence[Any], samples: int | None) -> str:
        return ""

    def compute_full_input_shape(self, shape: Shape, index: int) -> Shape:
        return shape

    def compute_local_output_shapes(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        return shapes

    def to_model_inputs(self, arrays: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        return arrays

    def to_model_output(self, array: Any, name: str, index: int, batched: bool) -> Any:
        return array

    def to_model_output_gradients(self, arrays: Sequence[Any], batched: bool) -> Sequence[Any]:
        return [self.to_model_output(array, "dy", index, batched) for index, array in enumerate(arrays)]

    def to_caller_layout(self, array: Any, batched: bool) -> Any:
        return array

    def all_reduce_caller_input_gradients(self, arrays: Sequence[Any], batched: bool) -> Sequence[Any]:
        return [None if array is None else self.to_caller_layout(array, batched) for array in arrays]

    def take_local_target(self, y: Any, index: int) -> Any:
        return y

    def bind_loss(self, loss: Loss) -> Loss:
        return loss

    def get_output_domain(self) -> Domain | tuple[Domain | None, ...]:
        raise ConfigError("output_grid: this trainer has whole samples: give distribute a grid of fields, domain=")


class Domain(ABC):
    """Base class for objects that describe how each sample is split over ranks, such as `fsdpx.Grid`. They are passed
    to `distribute` as the argument `domain`, and must have the same `repr` on all ranks.

    Attributes
    ----------
    dims : number of ranks along each split dimension
    excluded : name of this kind of domain in core/trainer/option_rules.py, which lists the options that cannot be
        combined with it
    """

    dims: tuple[int, ...]
    excluded: ClassVar[str] = "`domain`"

    @property
    @abstractmethod
    def comm(self) -> Any:
        """The communicator of the ranks that hold parts of the same sample, or None in a dry run."""

    @property
    @abstractmethod
    def local_shape(self) -> tuple[int, ...]:
        """The number of cells in this rank's part, along each dimension."""

    @property
    @abstractmethod
    def offsets(self) -> tuple[int, ...]:
        """The index of this rank's first cell in the full sample, along each dimension."""

    @property
    @abstractmethod
    def joined_partition(self) -> tuple[FieldPartition, ...] | None:
        """The partitions that a single process needs to run the model on complete samples: one partition for all
        inputs, or one for each input. None if the process can run the model unchanged."""

    @abstractmethod
    def take_local(self, array: Any) -> Any:
        """Return this rank's part of an array that holds unsplit samples."""

    @abstractmethod
    def all_gather(self, array: Any) -> Any:
        """All-gather the parts of all ranks, and return the unsplit array on every rank. Collective."""

    def all_gather_rank_groups_by_sample(self, mesh: Mesh, world: Communicator) -> SampleGroups | None:
        """Determine which data ranks hold parts of the same samples. Return None if each data rank has its own complete
        samples. Collective.

        Raise ConfigError or MeshError if the groups of ranks do not fit the mesh."""
        return None

    @abstractmethod
    def shard_model(self, model: Layer, parts: Sequence[FieldPartition] | None = None) -> tuple[Layer, Sequence[Kind]]:
        """Return the model that each rank runs on its part of a sample, and how each output of this model is
        distributed over the ranks. `parts` holds one partition for all inputs, or one for each input. If `parts` is
        None, use the partitions of this domain.

        Raise ConfigError if a layer cannot run on a part of a sample."""

    @property
    def busiest_ranks(self) -> tuple[int, ...]:
        """The ranks whose memory and traffic a plan reports, as indices among the ranks that share a sample. The first
        is the rank with the most computation. If a different rank has the most communication, it is the second."""
        return (0,)

    def as_rank(self, rank: int) -> Domain:
        """Return this domain as rank `rank` would see it, without a communicator. This is used in dry runs."""
        raise ConfigError(f"{self!r} cannot be used in plans and dry runs, as {type(self).__name__} defines no as_rank")

    def compute_local_shapes(
        self, model: Layer, inputs: Sequence[Shape], target: Shape
    ) -> tuple[Sequence[Shape], Shape]:
        """Return the shapes of this rank's parts of the inputs and the target, given the shapes of the unsplit inputs
        and target."""
        raise ConfigError(f"{self!r} cannot be planned, as {type(self).__name__} defines no compute_local_shapes")

    def make_unsharded_model(self, model: Layer) -> Layer:
        """Return the model that a single process would run on unsplit samples."""
        return model if self.joined_partition is None else self.shard_model(model, self.joined_partition)[0]

    @abstractmethod
    def make_sample_layout(self, model: Layer, axes: MeshAxes) -> SampleLayout:
        """Return the layout of this model's samples over the ranks of a mesh."""


class UnshardedDomain(Domain):
    """The default for the option `domain`: samples are not split."""

    dims, excluded, local_shape, offsets, comm, joined_partition = (), "nothing", (), (), None, None

    def __repr__(self) -> str:
        return "None"

    def take_local(self, array: Any) -> Any:
        return array

    def all_gather(self, array: Any) -> Any:
        return array

    def all_gather_rank_groups_by_sample(self, mesh: Mesh, world: Communicator) -> SampleGroups | None:
        if dims := mesh.domain:
            raise ConfigError(
                f"Mesh(domain={dims}): which cells each rank has is not known; give domain=fsdpx.Grid(comm, "
                f"u.shape[:{len(dims)}], dims={dims}) as well"
            )
        return None

    busiest_ranks = (0,)

    def as_rank(self, rank: int) -> Domain:
        return self

    def compute_local_shapes(
        self, model: Layer, inputs: Sequence[Shape], target: Shape
    ) -> tuple[Sequence[Shape], Shape]:
        return inputs, target

    def shard_model(self, model: Layer, parts: Sequence[FieldPartition] | None = None) -> tuple[Layer, Sequence[Kind]]:
        return model, [Replicated()] * model.n_outputs

    def make_sample_layout(self, model: Layer, axes: MeshAxes) -> SampleLayout:
        return CompleteSamples()


UNSHARDED = UnshardedDomain()
