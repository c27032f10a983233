"""fsdpx layers that are equivalent to PyTorch functions, for fields that may be split over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch

from fsdpx import nn
from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.ext.fields.scalars import BroadcastScalars
from fsdpx.ext.interop.channel_layers import ChannelParameter, ChannelRange
from fsdpx.ext.interop.field_twins import NoTwinError, make_dim_layer
from fsdpx.nn.layer import Layer

__all__ = ["FieldValue", "FunctionCall", "convert_function"]


@dataclass(frozen=True)
class FieldValue:
    """Describes the value that corresponds to a tensor of a PyTorch module. The module computes the tensor in
    `forward`, and the value belongs to the container of fsdpx layers that replaces the module.

    Attributes
    ----------
    name : name of the value in the container
    channels_last : whether the tensor has its channels in the last dim; the value always has them in dim 1
    mean_of : if this value is the mean of a field over all cells, the name of that field; this value is then a field of
        one cell. Otherwise, ""
    unit_cells : whether the value consists of scalars (samples, n), while the tensor has additional dims of size 1,
        such as (samples, n, 1, 1)
    """

    name: str
    channels_last: bool = False
    mean_of: str = ""
    unit_cells: bool = False


class Steps(Protocol):
    """Protocol for building a container of layers. It holds the steps (calls of layers) added so far."""

    def get_value(self, tensor: torch.Tensor) -> FieldValue:
        """Return the `FieldValue` that corresponds to a tensor. Raises NoTwinError if no layer computes the tensor."""

    def find_parameter(self, tensor: torch.Tensor) -> str:
        """Return the name of a parameter, given its tensor, or "" if the tensor is not a parameter."""

    def add_step(self, layer: Layer, *sources: str, name: str | None = None) -> str:
        """Add a step that runs `layer` on values, and return the name of its result."""


@dataclass(frozen=True)
class FunctionCall:
    """A call of a PyTorch function: the function and its name, the arguments, and the result.

    For an in-place function (`add_`) or an operator (`__add__`), the name is the name of the plain function (`add`)."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    steps: Steps
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", getattr(self.function, "__name__", str(self.function)).strip("_"))

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def x(self) -> torch.Tensor:
        tensor: torch.Tensor = self.args[0] if self.args else self.kwargs["input"]
        return tensor

    def get_field_argument(self) -> FieldValue:
        """Return the first argument as a `FieldValue`. Raises NoTwinError unless it is a field with channels in dim
        1."""
        value = self.steps.get_value(self.x)
        if value.channels_last or value.unit_cells or self.x.ndim < 3:
            raise NoTwinError("it needs a field with channels in dim 1")
        return value

    def apply(self, layer: Layer | None) -> FieldValue:
        """Add a step that applies a layer to the field given as the first argument, and return the step's result. If
        `layer` is None, return the field unchanged."""
        value = self.get_field_argument()
        return value if layer is None else FieldValue(self.steps.add_step(layer, value.name))


def convert_function(call: FunctionCall) -> list[FieldValue]:
    """Add steps that are equivalent to the given PyTorch function call, and return the results of the call. Raises
    NoTwinError if there are no such steps."""
    if call.name in ("chunk", "split", "split_with_sizes"):
        return _convert_split(call)
    if (activate := _ACTIVATIONS.get(call.name)) is not None:
        value = call.steps.get_value(call.x)
        return [replace(value, name=call.steps.add_step(activate(call), value.name), mean_of="")]
    if (convert := _FUNCTIONS.get(call.name)) is None:
        is_spectral = "fft" in call.name or "einsum" in call.name
        other = "fsdpx.models.from_state_dict converts FNOs" if is_spectral else "it is not known here"
        raise NoTwinError(other)
    return [convert(call)]


def _convert_split(call: FunctionCall) -> list[FieldValue]:
    value, dim = call.steps.get_value(call.x), call.get(2, "dim", 0)
    if dim % call.x.ndim != (call.x.ndim - 1 if value.channels_last else 1):
        raise NoTwinError(f"it splits along dim {dim}; only channels can be split")
    found, start = list[FieldValue](), 0
    for piece in call.result:
        found.append(_take_channels(call.steps, value, start, start + piece.shape[dim]))
        start += piece.shape[dim]
    return found


def _take_channels(steps: Steps, value: FieldValue, start: int, stop: int) -> FieldValue:
    return replace(value, name=steps.add_step(ChannelRange(start, stop), value.name), mean_of="")


def _convert_arithmetic(call: FunctionCall) -> FieldValue:
    """Convert a sum, difference, product or quotient of two values, or of a value and a number or parameter."""
    name = {"true_divide": "div", "rtruediv": "rdiv", "subtract": "sub", "multiply": "mul"}.get(call.name, call.name)
    a, b = call.args[:2] if len(call.args) > 1 else (call.x, call.kwargs["other"])
    if call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("rounding_mode"):
        raise NoTwinError("alpha= and rounding_mode= are not known here")
    if name[0] == "r":
        a, b, name = b, a, name[1:]
    if isinstance(b, Real) or isinstance(a, Real):
        return _convert_operation_with_number(call.steps, name, a, b)
    if call.steps.find_parameter(b):
        return _combine_with_parameter(call.steps, name, a, b)
    if call.steps.find_parameter(a) and name != "div":
        turned = _negate_value(call.steps, call.steps.get_value(b)) if name == "sub" else None
        return _combine_with_parameter(call.steps, "add" if turned else name, b, a, turned)
    left, right = call.steps.get_value(a), call.steps.get_value(b)
    if name == "div":
        raise NoTwinError("a field is divided by another; use fsdpx.nn.Lambda")
    right = _negate_value(call.steps, right) if name == "sub" else right
    if left.unit_cells != right.unit_cells or a.shape != b.shape:
        return _convert_channelwise_operation(call.steps, name, (a, left), (b, right))
    if left.channels_last != right.channels_last:
        raise NoTwinError(_describe_shapes(a, b))
    layer: Layer = nn.Multiply() if name == "mul" else nn.Add()
    return replace(left, name=call.steps.add_step(layer, left.name, right.name), mean_of="")


def _describe_shapes(a: torch.Tensor, b: torch.Tensor) -> str:
    return (
        f"its arguments have the shapes {tuple(a.shape)} and {tuple(b.shape)}; give fields of equal shape, or a field "
        "and values (samples, channels, 1, ...)"
    )


def _convert_channelwise_operation(
    steps: Steps, name: str, left: tuple[torch.Tensor, FieldValue], right: tuple[torch.Tensor, FieldValue]
) -> FieldValue:
    """Convert a sum or product of two operands: a field, and an array with one value per sample and channel."""
    (x, field), (s, scalars) = (right, left) if left[1].unit_cells else (left, right)
    if math.prod(x.shape[2:]) == 1 and not field.unit_cells and math.prod(s.shape[2:]) > 1:
        (x, field), (s, scalars) = (s, scalars), (x, field)
    alike = s.shape[:2] == x.shape[:2] and (scalars.unit_cells or math.prod(s.shape[2:]) == 1)
    if field.unit_cells or x.ndim < 3 or not alike or field.channels_last:
        raise NoTwinError(_describe_shapes(x, s))
    return FieldValue(
        steps.add_step(
            BroadcastScalars(name != "mul"), field.name, _convert_one_cell_field_to_scalars(steps, scalars).name
        )
    )


def _convert_one_cell_field_to_scalars(steps: Steps, value: FieldValue) -> FieldValue:
    """Convert a field of one cell to scalars (samples, n). Return the new value. The PyTorch tensor that it stands for
    still has cell dims, all of size 1."""
    if value.unit_cells:
        return value
    return FieldValue(steps.add_step(nn.GlobalMean(), value.mean_of or value.name), unit_cells=True)


def _negate_value(steps: Steps, value: FieldValue) -> FieldValue:
    return replace(value, name=steps.add_step(nn.Scale(-1.0), value.name), mean_of="")


def _convert_operation_with_number(steps: Steps, name: str, a: Any, b: Any) -> FieldValue:
    number, is_second = (b, True) if isinstance(b, Real) else (a, False)
    value, number = steps.get_value(a if is_second else b), float(number)
    if name == "div" and not is_second:
        raise NoTwinError("a number is divided by a field; use fsdpx.nn.Lambda")
    if name in ("mul", "div"):
        layer: Layer = nn.Scale(number if name == "mul" else 1.0 / number)
        return replace(value, name=steps.add_step(layer, value.name), mean_of="")
    if name == "sub" and is_second:
        number = -number
    elif name == "sub":
        value = _negate_value(steps, value)
    layer = nn.Lambda(lambda x: x + number, np.ones_like)
    return replace(value, name=steps.add_step(layer, value.name), mean_of="") if number else value


def _combine_with_parameter(steps: Steps, name: str, x: Any, w: Any, turned: FieldValue | None = None) -> FieldValue:
    """Convert an operation on the field `x` and the parameter `w`. If `turned` is given, it replaces the value of `x`
    in the operation. For example, w - x is computed as w + turned, where `turned` is -x."""
    value = turned or steps.get_value(x)
    channels = x.shape[-1 if value.channels_last else 1]
    wide = (1,) * (x.ndim - w.ndim) + tuple(w.shape)
    along = wide[-1 if value.channels_last else 1] if len(wide) == x.ndim else 0
    if x.ndim < 3 or value.unit_cells or w.numel() not in (1, channels) or along != w.numel():
        raise NoTwinError(
            f"parameter {steps.find_parameter(w)!r} of shape {tuple(w.shape)} must have one element, or one per "
            "channel; use fsdpx.nn.StaticChannels for values that differ between cells"
        )
    layer = ChannelParameter(tuple(w.shape), name)
    return FieldValue(steps.add_step(layer, value.name, name=steps.find_parameter(w)), value.channels_last)


def _convert_negation(call: FunctionCall) -> FieldValue:
    return _convert_operation_with_number(call.steps, "mul", call.x, -1.0)


def _convert_power(call: FunctionCall) -> FieldValue:
    exponent = 2 if call.name == "square" else call.get(1, "exponent")
    if exponent != 2:
        raise NoTwinError("only squares are known here; use fsdpx.nn.Lambda")
    value = call.steps.get_value(call.x)
    return replace(value, name=call.steps.add_step(nn.Multiply(), value.name, value.name), mean_of="")


def _convert_concatenation(call: FunctionCall) -> FieldValue:
    tensors, dim = call.args[0] if call.args else call.kwargs["tensors"], call.get(1, "dim", 0)
    values = [call.steps.get_value(tensor) for tensor in tensors]
    ndim, last = tensors[0].ndim, values[0].channels_last
    if dim % ndim != (ndim - 1 if last else 1) or any(
        value.channels_last != last or value.unit_cells for value in values
    ):
        raise NoTwinError(f"it concatenates along dim {dim}; only the channels of fields can be concatenated")
    return FieldValue(call.steps.add_step(nn.Concat(1), *(value.name for value in values)), last)


def _convert_permutation(call: FunctionCall) -> FieldValue:
    """Convert a function that reorders dims. It may only move the channels to the last dim, or from there to dim 1."""
    value, n = call.steps.get_value(call.x), call.x.ndim
    with torch.no_grad():
        probe = call.function(torch.empty(tuple(range(2, n + 2)), device="meta"), *call.args[1:], **call.kwargs)
    order = [size - 2 for size in probe.shape]
    if order == list(range(n)):
        return value
    if order == ([0, n - 1, *range(1, n - 1)] if value.channels_last else [0, *range(2, n), 1]):
        return replace(value, channels_last=not value.channels_last)
    raise NoTwinError("it may only move the channels to the last dim, or from there to dim 1")


def _convert_reduction(call: FunctionCall) -> FieldValue:
    """Convert a mean, sum or maximum over all cells."""
    dims, value = call.get(1, "dim"), call.get_field_argument()
    dims = (dims,) if isinstance(dims, int) else dims
    cells = list(range(2, call.x.ndim))
    if dims is None or sorted(d % call.x.ndim for d in dims) != cells:
        raise NoTwinError("it must reduce all cells of each channel, as in x.mean((2, 3))")
    name = {"mean": "GlobalMean", "sum": "GlobalSum", "amax": "GlobalMax"}[call.name]
    if call.get(2, "keepdim", False):
        if name != "GlobalMean":
            raise NoTwinError("keepdim=True is not known here")
        pooled = call.steps.add_step(make_dim_layer("AdaptiveAvgPool", len(cells), 1), value.name)
        return FieldValue(pooled, mean_of=value.name)
    return FieldValue(call.steps.add_step(getattr(nn, name)(), value.name))


def _convert_reshape(call: FunctionCall) -> FieldValue:
    """Convert a reshape of one of two kinds: a mean over all cells becomes scalars (samples, channels), or scalars
    change between the shapes (samples, n) and (samples, n, 1, ...)."""
    value, before, after = call.steps.get_value(call.x), tuple(call.x.shape), tuple(call.result.shape)
    if before == after:
        return value
    if value.mean_of and after == before[:2]:
        return FieldValue(call.steps.add_step(nn.GlobalMean(), value.mean_of))
    is_scalars, units = len(before) == 2 or value.unit_cells, (1,) * (len(after) - 2)
    if is_scalars and after == (*before[:2], *units):
        return replace(value, unit_cells=len(after) > 2)
    raise NoTwinError("a field keeps its shape; only a mean over all cells can become scalars (samples, channels)")


def _convert_expand(call: FunctionCall) -> FieldValue:
    """Convert a call to `expand` that repeats one value per sample and channel over all cells."""
    value, before, after = call.steps.get_value(call.x), tuple(call.x.shape), tuple(call.result.shape)
    if before == after:
        return value
    if before == (*after[:2], *(1,) * (len(after) - 2)) and not value.channels_last:
        return _convert_one_cell_field_to_scalars(call.steps, value)
    raise NoTwinError("only values (samples, channels, 1, ...) can be repeated for all cells")


def _convert_identity(call: FunctionCall) -> FieldValue:
    if call.result.dtype != call.x.dtype or call.result.shape != call.x.shape:
        raise NoTwinError("it changes the dtype; choose precision= when you distribute the model")
    return call.steps.get_value(call.x)


def _convert_interpolation(call: FunctionCall) -> FieldValue:
    """Convert an interpolation. If the size of the result along each dim is a multiple of the size of the input, the
    layer works for fields of all sizes."""
    size, factor, mode = call.get(1, "size"), call.get(2, "scale_factor"), call.get(3, "mode", "nearest")
    if call.get(6, "antialias", False):
        raise NoTwinError("antialias=True is not known here; use AvgPool first")
    call.get_field_argument()
    if size is not None or call.get(5, "recompute_scale_factor"):
        pairs = list(zip(call.x.shape[2:], call.result.shape[2:], strict=True))
        divides = all(m % n == 0 for n, m in pairs)
        size, factor = (None, tuple(m // n for n, m in pairs)) if divides else (tuple(m for _, m in pairs), None)
    return call.apply(nn.Upsample(size, factor, mode, call.get(4, "align_corners")))


def _convert_padding(call: FunctionCall) -> FieldValue:
    mode, value, dims = call.get(2, "mode", "constant"), call.get(3, "value") or 0.0, call.x.ndim - 2
    pad = tuple(map(int, call.get(1, "pad")))
    pairs = [*zip(pad[::2], pad[1::2], strict=True), *((0, 0),) * dims]
    if any(map(any, pairs[dims:])):
        raise NoTwinError("it pads channels or samples; concatenate channels instead")
    side: Any = (value or "zeros") if mode == "constant" else mode
    return call.apply(nn.Pad(tuple(pairs[:dims][::-1]), side) if any(map(any, pairs)) else None)


def _convert_indexing(call: FunctionCall) -> FieldValue:
    """Convert an index such as `x[:, :2, 1:-1]`, which keeps a range of channels and the cells in a box, or
    `s[:, :, None, None]`, which appends dims of size 1."""
    value, last = call.steps.get_value(call.x), call.x.ndim - 1
    index, shape = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],), tuple(call.x.shape)
    if any(one is Ellipsis for one in index):
        at = next(i for i, one in enumerate(index) if one is Ellipsis)
        index = (*index[:at], *(slice(None),) * (len(shape) - len(index) + 1), *index[at + 1 :])
    index = (*index, *(slice(None),) * (len(shape) - len(index)))
    if last == 1 and all(one in (None, slice(None)) for one in index):
        return _convert_reshape(call)
    if len(index) != len(shape) or not all(isinstance(one, slice) for one in index):
        raise NoTwinError("an index may only keep a box of cells, or a range of channels, as in x[:, :2, 1:-1]")
    ranges = [range(n)[one] for n, one in zip(shape, index, strict=True)]
    dim = last if value.channels_last else 1
    kept, cells = ranges.pop(dim), [n for i, n in enumerate(shape) if i not in (0, dim)]
    if any(r.step != 1 for r in (*ranges, kept)) or len(ranges.pop(0)) != shape[0]:
        raise NoTwinError("an index may only keep a box of cells, or a range of channels; use AvgPool to coarsen")
    if len(kept) != shape[dim]:
        value = _take_channels(call.steps, value, kept.start, kept.stop)
    pairs = tuple((-r.start, r.stop - n) for r, n in zip(ranges, cells, strict=True))
    if not any(map(any, pairs)):
        return value
    if value.unit_cells:
        raise NoTwinError("it crops a field of one cell")
    return replace(value, name=call.steps.add_step(nn.Pad(pairs), value.name), mean_of="")


def _convert_max_pool(call: FunctionCall) -> FieldValue:
    if call.name.endswith("with_indices"):
        raise NoTwinError("it returns indices; use ConvTranspose or Upsample instead of max_unpool")
    window = (call.get(1, "kernel_size"), call.get(2, "stride") or None, call.get(3, "padding", 0))
    options = call.get(4, "dilation", 1), call.get(5, "ceil_mode", False)
    layer = make_dim_layer("MaxPool", call.x.ndim - 2, *window, options[0], ceil_mode=options[1])
    return call.apply(layer)


def _convert_avg_pool(call: FunctionCall) -> FieldValue:
    window = (call.get(1, "kernel_size"), call.get(2, "stride") or None, call.get(3, "padding", 0))
    options = call.get(4, "ceil_mode", False), call.get(5, "count_include_pad", True), call.get(6, "divisor_override")
    return call.apply(make_dim_layer("AvgPool", call.x.ndim - 2, *window, *options))


def _convert_adaptive_avg_pool(call: FunctionCall) -> FieldValue:
    value, cells = call.get_field_argument(), tuple(call.result.shape[2:])
    found = call.apply(make_dim_layer("AdaptiveAvgPool", len(cells), cells))
    return replace(found, mean_of=value.name if set(cells) == {1} else "")


def _convert_channel_norm(call: FunctionCall) -> FieldValue:
    """Convert a layer norm over channels in the last dim. Its weight and bias must be parameters of the calling
    module."""
    value, shape = call.steps.get_value(call.x), tuple(call.get(1, "normalized_shape"))
    names = [call.steps.find_parameter(call.get(at, name)) for at, name in ((2, "weight"), (3, "bias"))]
    path = names[0].removesuffix("weight")
    if not value.channels_last or len(shape) != 1 or not names[0] or names != [f"{path}weight", f"{path}bias"]:
        raise NoTwinError(
            "it must normalize channels in the last dim, with parameters named weight and bias; use GroupNorm"
        )
    layer = nn.ChannelLayerNorm(shape[0], call.get(4, "eps", 1e-5))
    return replace(value, name=call.steps.add_step(layer, value.name, name=path.removesuffix(".")), mean_of="")


def _convert_dropout(call: FunctionCall) -> FieldValue:
    p, training = call.get(1, "p", 0.5), call.get(2, "training", True)
    value = call.steps.get_value(call.x)
    if not training or not p:
        return value
    if call.name != "dropout" and value.channels_last:
        raise NoTwinError("it drops channels of dim 1")
    layer = nn.Dropout(p) if call.name == "dropout" else getattr(nn, f"D{call.name[1:]}")(p)
    return FieldValue(call.steps.add_step(layer, value.name), value.channels_last)


def _convert_pixel_shuffle(call: FunctionCall) -> FieldValue:
    if call.name == "pixel_shuffle":
        return call.apply(nn.PixelShuffle(call.get(1, "upscale_factor")))
    return call.apply(nn.PixelUnshuffle(call.get(1, "downscale_factor")))


def _make_clip(low: float | None, high: float | None) -> Layer:
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return nn.Lambda(lambda x: np.clip(x, low, high), lambda x: (x > low) & (x < high))


def _make_mish() -> Layer:
    def differentiate(x: Any) -> Any:
        t = np.tanh(np.logaddexp(0, x))
        return t + x * (1 - t * t) * np.exp(-np.logaddexp(0, -x))

    return nn.Lambda(lambda x: x * np.tanh(np.logaddexp(0, x)), differentiate)


def _make_hardswish() -> Layer:
    return nn.Lambda(
        lambda x: x * np.clip(x + 3, 0, 6) / 6, lambda x: (x > -3) * np.where(x < 3, (2 * x + 3) / 6, np.ones_like(x))
    )


_ACTIVATIONS: dict[str, Callable[[FunctionCall], Layer]] = {
    "abs": lambda call: nn.Lambda(np.abs, np.sign),
    "clamp": lambda call: _make_clip(call.get(1, "min"), call.get(2, "max")),
    "cos": lambda call: nn.Lambda(np.cos, lambda x: -np.sin(x)),
    "elu": lambda call: nn.ELU(call.get(1, "alpha", 1.0)),
    "exp": lambda call: nn.Lambda(np.exp, np.exp),
    "gelu": lambda call: nn.GELU(call.kwargs.get("approximate", "none")),
    "hardsigmoid": lambda call: nn.Lambda(
        lambda x: np.clip(x / 6 + 0.5, 0, 1), lambda x: (abs(x) < 3) * np.full_like(x, 1 / 6)
    ),
    "hardswish": lambda call: _make_hardswish(),
    "hardtanh": lambda call: _make_clip(call.get(1, "min_val", -1.0), call.get(2, "max_val", 1.0)),
    "leaky_relu": lambda call: nn.LeakyReLU(call.get(1, "negative_slope", 0.01)),
    "mish": lambda call: _make_mish(),
    "relu": lambda call: nn.ReLU(),
    "relu6": lambda call: _make_clip(0.0, 6.0),
    "sigmoid": lambda call: nn.Sigmoid(),
    "silu": lambda call: nn.SiLU(),
    "sin": lambda call: nn.Lambda(np.sin, np.cos),
    "softsign": lambda call: nn.Lambda(lambda x: x / (1 + abs(x)), lambda x: (1 + abs(x)) ** -2),
    "softplus": lambda call: nn.Softplus(call.get(1, "beta", 1.0), call.get(2, "threshold", 20.0)),
    "tanh": lambda call: nn.Tanh(),
}
_CONVERTERS: dict[Callable[[FunctionCall], FieldValue], str] = {
    _convert_adaptive_avg_pool: "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    _convert_avg_pool: "avg_pool1d avg_pool2d avg_pool3d",
    _convert_arithmetic: "add sub rsub mul div true_divide rtruediv rdiv subtract multiply",
    _convert_concatenation: "cat concat concatenate",
    _convert_indexing: "getitem",
    _convert_dropout: "dropout dropout1d dropout2d dropout3d",
    _convert_interpolation: "interpolate",
    _convert_expand: "expand expand_as",
    _convert_identity: "clone contiguous to float double type_as",
    _convert_max_pool: (
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices"
    ),
    _convert_negation: "neg negative",
    _convert_channel_norm: "layer_norm",
    _convert_padding: "pad",
    _convert_permutation: "permute movedim moveaxis transpose swapaxes swapdims",
    _convert_power: "pow square",
    _convert_reduction: "mean sum amax",
    _convert_reshape: "flatten view reshape squeeze unsqueeze unflatten",
    _convert_pixel_shuffle: "pixel_shuffle pixel_unshuffle",
}
_FUNCTIONS = {name: convert for convert, names in _CONVERTERS.items() for name in names.split()}
