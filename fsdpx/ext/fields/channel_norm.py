"""Layer normalization over the channels of each cell of a field."""

from __future__ import annotations

from typing import Any

from fsdpx.core.array.kernels.memory_order import put_channels_last
from fsdpx.errors import ShapeError
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, require_positive
from fsdpx.nn.norm import LayerNorm

__all__ = ["ChannelLayerNorm"]


class ChannelLayerNorm(Layer):
    """Layer normalization over the channels of each cell of (samples, num_channels, *cells): (x - mean) / sqrt(var +
    eps) * weight + bias.

    This is ConvNeXt's LayerNorm with data_format="channels_first" (Liu et al. 2022), which torchvision and timm call
    LayerNorm2d. In contrast to `GroupNorm(1, num_channels)`, each cell is normalized independently, so ranks that hold
    parts of a field do not communicate.

    Parameters
    ----------
    num_channels : size of dim 1, and size of `weight` (initially ones) and of `bias` (initially zeros)
    eps : number added to the variance; default 1e-6, as in ConvNeXt
    """

    fields = takes_ghosts = cheap = True

    def __init__(self, num_channels: int, eps: float = 1e-6) -> None:
        require_positive(self, num_channels=num_channels)
        self.num_channels, self.eps = num_channels, float(eps)
        self._norm = LayerNorm(num_channels, eps)
        self.kernel_names = ("channels_last", *self._norm.kernel_names)

    def specs(self) -> dict[str, ParameterSpec]:
        return self._norm.specs()

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            raise ShapeError(f"{self!r} wants (samples, {self.num_channels}, *cells), got {tuple(x.shape)}")
        x = put_channels_last(env.xp, x)
        y, (_, mean, rstd) = self._norm.forward(env, p, env.xp.moveaxis(x, 1, -1))
        return env.xp.moveaxis(y, -1, 1), (x, mean, rstd)

    def recompute(self, env: LayerContext, p: Params, saved: Any) -> Array:
        return self.forward(env, p, saved[0])[0]

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, mean, rstd = saved
        rows, drows = (env.xp.moveaxis(a, 1, -1) for a in (x, dy))
        dx, kept = self._norm.backward_input(env, p, (rows, mean, rstd), drows)
        return env.xp.moveaxis(dx, -1, 1), kept

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        self._norm.backward_params(env, g, kept)
