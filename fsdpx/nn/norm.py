"""Normalization layers: LayerNorm, RMSNorm and BatchNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.core.array.devices import get_device_of_array
from fsdpx.core.array.kernels.memory_order import put_channels_last
from fsdpx.errors import DataError, ShapeError
from fsdpx.nn.gradient_accumulation import accumulation_dtype
from fsdpx.nn.init import ones, zeros
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, require_fraction, require_positive

__all__ = ["BatchNorm", "LayerNorm", "RMSNorm", "cast_channel_arrays", "make_affine_specs"]


class _RowNorm(Layer):
    """Base class for LayerNorm and RMSNorm, which normalize over the last dims. Their results are not saved, but
    recomputed in the backward pass."""

    cheap = True

    def __init__(self, normalized_shape: int | Sequence[int], elementwise_affine: bool) -> None:
        self.normalized_shape = normalized_shape
        self.elementwise_affine = bool(elementwise_affine)
        self._shape = _as_shape_tuple(self, normalized_shape)
        self.acts_on = "position" if len(self._shape) == 1 else "sample"

    def recompute(self, env: LayerContext, p: Params, saved: Any) -> Array:
        return self.forward(env, p, saved[0])[0]


class LayerNorm(_RowNorm):
    """Layer normalization over the last dims (Ba et al. 2016): `(x - mean) / sqrt(var + eps) * weight + bias`.

    Parameters
    ----------
    normalized_shape : the size of the last dim, or the sizes of several last dims
    eps : number that is added to the variance
    elementwise_affine : whether there is a `weight` of shape normalized_shape, initialized with ones
    bias : whether there is a `bias` in addition to `weight`, initialized with zeros
    """

    kernel_names = ("layer_norm", "layer_norm_backward_input", "layer_norm_backward_params")

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine)
        self.eps = float(eps)
        self.bias = bool(bias)

    def specs(self) -> dict[str, ParameterSpec]:
        return make_affine_specs(self._shape, self.bias) if self.elementwise_affine else {}

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        rows = _as_norm_rows(self, x, self._shape)
        y, mean, rstd = kernels.layer_norm(
            env.xp, rows, _flatten_parameter(p, "weight"), _flatten_parameter(p, "bias"), self.eps
        )
        return y.reshape(x.shape), (x, mean, rstd)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, mean, rstd = saved
        rows, drows = _as_norm_rows(self, x, self._shape), _as_norm_rows(self, dy, self._shape)
        dx = kernels.layer_norm_backward_input(env.xp, rows, _flatten_parameter(p, "weight"), mean, rstd, drows)
        return dx.reshape(x.shape), (rows, mean, rstd, drows)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        if g:
            kernels.layer_norm_backward_params(
                env.xp, *kept, _flatten_parameter(g, "weight"), _flatten_parameter(g, "bias")
            )


class RMSNorm(_RowNorm):
    """Root-mean-square normalization over the last dims (Zhang and Sennrich 2019):
    `x / sqrt(mean(x^2) + eps) * weight`.

    Parameters
    ----------
    normalized_shape : the size of the last dim, or the sizes of several last dims
    eps : number that is added to the mean square; if None, the machine epsilon of the compute dtype, as in PyTorch
    elementwise_affine : whether there is a `weight` of shape normalized_shape, initialized with ones
    unit_offset : whether to multiply by 1 + weight instead of weight, with `weight` initialized with zeros (Gemma)
    """

    kernel_names = ("rms_norm", "rms_norm_backward_input", "rms_norm_backward_params")

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        unit_offset: bool = False,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine)
        self.eps = None if eps is None else float(eps)
        self.unit_offset = bool(unit_offset)

    def specs(self) -> dict[str, ParameterSpec]:
        begin = zeros if self.unit_offset else ones
        return {"weight": ParameterSpec(self._shape, begin, norm=True)} if self.elementwise_affine else {}

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        eps = float(np.finfo(accumulation_dtype(x.dtype)).eps) if self.eps is None else self.eps
        y, rstd = kernels.rms_norm(env.xp, _as_norm_rows(self, x, self._shape), self._get_weight_factor(p), eps)
        return y.reshape(x.shape), (x, rstd)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, rstd = saved
        rows, drows = _as_norm_rows(self, x, self._shape), _as_norm_rows(self, dy, self._shape)
        dx = kernels.rms_norm_backward_input(env.xp, rows, self._get_weight_factor(p), rstd, drows)
        return dx.reshape(x.shape), (rows, rstd, drows)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        if "weight" in g:
            kernels.rms_norm_backward_params(env.xp, *kept, _flatten_parameter(g, "weight"))

    def _get_weight_factor(self, p: Params) -> Array | None:
        weight = _flatten_parameter(p, "weight")
        if weight is None or not self.unit_offset:
            return weight
        return (
            weight.astype(accumulation_dtype(weight.dtype), copy=False) + 1.0
        )  # computed in float32, because a 16-bit sum 1 + weight would lose most bits of weight


def _as_shape_tuple(layer: Layer, shape: int | Sequence[int]) -> tuple[int, ...]:
    dims = (int(shape),) if isinstance(shape, int | np.integer) else tuple(shape)
    require_positive(layer, normalized_shape=len(dims))
    for size in dims:
        require_positive(layer, normalized_shape=size)
    return dims


def make_affine_specs(shape: tuple[int, ...], bias: bool = True) -> dict[str, ParameterSpec]:
    """Return the parameter specs of a norm's weight (ones) and, if `bias` is true, of its bias (zeros)."""
    return {"weight": ParameterSpec(shape, ones, norm=True)} | (
        {"bias": ParameterSpec(shape, zeros, norm=True)} if bias else {}
    )


def _as_norm_rows(layer: Layer, x: Array, dims: tuple[int, ...]) -> Array:
    if x.ndim <= len(dims) or tuple(x.shape[-len(dims) :]) != dims:
        wanted = ", ".join(map(str, dims))
        raise ShapeError(f"{layer!r} wants an input of shape (samples, ..., {wanted}), got {tuple(x.shape)}")
    return x.reshape(-1, math.prod(dims))


def _flatten_parameter(arrays: Params, name: str) -> Array | None:
    return arrays[name].reshape(-1) if name in arrays else None


class BatchNorm(Layer):
    """Batch normalization of each channel (dim 1): `(x - mean) / sqrt(var + eps) * weight + bias` (Ioffe and Szegedy
    2015).

    The input is `(samples, num_features, ...)` with any number of dims. In training, the mean and variance are computed
    over the global batch. The forward pass performs two all-reduces over the data axis: one for the sums that give the
    mean (`8 * (num_features + 1)` bytes), and one for the squared deviations from the mean (`8 * num_features` bytes).
    Subtracting the mean first avoids cancellation. The backward pass performs one all-reduce of `16 * num_features`
    bytes. Ranks may hold different numbers of samples, or none. Evaluation uses the running statistics `running_mean`
    and `running_var` (unbiased). Each forward pass in training updates them, unless it is a recomputation. As in
    PyTorch, DataError is raised in training if the global batch has only one value per channel.

    Parameters
    ----------
    num_features : size of dim 1
    eps : number that is added to the variance
    momentum : weight of the current batch in the update of the running statistics
    affine : whether there are a `weight`, initialized with ones, and a `bias`, initialized with zeros, both
        `(num_features,)`
    """

    collective = True
    fields = True
    aliases: ClassVar = {"num_batches_tracked": None}
    kernel_names = (
        "batch_norm_backward_factors", "batch_norm_scales_and_running_stats", "channel_affine",
        "channel_norm_backward_input", "channel_squares", "channel_sums", "channel_gradient_sums", "channels_last",
    )  # fmt: skip

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        require_positive(self, num_features=num_features)
        require_fraction(self, momentum=momentum)
        self.num_features = num_features
        self.eps = float(eps)
        self.momentum = float(momentum)
        self.affine = bool(affine)

    def specs(self) -> dict[str, ParameterSpec]:
        shape = (self.num_features,)
        affine = make_affine_specs(shape) if self.affine else {}
        state = {
            "running_mean": ParameterSpec(shape, zeros, state=True),
            "running_var": ParameterSpec(shape, ones, state=True),
        }
        return affine | state

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim < 2 or x.shape[1] != self.num_features:
            wanted = f"(samples, {self.num_features}, ...)"
            raise ShapeError(f"{self!r} wants an input of shape {wanted}, got {tuple(x.shape)}")
        weight, x = p.get("weight"), put_channels_last(env.xp, x)
        if env.training:
            mean, squares, count = self._all_reduce_statistics(env, x)
            if count == 1 and not getattr(env.xp, "holds_no_data", False):
                raise DataError(
                    f"{self!r}: more than 1 value per channel is needed in training, and all ranks together have 1 "
                    f"(input {tuple(x.shape)}): its variance is 0, and the result does not depend on it. Give more "
                    "samples, drop_last=True of a loader, or fewer microbatches"
                )
            running = (None, None) if env.recomputing else (p["running_mean"], p["running_var"])
            numbers = count, self.eps, self.momentum
            rstd, scale = kernels.batch_norm_scales_and_running_stats(env.xp, squares, mean, weight, *running, *numbers)
        else:
            mean, var, count = p["running_mean"], p["running_var"].astype(np.float64), 0.0
            rstd, scale = kernels.batch_norm_scales_and_running_stats(
                env.xp, var, None, weight, None, None, 1.0, self.eps, 0.0
            )
        shift = p["bias"] if self.affine else env.xp.zeros_like(rstd)
        return kernels.channel_affine(env.xp, x, *cast_channel_arrays(x, mean, scale, shift)), (x, mean, rstd, count)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, mean, rstd, count = saved
        sums = kernels.channel_gradient_sums(env.xp, dy, x, *cast_channel_arrays(x, mean, rstd))
        whole, ranks = sums if env.training else env.xp.zeros_like(sums), env.mesh.data
        if env.training and ranks.size > 1:
            whole = sums.copy()
            ranks.all_reduce(whole, what="BatchNorm backward").wait()
        slopes = kernels.batch_norm_backward_factors(env.xp, whole, rstd, p.get("weight"), count)
        channels = cast_channel_arrays(x, mean, *slopes)
        return kernels.channel_norm_backward_input(env.xp, dy, x, *channels), (sums,)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        (sums,) = kept
        if "bias" in g:
            g["bias"][...] += sums[: self.num_features].astype(g["bias"].dtype)
        if "weight" in g:
            g["weight"][...] += sums[self.num_features :].astype(g["weight"].dtype)

    def _all_reduce_statistics(self, env: LayerContext, x: Array) -> tuple[Array, Array, float]:
        """Return (mean, squares, count) of the global batch. `mean` contains the mean of each channel, and `squares`
        the sum of squared deviations from this mean, both in float64. `count` is the number of elements per channel.
        Collective."""
        ranks, count = env.mesh.data, float(x.shape[0] * math.prod(x.shape[2:]))
        sums = kernels.channel_sums(env.xp, x)
        if ranks.size > 1:
            sums = env.xp.concatenate([sums, env.xp.full((1,), count, dtype=np.float64)])
            ranks.all_reduce(sums, what="BatchNorm mean").wait()
            sums, count = sums[:-1], float(sums[-1])
        mean = sums / max(count, 1.0)
        squares = kernels.channel_squares(env.xp, x, *cast_channel_arrays(x, mean))
        if ranks.size > 1:
            ranks.all_reduce(squares, what="BatchNorm variance").wait()
        return mean, squares, count


def cast_channel_arrays(x: Array, *channels: Array) -> tuple[Array, ...]:
    """Cast arrays with one value per channel to the dtype that kernels use to combine them with x: float64 on devices
    that have their own kernels for sums, else the accumulation dtype of x."""
    dtype = np.dtype(np.float64) if get_device_of_array(x).has_sum_kernels else accumulation_dtype(x.dtype)
    return tuple(a if a.dtype == dtype else a.astype(dtype) for a in channels)
