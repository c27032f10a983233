"""What a program is given: microbatches, and the shapes of the values between units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.array.shapes.array import measure_memory
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.mesh import MeshAxes, connect_axes
from fsdpx.nn.cache import KeyValueCache
from fsdpx.nn.linearize import LayerList, value_shapes

__all__ = ["Microbatch", "StepInputs", "ValueShape", "ValueShapes"]


@dataclass(frozen=True)
class Microbatch:
    """One forward's worth of this rank's batch. row: number of its first sample in the global batch."""

    inputs: tuple[Any, ...]
    target: Any
    row: int


@dataclass(frozen=True)
class StepInputs:
    """batch: the microbatches of this rank; None in place of one without samples. training: the mode of layers such as
    dropout. commit: called with the mean loss and the scale of a step before it updates. cache: as `LayerContext` has
    it. batched: whether the caller's arrays have a dim of samples."""

    batch: list[Microbatch | None] = field(default_factory=list)
    training: bool = True
    commit: Callable[[Any, Any], None] | None = None
    cache: KeyValueCache | None = None
    batched: bool = True


class ValueShape(NamedTuple):
    """Of the array that a value of the model is on one rank."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Its elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class ValueShapes:
    """The shapes of all values of a model in one format, on any rank of the tensor axis; found once for each shape of a
    batch."""

    def __init__(self, model: LayerList, axes: MeshAxes, dtype: Any) -> None:
        self._model, self._axes, self._dtype = model, axes, dtype
        self._found: dict[Any, list[ValueShape]] = {}
        self._imagined: dict[int, MeshAxes] = {}

    def shape_of(self, value: int, batch: Microbatch, tensor: int | None = None) -> ValueShape:
        """A value of a microbatch; on rank `tensor` of the tensor axis."""
        rank = self._axes.tensor.rank if tensor is None else tensor
        key = (rank, *((tuple(a.shape), str(a.dtype)) for a in batch.inputs))
        if key not in self._found:
            with measure_memory():  # a dry run does not count as memory what only says shapes
                inputs = [ShapeArray(tuple(a.shape), a.dtype) for a in batch.inputs]
                shapes = value_shapes(self._model, inputs, self._dtype, axes=self.axes_at_tensor_rank(rank))
                self._found[key] = [ValueShape(tuple(one.shape), one.dtype) for one in shapes]
        return self._found[key][value]

    def axes_at_tensor_rank(self, tensor: int) -> MeshAxes:
        """These axes at a rank of the tensor axis, without other ranks on them: layers can be asked for shapes."""
        if tensor not in self._imagined:
            mesh, place = self._axes.mesh, self._axes.coordinates._replace(tensor=tensor)
            fake = FakeCommunicator(mesh.rank_of(place), mesh.size)
            self._imagined[tensor] = connect_axes(mesh, fake, samples=self._axes.groups)
        return self._imagined[tensor]
