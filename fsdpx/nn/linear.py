"""Linear layers, replicated or tensor-parallel (column-parallel and row-parallel)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.nn import collectives
from fsdpx.nn.gradient_accumulation import (
    add_linear_gradients,
    add_matmul_gradient,
    add_sum_over_dims_into,
    as_rows,
    linear_backward,
    linear_forward,
    matmul_in_dtype_of_first,
)
from fsdpx.nn.init import Init, uniform
from fsdpx.nn.layer import (
    Array,
    Layer,
    LayerContext,
    ParameterSpec,
    Params,
    ShardedLayer,
    require_last_dim,
    require_positive,
)
from fsdpx.nn.shard_specs import (
    ColumnParallel,
    Kind,
    Replicated,
    RowParallel,
    ShardedFeatures,
    ShardedSequence,
    ShardingContext,
    ShardSpec,
    VocabParallel,
)

__all__ = [
    "ColumnParallelLinear", "Linear", "RowParallelLinear", "ShardedLinear", "make_call_label", "require_known_length",
]  # fmt: skip


class Linear(Layer):
    """Fully connected layer, `y = x @ weight.T + bias`: `(samples, ..., in_features)` -> `(samples, ...,
    out_features)`.

    Parameters
    ----------
    in_features, out_features : sizes of the last dims of the input and the result; `weight` is (out_features,
        in_features)
    bias : whether the layer has a `bias (out_features,)`
    init : initializer of `weight`; if None, U(-k, k) with k = 1/sqrt(in_features), as in PyTorch
    bias_init : initializer of `bias`; if None, U(-k, k) with the same k
    """

    acts_on = "position"
    kernel_names: tuple[str, ...] = ("linear",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init: Init | None = None,
        bias_init: Init | None = None,
    ) -> None:
        require_positive(self, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.bias = bool(bias)
        self.init, self.bias_init = init, bias_init

    def specs(self) -> dict[str, ParameterSpec]:
        default = uniform(1.0 / math.sqrt(self.in_features))
        specs = {"weight": ParameterSpec((self.out_features, self.in_features), self.init or default)}
        if self.bias:
            specs["bias"] = ParameterSpec((self.out_features,), self.bias_init or default)
        return specs

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        if type(self) is not Linear:  # a subclass must not be replaced, since it may compute something else
            return super().shard_over_ranks(request)
        return self._shard_by_mark(request)

    def _shard_by_mark(self, request: ShardingContext) -> ShardedLayer:
        mark = request.mark
        if isinstance(mark, RowParallel):
            return self._shard_as_row(request, request.kinds[0])
        if isinstance(mark, ColumnParallel | VocabParallel):
            return self._shard_as_column(
                request,
                request.require_unsharded_features(self),
                mark if isinstance(mark, ColumnParallel) else ColumnParallel(),
            )
        return Layer.shard_over_ranks(self, request)

    def _shard_as_column(self, request: ShardingContext, kind: Kind, mark: ColumnParallel) -> ShardedLayer:
        count, rest = divmod(self.out_features, mark.blocks * mark.grain)
        if rest:
            raise ConfigError(
                f"{request.path!r} {self!r}: its {self.out_features} results are not {mark.blocks} blocks of multiples "
                f"of {mark.grain}"
            )
        request.require_at_least_one_per_rank(count, "results" if mark.grain == 1 else f"runs of {mark.grain} results")
        options = {"gather_output": mark.gather_output, "blocks": mark.blocks, "grain": mark.grain}
        new, partial = self._make_column_parallel(sequence=isinstance(kind, ShardedSequence), **options)
        ends = isinstance(request.mark, VocabParallel)
        features = ShardedFeatures(self.out_features, mark.blocks, mark.grain, request.path, ends)
        return ShardedLayer(new, Replicated() if mark.gather_output else features, partial)

    def _shard_as_row(self, request: ShardingContext, kind: Kind) -> ShardedLayer:
        location = f"{request.path!r} {self!r}"
        if not isinstance(kind, ShardedFeatures):
            raise ConfigError(
                f"{location} is a RowParallel, but reads {kind}: make the Linear before it a ColumnParallel, so that "
                "its features are "
                "cut"
            )
        if kind.blocks != 1 or kind.total != self.in_features:
            raise ConfigError(
                f"{location} cannot close {kind}: they are {kind.total} in {kind.blocks} blocks, and a RowParallel "
                "reads "
                f"{self.in_features} in one block"
            )
        outside = request.unsharded_kind
        new, partial = self._make_row_parallel(sequence=isinstance(outside, ShardedSequence), grain=kind.grain)
        return ShardedLayer(new, outside, partial)

    def _make_column_parallel(self, **options: Any) -> tuple[Layer, tuple[str, ...]]:
        """Return the column-parallel version of this layer, and the names of the parameters that have only a partial
        gradient on each rank."""
        size = (self.in_features, self.out_features, self.bias)
        return ColumnParallelLinear(*size, **options, init=self.init, bias_init=self.bias_init), ()

    def _make_row_parallel(self, sequence: bool, grain: int) -> tuple[Layer, tuple[str, ...]]:
        """Return the row-parallel version of this layer, and the names of the parameters that have only a partial
        gradient on each rank."""
        size = (self.in_features, self.out_features, self.bias, sequence, grain)
        partial = ("bias",) if sequence and self.bias else ()
        return RowParallelLinear(*size, init=self.init, bias_init=self.bias_init), partial

    def forward_without_bias(self, env: LayerContext, p: Params, x: Array) -> Array:
        """Return `x @ weight.T`, without the bias.

        Parameters
        ----------
        env : array namespace and mesh
        p : this layer's parameters
        x : input, (samples, ..., in_features)

        Returns
        -------
        array
            (samples, ..., out_features)
        """
        require_last_dim(self, x, self.in_features)
        return linear_forward(env.xp, as_rows(x), p["weight"], None).reshape(*x.shape[:-1], self.out_features)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        bias = p["bias"] if self.bias else None
        if x.ndim == 2 and x.shape[1] == self.in_features:  # skip reshapes, which take noticeable time in small layers
            return linear_forward(env.xp, x, p["weight"], bias), (x,)
        require_last_dim(self, x, self.in_features)
        return linear_forward(env.xp, as_rows(x), p["weight"], bias).reshape(*x.shape[:-1], self.out_features), (x,)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        (x,) = saved
        if x.ndim == 2:
            return linear_backward(env.xp, g, p["weight"], dy, x)
        return linear_backward(env.xp, g, p["weight"], as_rows(dy), as_rows(x)).reshape(x.shape)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (*saved, dy))

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,) = saved
        dx = matmul_in_dtype_of_first(env.xp, as_rows(dy), p["weight"])
        return dx if x.ndim == 2 else dx.reshape(x.shape), (x, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, dy = kept
        add_linear_gradients(env.xp, g, as_rows(dy), as_rows(x))


class ShardedLinear(Layer):
    """Base class for ColumnParallelLinear and RowParallelLinear. The class holds the options of the full Linear, and
    the options that define the sharding.

    The two subclasses form a pair, as in Megatron-LM (Shoeybi et al. 2019): between a ColumnParallelLinear and the
    following RowParallelLinear, activations are sharded along the features, and nothing is communicated. If `sequence`
    is true, activations outside the pair are sharded along dim 1 (Korthikanti et al. 2022). Each rank sends the
    following numbers of bytes, where n is the size in bytes of the full activation outside the pair, and N the number
    of ranks on the tensor axis:

                                  forward          backward
        ColumnParallelLinear              0                2n(N-1)/N
        RowParallelLinear                 2n(N-1)/N        0
        ColumnParallelLinear, sequence     n(N-1)/N         n(N-1)/N, and n(N-1)/N to gather its input once more
        RowParallelLinear, sequence        n(N-1)/N         n(N-1)/N"""

    kernel_names = ("linear",)

    def __init__(self, linear: Linear, sequence: bool, grain: int, cut: ShardSpec) -> None:
        self._linear, self._cut = linear, cut
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.init, self.bias_init = linear.init, linear.bias_init
        self.sequence, self.grain = bool(sequence), grain
        self.caches = not sequence
        cut.count_grains((linear.out_features, linear.in_features))

    def _multiply_shard(self, env: LayerContext, p: Params, x: Array, bias: Array | None) -> Array:
        """Return the product of x with this rank's shard of the weight, as a matrix (rows, features). In a
        column-parallel layer, this product is a shard of the result. In a row-parallel layer, it is a partial sum that
        must still be reduced over the ranks."""
        return linear_forward(env.xp, as_rows(x), p["weight"], bias)

    def _compute_input_gradient_rows(self, env: LayerContext, p: Params, dy: Array) -> Array:
        """Return this rank's contribution to the input gradient, as a matrix (rows, features). In a column-parallel
        layer, it is a partial sum that must still be reduced over the ranks. In a row-parallel layer, it is a shard of
        the gradient."""
        return matmul_in_dtype_of_first(env.xp, as_rows(dy), p["weight"])


class ColumnParallelLinear(ShardedLinear):
    """`Linear` whose `weight` and `bias` are sharded along dim 0: `(samples, ..., in_features)` ->
    `(samples, ..., this rank's shard of out_features)`.

    The backward pass all-reduces the gradient of the input while it computes the gradient of the weight.

    Parameters
    ----------
    in_features, out_features, bias, init, bias_init : arguments of the full layer, as in `Linear`
    gather_output : whether to all-gather the result, so that every rank has the full result; requires blocks = grain =
        1
    sequence : whether the input is sharded along dim 1; a sharded input is all-gathered for the matrix product, and
        once more in the backward pass
    blocks, grain : sharding of `out_features`, see `ShardSpec`
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        sequence: bool = False,
        blocks: int = 1,
        grain: int = 1,
        *,
        init: Init | None = None,
        bias_init: Init | None = None,
    ) -> None:
        require_positive(self, blocks=blocks, grain=grain)
        linear = Linear(in_features, out_features, bias, init=init, bias_init=bias_init)
        super().__init__(linear, sequence, grain, ShardSpec(0, blocks, grain))
        self.gather_output = bool(gather_output)
        self.blocks = blocks
        if gather_output and (blocks, grain) != (1, 1):
            raise ConfigError(f"{self!r}: gather_output works for blocks=1 and grain=1 only")

    def specs(self) -> dict[str, ParameterSpec]:
        return {name: replace(spec, cut=self._cut) for name, spec in self._linear.specs().items()}

    def forward_without_bias(self, env: LayerContext, p: Params, x: Array) -> Array:
        """Return `x @ weight.T`, without the bias, for this rank's shard of the features. Collective if `sequence` is
        true.

        Parameters
        ----------
        env : array namespace and mesh
        p : this rank's shards of the parameters
        x : input, (samples, ..., in_features), with only this rank's positions if `sequence` is true

        Returns
        -------
        array
            (samples, ..., features of this rank), with all positions
        """
        x = self._all_gather_input(env, x)
        return self._multiply_shard(env, p, x, None).reshape(*x.shape[:-1], p["weight"].shape[0])

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        full = self._all_gather_input(env, x)
        y = self._multiply_shard(env, p, full, p["bias"] if self.bias else None)
        y = y.reshape(*full.shape[:-1], p["weight"].shape[0])
        if self.gather_output:
            y = collectives.all_gather_replicated(
                env.xp, env.mesh.tensor, y, -1, self.out_features, what=make_call_label(env, "output")
            )
        return y, (x,)

    def backward(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> Array:
        (x,) = saved
        comm, dy = env.mesh.tensor, self._take_gradient_shard(env, dy)
        if comm.size == 1:
            return linear_backward(env.xp, g, p["weight"], as_rows(dy), as_rows(x)).reshape(x.shape)
        full = collectives.PendingCollective(None, lambda: x)
        if self.sequence and "weight" in g:
            full = collectives.start_all_gather_dim(env.xp, comm, x, 1, env.time, what=make_call_label(env, "input"))
        dx = self._start_reducing_input_gradient(env, p, dy)
        _add_gradients(env, g, dy, full.wait())
        return dx.wait()

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (*saved, self._take_gradient_shard(env, dy)))

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        dy = self._take_gradient_shard(env, dy)
        return self._start_reducing_input_gradient(env, p, dy).wait(), (*saved, dy)

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, dy = kept
        _add_gradients(env, g, dy, self._all_gather_input(env, x) if "weight" in g else x)

    def _all_gather_input(self, env: LayerContext, x: Array) -> Array:
        """Return the input with the full sequence along dim 1. Collective if `sequence` is true."""
        require_last_dim(self, x, self.in_features)
        if not self.sequence:
            return x
        return collectives.all_gather_dim(env.xp, env.mesh.tensor, x, 1, env.time, what=make_call_label(env, "input"))

    def _take_gradient_shard(self, env: LayerContext, dy: Array) -> Array:
        """Return the gradient of this rank's shard of the features, given the gradient `dy` of the layer's result."""
        return collectives.take_shard(env.xp, env.mesh.tensor, dy, -1) if self.gather_output else dy

    def _start_reducing_input_gradient(self, env: LayerContext, p: Params, dy: Array) -> collectives.PendingCollective:
        dx = self._compute_input_gradient_rows(env, p, dy).reshape(*dy.shape[:-1], self.in_features)
        comm, description = env.mesh.tensor, make_call_label(env, "input gradient")
        if self.sequence:
            return collectives.start_reduce_scatter_dim(env.xp, comm, dx, 1, what=description)
        return collectives.start_all_reduce_sum(env.xp, comm, dx, fresh=True, what=description)


class RowParallelLinear(ShardedLinear):
    """`Linear` whose `weight` is sharded along dim 1: `(samples, ..., this rank's shard of in_features)` ->
    `(samples, ..., out_features)`.

    The products of the ranks are summed over the tensor axis. Every rank holds the full `bias`, which is added after
    the sum.

    Parameters
    ----------
    in_features, out_features, bias, init, bias_init : arguments of the full layer, as in `Linear`
    sequence : whether to shard the result along dim 1; each rank then computes only the contribution of its own
        positions to the gradient of `bias`
    grain : number of consecutive elements of `in_features` that stay on one rank, see `ShardSpec`
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        sequence: bool = False,
        grain: int = 1,
        *,
        init: Init | None = None,
        bias_init: Init | None = None,
    ) -> None:
        require_positive(self, grain=grain)
        linear = Linear(in_features, out_features, bias, init=init, bias_init=bias_init)
        super().__init__(linear, sequence, grain, ShardSpec(1, 1, grain))

    def specs(self) -> dict[str, ParameterSpec]:
        specs = self._linear.specs()
        return specs | {"weight": replace(specs["weight"], cut=self._cut)}

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        require_last_dim(self, x, p["weight"].shape[1])
        bias, shape = p["bias"] if self.bias else None, (*x.shape[:-1], self.out_features)
        if env.mesh.tensor.size == 1:
            return self._multiply_shard(env, p, x, bias).reshape(shape), (x,)
        y = self._multiply_shard(env, p, x, None).reshape(shape)
        comm, description = env.mesh.tensor, make_call_label(env, "output")
        if self.sequence:
            y = collectives.reduce_scatter_dim(env.xp, comm, y, 1, what=description)
        else:
            y = collectives.all_reduce_sum(env.xp, comm, y, fresh=True, what=description)
        if bias is not None:
            y += bias
        return y, (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        (x,), full = saved, self._all_gather_gradient(env, dy)
        return self._compute_input_gradient_rows(env, p, full).reshape(x.shape), (x, full, dy)

    def backward_leaf(self, env: LayerContext, p: Params, g: Params, saved: Any, dy: Array) -> None:
        self.backward_params(env, g, (*saved, self._all_gather_gradient(env, dy), dy))

    def _all_gather_gradient(self, env: LayerContext, dy: Array) -> Array:
        """Return the gradient of the output for the full sequence (dim 1). Collective if `sequence` is true."""
        if not self.sequence:
            return dy
        return collectives.all_gather_dim(
            env.xp, env.mesh.tensor, dy, 1, env.time, what=make_call_label(env, "output gradient")
        )

    def backward_params(self, env: LayerContext, g: Params, kept: Any) -> None:
        x, full, dy = (as_rows(array) for array in kept)
        if not self.sequence:
            add_linear_gradients(env.xp, g, full, x)
            return
        add_matmul_gradient(env.xp, g, "weight", full.T, x)
        if "bias" in g:
            add_sum_over_dims_into(env.xp, g["bias"], dy, 0)


def _add_gradients(env: LayerContext, g: Params, dy: Array, x: Array) -> None:
    """Add the gradients of weight and bias to `g`. If the weight is frozen, only the gradient of the bias is added; `x`
    is then not needed, and may have only this rank's positions."""
    if x.shape[:-1] == dy.shape[:-1]:
        add_linear_gradients(env.xp, g, as_rows(dy), as_rows(x))
    elif "bias" in g:
        add_sum_over_dims_into(env.xp, g["bias"], as_rows(dy), 0)


def make_call_label(env: LayerContext, thing: str) -> str:
    """Return the label of a collective for error messages. The label consists of the layer's path and `thing`, a name
    for the array that is communicated."""
    return f"{env.random.path} {thing}" if env.random.path else thing


def require_known_length(env: LayerContext, x: Array, what: str) -> None:
    """Raise ShapeError unless the full length of a sequence is known. `x` is this rank's shard of the sequence along
    dim 1. The full length is `env.time` if that is set; otherwise, the shards of all ranks must have equal lengths.
    `what` describes the sequence in the message."""
    if env.time is None:
        collectives.require_divisible_dim(x.shape, 1, env.mesh.tensor.size, what)
    assert env.time in (None, x.shape[1]), f"{what}: a sequence of {x.shape[1]}, not {env.time}"
