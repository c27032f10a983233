"""The U-Net: a convolutional encoder and decoder with skip connections (Ronneberger et al. 2015)."""

from __future__ import annotations

from typing import Any

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields import conv, pool, resample
from fsdpx.ext.fields.global_attention import GlobalAttention
from fsdpx.ext.fields.group_norm import GroupNorm
from fsdpx.ext.fields.halo import PaddingMode
from fsdpx.ext.fields.scalars import FiLM, TimeEmbedding
from fsdpx.nn.activation import GELU, ReLU, SiLU, Tanh
from fsdpx.nn.container import Residual, Sequential
from fsdpx.nn.graph import Graph
from fsdpx.nn.layer import Array, Layer, format_constructor, require_positive
from fsdpx.nn.linear import Linear
from fsdpx.nn.norm import BatchNorm
from fsdpx.nn.shape import Concat
from fsdpx.nn.shard_specs import FieldPartition

__all__ = ["UNet"]

ACTIVATIONS: dict[str, Any] = {"relu": ReLU, "tanh": Tanh, "gelu": GELU, "silu": SiLU}
GROUP = 8
"""Number of channels in each group if `norm="group"`."""


class FirstPool(pool.MaxPool):
    """The pool of the first level of a U-Net. It checks that the field can be halved at every level."""

    def __init__(self, unet: UNet) -> None:
        super().__init__(2)
        self.unet, self.depth = repr(unet), unet.depth

    def __repr__(self) -> str:
        return f"MaxPool{self.dims}d(2)"

    def get_partition(self, x: Array) -> FieldPartition:
        return self._require_divisible(super().get_partition(x))

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        return super().partition_outputs(self._require_divisible(parts))

    def _require_divisible(self, parts: FieldPartition) -> FieldPartition:
        """Return `parts`. Raise ShapeError unless each size of the field is a multiple of 2^depth."""
        factor = 1 << self.depth
        d = next((d for d, n in enumerate(parts.shape) if n % factor), None)
        if d is not None:
            halvings = (parts.shape[d] & -parts.shape[d]).bit_length() - 1
            raise ShapeError(
                f"{self.unet}: the input has {' x '.join(map(str, parts.shape))} cells, and each size must be a "
                f"multiple of {factor} (2 to the power of depth={self.depth}): along {parts.get_dim_name(d)}, level "
                f"{halvings + 1} has {parts.shape[d] >> halvings} cells, which cannot be halved. Pad or crop the "
                "field, or choose a smaller depth"
            )
        return parts


class _FirstPool1d(FirstPool, dims=1):
    pass


class _FirstPool2d(FirstPool, dims=2):
    pass


class _FirstPool3d(FirstPool, dims=3):
    pass


_FIRST_POOLS = {1: _FirstPool1d, 2: _FirstPool2d, 3: _FirstPool3d}


class UNet(Graph):
    """U-Net for (samples, in_channels, *cells). It can load weights from the common PyTorch implementation.

    Each level has two convolutions with a kernel size of 3 and no bias, each followed by a norm and an activation. Max
    pooling of size 2 leads to the next lower level, and transposed convolutions of size 2 lead back up. The sizes of
    the field must be multiples of 2^depth. Parameters are named `encoder1.enc1conv1.weight`,
    `bottleneck.bottleneckconv1.weight`, `upconv1.weight`, `decoder1.dec1conv1.weight` and `conv.weight`.

    With `time_embedding`, the network has a second input, as in diffusion models (Ho et al. 2020): the time or
    diffusion step of each sample, (samples,) or (samples, 1). A `TimeEmbedding` and an MLP (`time.mlp1` and
    `time.mlp2`) turn the time into features, and a `FiLM` after the first norm of each block reads these features.
    `FiLM` parameters have names such as `encoder1.enc1film.linear.weight`. With `attention`, x + attention(norm(x))
    follows the lowest level, where `norm` is a `GroupNorm` and `attention` is a `GlobalAttention`.

    Parameters
    ----------
    in_channels, out_channels : number of channels of the input and of the output field
    dims : number of cell dims, 1 to 3; default 2
    width : number of channels in the first level; each further level has twice as many as the one above it. Default 32
    depth : number of levels above the lowest one; default 4
    padding : values beyond the ends of the field, as for `padding_mode` in `Conv`; default "zeros"
    norm : "batch" (default), "group" (max(channels // 8, 1) groups), or None
    activation : "relu" (default), "tanh", "gelu" or "silu"
    time_embedding : number of features of the embedded time, which must be even and at least 4; if None (default),
        there is no time input
    attention : number of attention heads, a divisor of width 2^depth; if None (default), there is no attention
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        dims: int = 2,
        width: int = 32,
        depth: int = 4,
        padding: PaddingMode = "zeros",
        norm: str | None = "batch",
        activation: str = "relu",
        time_embedding: int | None = None,
        attention: int | None = None,
    ) -> None:
        require_positive(self, in_channels=in_channels, out_channels=out_channels, width=width, depth=depth)
        if dims not in (1, 2, 3):
            raise ConfigError(f"UNet: dims={dims!r}: a field has 1 to 3 dims of cells")
        if activation not in ACTIVATIONS:
            raise ConfigError(f"UNet: activation={activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        if norm not in ("batch", "group", None):
            raise ConfigError(f"UNet: norm={norm!r}: choose 'batch', 'group' or None")
        self.in_channels, self.out_channels, self.dims, self.width = in_channels, out_channels, dims, width
        self.depth, self.padding, self.norm, self.activation = depth, padding, norm, activation
        self.time_embedding, self.attention = time_embedding, attention
        kind: Any = getattr(conv, f"Conv{dims}d")
        widest = getattr(pool, f"MaxPool{dims}d")
        rising = getattr(resample, f"ConvTranspose{dims}d")
        nodes: dict[str, tuple[Any, ...]] = {}
        times: tuple[str, ...] = ()
        if time_embedding is not None:
            nodes["time"], times = (_make_time_mlp(time_embedding), "t"), ("time",)
        last, channels = "x", in_channels
        for level in range(1, depth + 1):
            many = width << (level - 1)
            nodes[f"encoder{level}"] = self._make_block(kind, f"enc{level}", channels, many), last, *times
            nodes[f"pool{level}"] = widest(2) if level > 1 else _FIRST_POOLS[dims](self), f"encoder{level}"
            last, channels = f"pool{level}", many
        nodes["bottleneck"] = self._make_block(kind, "bottleneck", channels, 2 * channels), last, *times
        last = "bottleneck"
        if attention is not None:
            nodes["attention"], last = (_make_attention(2 * channels, attention), last), "attention"
        for level in range(depth, 0, -1):
            many = width << (level - 1)
            nodes[f"upconv{level}"] = rising(2 * many, many, 2, 2), last
            nodes[f"cat{level}"] = Concat(1), f"upconv{level}", f"encoder{level}"
            nodes[f"decoder{level}"] = self._make_block(kind, f"dec{level}", 2 * many, many), f"cat{level}", *times
            last = f"decoder{level}"
        nodes["conv"] = kind(width, out_channels, 1), last
        super().__init__(nodes, inputs=("x", "t") if times else ("x",), outputs=("conv",))

    def __repr__(self) -> str:
        return format_constructor(self)

    def _make_block(self, conv_class: Any, name: str, in_channels: int, out_channels: int) -> Layer:
        layers: dict[str, Layer] = {}
        for number, channels in ((1, in_channels), (2, out_channels)):
            layers[f"{name}conv{number}"] = conv_class(
                channels, out_channels, 3, padding=1, bias=False, padding_mode=self.padding
            )
            if self.norm == "batch":
                layers[f"{name}norm{number}"] = BatchNorm(out_channels)
            elif self.norm == "group":
                layers[f"{name}norm{number}"] = GroupNorm(max(out_channels // GROUP, 1), out_channels)
            if self.time_embedding is not None and number == 1:
                layers[f"{name}film"] = FiLM(4 * self.time_embedding, out_channels)
            layers[f"{name}{self.activation}{number}"] = ACTIVATIONS[self.activation]()
        if self.time_embedding is None:
            return Sequential(layers)
        nodes: dict[str, tuple[Any, ...]] = {}
        for before, (step, layer) in zip(["x", *layers], layers.items(), strict=False):
            nodes[step] = (layer, before, "time") if isinstance(layer, FiLM) else (layer, before)
        return Graph(nodes, inputs=("x", "time"), outputs=(step,))


def _make_attention(channels: int, n_heads: int) -> Layer:
    norm = GroupNorm(max(channels // GROUP, 1), channels)
    return Residual(Sequential({"norm": norm, "attention": GlobalAttention(channels, n_heads)}))


def _make_time_mlp(features: int) -> Layer:
    """Return the layers that embed times and pass them through an MLP: (samples,) -> (samples, 4 features)."""
    return Sequential(
        {
            "embedding": TimeEmbedding(features), "mlp1": Linear(features, 4 * features), "silu1": SiLU(),
            "mlp2": Linear(4 * features, 4 * features), "silu2": SiLU(),
        }
    )  # fmt: skip
