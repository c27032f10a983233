"""The vision transformer for fields: patch embedding, attention among patches, and projection back to cells
(Dosovitskiy et al. 2021)."""

from __future__ import annotations

from typing import Any

from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields import resample
from fsdpx.ext.fields.channel_norm import ChannelLayerNorm
from fsdpx.ext.fields.conv import Conv, Sizes
from fsdpx.ext.fields.global_attention import GlobalAttention
from fsdpx.ext.fields.halo import HaloSpec
from fsdpx.ext.fields.neighborhood_attention import NeighborhoodAttention, list_to_tuple
from fsdpx.ext.fields.over_channels import OverChannels
from fsdpx.ext.fields.slice_attention import PhysicsAttention
from fsdpx.ext.fields.spectral import GridEmbedding
from fsdpx.nn.container import Composite
from fsdpx.nn.graph import Graph
from fsdpx.nn.layer import Layer, format_constructor, require_positive
from fsdpx.nn.shard_specs import FieldPartition
from fsdpx.nn.transformer import MLP

__all__ = ["FieldTransformerBlock", "PatchConv1d", "PatchConv2d", "PatchConv3d", "VisionTransformer"]


class PatchConv(Conv):
    """Patch embedding: a convolution whose windows are the patches of a field. Raises ShapeError unless the field
    consists of whole patches."""

    def __init__(self, in_channels: int, out_channels: int, patch_size: int) -> None:
        super().__init__(in_channels, out_channels, patch_size, patch_size)
        self.patch_size = patch_size

    def plan_outputs_halo_and_padding(
        self, parts: FieldPartition
    ) -> tuple[FieldPartition, tuple[HaloSpec, ...], tuple[int, ...]]:
        for d, n in enumerate(parts.shape):
            if n % self.patch_size:
                raise ShapeError(
                    f"{self!r}: the field has {n} cells along {parts.get_dim_name(d)}, which is not a multiple of the "
                    f"patch size {self.patch_size}"
                )
        return super().plan_outputs_halo_and_padding(parts)


class PatchConv1d(PatchConv, dims=1):
    """Patch embedding of a one-dimensional field."""


class PatchConv2d(PatchConv, dims=2):
    """Patch embedding of a field of two dims."""


class PatchConv3d(PatchConv, dims=3):
    """Patch embedding of a field of three dims."""


class FieldTransformerBlock(Composite):
    """Pre-norm transformer block on the cells of a field: x + attn(norm1(x)), then x + mlp(norm2(x)). The block is one
    FSDP unit.

    Parameters
    ----------
    channels, hidden : number of channels, and number of hidden features of the MLP
    attention : the attention layer
    """

    unit = True

    def __init__(self, channels: int, hidden: int, attention: Layer) -> None:
        self.channels, self.hidden = channels, hidden
        self.norm1, self.norm2 = ChannelLayerNorm(channels), ChannelLayerNorm(channels)
        self.attn, self.mlp = attention, OverChannels(MLP(channels, hidden), channels)

    def compose(self, x: Any) -> Any:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(Graph):
    """Vision transformer (Dosovitskiy et al. 2021) from a field (samples, in_channels, *cells) to a field (samples,
    out_channels, *cells).

    A convolution turns each patch, which has patch_size cells along each dim, into one cell of `width` channels. Next
    come pre-norm transformer blocks, a norm, and a transposed convolution back to the cells. The sizes of the field
    must be multiples of the patch size. Parameters are named `patches.weight`, `block0.norm1.weight`,
    `block0.attn.qkv.weight`, `block0.mlp.up.weight`, `norm.weight` and `output.weight`.

    With `attention="physics"` and `patch_size=1`, this is Transolver (Wu et al. 2024).

    Parameters
    ----------
    in_channels, out_channels : number of channels of the input and of the output field
    dims : number of cell dims, 1 to 3; default 2
    patch_size : number of cells of a patch along each dim; default 4
    width : number of channels of the blocks; default 64
    depth : number of blocks; default 4
    n_heads : number of attention heads, a divisor of width; default 4
    attention : "global" (default), `GlobalAttention` among all patches; "neighborhood", `NeighborhoodAttention` to a
        window of patches; or "physics", `PhysicsAttention` among slices
    kernel_size : window size in patches for attention="neighborhood": one number for all dims, or one per dim; default
        7
    n_slices : number of slices for attention="physics"; default 64
    hidden : number of hidden features in the MLP of each block; if None (default), 4 width
    periodic : whether windows of "neighborhood" wrap around at the ends of the field, as in `NeighborhoodAttention`
    positions : whether to append the positions of cells to the input channels, as in `GridEmbedding`; default True
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        dims: int = 2,
        patch_size: int = 4,
        width: int = 64,
        depth: int = 4,
        n_heads: int = 4,
        attention: str = "global",
        kernel_size: Sizes | list[int] = 7,
        n_slices: int = 64,
        hidden: int | None = None,
        periodic: bool | tuple[bool, ...] | list[bool] = False,
        positions: bool = True,
    ) -> None:
        require_positive(self, in_channels=in_channels, out_channels=out_channels, patch_size=patch_size)
        mlp_hidden = 4 * width if hidden is None else hidden
        require_positive(self, width=width, depth=depth, hidden=mlp_hidden)
        if dims not in (1, 2, 3):
            raise ConfigError(f"VisionTransformer: dims={dims!r}: a field has 1 to 3 dims of cells")
        makers: dict[str, Any] = {
            "global": lambda: GlobalAttention(width, n_heads),
            "neighborhood": lambda: NeighborhoodAttention(width, n_heads, kernel_size, periodic),
            "physics": lambda: PhysicsAttention(width, n_heads, n_slices),
        }
        if attention not in makers:
            raise ConfigError(f"VisionTransformer: attention={attention!r}: choose one of {', '.join(makers)}")
        kernel_size, periodic = list_to_tuple(kernel_size), list_to_tuple(periodic)
        _refuse_options_of_other_attention(attention, kernel_size=kernel_size, periodic=periodic, n_slices=n_slices)
        self.in_channels, self.out_channels, self.dims, self.patch_size = in_channels, out_channels, dims, patch_size
        self.width, self.depth, self.n_heads, self.attention = width, depth, n_heads, attention
        self.kernel_size, self.n_slices, self.hidden = kernel_size, n_slices, hidden
        self.periodic, self.positions = periodic, bool(positions)
        nodes: dict[str, tuple[Any, ...]] = {"embedding": (GridEmbedding(), "x")} if positions else {}
        embed = (PatchConv1d, PatchConv2d, PatchConv3d)[dims - 1]
        last = "embedding" if positions else "x"
        nodes["patches"] = embed(in_channels + dims * self.positions, width, patch_size), last
        last = "patches"
        for i in range(depth):
            nodes[f"block{i}"] = FieldTransformerBlock(width, mlp_hidden, makers[attention]()), last
            last = f"block{i}"
        nodes["norm"] = ChannelLayerNorm(width), last
        rising = getattr(resample, f"ConvTranspose{dims}d")
        nodes["output"] = rising(width, out_channels, patch_size, patch_size), "norm"
        super().__init__(nodes, outputs=("output",))

    def __repr__(self) -> str:
        return format_constructor(self)


_OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "neighborhood": {"kernel_size": 7, "periodic": False}, "physics": {"n_slices": 64},
}  # fmt: skip
"""Options that only one kind of attention takes, and their defaults, keyed by the kind of attention."""


def _refuse_options_of_other_attention(attention: str, **values: Any) -> None:
    """Raise ConfigError if an option for another kind of attention differs from its default."""
    for kind, options in _OWN_OPTIONS.items():
        for name, default in options.items():
            if kind != attention and values[name] != default:
                raise ConfigError(
                    f"VisionTransformer: {name}={values[name]!r} is an option of attention={kind!r}, got "
                    f"attention={attention!r}"
                )
