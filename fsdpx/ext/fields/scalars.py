"""Layers that combine a field with scalars, such as a time step or a Reynolds number, or reduce a field to scalars."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError, DataError, ShapeError
from fsdpx.ext.fields.cell_reductions import all_reduce_over_parts
from fsdpx.ext.fields.halo import FieldLayer
from fsdpx.ext.fields.local_arrays import HoldsLocalArray, require_weights_of_cells, require_weights_of_channels
from fsdpx.ext.fields.over_parts import TakesScalars
from fsdpx.nn.container import Composite
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, ShardedLayer, require_finite_arguments, require_positive
from fsdpx.nn.linear import Linear
from fsdpx.nn.losses import CellWeights
from fsdpx.nn.shard_specs import FieldPartition, Kind, Replicated, ShardingContext

__all__ = [
    "BroadcastScalars", "ConcatScalars", "FiLM", "GlobalMax", "GlobalMean", "GlobalSum", "ScaleShift", "TimeEmbedding",
]  # fmt: skip


class ScalarsToField(FieldLayer, TakesScalars):
    """Base class for layers with two inputs. The first is a field (samples, channels, *cells), or values (samples,
    rows, features) at the nodes or edges of a mesh. The second consists of scalars (samples, n).

    Every rank of a field holds all scalars. In this layer and in the layers before it, each rank computes the
    contribution of its own cells to the gradient of the scalars. The gradient is the sum of these contributions over
    ranks."""

    n_inputs = 2
    scalar_inputs = (1,)
    takes_ghosts = True
    rows_of_mesh = ("nodes", "ghosts", "edges")

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        field, scalars = request.kinds
        if not isinstance(field, FieldPartition):
            return super().shard_over_ranks(request)
        if not isinstance(scalars, Replicated):
            raise ConfigError(
                f"{request.path!r} {self!r} reads {field} and {scalars}: its second input must be scalars, which each "
                "rank has whole, as (samples, n)"
            )
        return self.bind_to_partition(request, field)

    def _get_field_and_scalars(self, x: Any) -> tuple[Array, Array]:
        """Return the field, with its channels in dim 1, and the scalars."""
        x, s = x
        if x.ndim < 3 or s.ndim != 2 or x.shape[0] != s.shape[0]:
            raise ShapeError(
                f"{self!r} wants a field (samples, channels, *cells) and scalars (samples, n), got {tuple(x.shape)} "
                f"and {tuple(s.shape)}"
            )
        return self.get_partition(x).to_channels_first(x), s

    def _to_result(self, env: LayerContext, y: Array) -> Array:
        return env.xp.ascontiguousarray(self.get_partition(y).to_channels_first(y))


def _sum_over_cells(a: Array) -> Array:
    """Return the sums of `a`, (samples, channels, *cells), over the cells. The sums are computed in float64 and
    returned in the dtype of `a`."""
    return a.sum(axis=tuple(range(2, a.ndim)), dtype=np.float64).astype(a.dtype)


def _broadcast_to_cells(s: Array, x: Array) -> Array:
    """Return `s`, (samples, n), with a dim of size 1 appended for each cell dim of `x`."""
    return s.reshape(*s.shape, *(1,) * (x.ndim - 2))


class ConcatScalars(ScalarsToField):
    """Appends n scalars to a field as n additional channels. Each of these channels has the value of its scalar in all
    cells.

    The layer takes two inputs: a field (samples, channels, *cells), and scalars (samples, n), which every rank of a
    grid passes in full. It returns (samples, channels + n, *cells). On a mesh, the field is (samples, nodes,
    features)."""

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Array, Any]:
        field, s = self._get_field_and_scalars(x)
        spread = env.xp.broadcast_to(_broadcast_to_cells(s, field), (*s.shape, *field.shape[2:]))
        y = env.xp.concatenate([field, spread.astype(field.dtype)], axis=1)
        return self._to_result(env, y), (field.shape[1],)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        (channels,), dy = saved, self.get_partition(dy).to_channels_first(dy)
        return (self._to_result(env, dy[:, :channels]), _sum_over_cells(dy[:, channels:])), ()


class ScaleShift(ScalarsToField):
    """Scales and shifts each channel of a field: y = (1 + scale) x + shift.

    The layer takes two inputs: a field (samples, channels, *cells), and scalars (samples, 2 channels), with all scales
    before all shifts. `FiLM` is a `Linear` followed by this layer. On a mesh, the field is (samples, nodes,
    features)."""

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Array, Any]:
        field, s = self._get_field_and_scalars(x)
        if s.shape[1] != 2 * field.shape[1]:
            raise ShapeError(
                f"{self!r}: a field of {field.shape[1]} channels takes {2 * field.shape[1]} scales and shifts, got "
                f"{s.shape[1]}"
            )
        gain = (1.0 + _broadcast_to_cells(s[:, : field.shape[1]], field)).astype(field.dtype, copy=False)
        y = field * gain
        y += _broadcast_to_cells(s[:, field.shape[1] :], field).astype(field.dtype, copy=False)
        return self.get_partition(y).to_channels_first(y), (field, gain)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        (field, gain), dy = saved, self.get_partition(dy).to_channels_first(dy)
        ds = env.xp.concatenate([_sum_over_cells(dy * field), _sum_over_cells(dy)], axis=1)
        dx = dy * gain
        return (self.get_partition(dx).to_channels_first(dx), ds), ()


class BroadcastScalars(ScalarsToField):
    """Adds a scalar to each channel of a field, or multiplies each channel by a scalar.

    The layer takes two inputs: a field (samples, channels, *cells), and scalars (samples, channels).

    Parameters
    ----------
    adds : whether to add the scalars instead of multiplying by them
    """

    def __init__(self, adds: bool) -> None:
        self.adds = bool(adds)

    def forward(self, env: LayerContext, p: Params, x: Any) -> tuple[Array, Any]:
        field, s = self._get_field_and_scalars(x)
        if s.shape[1] != field.shape[1]:
            raise ShapeError(f"{self!r} wants {field.shape[1]} scalars, one per channel, got {s.shape[1]}")
        wide = _broadcast_to_cells(s, field)
        y = field + wide if self.adds else field * wide
        return self._to_result(env, y.astype(field.dtype, copy=False)), (field, wide)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Any, Any]:
        (field, wide), dy = saved, self.get_partition(dy).to_channels_first(dy)
        dx, ds = (dy, dy) if self.adds else (dy * wide, dy * field)
        return (self._to_result(env, dx), _sum_over_cells(ds)), ()


class FiLM(Composite):
    """Feature-wise linear modulation (Perez et al. 2018): y = (1 + scale(s)) x + shift(s), where a `Linear` computes
    a scale and a shift for each channel of x from the scalars s.

    The layer takes two inputs: a field (samples, channels, *cells), and scalars (samples, n_scalars), such as a time
    step, a Reynolds number or a `TimeEmbedding`. Every rank of a grid passes all scalars. The first `channels` outputs
    of the Linear are the scales, as in diffusion models (Dhariwal and Nichol 2021). The parameters are `linear.weight`,
    (2 channels, n_scalars), and `linear.bias`.

    Parameters
    ----------
    n_scalars : number of scalars of each sample
    channels : number of channels of the field
    """

    def __init__(self, n_scalars: int, channels: int) -> None:
        require_positive(self, n_scalars=n_scalars, channels=channels)
        self.n_scalars, self.channels = n_scalars, channels
        self.linear = Linear(n_scalars, 2 * channels)

    def compose(self, x: Any, s: Any) -> Any:
        return ScaleShift()(x, self.linear(s))


class TimeEmbedding(Layer):
    """Sinusoidal embedding of a time t, or of the step t of a diffusion process: all sin(t f_k), followed by all cos(t
    f_k), for frequencies f_k from 1 to 1 / max_period.

    f_k = max_period^(-k / (dim / 2 - 1)) for k = 0 ... dim / 2 - 1, as in Ho et al. (2020), after Vaswani et al.
    (2017). The input is (samples,) or (samples, 1), and the output is (samples, dim). An input of a model that computes
    in 16 bits is read in float32, because 16-bit floats cannot represent all times: bfloat16 has no integer between 256
    and 258.

    Parameters
    ----------
    dim : number of outputs, which must be even and at least 4
    max_period : inverse of the smallest frequency; default 10000
    """

    takes = "exact"

    def __init__(self, dim: int, max_period: float = 10000.0) -> None:
        require_positive(self, dim=dim)
        require_finite_arguments(self, max_period=max_period)
        if dim < 4 or dim % 2 or not max_period > 0:
            raise ConfigError(f"TimeEmbedding(dim={dim}, max_period={max_period}): dim must be even and at least 4")
        self.dim, self.max_period = dim, float(max_period)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim not in (1, 2) or x.shape[1:] not in ((), (1,)):
            raise ShapeError(f"{self!r} wants (samples,) or (samples, 1), got {tuple(x.shape)}")
        angles = x.reshape(-1, 1).astype(np.float64) * self._make_frequencies(env)
        sin, cos = env.xp.sin(angles), env.xp.cos(angles)
        y = env.xp.concatenate([sin, cos], axis=1).astype(x.dtype if env.dtype is None else env.dtype)
        return y, (sin, cos, x.shape)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        sin, cos, shape = saved
        slopes = env.xp.concatenate([cos, -sin], axis=1) * env.xp.concatenate([self._make_frequencies(env)] * 2)
        return (dy * slopes).sum(axis=1).astype(dy.dtype).reshape(shape), ()

    def _make_frequencies(self, env: LayerContext) -> Array:
        half = self.dim // 2
        return env.xp.asarray(np.exp(-math.log(self.max_period) / (half - 1) * np.arange(half)))


class _GlobalReduction(FieldLayer):
    """Base class for layers that reduce a field, or the nodes of a mesh, to scalars (samples, channels). Every rank
    gets the result."""

    rows_of_mesh = ("nodes",)
    gives_scalars = True

    def partition_outputs(self, parts: FieldPartition) -> Kind:
        return Replicated()

    def _get_field(self, x: Array) -> Array:
        """Return the input `x`, with its channels in dim 1."""
        if x.ndim < 3:
            raise ShapeError(f"{self!r} wants a field (samples, channels, *cells), got {tuple(x.shape)}")
        return self.get_partition(x).to_channels_first(x)

    def _to_input_gradient(self, env: LayerContext, dx: Array, shape: tuple[int, ...]) -> Array:
        """Return the gradient of the input, in the input's layout. `dx` is this gradient with the channels in dim 1, or
        an array that broadcasts to it. `shape` is the shape of the input with the channels in dim 1."""
        wide = env.xp.broadcast_to(dx, shape)
        return env.xp.ascontiguousarray(self.get_partition(wide).to_channels_first(wide))


class GlobalMean(_GlobalReduction, HoldsLocalArray):
    """Mean of each channel over all cells of the field: (samples, channels, *cells) -> scalars (samples, channels).

    On a grid, every rank gets the result, so layers such as `Linear` may follow. The forward and backward passes each
    all-reduce 8 bytes per sample and channel. On a mesh, the mean is over all nodes: (samples, nodes, features) ->
    (samples, features).

    Parameters
    ----------
    weights : weight of each cell, such as its volume: an array (*cells) or (channels, *cells) of numbers >= 0 for this
        rank's part of the field, or (nodes,) or (nodes, features) for the nodes that this rank owns. Weighted sums are
        divided by the sum of weights. If None (default), all weights are 1
    """

    def __init__(self, weights: Any = None) -> None:
        self.weights = None if weights is None else CellWeights(type(self).__name__, weights)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        x = self._get_field(x)
        w, dims = self._get_broadcastable_weights(env, x), tuple(range(2, x.ndim))
        total = (x if w is None else x * w).sum(axis=dims, dtype=np.float64)
        below = self._all_reduce_divisor(env, x, w)
        total = all_reduce_over_parts(env, total, env.random.path) / below
        return total.astype(x.dtype), (w, below, x.shape)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        w, below, shape = saved
        # each rank's dy comes only from that rank's own use of the result, so sum dy over ranks
        total = all_reduce_over_parts(env, dy.astype(np.float64), env.random.path) / below
        dx = total.astype(dy.dtype).reshape(*total.shape, *(1,) * (len(shape) - 2))
        return self._to_input_gradient(env, dx if w is None else (dx * w).astype(dx.dtype), shape), ()

    def _all_reduce_divisor(self, env: LayerContext, x: Array, w: Array | None) -> Any:
        """Return the divisor for sums over all cells: the number of cells, or the sum of the weights `w`."""
        if w is None:
            return max(math.prod(self.get_partition(x).shape), 1)
        key = "sums of weights over all parts", id(self.weights), x.shape[1], w.dtype.str
        if key not in env.constants:  # check only once: weights never change, and a check makes the host wait for a GPU
            total = env.xp.broadcast_to(w, (1, *x.shape[1:])).sum(axis=tuple(range(2, x.ndim)), dtype=np.float64)
            total = all_reduce_over_parts(env, total, env.random.path)
            if not getattr(env.xp, "holds_no_data", False) and not bool((total > 0).all()):
                raise DataError(f"{self!r}: all weights of a channel are 0")
            env.constants[key] = total
        return env.constants[key]

    def _get_broadcastable_weights(self, env: LayerContext, x: Array) -> Array | None:
        """Return the weights in a shape that broadcasts with x, or None if all weights are 1."""
        if self.weights is None:
            return None
        weights = self.weights if self.get_partition(x).has_cells else self.weights.of_nodes
        require_weights_of_channels(self, "weights", weights, x)
        if getattr(env.xp, "holds_no_data", False):  # in a dry run, x may be the full field, so skip the check
            return env.xp.empty((1, *x.shape[1:]), dtype=x.dtype)
        weights.require_broadcastable(self, x.shape, error=ShapeError)
        return weights.reshape_to_broadcast(env, x)

    def require_local_cells(self, cells: tuple[int, ...]) -> None:
        require_weights_of_cells(self, "weights", self.weights, cells)


class GlobalSum(GlobalMean):
    """Sum of each channel over all cells of the field, for example to compute a force from stresses and areas. Input,
    output and `weights` are as in `GlobalMean`, but the weighted sum is not divided by the sum of weights."""

    def _all_reduce_divisor(self, env: LayerContext, x: Array, w: Array | None) -> Any:
        return 1.0


class GlobalMax(_GlobalReduction):
    """Maximum of each channel over all cells of the field, such as a peak stress: (samples, channels, *cells) ->
    scalars (samples, channels). On a mesh, the maximum is over all nodes.

    If several cells share the maximum, they split the gradient equally, as in `torch.amax`. Every rank gets the result.
    The forward pass all-reduces 16 bytes per sample and channel, and the backward pass 8 bytes. If any value is NaN,
    the result is NaN."""

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        x, xp = self._get_field(x), env.xp
        dims, shape = tuple(range(2, x.ndim)), (*x.shape[:2], *(1,) * (x.ndim - 2))
        unknown = xp.isnan(x)
        most = xp.full(x.shape[:2], -np.inf, dtype=np.float64)
        if math.prod(x.shape[2:]):
            most = xp.where(unknown, -np.inf, x).max(axis=dims).astype(np.float64)
        most = all_reduce_over_parts(env, most, env.random.path, "max")
        hits = (x == most.reshape(shape).astype(x.dtype)) | unknown
        counts = xp.stack([hits.sum(axis=dims, dtype=np.float64), unknown.sum(axis=dims, dtype=np.float64)])
        hit_count, unknown_count = all_reduce_over_parts(env, counts, env.random.path)
        if not getattr(xp, "holds_no_data", False) and not bool((hit_count > 0).all()):
            raise DataError(f"{self!r}: the field has no cells")
        return xp.where(unknown_count > 0, np.nan, most).astype(x.dtype), (hits, hit_count)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        hits, count = saved
        # each rank's dy comes only from that rank's own use of the result, so sum dy over ranks
        share = all_reduce_over_parts(env, dy.astype(np.float64), env.random.path) / count
        dx = (hits * share.reshape(*share.shape, *(1,) * (hits.ndim - 2))).astype(dy.dtype)
        return self._to_input_gradient(env, dx, hits.shape), ()
