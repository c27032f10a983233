"""Adapters of low rank beside a Linear (LoRA), whole and cut over the tensor axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from fsdpx.core.array import kernels
from fsdpx.core.base.name_hints import demand_match
from fsdpx.errors import ConfigError
from fsdpx.nn.container import Container, check_layer
from fsdpx.nn.gradient_accumulation import add_product, affine, flat, product
from fsdpx.nn.init import uniform
from fsdpx.nn.layer import Array, Env, Layer, Params, Portion, Spec, dotted, fraction, positive, want_last
from fsdpx.nn.linear import ColumnLinear, CutLinear, Linear, RowLinear
from fsdpx.nn.sharding import CutRequest

__all__ = ["LOW", "ColumnLoRA", "LoRALinear", "RowLoRA", "adapter_of", "lora"]

LOW = ("lora_A.weight", "lora_B.weight")
"""The names of the trained matrices, those of PEFT."""


class LoRALinear(Linear):
    """y = x weight^T + bias + alpha / rank dropout(x) A^T B^T, where A and B alone are trained.

    `weight` and `bias` are named and shaped as in `Linear`; `lora_A.weight (rank, in)` begins as Kaiming's uniform with
    a = sqrt(5), U(-k, k) with k = 1/sqrt(in), and `lora_B.weight (out, rank)` as zeros, so that nothing changes at
    first. Only x is saved for backward: the mask of the dropout and x A^T are made again there.

    Parameters
    ----------
    linear : the layer that is frozen
    rank, alpha, dropout : as in `lora`
    path : the name of the layer in the model, by which its dropout differs from that of others
    """

    def __init__(self, linear: Linear, rank: int, alpha: float, dropout: float = 0.0, path: str = "") -> None:
        positive(self, rank=rank)
        fraction(self, dropout=dropout)
        size = (linear.in_features, linear.out_features, linear.bias)
        super().__init__(*size, init=linear.init, bias_init=linear.bias_init)
        self.linear = linear
        self.rank, self.alpha, self.dropout, self.path = rank, float(alpha), float(dropout), path
        self.scale = self.alpha / rank
        if dropout:
            self.acts_on = "sample"  # the mask is that of whole sequences
            self.caches = True  # there is none when not training
            self.runs = ("linear", "drop", "drop_backward")

    def specs(self) -> dict[str, Spec]:
        frozen = {name: replace(spec, trainable=False) for name, spec in super().specs().items()}
        shapes = (self.rank, self.in_features), (self.out_features, self.rank)
        down = Spec(shapes[0], uniform(1.0 / math.sqrt(self.in_features)))
        return frozen | dict(zip(LOW, (down, Spec(shapes[1])), strict=True))

    def cut(self, request: CutRequest) -> Portion:
        if request.mark is not None and self.dropout:
            raise ConfigError(
                f"{request.path!r} {self!r} cannot be cut, since its adapters have dropout={self.dropout}: use nn.lora "
                "with dropout=0"
            )
        return self._cut_by_mark(request) if type(self) is LoRALinear else Layer.cut(self, request)

    def _column(self, **options: Any) -> tuple[Layer, tuple[str, ...]]:
        return ColumnLoRA(self, **options), (ColumnLoRA.partial,)

    def _row(self, sequence: bool, grain: int) -> tuple[Layer, tuple[str, ...]]:
        _, partial = super()._row(sequence, grain)
        return RowLoRA(self, sequence=sequence, grain=grain), (*partial, RowLoRA.partial)

    def bare(self, env: Env, p: Params, x: Array) -> Array:
        """The product without the bias."""
        return self.added(env, p, x, super().bare(env, p, x))

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        want_last(self, x, self.in_features)
        y, saved = super().forward(env, p, x)
        return self.added(env, p, x, y), saved

    def backward(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        dx, kept = self.backward_input(env, p, saved, dy)
        self.backward_params(env, g, kept)
        return dx

    def backward_leaf(self, env: Env, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (*saved, dy, self.inside(env, p, dy), p[LOW[0]], self._dropped(env, saved[0])[1]))

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,) = saved  # of the MLP's `down` it has the right shape alone, and what is kept of it is put right
        inside = self.inside(env, p, dy)
        dx = product(env.xp, flat(dy), p["weight"]).reshape(x.shape)
        low = product(env.xp, inside, p[LOW[0]]).reshape(x.shape)
        mask = self._dropped(env, x)[1]
        dx += low if mask is None else kernels.drop_backward(env.xp, low, mask, self.dropout)
        return dx, (x, dy, inside, p[LOW[0]].copy(), mask)  # a page may be gone when `backward_params` runs

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        x, dy, inside, down, mask = kept
        if not any(name in g for name in LOW):
            return
        x = flat(x if mask is None else kernels.drop_backward(env.xp, x, mask, self.dropout))
        add_product(env.xp, g, LOW[0], inside.T, x)
        z = affine(env.xp, x, down, None)
        z *= self.scale
        add_product(env.xp, g, LOW[1], flat(dy).T, z)

    def added(self, env: Env, p: Params, x: Array, y: Array) -> Array:
        """`y`, to which what the adapters make of `x` is added in place."""
        z = affine(env.xp, flat(self._dropped(env, x)[0]), p[LOW[0]], None)
        z *= self.scale
        y += affine(env.xp, z, p[LOW[1]], None).reshape(y.shape)
        return y

    def inside(self, env: Env, p: Params, dy: Array) -> Array:
        """The gradient of x A^T."""
        inside = product(env.xp, flat(dy), p[LOW[1]])
        inside *= self.scale
        return inside

    def _dropped(self, env: Env, x: Array) -> tuple[Array, Array | None]:
        """What A reads, and the mask."""
        if not env.training or self.dropout == 0.0:
            return x, None
        kept: tuple[Array, Array] = kernels.drop(env.xp, x, env.random.at(self.path).stretch(x.shape), self.dropout)
        return kept


def lora(
    model: Layer, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0, *, targets: str | Sequence[str]
) -> Layer:
    """`model` with adapters in its Linear layers, and all of its own parameters frozen (Hu et al. 2021).

    Names of parameters stay, and those of the adapters are below the names of their layers, as in PEFT. ConfigError for
    a target that fits no Linear.

    Parameters
    ----------
    model : any model that holds Linear layers; it is not changed
    rank : columns of the thin matrices
    alpha : adapters are scaled by alpha / rank
    dropout : probability that an element of what an adapter reads is dropped
    targets : names of Linear layers: whole, their last parts ("attn.qkv", as PEFT's `target_modules`), or patterns; of
        a model of `fsdpx.models.from_pretrained` also those of its folder ("q_proj")
    """
    adapting = _Adapting(rank, alpha, dropout, (targets,) if isinstance(targets, str) else tuple(targets), model)
    new = adapting.visit(check_layer("lora", "model", model), "")
    adapting.demand_found()
    return new.with_frozen(LOW) if isinstance(new, Container) else new


class _Adapting:
    """One walk over a model. found: target -> whether a Linear fits. names: of all Linear. there: name of a
    parameter -> what it is called in the files that it is read from."""

    def __init__(self, rank: int, alpha: float, dropout: float, targets: tuple[str, ...], model: Layer) -> None:
        self.options = (rank, alpha, dropout)
        self.there = {name: getattr(first, "name", "") for name, first in getattr(model, "initial", {}).items()}
        self.found = dict.fromkeys(targets, False)
        self.names: list[str] = []

    def visit(self, layer: Layer, path: str) -> Layer:
        if type(layer) is Linear:
            return self._linear(layer, path)
        children = layer.children()
        new = {name: self.visit(child, dotted(path, name)) for name, child in children.items()}
        if all(new[name] is child for name, child in children.items()):
            return layer
        if isinstance(layer, Container):
            return layer.with_layers(new)
        raise ConfigError(f"lora: {path!r} {layer!r} is no container, so the Linear layers inside cannot be replaced")

    def demand_found(self) -> None:
        missing = [target for target, found in self.found.items() if not found]
        demand_match("lora(targets=)", missing, self.names, "Linear layer", lambda name, target: False)
        if not self.found:
            raise ConfigError("lora: targets names no layer")

    def _linear(self, layer: Linear, path: str) -> Layer:
        self.names.append(path)
        names = (path, self.there.get(f"{path}.weight", "").removesuffix(".weight"))
        fits = [t for t in self.found if any(n == t or n.endswith(f".{t}") or fnmatchcase(n, t) for n in names if n)]
        self.found.update(dict.fromkeys(fits, True))
        return LoRALinear(layer, *self.options, path) if fits else layer


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
