"""Spectral layers and the Fourier neural operator, for fields that may be partitioned over ranks.

Mode k of n cells x_j along a dim is the sum over j of x_j e^(-2 pi i j k / n). Each rank computes partial sums over its
own cells with one matmul per dim, and a reduction over the ranks adds the partial sums. The traffic depends only on the
number of modes, not on the size of the field. Lingsch et al. (2024) use the same sums on a single device for points at
arbitrary positions."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from fsdpx.core.array import kernels
from fsdpx.core.array.devices import get_device_of_array
from fsdpx.core.array.namespace import concatenate_on_device
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.ext.fields.conv import expand_to_dims, make_conv_specs
from fsdpx.ext.fields.halo import FieldLayer, get_local_range, require_field_shape
from fsdpx.ext.fields.kernels import WindowStrides, correlate_backward_params
from fsdpx.nn import collectives
from fsdpx.nn.activation import GELU
from fsdpx.nn.container import Sequential
from fsdpx.nn.gradient_accumulation import (
    accumulation_dtype,
    add_sum_over_dims_into,
    batched_matmul_keeping_dtype,
    get_gradient_and_whether_to_add,
)
from fsdpx.nn.graph import Graph
from fsdpx.nn.init import Constant, normal
from fsdpx.nn.layer import (
    Array,
    Layer,
    LayerContext,
    ParameterSpec,
    Params,
    format_constructor,
    require_finite_arguments,
    require_positive,
)
from fsdpx.nn.shape import Add
from fsdpx.nn.shard_specs import FieldPartition, shard_bounds

__all__ = ["FNO", "ChannelScale", "GridEmbedding", "PointwiseConv", "SpectralConv"]


class SpectralConv(FieldLayer):
    """Spectral convolution (Li et al. 2021): multiplies each of the lowest Fourier modes of (samples, in_channels,
    *cells) by its own complex matrix.

    The parameters are `weight`, of shape (in_channels, out_channels, *modes, 2) with real and imaginary parts in the
    last dim, and `bias`, of shape (out_channels,). `modes` equals n_modes, except in the last dim, where it is
    n_modes[-1] // 2 + 1. The real and imaginary parts of the weight are initialized from a normal distribution with
    standard deviation sqrt(2 / (in + out)) / sqrt(2). Index w along the last mode dim stands for frequency w; along the
    other mode dims, it stands for frequency w - modes // 2.

    On a grid of ranks, the partial sums of modes are reduce-scattered, each rank multiplies its share of the modes, and
    the results are all-gathered. There are two collectives in the forward pass and two in the backward pass. The weight
    is not partitioned by modes. With "ddp", each rank holds the full weight, and its gradients are summed over the
    ranks like all other gradients. With "fsdp", the weight is sharded like other parameters, and gathered before use.

    Parameters
    ----------
    in_channels, out_channels : size of dim 1 of the input and of the output
    n_modes : number of modes kept along each dim: one number for a one-dimensional field, otherwise one per dim. If a
        field is too small for some modes, these modes are 0
    bias : whether there is a bias; default True
    """

    def __init__(self, in_channels: int, out_channels: int, n_modes: int | tuple[int, ...], bias: bool = True) -> None:
        require_positive(self, in_channels=in_channels, out_channels=out_channels)
        self.in_channels, self.out_channels, self.bias = in_channels, out_channels, bool(bias)
        self.n_modes = n_modes
        each = tuple(n_modes) if isinstance(n_modes, tuple | list) else (n_modes,)
        if not 1 <= len(each) <= 3:
            raise ConfigError(f"SpectralConv: n_modes={n_modes!r}: give one number for each of 1 to 3 dims")
        each = expand_to_dims(self, "n_modes", each, len(each), 1)
        self.modes = (*each[:-1], each[-1] // 2 + 1)

    def specs(self) -> dict[str, ParameterSpec]:
        deviation = math.sqrt(1.0 / (self.in_channels + self.out_channels))
        shape = (self.in_channels, self.out_channels, *self.modes, 2)
        specs = {"weight": ParameterSpec(shape, normal(deviation))}
        if self.bias:
            specs["bias"] = ParameterSpec((self.out_channels,))
        return specs

    def partition_outputs(self, parts: FieldPartition) -> FieldPartition:
        if len(parts.shape) != len(self.modes):
            raise ShapeError(f"{self!r} has modes of {len(self.modes)} dims, and the field {len(parts.shape)}")
        return parts

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_field_shape(self, x, len(self.modes), self.in_channels)
        parts = self.partition_outputs(self.get_partition(x))
        tables = self._get_forward_and_inverse_matrices(env, parts, x.dtype)
        mine = _stack_complex_rows(
            env.xp,
            self._reduce_scatter_modes(
                env, _transform_to_modes(env.xp, kernels.to_float32(env.xp, x), [t[0] for t in tables])
            ),
        )
        found = _multiply_complex(env.xp, mine, self._select_weights_of_own_modes(env, p["weight"]))
        y = _transform_to_cells(env.xp, self._all_gather_modes(env, found), [t[1] for t in tables])
        y = kernels.cast_float_to_dtype(env.xp, y, x.dtype)
        if self.bias:
            y = y + p["bias"].reshape(-1, *(1,) * len(self.modes))
        return y, (mine, tables)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        mine, tables = saved
        xp = env.xp
        slopes = _transform_to_modes(xp, kernels.to_float32(xp, dy), [t[1].T for t in tables])
        dmodes = _stack_gradient_rows(xp, self._reduce_scatter_modes(env, slopes))
        weights = self._select_weights_of_own_modes(env, p["weight"])
        parts = batched_matmul_keeping_dtype(xp, dmodes, weights.swapaxes(1, 2))
        found = xp.stack(xp.split(parts, 2, axis=1), axis=-1)
        dx = _transform_to_cells(xp, self._all_gather_modes(env, found), [to.T for to, _ in tables])
        return kernels.cast_float_to_dtype(xp, dx, dy.dtype), (mine, dmodes, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        mine, dmodes, dy = kept
        into = get_gradient_and_whether_to_add(g, "weight")
        if into is not None:
            out, add = into
            if not add:
                out[...] = 0
            start, stop = self._get_own_mode_bounds(env)
            flat = batched_matmul_keeping_dtype(env.xp, mine.swapaxes(1, 2), dmodes).astype(out.dtype, copy=False)
            flat = flat.reshape(stop - start, self.in_channels, self.out_channels, 2).transpose(1, 2, 0, 3)
            rows = out.reshape(self.in_channels, self.out_channels, math.prod(self.modes), 2)
            rows[:, :, start:stop] += flat
        if "bias" in g:
            add_sum_over_dims_into(env.xp, g["bias"], dy, (0, *range(2, dy.ndim)))

    def _get_own_mode_bounds(self, env: LayerContext) -> tuple[int, int]:
        """Return the range [start, stop) of flattened mode indices that this rank multiplies."""
        ranks, count = self._get_field_communicator(env), math.prod(self.modes)
        return (0, count) if ranks is None else shard_bounds(count, ranks.rank, ranks.size)

    def _get_field_communicator(self, env: LayerContext) -> Any:
        """Return the communicator of the ranks that share the field, or None if this rank holds the full field."""
        return None if self.parts is None or self.parts.is_on_one_rank else env.mesh.parts

    def _select_weights_of_own_modes(self, env: LayerContext, weight: Array) -> Array:
        """Return the weights for the modes that this rank multiplies, as (modes, in, 2 out) with interleaved real and
        imaginary parts."""
        start, stop = self._get_own_mode_bounds(env)
        flat = weight.reshape(self.in_channels, self.out_channels, math.prod(self.modes), 2)
        own = kernels.to_float32(env.xp, flat[:, :, start:stop].transpose(2, 0, 1, 3))
        return own.reshape(stop - start, self.in_channels, 2 * self.out_channels)

    def _get_forward_and_inverse_matrices(
        self, env: LayerContext, parts: FieldPartition, dtype: Any
    ) -> list[tuple[Array, Array]]:
        """Return, for each dim, the two matrices that transform this rank's cells to Fourier modes and back. The
        matrices are cached per context.

        If the field has a 16-bit dtype, the matrices are float32."""
        found, dtype = [], accumulation_dtype(dtype)
        for d, (cuts, k) in enumerate(zip(parts.cuts, self.modes, strict=True)):
            last = d == len(self.modes) - 1
            row = *get_local_range(env, cuts, d), cuts[-1], k, last
            key = "spectral", row, dtype.str
            if key not in env.constants:
                to, back = _make_fourier_matrices(*row)
                env.constants[key] = env.xp.asarray(to.astype(dtype)), env.xp.asarray(back.astype(dtype))
            found.append(env.constants[key])
        return found

    def _reduce_scatter_modes(self, env: LayerContext, modes: Array) -> Array:
        """Reduce-scatter the ranks' partial sums `modes`, (samples, channels, *modes, 2), and return the modes that
        this rank multiplies, as (own modes, samples, channels, 2)."""
        ranks = self._get_field_communicator(env)
        rows = modes.reshape(*modes.shape[:2], math.prod(self.modes), 2).transpose(2, 0, 1, 3)
        return rows if ranks is None else collectives.reduce_scatter_dim(env.xp, ranks, rows, 0, what=env.random.path)

    def _all_gather_modes(self, env: LayerContext, mine: Array) -> Array:
        """All-gather the modes that each rank has multiplied, and return all modes as (samples, channels, *modes, 2).
        `mine` holds this rank's modes, (own modes, samples, channels, 2)."""
        ranks, count, rows = self._get_field_communicator(env), math.prod(self.modes), mine
        if ranks is not None:
            rows = collectives.all_gather_dim(env.xp, ranks, mine, 0, count, what=env.random.path)
        return rows.transpose(1, 2, 0, 3).reshape(*mine.shape[1:3], *self.modes, 2)


class PointwiseConv(Layer):
    """Convolution with a window of one cell: multiplies the channels of each cell of (samples, in_channels, *cells) by
    the same matrix, and adds a bias.

    The parameters `weight (out_channels, in_channels, 1)` and `bias (out_channels,)`, and their initial values, are the
    same as in PyTorch's Conv1d with kernel_size 1.

    Parameters
    ----------
    in_channels, out_channels : size of dim 1 of the input and of the output
    bias : whether there is a bias; default True
    """

    fields = True
    init = None

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True) -> None:
        require_positive(self, in_channels=in_channels, out_channels=out_channels)
        self.in_channels, self.out_channels, self.bias = in_channels, out_channels, bool(bias)

    def specs(self) -> dict[str, ParameterSpec]:
        return make_conv_specs(self, (self.out_channels, self.in_channels, 1))

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim < 3 or x.shape[1] != self.in_channels:
            raise ShapeError(f"{self!r} wants (samples, {self.in_channels}, *cells), got {tuple(x.shape)}")
        y = batched_matmul_keeping_dtype(env.xp, p["weight"][None, :, :, 0], _flatten_cells(x))
        if self.bias:
            y += p["bias"][:, None]
        return y.reshape(x.shape[0], self.out_channels, *x.shape[2:]), (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,) = saved
        return batched_matmul_keeping_dtype(
            env.xp, p["weight"][None, :, :, 0].swapaxes(1, 2), _flatten_cells(dy)
        ).reshape(x.shape), (x, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, dy = kept
        if get_device_of_array(dy).has_sum_kernels:
            into, window = (
                (get_gradient_and_whether_to_add(g, "weight"), get_gradient_and_whether_to_add(g, "bias")),
                WindowStrides((1,), (1,), (1,), (0,), 1),
            )
            correlate_backward_params(env.xp, _flatten_cells(x), _flatten_cells(dy), window, *into)
            return
        if "weight" in g:
            a, b = (kernels.to_float32(env.xp, _flatten_cells(v)) for v in (dy, x))
            g["weight"][...] += env.xp.matmul(a, b.swapaxes(1, 2)).sum(axis=0)[:, :, None].astype(x.dtype, copy=False)
        if "bias" in g:
            add_sum_over_dims_into(env.xp, g["bias"], dy, (0, *range(2, dy.ndim)))


def _flatten_cells(x: Array) -> Array:
    """Reshape (samples, channels, *cells) to (samples, channels, cells)."""
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:]))


class ChannelScale(Layer):
    """Multiplies each channel of (samples, channels, *cells) by a learned factor. The factors are the parameter `weight
    (1, channels, 1, ...)`.

    Parameters
    ----------
    channels : size of dim 1
    dims : number of cell dims
    initial : initial value of the factors; default 1
    """

    fields = True

    def __init__(self, channels: int, dims: int, initial: float = 1.0) -> None:
        require_positive(self, channels=channels, dims=dims)
        require_finite_arguments(self, initial=initial)
        self.channels, self.dims, self.initial = channels, dims, float(initial)

    def specs(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec((1, self.channels, *(1,) * self.dims), Constant(self.initial))}

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_field_shape(self, x, self.dims, self.channels)
        return x * p["weight"], (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return dy * p["weight"], (*saved, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, dy = kept
        add_sum_over_dims_into(env.xp, g["weight"].reshape(-1), x * dy, (0, *range(2, dy.ndim)))


class GridEmbedding(FieldLayer):
    """Appends the position of each cell to the channels of (samples, channels, *cells), as one channel per cell dim.

    The position of cell i along a dim of n cells is i / n. If the field is partitioned, i and n refer to the full
    field."""

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        xp, parts = env.xp, self.get_partition(x)
        found = [x]
        for d, cuts in enumerate(parts.cuts):
            shape = [1] * x.ndim
            shape[d + 2] = x.shape[d + 2]
            at = xp.arange(*get_local_range(env, cuts, d), dtype=np.float64) / max(cuts[-1], 1)
            places = xp.zeros((x.shape[0], 1, *x.shape[2:]), dtype=x.dtype)
            places += at.astype(x.dtype).reshape(shape)
            found.append(places)
        return concatenate_on_device(xp, found, 1), x.shape[1]

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return env.xp.ascontiguousarray(dy[:, :saved]), ()


class FNO(Graph):
    """Fourier neural operator over (samples, in_channels, *cells) (Li et al. 2021), with the architecture of
    neuraloperator.

    First, an MLP lifts the input channels and positions to `width` channels. Each block then sums a `SpectralConv` and
    a `PointwiseConv` of its input, applies a two-layer pointwise MLP to the sum, and adds a `ChannelScale` of the
    block's input. Finally, a projection MLP maps to out_channels.

    Parameters
    ----------
    in_channels, out_channels : number of channels of the input and of the output field
    n_modes : number of modes kept along each dim
    width : number of channels in the blocks; default 32
    layers : number of blocks; default 4
    lifting, projection : number of hidden channels in the lifting and projection MLPs; if None (default), 2 width
    hidden : number of hidden channels in the MLPs of the blocks; if None (default), width / 2
    positions : whether to append the positions of cells to the input channels; default True
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        n_modes: int | tuple[int, ...],
        width: int = 32,
        layers: int = 4,
        lifting: int | None = None,
        projection: int | None = None,
        hidden: int | None = None,
        positions: bool = True,
    ) -> None:
        require_positive(self, in_channels=in_channels, out_channels=out_channels, width=width, layers=layers)
        self.in_channels, self.out_channels, self.n_modes = in_channels, out_channels, n_modes
        self.width, self.layers, self.positions = width, layers, bool(positions)
        self.lifting, self.projection, self.hidden = lifting, projection, hidden
        dims = len(n_modes) if isinstance(n_modes, tuple | list) else 1
        nodes: dict[str, tuple[Any, ...]] = {"embedding": (GridEmbedding(), "x")} if positions else {}
        first = in_channels + dims * self.positions
        nodes["lifting"] = _make_pointwise_mlp(first, lifting or 2 * width, width), "embedding" if positions else "x"
        last = "lifting"
        for i in range(layers):
            nodes[f"conv{i}"] = SpectralConv(width, width, n_modes), last
            nodes[f"skip{i}"] = PointwiseConv(width, width, bias=False), last
            nodes[f"sum{i}"] = Add(), f"conv{i}", f"skip{i}"
            through = f"sum{i}"
            if i < layers - 1:
                nodes[f"act{i}"] = GELU(), through
                through = f"act{i}"
            nodes[f"mlp{i}"] = _make_pointwise_mlp(width, hidden or max(width // 2, 1), width), through
            nodes[f"gate{i}"] = ChannelScale(width, dims), last
            nodes[f"out{i}"] = Add(), f"mlp{i}", f"gate{i}"
            last = f"out{i}"
            if i < layers - 1:
                nodes[f"end{i}"] = GELU(), last
                last = f"end{i}"
        nodes["projection"] = _make_pointwise_mlp(width, projection or 2 * width, out_channels), last
        super().__init__(nodes, outputs=("projection",))

    def __repr__(self) -> str:
        return format_constructor(self)


def _make_pointwise_mlp(channels: int, hidden: int, out_channels: int) -> Sequential:
    return Sequential(PointwiseConv(channels, hidden), GELU(), PointwiseConv(hidden, out_channels))


@lru_cache(256)
def _make_fourier_matrices(start: int, stop: int, n: int, k: int, is_last_dim: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return two matrices for one dim of n cells: the first transforms the cells [start, stop) to k Fourier modes, and
    the second transforms the modes back to these cells.

    Real and imaginary parts are interleaved. Modes that do not exist in a field of n cells are 0. If `is_last_dim`, the
    input is real, so positive modes also stand for their complex conjugates, and the first matrix is (cells, 2 modes).
    Otherwise, it is (2 cells, 2 modes)."""
    modes = np.arange(k) - (0 if is_last_dim else k // 2)
    turns = np.outer(np.arange(start, stop), modes) % n * (2 * np.pi / n)
    there = modes <= n // 2 if is_last_dim else (-(n // 2) <= modes) & (modes <= (n - 1) // 2)
    cosine, sine = np.cos(turns) * there, np.sin(turns) * there
    if is_last_dim:
        twice = np.where((modes == 0) | (2 * modes == n), 1.0, 2.0)
        to = np.stack([cosine, -sine], axis=-1).reshape(stop - start, 2 * k) / n
        back = np.stack([cosine * twice, -sine * twice], axis=-1).reshape(stop - start, 2 * k)
        return to, back.T
    # before they are reshaped, both matrices have the dims (cells, 2, modes, 2)
    to = np.stack([np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)], axis=1) / n
    back = np.stack([np.stack([cosine, sine], -1), np.stack([-sine, cosine], -1)], axis=1)
    return to.reshape(2 * (stop - start), 2 * k), back.transpose(2, 1, 0, 3).reshape(2 * k, -1)


def _transform_to_modes(xp: Any, x: Array, tables: list[Array]) -> Array:
    """Transform cells (samples, channels, *cells) to Fourier modes (samples, channels, *modes, 2), one dim at a time,
    starting with the last dim."""
    y = x[..., None]
    for d in reversed(range(len(tables))):
        y = _multiply_complex_dim_by_matrix(xp, y, 2 + d, tables[d], 2)
    return y


def _transform_to_cells(xp: Any, modes: Array, tables: list[Array]) -> Array:
    """Transform Fourier modes (samples, channels, *modes, 2) to cells (samples, channels, *cells)."""
    y = modes
    for d, table in enumerate(tables):
        y = _multiply_complex_dim_by_matrix(xp, y, 2 + d, table, 1 if d == len(tables) - 1 else 2)
    return y[..., 0]


def _multiply_complex_dim_by_matrix(xp: Any, y: Array, dim: int, matrix: Array, result_parts: int) -> Array:
    """Multiply y by `matrix` along dim `dim` and the last dim, which are flattened into one. The last dim holds real
    and imaginary parts. Its size in the result is `result_parts`: 1 for real results, and 2 for complex ones."""
    turned = xp.moveaxis(y, dim, -2)
    shape = turned.shape[:-2]
    product = batched_matmul_keeping_dtype(xp, turned.reshape(math.prod(shape), matrix.shape[0]), matrix)
    return xp.moveaxis(product.reshape(*shape, matrix.shape[1] // result_parts, result_parts), -2, dim)


def _multiply_complex(xp: Any, rows: Array, w: Array) -> Array:
    """Return the complex product of each mode and its weights, as (modes, samples, out, 2). `rows` is a result of
    `_stack_complex_rows`, and `w` is (modes, in, 2 out)."""
    made = batched_matmul_keeping_dtype(xp, rows, w)
    real, imaginary = xp.split(made.reshape(*made.shape[:2], made.shape[2] // 2, 2), 2, axis=1)
    real[..., 0] -= imaginary[..., 1]
    real[..., 1] += imaginary[..., 0]
    return real


def _stack_complex_rows(xp: Any, x: Array) -> Array:
    """Reshape (modes, samples, channels, 2) to (modes, 2 samples, channels), with all real parts before all imaginary
    parts."""
    return xp.concatenate([x[..., 0], x[..., 1]], axis=1)


def _stack_gradient_rows(xp: Any, dy: Array) -> Array:
    """Return the gradients `dy` of complex results as (modes, 2 samples, 2 channels). The first half of the rows is for
    the real parts of the inputs, and the second half is for the imaginary parts."""
    other = xp.stack([dy[..., 1], -dy[..., 0]], axis=-1)
    return xp.concatenate([dy, other], axis=1).reshape(len(dy), 2 * dy.shape[1], 2 * dy.shape[2])
