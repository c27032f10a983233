"""Layers that read the types of nodes, such as inner nodes, walls and inflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.errors import DataError, ShapeError
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, require_positive

__all__ = ["OneHot", "WhereType"]


class OneHot(Layer):
    """One-hot encoding of node types: integers (samples, nodes, 1) -> (samples, nodes, types). Feature t is 1 at nodes
    of type t, and 0 elsewhere.

    Parameters
    ----------
    types : number of types, which are numbered from 0
    """

    acts_on = "position"

    def __init__(self, types: int) -> None:
        require_positive(self, types=types)
        self.types = types

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        _require_one_feature(self, x)
        found = x == env.xp.arange(self.types)
        if not getattr(env.xp, "holds_no_data", False) and not bool(found.any(axis=-1).all()):
            raise DataError(f"{self!r}: types must be whole numbers from 0 to {self.types - 1}")
        return found.astype(x.dtype), ()

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[None, Any]:
        return None, ()


class WhereType(Layer):
    """Selects one of two values for each node according to its type, for example to keep prescribed values on a
    boundary.

    Takes three inputs: node types (samples, nodes, 1), and values a and b (samples, nodes, features). Returns a at
    nodes whose type is in `types`, and b at all others.

    Parameters
    ----------
    types : node types where the result is `a`
    """

    acts_on = "position"
    n_inputs = 3

    def __init__(self, types: int | Sequence[int]) -> None:
        self.types = tuple(np.atleast_1d(types).tolist())

    def forward(self, env: LayerContext, p: Params, x: tuple[Array, Array, Array]) -> tuple[Array, Any]:
        types, a, b = x
        _require_one_feature(self, types)
        chosen = (types == env.xp.asarray(self.types)).any(axis=-1, keepdims=True)
        return env.xp.where(chosen, a, b), (chosen,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        (chosen,) = saved
        return (None, dy * chosen, dy * ~chosen), ()


def _require_one_feature(layer: Layer, x: Array) -> None:
    if x.ndim != 3 or x.shape[-1] != 1:
        raise ShapeError(f"{layer!r} wants types of shape (samples, nodes, 1), got {tuple(x.shape)}")
