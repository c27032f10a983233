"""Convolutions over fields of one to three dims, and the sliding windows that both convolutions and pools use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fsdpx.core.array.kernels.memory_order import put_channels_last
from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.halo import (
    DimEnds,
    FieldLayer,
    HaloSpec,
    PaddingMode,
    PaddingSide,
    compute_output_bounds_of_ranks,
    expand_padding_modes,
    make_halo_spec_per_dim,
    require_field_shape,
    require_halo_fits_field,
)
from fsdpx.ext.fields.halo_slabs import (
    HaloBox,
    HaloSlabs,
    exchange_halo,
    exchange_halo_backward,
    exchange_slab_gradients,
)
from fsdpx.ext.fields.kernels import WindowStrides, correlate, correlate_backward_input, correlate_backward_params
from fsdpx.nn.gradient_accumulation import get_gradient_and_whether_to_add
from fsdpx.nn.init import Init, uniform
from fsdpx.nn.layer import Array, Layer, LayerContext, ParameterSpec, Params, ShardedLayer, require_positive
from fsdpx.nn.shard_specs import Cuts, FieldPartition, ShardingContext

__all__ = [
    "Conv1d", "Conv2d", "Conv3d", "ConvWindow", "Sizes", "WindowLayer", "expand_to_dims", "get_local_shape",
    "make_conv_specs", "require_divisible_channels",
]  # fmt: skip

Sizes = int | tuple[int, ...]


@dataclass(frozen=True)
class ConvWindow:
    """The sliding window of a convolution or pool. All attributes except `ceil_mode` have one value per dim.

    Attributes
    ----------
    kernel, stride, dilation : size of the window, step from one window to the next, and distance between the cells of a
        window
    low, high : number of padding cells before and after the field
    modes : padding modes before and after the field, such as ("zeros", "reflect"); a number is the value of the padding
        cells
    ceil_mode : whether a window that reaches beyond the end of the field also produces an output, as in PyTorch
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilation: tuple[int, ...]
    modes: tuple[tuple[PaddingSide, PaddingSide], ...]
    ceil_mode: bool = False

    @classmethod
    def from_arguments(
        cls, layer: Layer, dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any, mode: Any,
        ceil_mode: bool = False,
    ) -> ConvWindow:  # fmt: skip
        """Return the window described by PyTorch-style arguments of `layer`; raise ConfigError if an argument is
        invalid."""
        sizes = [
            expand_to_dims(layer, name, value, dims, 1)
            for name, value in (("kernel_size", kernel), ("stride", stride), ("dilation", dilation))
        ]
        modes = expand_padding_modes(layer, "padding_mode", mode, dims)
        low, high = _parse_padding(layer, padding, dims, *sizes)
        return cls(sizes[0], sizes[1], low, high, sizes[2], modes, ceil_mode)

    @property
    def spans(self) -> tuple[int, ...]:
        """Number of cells along each dim from the first to the last cell of a window: dilation * (kernel - 1) + 1."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        """Return how the outputs are partitioned over the ranks.

        An output belongs to the rank that owns the first cell under its window, not counting padding."""
        made = []
        for cuts, s, a, b, span in zip(parts.cuts, self.stride, self.low, self.high, self.spans, strict=True):
            total = self._count_outputs(cuts[-1], s, a, b, span)
            made.append(compute_output_bounds_of_ranks(cuts, [-(-cut // s) for cut in cuts], total))
        return parts.with_cuts(tuple(made))

    def _count_outputs(self, n: int, stride: int, low: int, high: int, span: int) -> int:
        steps = n + low + high - span
        count = (-(-steps // stride) if self.ceil_mode else steps // stride) + 1
        if self.ceil_mode and (count - 1) * stride >= n + low:
            count -= 1
        return max(count, 0)

    def count_zeros_kernel_adds_before_field(self, parts: FieldPartition) -> tuple[int, ...]:
        """Return, for each dim, the number of zeros that the compute kernel itself adds before the field.

        The number is 0 for a dim that is partitioned, has ghost cells, or has a padding mode other than "zeros",
        because there the halo exchange provides the padding."""
        rows = zip(parts.cuts, self.low, self.modes, strict=True)
        return tuple(pad if self._is_padding_added_by_kernel(parts, cuts, mode) else 0 for cuts, pad, mode in rows)

    def _is_padding_added_by_kernel(
        self, parts: FieldPartition, cuts: Cuts, mode: tuple[PaddingSide, PaddingSide]
    ) -> bool:
        """Return whether the compute kernel itself adds the padding along a dim. The kernel can add only zeros. If any
        dim is padded with a fixed number, the kernel adds no padding at all. The halo exchange then pads all dims, so
        that each corner gets the padding value of the last dim."""
        has_numbers = any(not isinstance(side, str) for sides in self.modes for side in sides)
        return len(cuts) == 2 and mode == ("zeros", "zeros") and not parts.ghosts and not has_numbers

    def make_window_strides(self, first: tuple[int, ...], groups: int = 1) -> WindowStrides:
        """Return the window in the form that the convolution kernels take. `first` holds the first cell of the window
        of output 0 along each dim."""
        return WindowStrides(self.kernel, self.stride, self.dilation, first, groups)

    def find_halos(self, parts: FieldPartition) -> tuple[HaloSpec, ...]:
        """Return one halo spec per dim, with the range of input cells that each rank needs for its outputs.

        Zeros that the compute kernel itself adds are not part of the halo. Raises ShapeError if the field is too small
        for the padding."""
        windows = [(s, -a, span) for s, a, span in zip(self.stride, self.low, self.spans, strict=True)]
        found = list(make_halo_spec_per_dim(parts, windows, self.partition_outputs(parts), self.modes))
        for i, (cuts, mode) in enumerate(zip(parts.cuts, self.modes, strict=True)):
            unpadded = len(cuts) == 2 and not parts.ghosts and self.low[i] == self.high[i] == 0
            if unpadded or self._is_padding_added_by_kernel(parts, cuts, mode):
                found[i] = HaloSpec(i + 2, cuts, ((0, cuts[-1]),))
        for halo in found:
            require_halo_fits_field(halo, parts)
        return tuple(found)


def expand_to_dims(layer: Layer, name: str, value: Any, dims: int, minimum: int) -> tuple[int, ...]:
    """Return `value`, such as `3` or `(3, 5)`, as one integer per dim; raise ConfigError if an entry is not an integer,
    or is below `minimum`."""
    each = (value,) * dims if hasattr(value, "__index__") else value
    if not isinstance(each, tuple | list) or len(each) != dims:
        many = {1: "one", 2: "one whole number or two", 3: "one whole number or three"}[dims]
        raise ConfigError(f"{type(layer).__name__}: {name} must be {many}, got {value!r}")
    if any(not hasattr(side, "__index__") or side < minimum for side in each):
        raise ConfigError(f"{type(layer).__name__}: {name} must be whole numbers >= {minimum}, got {value!r}")
    return tuple(map(int, each))


def require_divisible_channels(layer: Layer, in_channels: int, out_channels: int, groups: int) -> None:
    """Raise ConfigError unless the numbers of input and output channels are multiples of `groups`."""
    require_positive(layer, in_channels=in_channels, out_channels=out_channels, groups=groups)
    if in_channels % groups or out_channels % groups:
        raise ConfigError(
            f"{type(layer).__name__}: in_channels={in_channels} and out_channels={out_channels} must be multiples "
            f"of groups={groups}"
        )


def make_conv_specs(layer: Any, shape: tuple[int, ...]) -> dict[str, ParameterSpec]:
    """Return the parameter specs of a convolution: a weight of shape `shape` and, if the layer has a bias, the bias.
    The bias and, by default, the weight are initialized as in PyTorch."""
    default = uniform(1.0 / math.sqrt(math.prod(shape[1:])))
    specs = {"weight": ParameterSpec(shape, layer.init or default)}
    if layer.bias:
        specs["bias"] = ParameterSpec((layer.out_channels,), default)
    return specs


def _parse_padding(
    layer: Layer, padding: Any, dims: int, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of padding cells before and after the field along each dim."""
    if padding == "valid":
        return (0,) * dims, (0,) * dims
    if padding == "same":
        if any(s != 1 for s in stride):
            raise ConfigError(f"{type(layer).__name__}: padding='same' needs stride 1, got {tuple(stride)}")
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    if isinstance(padding, str):
        raise ConfigError(f"{type(layer).__name__}: padding={padding!r}: give cells, or 'same' or 'valid'")
    if isinstance(padding, tuple | list) and any(isinstance(side, tuple | list) for side in padding):
        pairs = [expand_to_dims(layer, "padding", side, 2, 0) for side in padding]
        if len(pairs) != dims:
            raise ConfigError(f"{type(layer).__name__}: padding must be {dims} pairs, got {padding!r}")
        return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
    each = expand_to_dims(layer, "padding", padding, dims, 0)
    return each, each


@lru_cache(1 << 10)
def _plan_window(
    window: ConvWindow, parts: FieldPartition
) -> tuple[FieldPartition, tuple[HaloSpec, ...], tuple[int, ...]]:
    halos = tuple(halo for halo in window.find_halos(parts) if not halo.is_local)
    return window.partition_outputs(parts), halos, window.count_zeros_kernel_adds_before_field(parts)


def get_local_shape(env: LayerContext, parts: FieldPartition) -> tuple[int, ...]:
    """Return the number of cells that this rank owns along each dim."""
    return parts.shape if parts.is_on_one_rank else parts.local_shape([line.rank for line in env.mesh.domain])


class WindowLayer(FieldLayer):
    """Base class for convolutions and pools, which compute each output from the cells under a sliding window."""

    window: ConvWindow

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        return self.plan_outputs_halo_and_padding(parts)[0]

    def list_dim_ends(self, dims: int) -> list[DimEnds]:
        rows = zip(self.window.low, self.window.high, self.window.modes, strict=True)
        return [DimEnds.of_padding(d, mode) for d, (low, high, mode) in enumerate(rows) if low + high > 0]

    def plan_outputs_halo_and_padding(
        self, parts: FieldPartition
    ) -> tuple[FieldPartition, tuple[HaloSpec, ...], tuple[int, ...]]:
        """Return what this layer needs in order to run on a partitioned field: the partition of its outputs and, for
        each dim, the halo to exchange and the number of zeros that the compute kernel itself adds before the field.

        Raises ShapeError, naming the layer, if the field is too small."""
        try:
            found = _plan_window(self.window, parts)
        except ShapeError as error:
            raise ShapeError(f"{self!r}: {error}") from None
        if min(found[0].shape) < 1:
            small = [parts.get_dim_name(d) for d, n in enumerate(found[0].shape) if n < 1]
            raise ShapeError(
                f"{self!r}: the window does not fit along {', '.join(small)} into a field of shape {parts.shape}"
            )
        return found

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        kind, dims = request.get_common_input_sharding(self), len(self.window.kernel)
        if isinstance(kind, FieldPartition) and kind.has_cells and len(kind.cuts) != dims:
            raise ConfigError(
                f"{request.path!r} {self!r} has windows of {dims} dims and reads {kind}: the grid must have as many "
                "dims as the field"
            )
        return super().shard_over_ranks(request)


class Conv(WindowLayer):
    """Convolution (cross-correlation) of (samples, in_channels, *cells), with PyTorch's arguments, weights and initial
    values. Base class of `Conv1d`, `Conv2d` and `Conv3d`.

    The parameters are `weight (out_channels, in_channels / groups, *kernel_size)` and `bias (out_channels,)`,
    initialized from U(-k, k) with k = 1/sqrt(in_channels / groups * prod(kernel_size)).

    On a grid of ranks, each rank computes its own windows: window i along a dim belongs to the rank that owns input
    cell i * stride, or to the last rank that has cells if there is no such input cell. The halo cells under these
    windows are received from their owners, and padding is added only at the ends of the full field.

    Parameters
    ----------
    in_channels, out_channels : size of dim 1 of the input and of the output
    kernel_size : size of the window: one number for all dims, or one per dim; the same holds for stride and dilation
    stride : step of the window in cells; default 1
    padding : number of cells added at each end: one number, one for each dim, or (before, after) for each dim. "same"
        (which requires stride 1) keeps the number of cells, and "valid" adds no cells. Default: no padding
    dilation : distance between neighboring cells of a window; default 1
    groups : number of groups of channels; the outputs of a group depend only on its own input channels. Default 1
    bias : whether to add a bias; default True
    padding_mode : values beyond the ends of the field: "zeros", "circular", "reflect", "replicate" (zero slope at the
        end), or a number, which is the value of all cells beyond the end in all channels (Dirichlet). Pass one mode for
        all dims, or one mode per dim. The mode of a dim may be a pair (before, after), as in (("reflect", 1.5),
        "circular"). Corners get the padding of the last dim. Default "zeros"
    init : initial values of `weight`; if None (default), the uniform distribution
    """

    takes_ghosts = True
    kernel_names = ("channels_last", "correlate", "correlate_backward_input", "correlate_backward_params")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str | tuple[tuple[int, int], ...] = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        *,
        init: Init | None = None,
    ) -> None:
        require_divisible_channels(self, in_channels, out_channels, groups)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation
        self.bias, self.padding_mode, self.init = bool(bias), padding_mode, init
        self.window = ConvWindow.from_arguments(self, self.dims, kernel_size, stride, padding, dilation, padding_mode)

    def specs(self) -> dict[str, ParameterSpec]:
        return make_conv_specs(self, (self.out_channels, self.in_channels // self.groups, *self.window.kernel))

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_field_shape(self, x, self.dims, self.in_channels)
        x = put_channels_last(env.xp, x)
        outputs, halos, kernel_padding = self.plan_outputs_halo_and_padding(self.get_partition(x))
        sizes, weight, bias = get_local_shape(env, outputs), p["weight"], p.get("bias")
        widened: tuple[HaloSpec, ...] = ()
        # in these cases, copy field and halo into one array instead of using separate halo slabs: slabs support neither
        # ghost cells nor fixed padding values, and adding the results of slabs would round 16-bit sums twice
        if x.dtype.itemsize < 4 or any(halo.ghosts or halo.has_constants for halo in halos):
            x, halos, widened = exchange_halo(env, x, halos), (), halos
        if not halos:
            box = HaloBox((0,) * self.dims, x)
            strides = self._make_window_strides_in_box(kernel_padding, box)
            return correlate(env.xp, x, weight, bias, strides, sizes), ((box,), (strides,), halos, widened)
        rims = HaloSlabs(env, x, halos)
        windows = [self._make_window_strides_in_box(kernel_padding, rims.boxes[0])]
        y = correlate(env.xp, x, weight, bias, windows[0], sizes)
        for box in rims.wait_for_slabs():
            windows.append(self._make_window_strides_in_box(kernel_padding, box))
            y = correlate(env.xp, box.cells, weight, None, windows[-1], sizes, y)
        return y, (tuple(rims.boxes), tuple(windows), halos, widened)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        boxes, windows, halos, widened = saved
        weight, slopes = p["weight"], [boxes[0]]

        def backward_box(n: int) -> Array:
            return correlate_backward_input(env.xp, weight, dy, windows[n], tuple(boxes[n].cells.shape))

        if not halos and not widened:
            return backward_box(0), (*saved, dy)
        slopes += [HaloBox(boxes[n].offset, backward_box(n)) for n in range(1, len(boxes))]
        dx = exchange_slab_gradients(env, halos, slopes, lambda: backward_box(0))
        return exchange_halo_backward(env, dx, widened), (*saved, dy)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (*saved, dy))

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        boxes, windows, _, _, dy = kept
        weight, bias = get_gradient_and_whether_to_add(g, "weight"), get_gradient_and_whether_to_add(g, "bias")
        for box, strides in zip(boxes, windows, strict=True):
            correlate_backward_params(env.xp, box.cells, dy, strides, weight, bias)
            weight, bias = None if weight is None else (weight[0], True), None

    def _make_window_strides_in_box(self, kernel_padding: tuple[int, ...], box: HaloBox) -> WindowStrides:
        """Return the window as a `WindowStrides`, which the convolution kernels take. Positions are relative to the
        first cell in `box`."""
        first = tuple(-pad - offset for pad, offset in zip(kernel_padding, box.offset, strict=True))
        return self.window.make_window_strides(first, self.groups)


class Conv1d(Conv, dims=1):
    """Convolution over (samples, in_channels, length), with the parameters of `Conv`."""


class Conv2d(Conv, dims=2):
    """Convolution over (samples, in_channels, height, width), with the parameters of `Conv`.

    On CPUs, convolutions with 3 x 3 windows, stride 1 and multiples of 16 channels use Winograd's F(4 x 4, 3 x 3),
    which needs a quarter of the multiplications, and has errors of a few 1e-6 in float32."""


class Conv3d(Conv, dims=3):
    """Convolution over (samples, in_channels, depth, height, width), with the parameters of `Conv`.

    On CPUs, convolutions with windows of any depth that are 3 x 3 along height and width use Winograd's algorithm under
    the same conditions as `Conv2d`."""
