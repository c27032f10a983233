"""`SplitSamples`: the base class for sample layouts in which several ranks hold parts of each sample."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from fsdpx.core.array.namespace import namespace_of, to_host
from fsdpx.core.comm.mesh import MeshAxes
from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.nn.shard_specs import FieldPartition, Kind

__all__ = ["SplitSamples"]


class SplitSamples(ABC):
    """Base class for sample layouts in which the ranks of a group hold parts of the same samples.

    Attributes
    ----------
    input_kinds, output_kinds : distribution of each model input and output: a partition, or `Replicated` for scalars
        (samples, n), which every rank holds in full
    axes : the communicators of the mesh on this rank
    """

    input_kinds: tuple[Kind, ...]
    output_kinds: tuple[Kind, ...]
    axes: MeshAxes

    has_complete_samples: ClassVar = False
    whole: ClassVar[str]
    """Name, used in error messages, of the object that is divided among the ranks."""

    @property
    def domain_version(self) -> int:
        """Number of times that the domain has changed."""
        return 0

    @abstractmethod
    def to_model_output(self, array: Any, name: str, index: int, batched: bool) -> Any: ...

    @abstractmethod
    def to_caller_layout(self, array: Any, batched: bool) -> Any: ...

    def get_first_split_input(self, inputs: Sequence[Any]) -> Any:
        """Return the first model input that is split over ranks rather than held in full by each rank."""
        return next(x for x, kind in zip(inputs, self.input_kinds, strict=True) if isinstance(kind, FieldPartition))

    def count_samples_per_group(self, rows: Sequence[int]) -> Sequence[int]:
        return [rows[member[0]] for member in self.axes.rank_groups_sharing_samples]

    def require_equal_sample_counts(self, rows: Sequence[int]) -> None:
        for member in self.axes.rank_groups_sharing_samples:
            odd = next((rank for rank in member if rows[rank] != rows[member[0]]), None)
            if odd is not None:
                raise DataError(
                    f"data rank {member[0]} has {rows[member[0]]} samples, and data rank {odd}, which has another part "
                    f"of the same {self.whole}, {rows[odd]}"
                )

    def all_gather_and_check_scalars(
        self, inputs: Sequence[Any], targets: Sequence[Any], samples: int | None, mine: Any
    ) -> tuple[list[Any], str]:
        """All-gather `mine` among the ranks that hold parts of the same samples. Return the gathered values in the
        order of the parts. Also return a warning if these ranks pass different scalars as inputs or targets, otherwise
        "". `samples` is a digest of the samples that this rank passes, or None if it is unknown.

        Raise DataError on all ranks if the digests of ranks that hold parts of the same samples differ. Each rank
        checks the groups of all pipeline stages, so that all ranks raise the error. If only some did, the others would
        wait for them."""
        groups = self.axes.groups
        assert groups is not None
        rows = [("scalars", *pair) for pair in zip(inputs, self.input_kinds, strict=True)]
        if len(targets) == len(self.output_kinds):  # otherwise, there is a single target for several outputs
            rows += [("scalar targets", *pair) for pair in zip(targets, self.output_kinds, strict=True)]
        scalars = [
            (what, zlib.crc32(np.ascontiguousarray(to_host(array)).tobytes()))
            for what, array, kind in rows
            if not isinstance(kind, FieldPartition)
        ]
        everyone = self.axes.uncounted_world.all_gather_value((mine, scalars, samples, groups.own_ranks))
        for member in dict.fromkeys(group for *_, group in everyone):
            known = {rank: everyone[rank][2] for rank in member if everyone[rank][2] is not None}
            if pair := next(((a, b) for a, b in pairwise(known) if known[a] != known[b]), None):
                raise DataError(
                    f"the DataLoader of rank {pair[1]} gives other samples than that of rank {pair[0]}, which has "
                    f"another part of the same {self.whole}: DataLoader(..., comm=trainer.data_group), with the same "
                    "seed and batch_size on all ranks"
                )
        values, found, *_ = zip(*(everyone[rank] for rank in groups.own_ranks), strict=True)
        text = ""
        if odd := next((i for i, theirs in enumerate(found) if theirs != found[0]), 0):
            what = next(one[0] for one, first in zip(found[odd], found[0], strict=True) if one != first)
            first, other = groups.own_ranks[0], groups.own_ranks[odd]
            text = (
                f"fsdpx: rank {other} passes other {what} than rank {first} with its part of the same "
                f"{self.whole.removesuffix('s')}: pass the same on all ranks, such as those that comm.bcast() gives"
            )
        return list(values), text

    def to_model_output_gradients(self, arrays: Sequence[Any], batched: bool) -> Sequence[Any]:
        found = [self.to_model_output(array, "dy", i, batched) for i, array in enumerate(arrays)]
        ranks = self.axes.parts.size
        return [
            dy if isinstance(kind, FieldPartition) else dy / ranks
            for dy, kind in zip(found, self.output_kinds, strict=True)
        ]

    def all_reduce_caller_input_gradients(self, arrays: Sequence[Any], batched: bool) -> Sequence[Any]:
        found: list[Any] = []
        for dx, kind in zip(arrays, self.input_kinds, strict=True):
            if dx is not None and not isinstance(kind, FieldPartition) and self.axes.parts.size > 1:
                total = namespace_of(dx).ascontiguousarray(dx).reshape(-1).copy()
                self.axes.parts.all_reduce(total, what="gradient of scalars").wait()
                dx = total.reshape(dx.shape)
            found.append(None if dx is None else self.to_caller_layout(dx, batched))
        return found

    @abstractmethod
    def compute_part_shapes(
        self, shape: tuple[int, ...], kind: FieldPartition
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return two shapes that an output should have: the shape over all ranks, and the shape of this rank's part.
        `kind` says how the output is split over the ranks. `shape` is the shape that the output has if the model runs
        on whole samples. Of this shape, only the numbers of samples and channels are used."""

    def compute_local_output_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
        found = []
        for i, (shape, kind) in enumerate(zip(shapes, self.output_kinds, strict=True)):
            if isinstance(kind, FieldPartition):
                wanted, local = self.compute_part_shapes(tuple(shape), kind)
                if tuple(shape) != wanted:  # without this check, a loss could compare parts of different shapes
                    raise ShapeError(
                        f"output {i} of the model is {tuple(shape)} for the whole {self.whole}, and must be {wanted}: "
                        "a layer changes the number of cells or rows without saying so"
                    )
                found.append(local)
            elif len(shape) != 2:
                raise ConfigError(f"output {i} of shape {tuple(shape)}: scalars must leave a model as (samples, n)")
            else:
                found.append(tuple(shape))
        return found

    def convert_caller_scalars_for_model(self, array: Any, name: str, batched: bool) -> Any:
        """Return scalars from the caller as (samples, n), or as (samples,). Raise DataError, which gives the array's
        `name`, if the array has the wrong number of dims."""
        if array.ndim not in ((1, 2) if batched else (0, 1)):
            wanted = "(samples, n)" if batched else f"(n,), as the {self.whole.removesuffix('s')} has no dim of samples"
            raise DataError(
                f"{name} has shape {tuple(array.shape)}: the model reads or returns scalars there, which every rank "
                f"passes in full, as {wanted}"
            )
        return array if batched else array[None]
