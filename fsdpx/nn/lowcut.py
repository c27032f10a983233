"""`LoRALinear` cut over the tensor axis, with the communication of the layers without adapters.

A column-parallel layer has B cut by rows, as its weight, and all of A; a row-parallel one has A cut by columns, and all
of B, by which x A^T goes before the one sum over the axis. Of the matrix that every rank holds whole each computes a
summand of the gradient: `partial` names it.
"""

from dataclasses import replace
from typing import Any

from fsdpx.nn.layer import Array, Env, Layer, Params, Spec
from fsdpx.nn.lowrank import LOW, LoRALinear
from fsdpx.nn.numeric import product
from fsdpx.nn.tensor import ColumnLinear, CutLinear, RowLinear

__all__ = ["ColumnLoRA", "RowLoRA", "adapter_of"]


class _CutLoRA(CutLinear):
    """What ColumnLoRA and RowLoRA share. low: the full layer, without dropout. partial: A or B, which is whole here."""

    low: LoRALinear
    partial: str

    def specs(self) -> dict[str, Spec]:
        cut = super().specs()
        return {
            name: replace(spec, cut=cut[name].cut if name in cut else None if name == self.partial else self._cut)
            for name, spec in self.low.specs().items()
        }

    backward = Layer.backward

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        self.low.backward_params(env, g, kept)

    def _kept(self, env: Env, p: Params, x: Array, dy: Array) -> Any:
        return x, dy, self.low.inside(env, p, dy), p[LOW[0]].copy(), None

    def _product(self, env: Env, p: Params, x: Array, bias: Array | None) -> Array:
        return self.low.added(env, p, x, super()._product(env, p, x, bias))

    def _inward(self, env: Env, p: Params, dy: Array) -> Array:
        dx = super()._inward(env, p, dy)
        dx += product(env.xp, self.low.inside(env, p, dy), p[LOW[0]])
        return dx


class ColumnLoRA(_CutLoRA, ColumnLinear):
    """`ColumnLinear` with adapters. low: the full layer; options: of `ColumnLinear`."""

    partial = LOW[0]

    def __init__(self, low: LoRALinear, **options: Any) -> None:
        super().__init__(low.in_features, low.out_features, low.bias, **options)
        self.low = low

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx, (x, dy) = ColumnLinear.backward_input(self, env, p, saved, dy)
        return dx, self._kept(env, p, x, dy)

    def backward_leaf(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> None:
        (x,) = saved
        self.backward_params(env, g, self._kept(env, p, x, self._part(env, dy)))

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        x, *rest = kept
        if any(name in g for name in LOW):
            super().backward_params(env, g, (self._full(env, x), *rest))


class RowLoRA(_CutLoRA, RowLinear):
    """`RowLinear` with adapters. low: the full layer; options: of `RowLinear`."""

    partial = LOW[1]

    def __init__(self, low: LoRALinear, **options: Any) -> None:
        super().__init__(low.in_features, low.out_features, low.bias, **options)
        self.low = low

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx, (x, full, _) = RowLinear.backward_input(self, env, p, saved, dy)
        return dx, self._kept(env, p, x, full)

    def backward_leaf(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> None:
        (x,) = saved
        self.backward_params(env, g, self._kept(env, p, x, self._full(env, dy)))


def adapter_of(layer: Layer) -> LoRALinear | None:
    """The full `LoRALinear` that `layer` is, or a part of; None: it has no adapters."""
    if isinstance(layer, _CutLoRA):
        return layer.low
    return layer if isinstance(layer, LoRALinear) else None
