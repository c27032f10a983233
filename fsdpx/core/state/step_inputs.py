"""The inputs of a program (its microbatches), and the shapes of the resulting activations."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.shapes.array import measuring_shape_only_memory
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.mesh import MeshAxes, connect_axes
from fsdpx.nn.cache import KeyValueCache
from fsdpx.nn.layer_list import LayerList
from fsdpx.nn.shape_inference import value_shapes

__all__ = ["Microbatch", "StepInputs", "ValueShape", "ValueShapes", "list_targets"]


def list_targets(target: Any) -> tuple[Any, ...]:
    """Return a tuple of the arrays in a target. A target is an array, a tuple that has one array for each output of
    the model, or None."""
    return target if isinstance(target, tuple) else () if target is None else (target,)


@dataclass(frozen=True)
class Microbatch:
    """The samples that this rank processes in one forward pass. `row` is the index of its first sample in the global
    batch. `target` is an array, a tuple of arrays for several outputs, or None."""

    inputs: tuple[Any, ...]
    target: Any
    row: int

    @property
    def targets(self) -> tuple[Any, ...]:
        """The arrays of the target, or () if there is no target."""
        return list_targets(self.target)


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one run of a program.

    Attributes
    ----------
    batch : the microbatches of this rank, with None for a microbatch without samples
    training : whether layers such as dropout are in training mode
    commit : function that is called before the update with the mean loss and the update scale of the step
    cache : the key-value cache of `LayerContext`
    batched : whether the caller's arrays have a sample dimension
    """

    batch: list[Microbatch | None] = field(default_factory=list)
    training: bool = True
    commit: Callable[[Any, Any], None] | None = None
    cache: KeyValueCache | None = None
    batched: bool = True


class ValueShape(NamedTuple):
    """The shape and dtype of an activation on one rank."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The number of elements of the activation."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class ValueShapes:
    """The shapes of all inputs, activations and outputs of a model, on any tensor rank. They are computed once per
    batch shape."""

    def __init__(self, model: LayerList, axes: MeshAxes, dtype: Any) -> None:
        self._model, self._axes, self._dtype = model, axes, dtype
        self._found: dict[Any, list[ValueShape]] = {}
        self._imagined: dict[int, MeshAxes] = {}

    def shape_of(self, value: int, batch: Microbatch, tensor: int | None = None) -> ValueShape:
        """Return the shape of input or activation number `value` for the microbatch `batch` on tensor rank `tensor`
        (default: this rank)."""
        rank = self._axes.tensor.rank if tensor is None else tensor
        key = (rank, *((tuple(a.shape), str(a.dtype)) for a in batch.inputs))
        if key not in self._found:
            # exclude these arrays from the memory count of a dry run, because they have no data
            with measuring_shape_only_memory():
                shapes = value_shapes(
                    self._model, batch.inputs, self._dtype, axes=self.make_fake_mesh_axes_for_tensor_rank(rank)
                )
                self._found[key] = [ValueShape(tuple(one.shape), one.dtype) for one in shapes]
        return self._found[key][value]

    def make_fake_mesh_axes_for_tensor_rank(self, tensor: int) -> MeshAxes:
        """Return the mesh axes of tensor rank `tensor` with fake communicators, so that layers can compute their output
        shapes without communicating."""
        if tensor not in self._imagined:
            mesh, place = self._axes.mesh, self._axes.coordinates._replace(tensor=tensor)
            fake = FakeCommunicator(mesh.rank_of(place), mesh.size)
            self._imagined[tensor] = connect_axes(mesh, fake, samples=self._axes.groups)
        return self._imagined[tensor]
