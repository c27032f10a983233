"""Physics attention (Transolver): attention among learned slices of a field that may be partitioned over ranks."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from fsdpx.core.array import kernels
from fsdpx.core.array.kernels.memory_order import put_channels_last
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields import conv
from fsdpx.ext.fields.cell_heads import (
    merge_heads_into_channels,
    require_divisible_by_heads,
    split_channels_into_heads,
)
from fsdpx.ext.fields.cell_reductions import all_reduce_over_parts
from fsdpx.ext.fields.halo import FieldLayer, PaddingMode
from fsdpx.ext.fields.over_channels import OverChannels
from fsdpx.nn.container import Composite
from fsdpx.nn.gradient_accumulation import accumulation_dtype
from fsdpx.nn.init import constant, uniform
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, format_constructor, require_positive
from fsdpx.nn.linear import Linear

__all__ = ["PhysicsAttention", "SliceAttention"]

EPSILON = 1e-5
"""Number added to the sum of a slice's weights, as in Transolver."""
TEMPERATURES = 0.1, 5.0
"""Bounds of the temperature, as in Transolver."""


class PhysicsAttention(Composite):
    """Physics attention of Transolver (Wu et al. 2024): attention among a few slices of a field instead of among its
    cells. The cost is linear in the number of cells. Input and output are (samples, channels, *cells).

    Each head assigns each cell to its slices with weights softmax(slice(x) / temperature), which sum to 1. The token of
    a slice is the weighted mean of its cells. The tokens attend to each other, and each cell gets the sum of the
    results, weighted by the cell's slice weights. On a grid of ranks, each rank computes the weights of its own cells.
    The forward pass all-reduces n_slices * (channels + n_heads) values per sample, and the backward pass n_slices *
    channels, regardless of the size of the field.

    On a mesh, `kernel_size` must be None, and input and output are (samples, nodes, channels).

    The parameters `in_project_x.*` project the cells to compute the weights, and `in_project_fx.*` project the cells to
    compute the tokens. The slices use `attend.in_project_slice.weight (n_slices, channels / n_heads)` and `.bias`, and
    `attend.temperature (1, n_heads, 1, 1)`, which starts at 0.5 and is clipped to [0.1, 5]. The attention uses
    `attend.to_q.weight`, `attend.to_k.weight` and `attend.to_v.weight`, all (channels / n_heads, channels / n_heads).
    The result is projected by `to_out.weight` and `.bias`. The names of Transolver's parameters are accepted too. The
    layer is one FSDP unit.

    Parameters
    ----------
    channels : number of channels of the input and the output
    n_heads : number of heads, a divisor of channels
    n_slices : number of slices of each head; default 64
    kernel_size : window of the convolutions `in_project_x` and `in_project_fx`, an odd number, as in Transolver for
        structured grids; if None (default), they are `Linear` layers on the channels of each cell
    dims : number of cell dims of these convolutions; default 2
    padding_mode : values beyond the ends of the field for these convolutions, as in `Conv`; default "zeros"
    """

    unit = True
    aliases: ClassVar = {
        "temperature": "attend.temperature",
        "in_project_slice.weight": "attend.in_project_slice.weight",
        "in_project_slice.bias": "attend.in_project_slice.bias",
        "to_q.weight": "attend.to_q.weight",
        "to_k.weight": "attend.to_k.weight",
        "to_v.weight": "attend.to_v.weight",
        "to_out.0.weight": "to_out.weight",
        "to_out.0.bias": "to_out.bias",
    }

    def __init__(
        self,
        channels: int,
        n_heads: int,
        n_slices: int = 64,
        kernel_size: int | None = None,
        dims: int = 2,
        padding_mode: PaddingMode = "zeros",
    ) -> None:
        require_positive(self, n_slices=n_slices)
        d_head = require_divisible_by_heads(self, channels, n_heads)
        if dims not in (1, 2, 3):
            raise ConfigError(f"PhysicsAttention: dims={dims!r}: a field has 1 to 3 dims of cells")
        if kernel_size is not None and (kernel_size < 1 or kernel_size % 2 == 0):
            raise ConfigError(f"PhysicsAttention: kernel_size must be odd, so that cells stay, got {kernel_size}")
        self.channels, self.n_heads, self.n_slices, self.kernel_size = channels, n_heads, n_slices, kernel_size
        self.dims, self.padding_mode = dims, padding_mode
        self.in_project_x, self.in_project_fx = self._make_projection(), self._make_projection()
        self.attend = SliceAttention(n_heads, d_head, n_slices)
        self.to_out = OverChannels(Linear(channels, channels), channels)

    def compose(self, x: Any) -> Any:
        return self.to_out(self.attend(self.in_project_x(x), self.in_project_fx(x)))

    def __repr__(self) -> str:
        return format_constructor(self)

    def _make_projection(self) -> Layer:
        if self.kernel_size is None:
            return OverChannels(Linear(self.channels, self.channels), self.channels)
        kind: Any = getattr(conv, f"Conv{self.dims}d")
        return kind(self.channels, self.channels, self.kernel_size, padding="same", padding_mode=self.padding_mode)


class SliceAttention(FieldLayer):
    """The part of `PhysicsAttention` between its projections.

    The layer takes two fields (samples, channels, *cells): x, which determines the slice weights of cells, and the
    values, which determine the tokens of slices. If `env.recompute` contains "attention", the backward pass recomputes
    the slice weights.

    Parameters
    ----------
    n_heads, d_head : number of heads, and number of channels per head
    n_slices : number of slices of each head
    """

    n_inputs = 2
    rows_of_mesh = ("nodes",)
    kernel_names = ("channels_last", "softmax", "softmax_backward", "attention", "attention_backward")

    def __init__(self, n_heads: int, d_head: int, n_slices: int) -> None:
        self.n_heads, self.d_head, self.n_slices = n_heads, d_head, n_slices

    def specs(self) -> dict[str, ParameterSpec]:
        default, square = uniform(1.0 / math.sqrt(self.d_head)), (self.d_head, self.d_head)
        return {
            "temperature": ParameterSpec((1, self.n_heads, 1, 1), constant(0.5)),
            "in_project_slice.weight": ParameterSpec((self.n_slices, self.d_head), default),
            "in_project_slice.bias": ParameterSpec((self.n_slices,), default),
        } | {f"to_{name}.weight": ParameterSpec(square, default) for name in "qkv"}

    def forward(self, env: LayerContext, p: Params, x: tuple[Array, Array]) -> tuple[Array, Any]:
        parts = self.get_partition(x[0])
        x = parts.to_channels_first(x[0]), parts.to_channels_first(x[1])
        xp, channels, cells = env.xp, self.n_heads * self.d_head, tuple(x[0].shape[2:])
        if x[0].ndim < 3 or x[0].shape[1] != channels or x[0].shape != x[1].shape:
            got = " and ".join(str(tuple(field.shape)) for field in x)
            raise ShapeError(f"{self!r} wants two fields (samples, {channels}, *cells), got {got}")
        fields = tuple(put_channels_last(xp, field) for field in x)
        rows, values = (self._split_into_heads(env, field) for field in fields)
        weights = self._compute_slice_weights(env, p, rows)
        # the last column of the sums is the sum of the weights
        sums = xp.matmul(weights.swapaxes(-1, -2), xp.concatenate([values, xp.ones_like(values[..., :1])], axis=-1))
        all_reduce_over_parts(env, sums, env.random.path)
        totals = sums[..., self.d_head :] + EPSILON
        tokens = sums[..., : self.d_head] / totals
        heads = [xp.matmul(tokens, matrix.T) for matrix in self._get_token_projections(p, tokens.dtype)]
        found, lse = kernels.attention(xp, *heads, False, self._scale)
        y = merge_heads_into_channels(xp, xp.matmul(weights, found), cells).astype(x[0].dtype, copy=False)
        kept_weights = () if "attention" in env.recompute else (weights,)
        return parts.to_channels_first(y), (*fields, kept_weights, (totals, tokens, *heads, found, lse))

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        (*fields, kept_weights, (totals, tokens, q, k, v, found, lse)), xp = saved, env.xp
        parts = self.get_partition(dy)
        dy = parts.to_channels_first(dy)
        rows, values, slopes = (self._split_into_heads(env, field) for field in (*fields, dy))
        weights = kept_weights[0] if kept_weights else self._compute_slice_weights(env, p, rows)
        # each rank sums only over its own cells, so the gradients of tokens and of their projections are partial sums
        dfound = xp.matmul(weights.swapaxes(-1, -2), slopes)
        dheads = kernels.attention_backward(xp, q, k, v, found, lse, dfound, False, self._scale)
        projections = self._get_token_projections(p, tokens.dtype)
        dtokens = sum(xp.matmul(one, matrix) for one, matrix in zip(dheads, projections, strict=True))
        all_reduce_over_parts(env, dtokens, env.random.path)
        dtotals = -xp.sum(dtokens * tokens, axis=-1, keepdims=True)
        dsums = xp.concatenate([dtokens, dtotals], axis=-1) / totals
        ones = xp.ones_like(values[..., :1])
        factor = xp.concatenate([dsums, found], axis=-1).swapaxes(-1, -2)
        dweights = xp.matmul(xp.concatenate([values, ones, slopes], axis=-1), factor)
        dlogits = self._map_rows(kernels.softmax_backward, env, weights, dweights)
        dx = xp.matmul(dlogits, self._divide_slice_projection_by_temperature(env, p, tokens.dtype)[0])
        dvalues = xp.matmul(weights, dsums[..., : self.d_head])
        both = (merge_heads_into_channels(xp, a, dy.shape[2:]).astype(dy.dtype, copy=False) for a in (dx, dvalues))
        slices = self._compute_slice_parameter_gradients(env, p, rows, dlogits)
        heads = {f"to_{name}.weight": _multiply_rows(xp, d, tokens) for name, d in zip("qkv", dheads, strict=True)}
        return tuple(map(parts.to_channels_first, both)), slices | heads

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        for name, gradient in kept.items():
            if name in g:
                g[name][...] += gradient.astype(g[name].dtype, copy=False)

    @property
    def _scale(self) -> float:
        return 1.0 / math.sqrt(self.d_head)

    def _split_into_heads(self, env: LayerContext, x: Array) -> Array:
        """Return a field as (samples, heads, cells, d_head), in float32 if it has a 16-bit dtype."""
        wide = x.astype(accumulation_dtype(x.dtype), copy=False)
        heads = split_channels_into_heads(env.xp, wide, self.n_heads)
        return heads.reshape(x.shape[0], self.n_heads, math.prod(x.shape[2:]), self.d_head)

    def _get_token_projections(self, p: Params, dtype: Any) -> list[Array]:
        return [p[f"to_{name}.weight"].astype(dtype, copy=False) for name in "qkv"]

    def _divide_slice_projection_by_temperature(
        self, env: LayerContext, p: Params, dtype: Any
    ) -> tuple[Array, Array, Array]:
        """Return `in_project_slice.weight` and `.bias` divided by the temperature of each head, (heads, n_slices,
        d_head) and (heads, 1, n_slices), and these temperatures, (heads, 1, 1)."""
        low, high = TEMPERATURES
        bounded = env.xp.minimum(env.xp.maximum(p["temperature"].astype(dtype, copy=False), low), high)
        temperature = bounded.reshape(self.n_heads, 1, 1)
        weight, bias = (p[f"in_project_slice.{name}"].astype(dtype, copy=False) for name in ("weight", "bias"))
        return weight / temperature, bias / temperature, temperature

    def _compute_slice_weights(self, env: LayerContext, p: Params, rows: Array) -> Array:
        """Return the weights (samples, heads, cells, n_slices) with which each cell is assigned to slices."""
        matrix, bias, _ = self._divide_slice_projection_by_temperature(env, p, rows.dtype)
        logits = env.xp.matmul(rows, matrix.swapaxes(-1, -2))
        logits += bias
        return self._map_rows(kernels.softmax, env, logits)

    def _compute_slice_parameter_gradients(
        self, env: LayerContext, p: Params, rows: Array, dlogits: Array
    ) -> dict[str, Array]:
        """Return the gradients of the temperature and of the projection to slices."""
        xp, raw = env.xp, p["temperature"]
        matrix, bias, temperature = self._divide_slice_projection_by_temperature(env, p, rows.dtype)
        dmatrix = xp.sum(xp.matmul(dlogits.swapaxes(-1, -2), rows), axis=0)
        dbias = xp.sum(dlogits, axis=(0, 2)).reshape(bias.shape)
        along = xp.sum(dmatrix * matrix, axis=(1, 2)) + xp.sum(dbias * bias, axis=(1, 2))
        inside = (raw >= TEMPERATURES[0]) & (raw <= TEMPERATURES[1])
        return {
            "temperature": -(along / temperature.reshape(along.shape)).reshape(raw.shape) * inside,
            "in_project_slice.weight": xp.sum(dmatrix / temperature, axis=0),
            "in_project_slice.bias": xp.sum(dbias / temperature, axis=(0, 1)),
        }

    def _map_rows(self, kernel: Any, env: LayerContext, *arrays: Array) -> Array:
        """Apply a matrix kernel to the rows of arrays (samples, heads, cells, n_slices)."""
        shape = arrays[0].shape
        return kernel(env.xp, *(a.reshape(math.prod(shape[:-1]), shape[-1]) for a in arrays)).reshape(shape)


def _multiply_rows(xp: Any, a: Array, b: Array) -> Array:
    """Flatten a and b, both (samples, heads, tokens, features), to matrices with one row per token of each head and
    sample. Return a^T b."""
    return xp.matmul(a.reshape(-1, a.shape[-1]).T, b.reshape(-1, b.shape[-1]))
