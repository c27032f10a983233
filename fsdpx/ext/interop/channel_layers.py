"""Layers over the channels of a field. Their parameters have the same shapes as in PyTorch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdpx.core.array.kernels.memory_order import put_channels_last
from fsdpx.ext.fields.over_channels import OverChannels
from fsdpx.nn.gradient_accumulation import add_sum_over_dims_into
from fsdpx.nn.init import ones
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import BatchNorm

__all__ = ["ChannelLinear", "ChannelParameter", "ChannelRange", "FixedBatchNorm"]


class ChannelLinear(OverChannels):
    """Applies a `Linear` to the channels of each cell of (samples, in_features, *cells), ghost cells included. A
    PyTorch module computes the same values if it moves the channels to the last dim before its `Linear`.

    The parameters are the same as in `Linear`: `weight (out_features, in_features)` and `bias (out_features,)`.

    Parameters
    ----------
    in_features, out_features : size of dim 1 of the input and of the output
    bias : whether there is a bias
    """

    takes_ghosts = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(Linear(in_features, out_features, bias), in_features)
        self.in_features, self.out_features, self.bias = in_features, out_features, bias

    def get_inner_saved_and_gradient(self, env: LayerContext, saved: Any, dy: Array) -> tuple[Any, Array]:
        return super().get_inner_saved_and_gradient(env, saved, put_channels_last(env.xp, dy))


class ChannelParameter(Layer):
    """Combines each channel of (samples, channels, *cells) with an element of a parameter: adds or subtracts the
    element, or multiplies or divides by it.

    The parameter's name is the name of the layer.

    Parameters
    ----------
    shape : shape of the parameter in PyTorch; it has one element per channel, or a single element
    operation : "add", "sub", "mul" or "div"
    """

    fields = takes_ghosts = True

    def __init__(self, shape: tuple[int, ...], operation: str) -> None:
        self.shape, self.operation = tuple(shape), operation

    def specs(self) -> dict[str, ParameterSpec]:
        return {"": ParameterSpec(self.shape, ones)}

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return _OPERATIONS[self.operation](x, self._reshape_to_broadcast(p, x)), (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,), w = saved, self._reshape_to_broadcast(p, dy)
        if self.operation in ("add", "sub"):
            return dy, (dy if self.operation == "add" else -dy,)
        dx = _OPERATIONS[self.operation](dy, w)
        return dx, (dy * x if self.operation == "mul" else -dx * x / w,)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        if "" in g:
            (d,), one = kept, math.prod(self.shape) == 1
            dims = tuple(range(d.ndim)) if one else (0, *range(2, d.ndim))
            add_sum_over_dims_into(env.xp, g[""].reshape(() if one else -1), d, dims)

    def _reshape_to_broadcast(self, p: Params, x: Array) -> Array:
        return p[""].reshape(1, -1, *(1,) * (x.ndim - 2))


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "div": operator.truediv, "mul": operator.mul, "sub": operator.sub,
}  # fmt: skip


class ChannelRange(Layer):
    """Selects consecutive channels of (samples, channels, *cells), or consecutive scalars of (samples, n).

    Parameters
    ----------
    start, stop : range in dim 1
    """

    fields = takes_ghosts = True

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return x[:, self.start : self.stop], (tuple(x.shape),)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dx = env.xp.zeros(saved[0], dtype=dy.dtype)
        dx[:, self.start : self.stop] = dy
        return dx, ()


class FixedBatchNorm(BatchNorm):
    """Batch norm that always uses its running statistics, like a PyTorch module in eval mode."""

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return super().forward(replace(env, training=False), p, x)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return super().backward_input(replace(env, training=False), p, saved, dy)
