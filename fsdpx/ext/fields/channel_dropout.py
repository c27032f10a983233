"""Dropout of whole channels of a field."""

from __future__ import annotations

from typing import Any, ClassVar

from fsdpx.ext.fields.halo import require_field_shape
from fsdpx.nn.activation import make_keep_mask
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, require_fraction

__all__ = ["Dropout1d", "Dropout2d", "Dropout3d"]


class ChannelDropout(Layer):
    """Sets each channel of each sample to 0 with probability p, and divides the other channels by 1 - p (Tompson et al.
    2015). Base class of `Dropout1d`, `Dropout2d` and `Dropout3d`.

    The mask depends on the seed, the layer's path, the step, the channel and the index of the sample in the global
    batch. It does not depend on how the batch or the field is split over ranks.

    Parameters
    ----------
    p : probability that a channel is set to 0; default 0.5
    """

    fields = takes_ghosts = True
    dims: ClassVar[int]

    def __init_subclass__(cls, dims: int) -> None:
        super().__init_subclass__()
        cls.dims = dims

    def __init__(self, p: float = 0.5) -> None:
        require_fraction(self, p=p)
        self.p = float(p)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_field_shape(self, x, self.dims)
        if not env.training or self.p == 0.0:
            return x, ()
        keep = make_keep_mask(env, x.shape[:2], self.p)
        scale = env.xp.where(keep, 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0, 0.0).astype(x.dtype)
        scale = scale.reshape(*scale.shape, *(1,) * self.dims)
        return x * scale, (scale,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return (dy * saved[0] if saved else dy), ()


class Dropout1d(ChannelDropout, dims=1):
    """Dropout of whole channels of (samples, channels, length), with the parameters of `Dropout2d`."""


class Dropout2d(ChannelDropout, dims=2):
    """Sets each channel of each sample of (samples, channels, height, width) to 0 with probability p, and divides the
    other channels by 1 - p (Tompson et al. 2015).

    The mask depends on the seed, the layer's path, the step, the channel and the index of the sample in the global
    batch. It does not depend on how the batch or the field is split over ranks.

    Parameters
    ----------
    p : probability that a channel is set to 0; default 0.5
    """


class Dropout3d(ChannelDropout, dims=3):
    """Dropout of whole channels of (samples, channels, depth, height, width), with the parameters of `Dropout2d`."""
