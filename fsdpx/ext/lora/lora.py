"""Linear layers with LoRA adapters, replicated or sharded over the tensor axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from fsdpx.core.array import kernels
from fsdpx.core.base.name_hints import require_pattern_matches
from fsdpx.errors import ConfigError
from fsdpx.nn.container import Container, require_layer
from fsdpx.nn.gradient_accumulation import add_matmul_gradient, as_rows, linear_forward, matmul_in_dtype_of_first
from fsdpx.nn.init import uniform
from fsdpx.nn.layer import (
    Array,
    Layer,
    LayerContext,
    ParameterSpec,
    Params,
    ShardedLayer,
    join_path,
    require_fraction,
    require_last_dim,
    require_positive,
)
from fsdpx.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear, ShardedLinear
from fsdpx.nn.shard_specs import ShardingContext

__all__ = ["ADAPTER_NAMES", "ColumnLoRA", "LoRALinear", "RowLoRA", "add_lora", "get_adapter_of_layer"]

ADAPTER_NAMES = ("lora_A.weight", "lora_B.weight")
"""Names of the trained matrices A and B, as in PEFT."""


class LoRALinear(Linear):
    """Linear layer with a low-rank adapter, in which only the adapter matrices A and B are trained.

    Computes `y = x @ weight.T + bias + alpha / rank * dropout(x) @ A.T @ B.T`.

    `weight` and `bias` have the same names and shapes as in `Linear`. `lora_A.weight (rank, in)` is initialized with
    the Kaiming uniform distribution for a = sqrt(5), which is U(-k, k) with k = 1/sqrt(in). `lora_B.weight (out, rank)`
    is initialized to zeros, so the initial output equals the output of the Linear. Only x is saved; the backward pass
    recomputes the dropout mask and `dropout(x) @ A.T`.

    Parameters
    ----------
    linear : the layer to adapt; its parameters are frozen
    rank, alpha, dropout : as in `add_lora`
    path : path of the layer in the model; seeds the random numbers of its dropout
    """

    def __init__(self, linear: Linear, rank: int, alpha: float, dropout: float = 0.0, path: str = "") -> None:
        require_positive(self, rank=rank)
        require_fraction(self, dropout=dropout)
        size = (linear.in_features, linear.out_features, linear.bias)
        super().__init__(*size, init=linear.init, bias_init=linear.bias_init)
        self.linear = linear
        self.rank, self.alpha, self.dropout, self.path = rank, float(alpha), float(dropout), path
        self.scale = self.alpha / rank
        if dropout:
            self.acts_on = "sample"  # needs full sequences, because the dropout mask is drawn for a full sequence
            self.caches = True  # keys and values can be cached, because generation runs without dropout
            self.kernel_names = ("linear", "drop", "drop_backward")

    def specs(self) -> dict[str, ParameterSpec]:
        frozen = {name: replace(spec, trainable=False) for name, spec in super().specs().items()}
        shapes = (self.rank, self.in_features), (self.out_features, self.rank)
        down = ParameterSpec(shapes[0], uniform(1.0 / math.sqrt(self.in_features)))
        return frozen | dict(zip(ADAPTER_NAMES, (down, ParameterSpec(shapes[1])), strict=True))

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        if request.mark is not None and self.dropout:
            raise ConfigError(
                f"{request.path!r} {self!r} cannot be cut, since its adapters have dropout={self.dropout}: use "
                "nn.add_lora "
                "with dropout=0"
            )
        return self._shard_by_mark(request) if type(self) is LoRALinear else Layer.shard_over_ranks(self, request)

    def _make_column_parallel(self, **options: Any) -> tuple[Layer, tuple[str, ...]]:
        return ColumnLoRA(self, **options), (ColumnLoRA.partial,)

    def _make_row_parallel(self, sequence: bool, grain: int) -> tuple[Layer, tuple[str, ...]]:
        _, partial = super()._make_row_parallel(sequence, grain)
        return RowLoRA(self, sequence=sequence, grain=grain), (*partial, RowLoRA.partial)

    def forward_without_bias(self, env: LayerContext, p: Params, x: Array) -> Array:
        """Return `x @ weight.T` plus the adapter's output. The bias is not added.

        Parameters
        ----------
        env : array namespace, mesh, random numbers and training mode
        p : this layer's parameters
        x : input, (samples, ..., in_features)

        Returns
        -------
        array
            (samples, ..., out_features)
        """
        return self.add_adapter_output(env, p, x, super().forward_without_bias(env, p, x))

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_last_dim(self, x, self.in_features)
        y, saved = super().forward(env, p, x)
        return self.add_adapter_output(env, p, x, y), saved

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        dx, kept = self.backward_input(env, p, saved, dy)
        self.backward_params(env, g, kept)
        return dx

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(
            env,
            g,
            (
                *saved,
                dy,
                self.compute_low_rank_output_gradient(env, p, dy),
                p[ADAPTER_NAMES[0]],
                self._apply_dropout(env, saved[0])[1],
            ),
        )

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,) = saved  # in an MLP, only the shape of x is valid here: the MLP overwrites x before backward_params
        inside = self.compute_low_rank_output_gradient(env, p, dy)
        dx = matmul_in_dtype_of_first(env.xp, as_rows(dy), p["weight"]).reshape(x.shape)
        low = matmul_in_dtype_of_first(env.xp, inside, p[ADAPTER_NAMES[0]]).reshape(x.shape)
        mask = self._apply_dropout(env, x)[1]
        dx += low if mask is None else kernels.drop_backward(env.xp, low, mask, self.dropout)
        # copy the adapter matrix A, because the parameter may be freed before `backward_params` needs it
        return dx, (x, dy, inside, p[ADAPTER_NAMES[0]].copy(), mask)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, dy, inside, down, mask = kept
        if not any(name in g for name in ADAPTER_NAMES):
            return
        x = as_rows(x if mask is None else kernels.drop_backward(env.xp, x, mask, self.dropout))
        add_matmul_gradient(env.xp, g, ADAPTER_NAMES[0], inside.T, x)
        z = linear_forward(env.xp, x, down, None)
        z *= self.scale
        add_matmul_gradient(env.xp, g, ADAPTER_NAMES[1], as_rows(dy).T, z)

    def add_adapter_output(self, env: LayerContext, p: Params, x: Array, y: Array) -> Array:
        """Add the adapter's output, `alpha / rank * dropout(x) @ A.T @ B.T`, to y in place.

        Parameters
        ----------
        env : array namespace, random numbers and training mode
        p : this layer's parameters
        x : input, (samples, ..., in_features)
        y : output of the Linear, (samples, ..., out_features); changed in place

        Returns
        -------
        array
            y
        """
        z = linear_forward(env.xp, as_rows(self._apply_dropout(env, x)[0]), p[ADAPTER_NAMES[0]], None)
        z *= self.scale
        y += linear_forward(env.xp, z, p[ADAPTER_NAMES[1]], None).reshape(y.shape)
        return y

    def compute_low_rank_output_gradient(self, env: LayerContext, p: Params, dy: Array) -> Array:
        """Return the gradient of `x @ A.T`, the intermediate result between the adapter's two matrices.

        Parameters
        ----------
        env : array namespace
        p : this layer's parameters
        dy : gradient of the output, (samples, ..., out_features)

        Returns
        -------
        array
            (rows, rank), with all dims but the last flattened into rows
        """
        inside = matmul_in_dtype_of_first(env.xp, as_rows(dy), p[ADAPTER_NAMES[1]])
        inside *= self.scale
        return inside

    def _apply_dropout(self, env: LayerContext, x: Array) -> tuple[Array, Array | None]:
        """Return x after dropout, and the mask of kept elements (None without dropout)."""
        if not env.training or self.dropout == 0.0:
            return x, None
        kept: tuple[Array, Array] = kernels.drop(
            env.xp, x, env.random.child(self.path).get_number_range(x.shape), self.dropout
        )
        return kept


def add_lora(
    model: Layer, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0, *, targets: str | Sequence[str]
) -> Layer:
    """Return a copy of `model` with LoRA adapters in its Linear layers and all original parameters frozen (Hu et al.
    2021).

    The original parameters keep their names. Adapter parameters are named after their layers, as in PEFT:
    "path.lora_A.weight". Raises ConfigError for a target that matches no Linear.

    Parameters
    ----------
    model : any model that contains Linear layers; it is not changed
    rank : inner dim of the matrix product B A
    alpha : the output of each adapter is multiplied by alpha / rank
    dropout : probability that an element of an adapter's input is dropped
    targets : names of the Linear layers to adapt: full names, their last parts ("attn.qkv", as in PEFT's
        `target_modules`), or patterns. For a model loaded by `fsdpx.models.from_pretrained`, layer names from its
        weight files ("q_proj") also match
    """
    adapting = _LoRAWalk(rank, alpha, dropout, (targets,) if isinstance(targets, str) else tuple(targets), model)
    new = adapting.adapt_layer(require_layer("add_lora", "model", model), "")
    adapting.require_matched_targets()
    return new.with_frozen_except_suffixes(ADAPTER_NAMES) if isinstance(new, Container) else new


class _LoRAWalk:
    """Traverses a model, and adds adapters to its Linear layers.

    Attributes
    ----------
    found : target -> whether it matched a Linear
    names : paths of all Linear layers that were visited
    file_names : parameter name -> name in the files that it is read from
    """

    def __init__(self, rank: int, alpha: float, dropout: float, targets: tuple[str, ...], model: Layer) -> None:
        self.options = (rank, alpha, dropout)
        self.file_names = {name: getattr(first, "name", "") for name, first in getattr(model, "initial", {}).items()}
        self.found = dict.fromkeys(targets, False)
        self.names: list[str] = []

    def adapt_layer(self, layer: Layer, path: str) -> Layer:
        if type(layer) is Linear:
            return self._adapt_linear(layer, path)
        children = layer.children()
        new = {name: self.adapt_layer(child, join_path(path, name)) for name, child in children.items()}
        if all(new[name] is child for name, child in children.items()):
            return layer
        if isinstance(layer, Container):
            return layer.with_layers(new)
        raise ConfigError(
            f"add_lora: {path!r} {layer!r} is no container, so the Linear layers inside cannot be replaced"
        )

    def require_matched_targets(self) -> None:
        missing = [target for target, found in self.found.items() if not found]
        require_pattern_matches("add_lora(targets=)", missing, self.names, "Linear layer", lambda name, target: False)
        if not self.found:
            raise ConfigError("add_lora: targets names no layer")

    def _adapt_linear(self, layer: Linear, path: str) -> Layer:
        self.names.append(path)
        names = (path, self.file_names.get(f"{path}.weight", "").removesuffix(".weight"))
        fits = [t for t in self.found if any(n == t or n.endswith(f".{t}") or fnmatchcase(n, t) for n in names if n)]
        self.found.update(dict.fromkeys(fits, True))
        return LoRALinear(layer, *self.options, path) if fits else layer


class _ShardedLoRA(ShardedLinear):
    """Base class for `LoRALinear` layers that are sharded over the tensor axis.

    Attributes
    ----------
    low : the `LoRALinear` before sharding, without its dropout
    partial : the adapter matrix (A or B) that every rank holds in full. Each rank computes only a partial gradient for
        it
    """

    low: LoRALinear
    partial: str

    def specs(self) -> dict[str, ParameterSpec]:
        cut = super().specs()
        return {
            name: replace(spec, cut=cut[name].cut if name in cut else None if name == self.partial else self._cut)
            for name, spec in self.low.specs().items()
        }

    backward = Layer.backward

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        self.low.backward_params(env, g, kept)

    def _make_kept_values(self, env: LayerContext, p: Params, x: Array, dy: Array) -> Any:
        return x, dy, self.low.compute_low_rank_output_gradient(env, p, dy), p[ADAPTER_NAMES[0]].copy(), None

    def _multiply_shard(self, env: LayerContext, p: Params, x: Array, bias: Array | None) -> Array:
        return self.low.add_adapter_output(env, p, x, super()._multiply_shard(env, p, x, bias))

    def _compute_input_gradient_rows(self, env: LayerContext, p: Params, dy: Array) -> Array:
        dx = super()._compute_input_gradient_rows(env, p, dy)
        dx += matmul_in_dtype_of_first(
            env.xp, self.low.compute_low_rank_output_gradient(env, p, dy), p[ADAPTER_NAMES[0]]
        )
        return dx


class ColumnLoRA(_ShardedLoRA, ColumnParallelLinear):
    """One rank's shard of a `LoRALinear`, sharded by output features as in `ColumnParallelLinear`. The argument `low`
    is the `LoRALinear` before sharding."""

    partial = ADAPTER_NAMES[0]

    def __init__(self, low: LoRALinear, **options: Any) -> None:
        super().__init__(low.in_features, low.out_features, low.bias, **options)
        self.low = low

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx, (x, dy) = ColumnParallelLinear.backward_input(self, env, p, saved, dy)
        return dx, self._make_kept_values(env, p, x, dy)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        (x,) = saved
        self.backward_params(env, g, self._make_kept_values(env, p, x, self._take_gradient_shard(env, dy)))

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, *rest = kept
        if any(name in g for name in ADAPTER_NAMES):
            super().backward_params(env, g, (self._all_gather_input(env, x), *rest))


class RowLoRA(_ShardedLoRA, RowParallelLinear):
    """One rank's shard of a `LoRALinear`, sharded by input features as in `RowParallelLinear`. The argument `low` is
    the `LoRALinear` before sharding."""

    partial = ADAPTER_NAMES[1]

    def __init__(self, low: LoRALinear, **options: Any) -> None:
        super().__init__(low.in_features, low.out_features, low.bias, **options)
        self.low = low

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx, (x, full, _) = RowParallelLinear.backward_input(self, env, p, saved, dy)
        return dx, self._make_kept_values(env, p, x, full)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        (x,) = saved
        self.backward_params(env, g, self._make_kept_values(env, p, x, self._all_gather_gradient(env, dy)))


def get_adapter_of_layer(layer: Layer) -> LoRALinear | None:
    """Return the layer itself if it is a `LoRALinear`, or the full `LoRALinear` if the layer is a shard of one. Return
    None if the layer has no adapter."""
    if isinstance(layer, _ShardedLoRA):
        return layer.low
    return layer if isinstance(layer, LoRALinear) else None
