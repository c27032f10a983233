"""The ConvNeXt block: a residual block of a depthwise convolution and a pointwise MLP (Liu et al. 2022)."""

from __future__ import annotations

from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.ext.fields import conv
from fsdpx.ext.fields.channel_norm import ChannelLayerNorm
from fsdpx.ext.fields.halo import PaddingMode
from fsdpx.ext.fields.spectral import ChannelScale
from fsdpx.nn.activation import GELU
from fsdpx.nn.container import Composite
from fsdpx.nn.layer import format_constructor, require_finite_arguments, require_positive

__all__ = ["ConvNeXtBlock"]


class ConvNeXtBlock(Composite):
    """Residual block of ConvNeXt (Liu et al. 2022): x + scale * pwconv2(GELU(pwconv1(norm(dwconv(x))))).

    `dwconv` convolves each channel with its own kernel, and `norm` is a `ChannelLayerNorm`. `pwconv1` and `pwconv2` are
    convolutions with a window of one cell: the first multiplies the number of channels by `expansion`, and the second
    restores it. The learned scale per channel, `gamma.weight`, starts small so that a deep network begins close to the
    identity. Input and output are (samples, channels, *cells). Only `dwconv` exchanges halos.

    Parameters
    ----------
    channels : number of channels
    dims : number of cell dims, 1 to 3; default 2
    kernel_size : window size along each dim, an odd number of cells; default 7
    expansion : number of channels between `pwconv1` and `pwconv2`, as a multiple of `channels`; default 4
    layer_scale : initial value of `gamma.weight`; default 1e-6. If None, the block has no `gamma`
    padding : values beyond the ends of the field, as for `padding_mode` in `Conv2d`; default "zeros"
    """

    def __init__(
        self,
        channels: int,
        dims: int = 2,
        kernel_size: int = 7,
        expansion: int = 4,
        layer_scale: float | None = 1e-6,
        padding: PaddingMode = "zeros",
    ) -> None:
        require_positive(self, channels=channels, kernel_size=kernel_size, expansion=expansion)
        require_finite_arguments(self, layer_scale=layer_scale or 0.0)
        if dims not in (1, 2, 3):
            raise ConfigError(f"ConvNeXtBlock: dims={dims!r}: a field has 1 to 3 dims of cells")
        if kernel_size % 2 == 0:
            raise ConfigError(f"ConvNeXtBlock: kernel_size must be odd, got {kernel_size}")
        self.channels, self.dims, self.kernel_size, self.expansion = channels, dims, kernel_size, expansion
        self.layer_scale, self.padding = layer_scale, padding
        kind: Any = getattr(conv, f"Conv{dims}d")
        self.dwconv = kind(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, padding_mode=padding
        )
        self.norm = ChannelLayerNorm(channels)
        self.pwconv1 = kind(channels, expansion * channels, 1)
        self.pwconv2 = kind(expansion * channels, channels, 1)
        if layer_scale is not None:
            self.gamma = ChannelScale(channels, dims, layer_scale)

    def compose(self, x: Any) -> Any:
        y = self.pwconv2(GELU()(self.pwconv1(self.norm(self.dwconv(x)))))
        return x + (y if self.layer_scale is None else self.gamma(y))

    def __repr__(self) -> str:
        return format_constructor(self)
