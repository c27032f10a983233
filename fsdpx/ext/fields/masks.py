"""Layers that prevent cells without data, such as land in an ocean model, from affecting other cells."""

from __future__ import annotations

from typing import Any

from fsdpx.errors import ShapeError
from fsdpx.ext.fields.halo import FieldLayer
from fsdpx.ext.fields.local_arrays import HoldsLocalArray, convert_to_numeric_array
from fsdpx.nn.layer import Array, Layer, LayerContext, Params

__all__ = ["FillNaN", "Mask"]


class FillNaN(Layer):
    """Replaces NaN in the input with `value`. The gradient of replaced elements is 0.

    Parameters
    ----------
    value : the number that replaces NaN; default 0
    """

    acts_on = "element"

    def __init__(self, value: float = 0.0) -> None:
        self.value = float(value)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        known = ~env.xp.isnan(x)
        return _fill_unknown(env, known, x, self.value), (known,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return _fill_unknown(env, saved[0], dy, 0.0), ()


class Mask(FieldLayer, HoldsLocalArray):
    """Keeps the input where `cells` is True, and replaces it with `value` elsewhere, even if the input is NaN there.
    The gradient of replaced elements is 0.

    The input is (samples, channels, *cells). As the last layer of a model, a mask keeps land cells constant over the
    steps of a rollout.

    Parameters
    ----------
    cells : bool array (*cells) for this rank's part of the field
    value : value of the output where `cells` is False; default 0
    """

    fields = True

    def __init__(self, cells: Any, value: float = 0.0) -> None:
        self.cells, self.value = convert_to_numeric_array("Mask: cells", cells, bool), float(value)

    def __repr__(self) -> str:
        """Return a description that excludes the mask. Ranks compare their descriptions, but each rank has a different
        part of the mask."""
        return f"Mask({self.value})"

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return _fill_unknown(env, self._get_mask(env, x), x, self.value), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return _fill_unknown(env, self._get_mask(env, dy), dy, 0.0), ()

    def require_local_cells(self, cells: tuple[int, ...]) -> None:
        if cells != self.cells.shape:
            raise ShapeError(f"{self!r}: the mask has {self.cells.shape} cells, and this rank's part {cells}")

    def _get_mask(self, env: LayerContext, x: Array) -> Array:
        if getattr(env.xp, "holds_no_data", False):  # in a dry run, x may be the full field, so skip the check
            return env.xp.empty(x.shape[2:], dtype=bool)
        self.require_local_cells(x.shape[2:])
        key = "mask", id(self)
        if key not in env.constants:
            env.constants[key] = env.xp.asarray(self.cells)
        return env.constants[key]


def _fill_unknown(env: LayerContext, known: Array, x: Array, value: float) -> Array:
    return env.xp.where(known, x, env.xp.asarray(value, dtype=x.dtype))
