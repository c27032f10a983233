"""How samples lie over ranks: whole, each on one data rank, unless a `domain` cuts each of them over several."""

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

__all__ = ["WHOLE", "Domain", "SampleLayout", "WholeSamples"]

Shape = tuple[int, ...]


class SampleLayout(Protocol):
    """What a placement asks of the way in which samples lie over ranks."""

    @property
    def is_whole(self) -> bool:
        """Whether each data rank has samples of its own, all of each."""

    @property
    def has_one_group(self) -> bool:
        """Whether all ranks work on the same samples: a rank that predicts waits for those beside it alone."""

    def is_batched(self, given: Any) -> bool:
        """Whether an array that a caller gives has a dim of samples."""

    def rows_per_group(self, rows: Sequence[int]) -> Sequence[int]:
        """The numbers of samples of each group of data ranks that work on the same ones, from those of data ranks."""

    def require_together(self, rows: Sequence[int]) -> None:
        """DataError where data ranks that work on the same samples do not have as many of them."""

    def describe_array(self, array: Any) -> str:
        """What of an array of the batch must be alike on all ranks."""

    def find_mistakes(self, x: Any) -> str:
        """What seems to be wrong with how samples were cut, by the first input, as text. May be collective."""

    def full_shape(self, shape: Shape) -> Shape:
        """The shape of an input as one process would have it."""

    def part_shape(self, shape: Shape) -> Shape:
        """The shape of this rank's part of an output that one process would have."""

    def to_model_inputs(self, arrays: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        """Inputs as the model reads them, from those of the caller; DataError if they are no such parts."""

    def to_model_output(self, array: Any, name: str) -> Any:
        """An array that belongs to the model's output, as the model gives it."""

    def to_caller_layout(self, array: Any, batched: bool) -> Any:
        """An array of the model as the caller has it."""

    def drop_foreign_target(self, y: Any) -> Any:
        """A target as the caller has it, without what belongs to other ranks."""

    def bind_loss(self, loss: Loss) -> Loss:
        """What compares outputs that lie so."""

    def get_output_space(self) -> Domain:
        """How the model's output is cut; ConfigError where it is not."""


@dataclass(frozen=True)
class WholeSamples:
    """Each data rank has samples of its own, all of each."""

    is_whole: ClassVar = True
    has_one_group: ClassVar = False

    def is_batched(self, given: Any) -> bool:
        return True

    def rows_per_group(self, rows: Sequence[int]) -> Sequence[int]:
        return rows

    def require_together(self, rows: Sequence[int]) -> None:
        return

    def describe_array(self, array: Any) -> str:
        return f"{array.dtype}{list(array.shape[1:])}"

    def find_mistakes(self, x: Any) -> str:
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

    def drop_foreign_target(self, y: Any) -> Any:
        return y

    def bind_loss(self, loss: Loss) -> Loss:
        return loss

    def get_output_space(self) -> Domain:
        raise ConfigError("output_grid: this trainer has whole samples: give distribute a grid of fields, domain=")


class Domain(ABC):
    """What says how each sample is cut over ranks, the argument `domain` of `distribute`. `fsdpx.Grid` is one. Ranks
    compare its `repr`.

    Attributes
    ----------
    dims : ranks along each dim that is cut
    excluded : the choice whose rows of the table in core/trainer/option_rules.py name what cannot be beside it
    """

    dims: tuple[int, ...]
    excluded: ClassVar[str] = "`domain`"

    @property
    @abstractmethod
    def comm(self) -> Any:
        """The communicator of its ranks; None in a dry run."""

    @property
    @abstractmethod
    def local_shape(self) -> tuple[int, ...]:
        """Cells of this rank's part."""

    @property
    @abstractmethod
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins, along each dim of the whole."""

    @property
    @abstractmethod
    def joined_partition(self) -> FieldPartition | None:
        """What one process would have, where its model is another than that of a rank."""

    @abstractmethod
    def take_local(self, what: Any) -> Any:
        """This rank's part of an array of the whole."""

    @abstractmethod
    def gather(self, array: Any) -> Any:
        """The whole, from the parts of all ranks, on every rank. Collective."""

    def all_gather_sample_groups(self, mesh: Mesh, world: Communicator) -> SampleGroups | None:
        """Which data ranks have parts of the same samples; None: each has samples of its own, all of each. Collective.

        ConfigError or MeshError where they do not fit the mesh."""
        return None

    @abstractmethod
    def shard_model(self, model: Layer, parts: FieldPartition | None = None) -> tuple[Layer, FieldPartition]:
        """What each rank runs of a model, and how its output is cut. parts: of the inputs; None: as it cuts them.

        ConfigError for layers that cannot work on a part."""

    def gather_model(self, model: Layer) -> Layer:
        """What one process would run of a model."""
        return model if self.joined_partition is None else self.shard_model(model, self.joined_partition)[0]

    @abstractmethod
    def make_sample_layout(self, model: Layer, axes: MeshAxes) -> SampleLayout:
        """How samples of this model lie over the ranks of a mesh."""


class UncutSamples(Domain):
    """Where no `domain` was given: samples are not cut."""

    dims, excluded, local_shape, offsets, comm, joined_partition = (), "nothing", (), (), None, None

    def __repr__(self) -> str:
        return "None"

    def take_local(self, what: Any) -> Any:
        return what

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
        return WholeSamples()


WHOLE = UncutSamples()
