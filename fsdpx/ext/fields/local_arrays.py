"""Arrays that layers hold for this rank's part of a field, such as masks, and checks that the arrays fit this part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.layer import Array, Layer, iterate_layers
from fsdpx.nn.losses import CellWeights
from fsdpx.nn.shard_specs import FieldPartition

__all__ = [
    "HoldsLocalArray", "convert_to_numeric_array", "iterate_layers_including_rollout_nets",
    "require_arrays_fit_local_part", "require_weights_of_cells", "require_weights_of_channels",
]  # fmt: skip


class HoldsLocalArray:
    """Base class for layers that hold an array for this rank's part of a field, such as a mask."""

    def require_local_cells(self, cells: tuple[int, ...]) -> None:
        """Raise ShapeError unless the array fits `cells`, the shape of this rank's part."""
        raise NotImplementedError

    def require_fit_local_part(self, find_cells: Callable[[FieldPartition], tuple[int, ...]]) -> None:
        """Raise ShapeError unless the array fits this rank's part of the field that the layer reads. `find_cells` takes
        a partition, and returns the shape of this rank's part."""
        if isinstance(parts := getattr(self, "parts", None), FieldPartition):
            self.require_local_cells(find_cells(parts))


def iterate_layers_including_rollout_nets(model: Layer, path: str = "") -> Iterator[tuple[str, Layer]]:
    """Yield (dotted path, layer) for each layer that `iterate_layers` visits and for each layer inside the net of a
    `Rollout`."""
    for name, layer in iterate_layers(model, path):
        yield name, layer
        if isinstance(net := getattr(layer, "net", None), Layer):
            yield from iterate_layers_including_rollout_nets(net, name)


def require_arrays_fit_local_part(model: Layer, find_cells: Callable[[FieldPartition], tuple[int, ...]]) -> None:
    """Check the arrays that layers of a partitioned model hold for this rank's part of a field. Raise ShapeError, which
    gives the path of the layer, if an array does not fit the part. `find_cells` returns the shape of this rank's part
    of a partition."""
    for path, layer in iterate_layers_including_rollout_nets(model):
        if isinstance(layer, HoldsLocalArray):
            try:
                layer.require_fit_local_part(find_cells)
            except ShapeError as error:
                raise ShapeError(f"{path!r} {error}" if path else str(error)) from None


def convert_to_numeric_array(name: str, values: Any, dtype: Any = None) -> np.ndarray:
    """Return a copy of `values` as an array. Raise ConfigError, which gives `name`, if they are not numbers or do not
    form a rectangular array."""
    try:
        return np.array(values, dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error


def require_weights_of_cells(layer: Any, name: str, weights: CellWeights | None, cells: tuple[int, ...]) -> None:
    """Raise ShapeError unless the shape of `weights` is (*cells) or (channels, *cells). On a mesh, the shape must be
    (nodes,) or (nodes, features)."""
    shape = cells if weights is None else weights.array.shape
    has_cells = layer.parts is None or layer.parts.has_cells
    if cells not in ((shape, shape[1:]) if has_cells else (shape, shape[:-1])):
        part = f"field has {cells} cells; give (*cells), or (channels, *cells)"
        if not has_cells:
            part = f"mesh has {cells[0]} nodes; give (nodes,), or (nodes, features)"
        raise ShapeError(f"{layer!r}: {name} of shape {shape} do not fit: this rank's part of the {part}")


def require_weights_of_channels(layer: object, name: str, weights: CellWeights, x: Array) -> None:
    """Raise ShapeError if weights (channels, *cells) and x (samples, channels, *cells) differ in their number of
    channels. This check needs no data, so the error is found before ranks communicate, even in a dry run."""
    if weights.array.ndim == x.ndim - 1 and weights.array.shape[0] not in (1, x.shape[1]):
        raise ShapeError(f"{layer!r}: {name} of {weights.array.shape[0]} channels do not fit a field of {x.shape[1]}")
