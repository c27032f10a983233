"""Finite-difference derivatives of fields that may be partitioned: gradient, divergence, curl and Laplacian.

A derivative along a dim is a weighted sum of shifted slices. Near a wall the stencil is one-sided. A rank's halo
consists of the cells on other ranks that its own stencils reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields import kernels
from fsdpx.ext.fields.halo import DimEnds, FieldLayer, HaloSpec, get_rank_along, require_halo_fits_field
from fsdpx.ext.fields.halo_slabs import exchange_halo, exchange_halo_backward
from fsdpx.ext.fields.kernels import ShiftedRange
from fsdpx.ext.fields.spacing import CellPositions, compute_stencil_weights, parse_spacing, shape_along_dim
from fsdpx.nn.layer import Array, LayerContext, Params
from fsdpx.nn.shard_specs import Cuts

__all__ = ["FieldCurl", "FieldDerivative", "FieldDivergence", "FieldGradient", "FieldLaplacian"]

Row = tuple[float, ...]
Spacing = float | Sequence[float | Sequence[float] | np.ndarray] | np.ndarray
SCHEMES: dict[tuple[int, int], tuple[Row, tuple[Row, ...]]] = {
    (1, 2): ((-1 / 2, 0, 1 / 2), ((-11 / 6, 3, -3 / 2, 1 / 3),)),
    (2, 2): ((1, -2, 1), ((2, -5, 4, -1),)),
    (1, 4): (
        (1 / 12, -2 / 3, 0, 2 / 3, -1 / 12),
        ((-25 / 12, 4, -3, 4 / 3, -1 / 4), (-1 / 4, -5 / 6, 3 / 2, -1 / 2, 1 / 12)),
    ),
    (2, 4): (
        (-1 / 12, 4 / 3, -5 / 2, 4 / 3, -1 / 12),
        ((15 / 4, -77 / 6, 107 / 6, -13, 61 / 12, -5 / 6), (5 / 6, -5 / 4, -1 / 3, 7 / 6, -1 / 2, 1 / 12)),
    ),
}
"""Stencil weights, keyed by (derivative, order): the weights of the central stencil and, for each of the first cells
next to a wall, the weights of the one-sided stencil that begins at the wall (Fornberg 1988)."""


class StencilTap(NamedTuple):
    """One term of a finite-difference stencil along one dim: y[out] += weight * x[cells]. If cells differ in width,
    `weight` has one number for each output."""

    out: slice
    cells: slice
    weight: float | np.ndarray


class DerivativeTerm(NamedTuple):
    """One of the derivatives that a layer sums into its output, such as dv/dx in a curl.

    The input channels `taken` are differentiated along one coordinate, multiplied by `sign`, and added to the output
    channels `given`."""

    coordinate: int
    taken: slice
    given: slice
    derivative: int = 1
    sign: float = 1.0


def _to_tuple_unless_scalar(value: Any) -> Any:
    """Return `value` as a tuple if it is a sequence or an array, and unchanged if it is a single value."""
    is_one = isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or getattr(value, "ndim", 1) == 0
    return value if is_one else tuple(value)


def _is_spacing(h: Any) -> bool:
    return isinstance(h, CellPositions) or (isinstance(h, Real) and 0 < float(h) < math.inf)


def _is_permutation(dims: Any) -> bool:
    """Return whether `dims` is a tuple that contains each integer from 0 to len(dims) - 1 exactly once."""
    whole = isinstance(dims, tuple) and all(isinstance(d, Integral) for d in dims)
    return whole and sorted(dims) == list(range(len(dims)))


class _DerivativeLayer(FieldLayer):
    """Base class for layers that add up finite-difference derivatives of their input. Subclasses list these derivatives
    in `_list_terms`."""

    kernel_names = ("apply_stencil",)

    def __init__(
        self,
        spacing: Spacing = 1.0,
        periodic: bool | Sequence[bool] = False,
        order: int = 2,
        along: Sequence[int] | None = None,
    ) -> None:
        if order not in (2, 4):
            raise ConfigError(f"{type(self).__name__}: order={order!r}: choose 2 or 4")
        self.periodic, self.along = map(_to_tuple_unless_scalar, (periodic, along))
        self.spacing, self.order = parse_spacing(self, spacing), order
        self._require_valid_per_dim("spacing", _is_spacing, "a number above 0")
        self._require_valid_per_dim("periodic", lambda wraps: isinstance(wraps, int | np.bool_), "True or False")
        if along is not None and not _is_permutation(self.along):
            raise ConfigError(f"{type(self).__name__}: along={along!r}: name each dim of cells once, as (1, 0)")

    def _require_valid_per_dim(self, name: str, is_valid: Callable[[Any], bool], expected: str) -> None:
        """Raise ConfigError if the attribute `name` is invalid. The attribute is a single value, or a tuple with one
        value per dim."""
        given = getattr(self, name)
        for value in given if isinstance(given, tuple) else (given,):
            if not is_valid(value):
                found = f"an array of {value.shape}" if isinstance(value, np.ndarray) else repr(value)
                raise ConfigError(f"{type(self).__name__}: {name}: {found} is not {expected}, for all dims or for each")

    def _list_terms(self, dims: int) -> list[DerivativeTerm]:
        raise NotImplementedError

    def _count_output_channels(self, channels: int, dims: int) -> int:
        """Return the number of output channels, or 0 if the layer does not accept this number of input channels or
        dims."""
        return channels

    def list_dim_ends(self, dims: int) -> list[DimEnds]:
        order = range(dims) if self.along is None else self._expand_to_dims("along", self.along, dims)
        wraps = self._expand_to_dims("periodic", self.periodic, dims)
        read = {order[term.coordinate] for term in self._list_terms(dims) if term.coordinate < dims}
        advice = "periodic=False", "periodic=True"
        return [DimEnds(d, bool(wraps[d]), f"reads it with periodic={bool(wraps[d])}", advice) for d in sorted(read)]

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        y = env.xp.empty((x.shape[0], self._count_output_channels(x.shape[1], x.ndim - 2), *x.shape[2:]), dtype=x.dtype)
        self.differentiate_into(env, x, y)
        return y, x

    def differentiate_into(self, env: LayerContext, x: Array, y: Array) -> None:
        """Write the layer's output for x into y. Collective over the ranks that share the field."""
        dims = x.ndim - 2
        if not 1 <= dims <= 3 or not self._count_output_channels(x.shape[1], dims):
            raise ShapeError(f"{self!r} wants {self._describe_input(dims)}, got {tuple(x.shape)}")
        begun: set[int | None] = set()  # first channel of each group of output channels that has already been written
        for term in self._list_terms(x.ndim - 2):
            halo, taps, d = self._find_halo_taps_and_dim(env, term, x)
            wide, taken = x, term.taken
            if not halo.is_local:
                wide, taken = exchange_halo(env, x[:, term.taken], (halo,)), slice(None)
            _apply_taps(env, y, wide, term.given, taken, d, taps, term.given.start in begun)
            begun.add(term.given.start)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx = env.xp.zeros(saved.shape, dtype=saved.dtype)
        self.add_input_gradient_into(env, dx, dy)
        return dx, ()

    def add_input_gradient_into(self, env: LayerContext, dx: Array, dy: Array) -> None:
        """Add the gradient with respect to the input to dx, given the gradient dy of the output. Collective over the
        ranks that share the field."""
        xp, dy = env.xp, env.xp.ascontiguousarray(dy)
        for term in self._list_terms(dx.ndim - 2):
            halo, taps, d = self._find_halo_taps_and_dim(env, term, dx)
            turned = [StencilTap(tap.cells, tap.out, tap.weight) for tap in taps]
            if halo.is_local:
                _apply_taps(env, dx, dy, term.taken, term.given, d, turned, True)
                continue
            shape = list(dy[:, term.given].shape)
            shape[d + 2] = halo.count_needed_cells(get_rank_along(env, halo.cuts, d))
            wide = xp.zeros(shape, dtype=dx.dtype)
            _apply_taps(env, wide, dy, slice(None), term.given, d, turned, True)
            dx[:, term.taken] += exchange_halo_backward(env, wide, (halo,))

    def _find_halo_taps_and_dim(
        self, env: LayerContext, term: DerivativeTerm, x: Array
    ) -> tuple[HaloSpec, list[StencilTap], int]:
        """Return the halo that the derivative `term` needs, the stencil taps for this rank's cells, and the cell dim
        along which the derivative is taken."""
        dims = x.ndim - 2
        d = term.coordinate if self.along is None else self._expand_to_dims("along", self.along, dims)[term.coordinate]
        periodic, h = (self._expand_to_dims(name, getattr(self, name), dims)[d] for name in ("periodic", "spacing"))
        cuts, scheme = self.get_partition(x).cuts[d], (term.derivative, self.order)
        if not periodic and cuts[-1] < len(SCHEMES[scheme][1][0]):
            least = len(SCHEMES[scheme][1][0])
            name = self.get_partition(x).get_dim_name(d)
            raise ShapeError(f"{self!r}: between walls {name} must have at least {least} cells, got {cuts[-1]}")
        halo = _find_stencil_halo(d + 2, cuts, bool(periodic), scheme)
        require_halo_fits_field(halo, self.get_partition(x))
        rank, factor = get_rank_along(env, cuts, d), term.sign
        if isinstance(h, CellPositions):
            try:
                name = self.get_partition(x).get_dim_name(d)
                taps = _find_stretched_taps(halo, rank, bool(periodic), scheme, h, name)
            except ShapeError as error:
                raise ShapeError(f"{self!r}: {error}") from None
        else:
            taps, factor = _find_stencil_taps_of_rank(halo, rank, bool(periodic), scheme), factor / h**term.derivative
        return halo, [StencilTap(tap.out, tap.cells, tap.weight * factor) for tap in taps], d

    def _expand_to_dims(self, name: str, value: Any, dims: int) -> Sequence[Any]:
        """Return the argument `value` as one value per cell dim. Raise ShapeError if it does not have `dims` values."""
        each = value if isinstance(value, tuple) else (value,) * dims
        if len(each) != dims:
            raise ShapeError(f"{self!r}: {name} is of {len(each)} dims, and the field has {dims}")
        return each

    def _describe_input(self, dims: int) -> str:
        return "(samples, channels, *cells) of 1 to 3 dims"


class FieldDerivative(_DerivativeLayer):
    """Finite-difference derivative of each channel of (samples, channels, *cells) along one coordinate.

    Errors decrease with the second or fourth power of the spacing, depending on `order`. Near walls the stencils are
    one-sided.

    Parameters
    ----------
    coordinate : index of the cell dim along which to differentiate, counted from 0; if `along` is given, an index into
        `along`
    derivative : order of the derivative, 1 or 2; default 1
    spacing : distance between cells: one number for all dims, or one per dim; default 1. For a dim whose cells differ
        in width, pass an array instead of a number, as in (bounds, 0.1). The array holds the positions of all values of
        the full field or, if values lie at cell centers, the bounds of all cells (one more than there are cells). A
        periodic dim requires the bounds
    periodic : whether the field is periodic: one bool for all dims, or one per dim. The ends of a dim that is not
        periodic are walls. Default False
    order : order of accuracy, 2 or 4; default 2
    along : the cell dim of each coordinate, such as (1, 0) if arrays are (y, x) but the components (u, v) of vectors
        point along x and y. Default: coordinate i is cell dim i
    """

    def __init__(
        self,
        coordinate: int,
        derivative: int = 1,
        spacing: Spacing = 1.0,
        periodic: bool | Sequence[bool] = False,
        order: int = 2,
        along: Sequence[int] | None = None,
    ) -> None:
        super().__init__(spacing, periodic, order, along)
        if coordinate not in (0, 1, 2) or derivative not in (1, 2):
            raise ConfigError(
                f"FieldDerivative: coordinate={coordinate!r} is 0 to 2, and derivative={derivative!r} 1 or 2"
            )
        self.coordinate, self.derivative = coordinate, derivative

    def _list_terms(self, dims: int) -> list[DerivativeTerm]:
        return [DerivativeTerm(self.coordinate, slice(None), slice(None), self.derivative)]

    def _count_output_channels(self, channels: int, dims: int) -> int:
        return channels if self.coordinate < dims else 0

    def _describe_input(self, dims: int) -> str:
        return f"(samples, channels, *cells) of {self.coordinate + 1} dims or more"


class FieldLaplacian(_DerivativeLayer):
    """Finite-difference Laplacian of each channel of (samples, channels, *cells).

    The parameters are as in `FieldDerivative`."""

    def _list_terms(self, dims: int) -> list[DerivativeTerm]:
        return [DerivativeTerm(j, slice(None), slice(None), 2) for j in range(dims)]


class FieldGradient(_DerivativeLayer):
    """Finite-difference gradient of each channel: maps (samples, channels, *cells) to (samples, channels x dims,
    *cells).

    The derivatives of a channel along all coordinates are consecutive output channels. The parameters are as in
    `FieldDerivative`."""

    def _list_terms(self, dims: int) -> list[DerivativeTerm]:
        return [DerivativeTerm(j, slice(None), slice(j, None, dims)) for j in range(dims)]

    def _count_output_channels(self, channels: int, dims: int) -> int:
        return channels * dims


class FieldDivergence(_DerivativeLayer):
    """Finite-difference divergence of vectors: maps (samples, vectors x dims, *cells) to (samples, vectors, *cells).

    The components of a vector are consecutive channels. The parameters are as in `FieldDerivative`."""

    def _list_terms(self, dims: int) -> list[DerivativeTerm]:
        return [DerivativeTerm(j, slice(j, None, dims), slice(None)) for j in range(dims)]

    def _count_output_channels(self, channels: int, dims: int) -> int:
        return 0 if channels % dims else channels // dims

    def _describe_input(self, dims: int) -> str:
        return f"(samples, a multiple of {dims}, *cells)"


class FieldCurl(_DerivativeLayer):
    """Finite-difference curl of vectors, whose components are consecutive channels.

    In two dims, (samples, vectors x 2, *cells) is mapped to (samples, vectors, *cells): the curl of a vector (u, v) is
    the scalar dv/dx - du/dy. In three dims, (samples, vectors x 3, *cells) is mapped to the same shape. x, y and z are
    the coordinates. The parameters are as in `FieldDerivative`."""

    def _list_terms(self, dims: int) -> list[DerivativeTerm]:
        if dims == 2:
            return [DerivativeTerm(j, slice(1 - j, None, 2), slice(None), 1, 1.0 - 2 * j) for j in range(2)]
        found = []
        for j in range(3):
            after, last = (j + 1) % 3, (j + 2) % 3
            found.append(DerivativeTerm(j, slice(after, None, 3), slice(last, None, 3)))
            found.append(DerivativeTerm(j, slice(last, None, 3), slice(after, None, 3), 1, -1.0))
        return found

    def _count_output_channels(self, channels: int, dims: int) -> int:
        return 0 if dims < 2 or channels % dims else channels // dims * (3 if dims == 3 else 1)

    def _describe_input(self, dims: int) -> str:
        return "(samples, vectors x dims, *cells) of 2 or 3 dims"


def _apply_taps(
    env: LayerContext, y: Array, x: Array, given: slice, taken: slice, d: int, taps: Sequence[StencilTap], add: bool
) -> None:
    """Apply a stencil to the channels `taken` of x, and write the result into the channels `given` of y, or add it."""
    if any(isinstance(tap.weight, np.ndarray) for tap in taps):
        for i, tap in enumerate(taps):
            cells, into = x[:, taken][_index_cells_along(d, tap.cells)], y[:, given][_index_cells_along(d, tap.out)]
            value = _shape_weight(env, tap.weight, x, d) * cells
            into[...] = into + value if add or (i and tap.out == taps[i - 1].out) else value
        return
    ranges = tuple(
        ShiftedRange(
            tap.out.start, tap.cells.start, tap.out.stop - tap.out.start, float(tap.weight),
            add or (i > 0 and tap.out == taps[i - 1].out),
        )
        for i, tap in enumerate(taps)
    )  # fmt: skip
    kernels.apply_stencil(env.xp, y, x, given, taken, d, ranges)


def _index_cells_along(d: int, cells: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * (d + 2), cells)


def _split_cells_into_equal_stencil_ranges(
    start: int, stop: int, n: int, periodic: bool, scheme: tuple[int, int]
) -> list[tuple[int, int, int, Row]]:
    """Split the cells [start, stop) into ranges of cells that have the same stencil. Stencils near walls are one-sided.

    Returns a list of (first cell, end, offset of the first weight, weights), one for each range."""
    inner, walls = SCHEMES[scheme]
    half = len(inner) // 2
    if periodic:
        return [(start, stop, -half, inner)] if stop > start else []
    sign = (-1.0) ** scheme[0]
    rows = [(i, i + 1, -i, row) for i, row in enumerate(walls)]
    rows.append((len(walls), n - len(walls), -half, inner))
    for i, row in enumerate(walls):
        turned = tuple(sign * w for w in reversed(row))
        rows.append((n - 1 - i, n - i, i + 1 - len(row), turned))
    found = ((max(a, start), min(b, stop), offset, row) for a, b, offset, row in rows)
    return [row for row in found if row[1] > row[0]]


@lru_cache(1 << 10)
def _find_stencil_halo(dim: int, cuts: Cuts, periodic: bool, scheme: tuple[int, int]) -> HaloSpec:
    needs = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        spans = _split_cells_into_equal_stencil_ranges(start, stop, cuts[-1], periodic, scheme)
        first = min((a + offset for a, _, offset, _ in spans), default=start)
        end = max((b - 1 + offset + len(row) for _, b, offset, row in spans), default=start)
        needs.append((first, end))
    return HaloSpec(dim, cuts, tuple(needs), "circular" if periodic else "zeros")


@lru_cache(1 << 10)
def _find_stencil_taps_of_rank(
    halo: HaloSpec, rank: int, periodic: bool, scheme: tuple[int, int]
) -> tuple[StencilTap, ...]:
    """Return the stencil taps of a rank. In each tap, `out` is an index into the array of the rank's own cells, and
    `cells` is an index into the array of own cells and halo."""
    start, stop, first = halo.cuts[rank], halo.cuts[rank + 1], halo.needs[rank][0]
    found = []
    for a, b, offset, row in _split_cells_into_equal_stencil_ranges(start, stop, halo.cuts[-1], periodic, scheme):
        for j, weight in enumerate(row):
            if weight:
                cells = slice(a + offset + j - first, b + offset + j - first)
                found.append(StencilTap(slice(a - start, b - start), cells, float(weight)))
    return tuple(found)


@lru_cache(1 << 10)
def _find_stretched_taps(
    halo: HaloSpec, rank: int, periodic: bool, scheme: tuple[int, int], spacing: CellPositions, name: str
) -> tuple[StencilTap, ...]:
    """Return the stencil taps of a rank along a dim whose cells lie at the positions `spacing`. Each stencil covers the
    same cells as a stencil for equidistant positions. The weights are computed as in Fornberg (1988). Raises
    ShapeError, which names the dim `name`, if the number of positions does not match the number of cells."""
    start, stop, (first, _) = halo.cuts[rank], halo.cuts[rank + 1], halo.needs[rank]
    n, found = halo.cuts[-1], []
    positions, period = spacing.compute_value_positions(n, periodic, name)
    for a, b, offset, row in _split_cells_into_equal_stencil_ranges(start, stop, n, periodic, scheme):
        cells = np.arange(a, b)[:, None] + offset + np.arange(len(row))
        points = positions[cells % n] + period * (cells // n)
        weights = compute_stencil_weights(positions[a:b], points, scheme[0])
        for j in range(len(row)):
            beside = slice(a + offset + j - first, b + offset + j - first)
            found.append(StencilTap(slice(a - start, b - start), beside, weights[:, j]))
    return tuple(found)


def _shape_weight(env: LayerContext, weight: float | np.ndarray, x: Array, d: int) -> Any:
    return shape_along_dim(env, weight, x, d) if isinstance(weight, np.ndarray) else weight
