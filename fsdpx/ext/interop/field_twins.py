"""fsdpx layers that are equivalent to `torch.nn` layers with parameters, for fields that may be split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdpx import nn
from fsdpx.errors import page_hint
from fsdpx.ext.interop.channel_layers import ChannelLinear, FixedBatchNorm
from fsdpx.nn.layer import Layer

__all__ = ["LISTED", "NoTwinError", "convert_torch_module_to_layer", "find_remedy", "has_twin", "make_dim_layer"]


class NoTwinError(Exception):
    """Raised if a PyTorch layer or function has no equivalent fsdpx layer that runs on a part of a field. The message
    explains why, or states what to use instead."""


LISTED = f"use a layer that {page_hint('fields')} lists"
INSTEAD = {
    "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d": "use AdaptiveAvgPool or MaxPool",
    "Embedding EmbeddingBag": "pass scalars as an input of shape (samples, n)",
    "FractionalMaxPool2d FractionalMaxPool3d LPPool1d LPPool2d LPPool3d": "use AvgPool or MaxPool",
    "GRU LSTM RNN GRUCell LSTMCell RNNCell": "train a convolutional network over several steps with fsdpx.nn.Rollout",
    "PReLU RReLU CELU SELU GLU": "use SiLU, GELU, ELU or LeakyReLU",
    "MaxUnpool1d MaxUnpool2d MaxUnpool3d": "use ConvTranspose or Upsample",
    "MultiheadAttention Transformer TransformerEncoder TransformerEncoderLayer TransformerDecoderLayer": (
        "its result for a cell depends on all cells; use convolutions or fsdpx.nn.FNO"
    ),
    "Softmax Softmax2d LogSoftmax Softmin": "use Sigmoid",
}
_INSTEAD = {name: remedy for names, remedy in INSTEAD.items() for name in names.split()}


def find_remedy(module: torch.nn.Module) -> str:
    """Return advice on what to use instead of a module that has no twin (equivalent fsdpx layer)."""
    return _INSTEAD.get(type(module).__name__, LISTED)


def has_twin(module: torch.nn.Module) -> bool:
    """Return whether a module runs the `forward` of a `torch.nn` layer that has a twin (equivalent fsdpx layer)."""
    kind: Any = next(one for one in type(module).__mro__ if one.__module__.startswith("torch.nn.modules."))
    return _get_base_name(kind) in _TWINS and type(module).forward is kind.forward


def convert_torch_module_to_layer(module: Any, x: torch.Tensor, y: torch.Tensor, channels_last: bool) -> Layer:
    """Return the fsdpx layer that is equivalent to `module`.

    Parameters
    ----------
    module : a layer for which `has_twin` is true
    x, y : input and output, without data
    channels_last : whether the channels of x are in its last dim

    Raises
    ------
    NoTwinError : if no fsdpx layer is equivalent to `module` with these arguments, or for this input
    """
    if hasattr(module, "parametrizations"):
        raise NoTwinError("it has a parametrization; call torch.nn.utils.parametrize.remove_parametrizations first")
    kind = next(one for one in type(module).__mro__ if one.__module__.startswith("torch.nn.modules."))
    if (name := _get_base_name(kind)) in ("Linear", "LayerNorm"):
        if x.ndim > 2 and not channels_last:
            other = "Conv with kernel_size=1" if name == "Linear" else "GroupNorm(1, channels)"
            raise NoTwinError(f"it acts on the last dim; move the channels there with x.movedim(1, -1), or use {other}")
    elif x.ndim < 3 or channels_last:
        raise NoTwinError("its input must be a field with channels in dim 1")
    return _TWINS[name](module, x, y)


def make_dim_layer(base: str, dims: int, *arguments: Any, **options: Any) -> Layer:
    """Return the layer `base` for fields of `dims` cell dims (1 to 3), such as `Conv2d` for "Conv" and 2."""
    layer: Layer = getattr(nn, f"{base}{dims}d")(*arguments, **options)
    return layer


def _get_base_name(kind: type) -> str:
    """Return the name of a class without its number of dims, such as "Conv" for Conv2d."""
    name = kind.__name__
    return name[:-2] if name[-2:] in ("1d", "2d", "3d") else name


def _make_conv(m: Any, x: torch.Tensor, y: torch.Tensor) -> Layer:
    arguments = (m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding, m.dilation, m.groups)
    return make_dim_layer("Conv", x.ndim - 2, *arguments, m.bias is not None, m.padding_mode)


def _make_conv_transpose(m: Any, x: torch.Tensor, y: torch.Tensor) -> Layer:
    rows = zip(x.shape[2:], y.shape[2:], m.stride, m.padding, m.dilation, m.kernel_size, strict=True)
    more = tuple(out - ((n - 1) * s - 2 * p + d * (k - 1) + 1) for n, out, s, p, d, k in rows)
    arguments = (m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding, more, m.groups)
    return make_dim_layer("ConvTranspose", x.ndim - 2, *arguments, m.bias is not None, m.dilation)


def _make_batch_norm(m: Any, x: torch.Tensor, y: torch.Tensor) -> Layer:
    if m.momentum is None or not m.track_running_stats:
        raise NoTwinError("batch norms need a momentum and running statistics; use GroupNorm, or change its arguments")
    return (nn.BatchNorm if m.training else FixedBatchNorm)(m.num_features, m.eps, m.momentum, m.affine)


def _make_instance_norm(m: Any, x: torch.Tensor, y: torch.Tensor) -> Layer:
    if m.track_running_stats:
        raise NoTwinError("it has running statistics; use track_running_stats=False, or BatchNorm")
    return nn.InstanceNorm(m.num_features, m.eps, affine=m.affine)


def _make_group_norm(m: Any, x: torch.Tensor, y: torch.Tensor) -> Layer:
    return nn.GroupNorm(m.num_groups, m.num_channels, m.eps, m.affine)


def _make_linear(m: Any, x: torch.Tensor, y: torch.Tensor) -> Layer:
    return (nn.Linear if x.ndim == 2 else ChannelLinear)(m.in_features, m.out_features, m.bias is not None)


def _make_layer_norm(m: Any, x: torch.Tensor, y: torch.Tensor) -> Layer:
    has_bias = m.elementwise_affine and m.bias is not None
    if x.ndim == 2:
        return nn.LayerNorm(m.normalized_shape, m.eps, m.elementwise_affine, has_bias)
    if len(m.normalized_shape) > 1 or not has_bias:
        raise NoTwinError("normalize the channels only, with a weight and a bias, or use GroupNorm(1, channels)")
    return nn.ChannelLayerNorm(m.normalized_shape[0], m.eps)


_TWINS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Layer]] = {
    "BatchNorm": _make_batch_norm,
    "Conv": _make_conv,
    "ConvTranspose": _make_conv_transpose,
    "GroupNorm": _make_group_norm,
    "InstanceNorm": _make_instance_norm,
    "LayerNorm": _make_layer_norm,
    "Linear": _make_linear,
    "SyncBatchNorm": _make_batch_norm,
}
"""Maps the name of a `torch.nn` layer, without its number of dims, to the function that makes the equivalent fsdpx
layer."""
