"""Layers that compute values on the faces of a staggered grid from values in its cells, or vice versa, as averages or
differences of neighbors (Harlow and Welch 1965).

Along a dim of n cells, face i lies between cells i - 1 and i, so there are n + 1 faces. In many solvers, arrays hold
only n of these faces: either the low face of each cell or the high face of each cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.halo import (
    DimEnds,
    FieldLayer,
    HaloSpec,
    PaddingSide,
    compute_output_bounds_of_ranks,
    expand_padding_modes,
    get_rank_along,
    require_halo_fits_field,
)
from fsdpx.ext.fields.halo_plan import slice_dim
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.ext.fields.spacing import CellPositions, compute_cell_widths, parse_spacing, shape_along_dim
from fsdpx.nn.graph import Graph
from fsdpx.nn.layer import Array, Layer, LayerContext, Params
from fsdpx.nn.shape import Add
from fsdpx.nn.shard_specs import Cuts, FieldPartition

__all__ = ["CellsToFaces", "FaceDivergence", "FacesToCells"]

FACES = ("all", "low", "high")
SidePair = tuple[PaddingSide, PaddingSide]
Sides = PaddingSide | SidePair
FaceSpacing = float | Sequence[float] | np.ndarray


class NeighborMove(NamedTuple):
    """Rule for outputs along a dim: each output is a weighted sum of two neighboring inputs,
    `y[i] = lower[i] * x[i + first] + upper[i] * x[i + first + 1]`.

    `outputs` contains the range of outputs that each rank computes. `lower` and `upper` are the weights for all outputs
    of the field, and `first` is a constant offset."""

    outputs: Cuts
    halo: HaloSpec
    lower: np.ndarray
    upper: np.ndarray


class _NeighborLayer(FieldLayer):
    """Base class for layers that compute each output from two neighboring values along one dim."""

    def __init__(self, dim: int, derivative: int, spacing: FaceSpacing, faces: str, padding_mode: Sides) -> None:
        name = type(self).__name__
        if isinstance(dim, bool) or dim not in (0, 1, 2):
            raise ConfigError(f"{name}: dim={dim!r}: give the number of a cell dim, 0 to 2")
        if isinstance(derivative, bool) or derivative not in (0, 1):
            raise ConfigError(f"{name}: derivative={derivative!r}: choose 0, the mean, or 1, the difference")
        if faces not in FACES:
            raise ConfigError(f"{name}: faces={faces!r}: choose one of {', '.join(FACES)}")
        self.dim, self.derivative, self.faces, self.padding_mode = int(dim), int(derivative), faces, padding_mode
        one: Any = spacing.item() if isinstance(spacing, np.ndarray) and spacing.ndim == 0 else spacing
        self.spacing = float(one) if isinstance(one, Real) else parse_spacing(self, (one,))[0]
        is_width = isinstance(self.spacing, float) and 0 < self.spacing < math.inf
        if not is_width and not isinstance(self.spacing, CellPositions):
            raise ConfigError(f"{name}: spacing={spacing!r} is not a number above 0, or the bounds of the cells")
        given: Any = padding_mode
        (self._mode,) = expand_padding_modes(
            self, "padding_mode", (tuple(given) if isinstance(given, list | tuple) else given,), 1
        )
        if faces == "all" and "circular" in self._mode:
            raise ConfigError(f"{name}: a periodic dim has as many faces as cells: choose faces='low' or 'high'")

    def _plan_neighbor_combination(self, parts: FieldPartition) -> NeighborMove:
        """Return the neighbors that this layer combines, and their weights, for an input partitioned as `parts`."""
        try:
            plan = _plan_cells_to_faces if isinstance(self, CellsToFaces) else _plan_faces_to_cells
            return plan(parts, self.dim, self.derivative, self.spacing, self.faces, self._mode)
        except ShapeError as error:
            raise ShapeError(f"{self!r}: {error}") from None

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        if self.dim >= len(parts.cuts):
            raise ShapeError(f"{self!r} moves values along dim {self.dim}, but reads {parts}")
        cuts = list(parts.cuts)
        cuts[self.dim] = self._plan_neighbor_combination(parts).outputs
        return parts.with_cuts(tuple(cuts))

    def list_dim_ends(self, dims: int) -> list[DimEnds]:
        if self.faces == "all" and isinstance(self, FacesToCells):
            return []
        circular = "'circular'" + " with faces='low' or 'high'" * (self.faces == "all")
        return [DimEnds.of_padding(self.dim, self._mode, circular)]

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if not 0 <= self.dim < x.ndim - 2 <= 3:
            raise ShapeError(f"{self!r} wants (samples, channels, *cells) of {self.dim + 1} to 3 dims, got {x.shape}")
        move = self._plan_neighbor_combination(self.get_partition(x))
        wide = exchange_halo(env, x, (move.halo,))
        (lower, here), (upper, beside) = self._get_neighbor_weights_and_indices(env, move, x)
        return lower * wide[here] + upper * wide[beside], move

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        shape = list(dy.shape)
        shape[self.dim + 2] = saved.halo.count_needed_cells(get_rank_along(env, saved.halo.cuts, self.dim))
        wide = env.xp.zeros(tuple(shape), dtype=dy.dtype)
        for weight, cells in self._get_neighbor_weights_and_indices(env, saved, dy):
            wide[cells] += weight * dy
        return exchange_halo_backward(env, wide, (saved.halo,)), ()

    def _get_neighbor_weights_and_indices(
        self, env: LayerContext, move: NeighborMove, x: Array
    ) -> list[tuple[Array, tuple[Any, ...]]]:
        """Return two pairs (weights, index), one for the lower neighbors and one for the upper neighbors. `weights` has
        one number per output of this rank, and `index` selects the neighbors from the rank's own values and halo."""
        rank = get_rank_along(env, move.halo.cuts, self.dim)
        start, stop = move.outputs[rank], move.outputs[rank + 1]
        return [
            (
                shape_along_dim(env, weights[start:stop], x, self.dim),
                slice_dim(env.xp, self.dim + 2, slice(shift, shift + stop - start)),
            )
            for shift, weights in enumerate((move.lower, move.upper))
        ]


@lru_cache(1 << 10)
def _plan_cells_to_faces(
    parts: FieldPartition, dim: int, derivative: int, spacing: float | CellPositions, faces: str, mode: SidePair
) -> NeighborMove:
    cuts, first = parts.cuts[dim], 0 if faces == "high" else -1
    outputs = compute_output_bounds_of_ranks(cuts, cuts, cuts[-1] + (faces == "all"))
    widths = compute_cell_widths(spacing, cuts[-1], parts.get_dim_name(dim))
    around = np.pad(widths, 1, "wrap" if "circular" in mode else "edge") if len(widths) else np.zeros(2)
    below, above = (around[i : i + outputs[-1]] for i in (first + 1, first + 2))
    halo = _make_halo_of_cells_beside_faces(parts, dim, outputs, first, mode)
    if derivative:
        slope = 2.0 / (below + above)
        return NeighborMove(outputs, halo, -slope, slope)
    return NeighborMove(outputs, halo, below / (below + above), above / (below + above))


@lru_cache(1 << 10)
def _plan_faces_to_cells(
    parts: FieldPartition, dim: int, derivative: int, spacing: float | CellPositions, faces: str, mode: SidePair
) -> NeighborMove:
    cuts, name = parts.cuts[dim], parts.get_dim_name(dim)
    count = cuts[-1] - (faces == "all")
    if count < 1:
        raise ShapeError(f"{name} has {cuts[-1]} faces, and no cell between them")
    outputs = compute_output_bounds_of_ranks(cuts, cuts, count)
    widths = compute_cell_widths(spacing, count, name)
    upper = 1.0 / widths if derivative else np.full(count, 0.5)
    halo = _make_halo_of_cells_beside_faces(parts, dim, outputs, -1 if faces == "high" else 0, mode)
    return NeighborMove(outputs, halo, -upper if derivative else upper, upper)


def _make_halo_of_cells_beside_faces(
    parts: FieldPartition, dim: int, outputs: Cuts, first: int, mode: SidePair
) -> HaloSpec:
    cuts = parts.cuts[dim]
    needs = tuple(
        (a + first, b + first + 1) if b > a else (start, start)
        for a, b, start in zip(outputs, outputs[1:], cuts, strict=False)
    )
    halo = HaloSpec(dim + 2, cuts, needs, mode)
    require_halo_fits_field(halo, parts)
    return halo


class CellsToFaces(_NeighborLayer):
    """Moves values from cells to faces along one dim. Each face gets the mean of the two cells that it separates, or
    the derivative between them.

    This layer is the adjoint of `FacesToCells` (for derivatives, with the opposite sign) if both fields are periodic or
    0 beyond the ends. The adjoint is defined by inner products that weight cells by their widths and faces by the
    distances between cell centers. The mean therefore also weights cells by their widths, which preserves the integral
    of a periodic field.

    Parameters
    ----------
    dim : index of the cell dim, counted from 0
    derivative : 0 (default) for the mean, or 1 for the difference between the upper and the lower cell, divided by the
        distance between their centers
    spacing : common width of all cells, or an array of length n + 1 with the bounds of all n cells of the full field;
        default 1
    faces : which faces of the n cells the output has. "all" (default) means all n + 1 faces; the last rank that has
        cells holds the last face. "low" or "high" means n faces: the low or the high face of each cell. Periodic dims
        have only n faces
    padding_mode : values of the cells beyond the ends, as for one dim of `Conv`. With "replicate" (default), the mean
        at a wall is the value of the adjacent cell, and the derivative is 0
    """

    def __init__(
        self,
        dim: int,
        derivative: int = 0,
        spacing: FaceSpacing = 1.0,
        faces: str = "all",
        padding_mode: Sides = "replicate",
    ) -> None:
        super().__init__(dim, derivative, spacing, faces, padding_mode)


class FacesToCells(_NeighborLayer):
    """Moves values from faces to cells along one dim. Each cell gets the mean of its two faces along this dim, or the
    derivative between them. If the values are fluxes, the derivative is the net outflow of the cell along this dim.

    Parameters
    ----------
    dim, spacing : as in `CellsToFaces`
    derivative : 0 (default) for the mean, or 1 for the difference between the upper and the lower face, divided by the
        width of the cell
    faces : the faces of the input, as in `CellsToFaces`
    padding_mode : value of the face that is missing from the input at one end of the field if `faces` is "low" or
        "high". The choices are the same as for one dim of `Conv`. Default "zeros": nothing flows through the wall.
        Ignored if `faces` is "all"
    """

    def __init__(
        self,
        dim: int,
        derivative: int = 0,
        spacing: FaceSpacing = 1.0,
        faces: str = "all",
        padding_mode: Sides = "zeros",
    ) -> None:
        super().__init__(dim, derivative, spacing, faces, padding_mode)


class _SelectComponent(Layer):
    """Selects the component with index `number` of each vector. The `dims` components of a vector are consecutive
    channels."""

    fields = True

    def __init__(self, number: int, dims: int) -> None:
        self.number, self.dims = number, dims

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim != self.dims + 2 or x.shape[1] % self.dims:
            wanted = f"(samples, a multiple of {self.dims}, *cells) of {self.dims} dims"
            raise ShapeError(f"FaceDivergence wants {wanted}, got {tuple(x.shape)}")
        return x[:, self.number :: self.dims], x.shape

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx = env.xp.zeros(saved, dtype=dy.dtype)
        dx[:, self.number :: self.dims] = dy
        return dx, ()


class FaceDivergence(Graph):
    """Divergence in each cell, computed from the fluxes through the faces of the cell. The divergence is the net
    outflow of the cell.

    If `faces` is "all", there are `dims` inputs x0, x1, ..., one per coordinate, each with the fluxes on n + 1 faces.
    Otherwise, there is a single input, (samples, vectors x dims, *cells). Each component has its values on the low or
    the high faces normal to the dim of its coordinate (see `along`). The components of a vector are consecutive
    channels.

    Parameters
    ----------
    dims : number of cell dims, 1 to 3
    spacing : as in `CellsToFaces`; one value for all dims, or a list or tuple with one per dim
    faces : as in `CellsToFaces`, for all dims; default "all"
    padding_mode : as in `FacesToCells`; one value for all dims, or one per dim; default "zeros"
    along : the cell dim of each coordinate, such as (1, 0) if components point along x and y but arrays are (y, x);
        default: coordinate i is cell dim i
    """

    def __init__(
        self,
        dims: int,
        spacing: Any = 1.0,
        faces: str = "all",
        padding_mode: Any = "zeros",
        along: Sequence[int] | None = None,
    ) -> None:
        if isinstance(dims, bool) or dims not in (1, 2, 3):
            raise ConfigError(f"FaceDivergence: dims={dims!r}: a field has 1 to 3 dims of cells")
        order = tuple(range(dims)) if along is None else tuple(along)
        if sorted(order) != list(range(dims)):
            raise ConfigError(f"FaceDivergence: along={along!r}: name each dim of cells once, as (1, 0)")
        each = spacing if isinstance(spacing, list | tuple) else (spacing,) * dims
        modes = expand_padding_modes(self, "padding_mode", padding_mode, dims)
        if len(each) != dims:
            raise ConfigError(f"FaceDivergence: spacing has {len(each)} entries, but dims={dims}: give one per dim")
        nodes: dict[str, tuple[Any, ...]] = {}
        for j, d in enumerate(order):
            source = f"x{j}"
            if faces != "all":
                source = f"component{j}"
                nodes[source] = _SelectComponent(j, dims), "x"
            nodes[f"outflow{j}"] = FacesToCells(d, 1, each[d], faces, modes[d]), source
        outflows = [f"outflow{j}" for j in range(dims)]
        if dims > 1:
            nodes["sum"] = Add(), *outflows
        inputs = tuple(f"x{j}" for j in range(dims)) if faces == "all" else ("x",)
        super().__init__(nodes, inputs, ("sum",) if dims > 1 else outflows)
        self.dims, self.faces = dims, faces

    def __repr__(self) -> str:
        steps = ", ".join(repr(step.layer) for step in self.steps if isinstance(step.layer, FacesToCells))
        return f"FaceDivergence({steps})"
