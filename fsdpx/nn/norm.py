"""Norms within one sample: LayerNorm and RMSNorm."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.array import kernels
from fsdpx.errors import ShapeError
from fsdpx.nn.check import positive
from fsdpx.nn.init import ones, zeros
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec
from fsdpx.nn.numeric import wide

__all__ = ["LayerNorm", "RMSNorm"]


class _Norm(Layer):
    """What LayerNorm and RMSNorm share: rows of the last dims, and a result that is recomputed."""

    cheap = True

    def __init__(self, normalized_shape: int | Sequence[int], elementwise_affine: bool) -> None:
        self.normalized_shape = normalized_shape
        self.elementwise_affine = bool(elementwise_affine)
        self._shape = _dims(self, normalized_shape)
        self.acts_on = "position" if len(self._shape) == 1 else "sample"

    def recompute(self, env: Env, p: Params, saved: Any) -> Array:
        return self.forward(env, p, saved[0])[0]


class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dims (Ba et al. 2016).

    Parameters
    ----------
    normalized_shape : the size of the last dim, or those of several
    eps : added to the variance
    elementwise_affine : whether there is a `weight`, ones at first, of normalized_shape
    bias : whether there is, beside `weight`, a `bias`, zeros at first
    """

    runs = ("layer_norm", "layer_norm_backward_input", "layer_norm_backward_params")

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

    def specs(self) -> dict[str, Spec]:
        if not self.elementwise_affine:
            return {}
        return {
            name: Spec(self._shape, init, norm=True)
            for name, init in (("weight", ones), ("bias", zeros))
            if name == "weight" or self.bias
        }

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        rows = _rows(self, x, self._shape)
        y, mean, rstd = kernels.layer_norm(env.xp, rows, _flat(p, "weight"), _flat(p, "bias"), self.eps)
        return y.reshape(x.shape), (x, mean, rstd)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, mean, rstd = saved
        rows, drows = _rows(self, x, self._shape), _rows(self, dy, self._shape)
        dx = kernels.layer_norm_backward_input(env.xp, rows, _flat(p, "weight"), mean, rstd, drows)
        return dx.reshape(x.shape), (rows, mean, rstd, drows)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        if g:
            kernels.layer_norm_backward_params(env.xp, *kept, _flat(g, "weight"), _flat(g, "bias"))


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dims (Zhang and Sennrich 2019).

    Parameters
    ----------
    normalized_shape : the size of the last dim, or those of several
    eps : added to the mean square; None: the machine epsilon of the dtype that is computed in, as in PyTorch
    elementwise_affine : whether there is a `weight`, ones at first, of normalized_shape
    unit_offset : the factor is 1 + weight, which begins at zeros (Gemma)
    """

    runs = ("rms_norm", "rms_norm_backward_input", "rms_norm_backward_params")

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

    def specs(self) -> dict[str, Spec]:
        begin = zeros if self.unit_offset else ones
        return {"weight": Spec(self._shape, begin, norm=True)} if self.elementwise_affine else {}

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        eps = float(np.finfo(wide(x.dtype)).eps) if self.eps is None else self.eps
        y, rstd = kernels.rms_norm(env.xp, _rows(self, x, self._shape), self._factor(p), eps)
        return y.reshape(x.shape), (x, rstd)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, rstd = saved
        rows, drows = _rows(self, x, self._shape), _rows(self, dy, self._shape)
        dx = kernels.rms_norm_backward_input(env.xp, rows, self._factor(p), rstd, drows)
        return dx.reshape(x.shape), (rows, rstd, drows)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        if "weight" in g:
            kernels.rms_norm_backward_params(env.xp, *kept, _flat(g, "weight"))

    def _factor(self, p: Params) -> Array | None:
        weight = _flat(p, "weight")
        if weight is None or not self.unit_offset:
            return weight
        return weight.astype(wide(weight.dtype), copy=False) + 1.0  # in 16 bits 1 + weight would lose most of weight


def _dims(layer: Layer, shape: int | Sequence[int]) -> tuple[int, ...]:
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    positive(layer, normalized_shape=len(dims))
    for size in dims:
        positive(layer, normalized_shape=size)
    return dims


def _rows(layer: Layer, x: Array, dims: tuple[int, ...]) -> Array:
    if x.ndim <= len(dims) or tuple(x.shape[-len(dims) :]) != dims:
        wanted = ", ".join(map(str, dims))
        raise ShapeError(f"{layer!r} wants an input of shape (samples, ..., {wanted}), got {tuple(x.shape)}")
    return x.reshape(-1, math.prod(dims))


def _flat(arrays: Params, name: str) -> Array | None:
    return arrays[name].reshape(-1) if name in arrays else None
