"""Elementwise layers: activations, softmax and dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdpx.core.array import kernels
from fsdpx.core.array.namespace import namespace_of
from fsdpx.core.array.random import NumberRange
from fsdpx.errors import ConfigError, ShapeError
from fsdpx.nn.layer import Array, Layer, LayerContext, Params, ShardedLayer, require_fraction
from fsdpx.nn.shard_specs import (
    FieldPartition,
    ShardedFeatures,
    ShardedSequence,
    ShardingContext,
    bind_partition,
    shard_bounds,
)

__all__ = [
    "GELU", "Dropout", "ReLU", "ShardedDropout", "SiLU", "Sigmoid", "Softmax", "Tanh", "apply_dropout_mask",
    "make_activation", "make_keep_mask",
]  # fmt: skip


class ReLU(Layer):
    """Rectified linear unit: max(x, 0) for each element, with gradient 0 at x = 0."""

    acts_on = "element"
    kernel_names = ("relu", "relu_backward")

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        y = kernels.relu(env.xp, x)
        # saving y takes no additional memory, because the next layer saves the same array anyway, as its input
        return y, (y,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return kernels.relu_backward(env.xp, saved[0], dy), ()


class GELU(Layer):
    """Gaussian error linear unit (Hendrycks and Gimpel 2016): `x * Phi(x)` for each element, where Phi is the
    cumulative distribution function of the standard normal distribution.

    Parameters
    ----------
    approximate : "none" for the exact function, or "tanh" for `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`
    """

    acts_on = "element"

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ConfigError(f"GELU: approximate must be 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate
        form = "" if approximate == "none" else f" {approximate}"
        self.kernel_names = (f"gelu{form}", f"gelu_backward{form}")

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return kernels.gelu(env.xp, x, self.approximate), (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return kernels.gelu_backward(env.xp, saved[0], dy, self.approximate), ()


class SiLU(Layer):
    """Sigmoid linear unit, also called swish: `x * sigmoid(x)` for each element."""

    acts_on = "element"
    kernel_names = ("silu", "silu_backward")

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        return kernels.silu(env.xp, x), (x,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return kernels.silu_backward(env.xp, saved[0], dy), ()


class Tanh(Layer):
    """Hyperbolic tangent of each element."""

    acts_on = "element"
    kernel_names = ("tanh_backward",)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        y = env.xp.tanh(x)
        return y, (y,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return kernels.tanh_backward(env.xp, saved[0], dy), ()


class Sigmoid(Layer):
    """Logistic sigmoid of each element, 1 / (1 + exp(-x)), computed without overflow."""

    acts_on = "element"
    kernel_names = ("sigmoid", "sigmoid_backward")

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        y = kernels.sigmoid(env.xp, x)
        return y, (y,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return kernels.sigmoid_backward(env.xp, saved[0], dy), ()


class Softmax(Layer):
    """Softmax along one dim: exp(x) divided by the sum of exp(x) over that dim.

    Parameters
    ----------
    dim : the dim along which the results sum to 1; must not be 0, the sample dim
    """

    kernel_names = ("softmax", "softmax_backward")

    def __init__(self, dim: int = -1) -> None:
        if dim == 0:
            raise ConfigError("Softmax: dim 0 is samples; choose a dim that lies within one sample")
        self.dim = dim
        self.acts_on = "position" if dim == -1 else "sample"

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        y = self._apply_kernel_by_rows(env, kernels.softmax, x)
        return y, (y,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return self._apply_kernel_by_rows(env, kernels.softmax_backward, saved[0], dy), ()

    def _apply_kernel_by_rows(self, env: LayerContext, kernel: Any, *arrays: Array) -> Array:
        """Apply a kernel that works on the rows of a matrix: move `self.dim` to the end, flatten all other dims, and
        restore the shape of the result."""
        if self.dim == -arrays[0].ndim:
            raise ShapeError(f"{self!r}: dim {self.dim} of {-self.dim} dims is samples; choose a dim within one sample")
        turned = [env.xp.moveaxis(a, self.dim, -1) for a in arrays]
        shape = turned[0].shape
        rows = kernel(env.xp, *(a.reshape(-1, shape[-1]) for a in turned))
        return env.xp.moveaxis(rows.reshape(shape), -1, self.dim)


ACTIVATIONS: dict[str, Callable[[], Layer]] = {
    "gelu": GELU,
    "gelu_new": lambda: GELU("tanh"),
    "gelu_pytorch_tanh": lambda: GELU("tanh"),
    "relu": ReLU,
    "silu": SiLU,
    "tanh": Tanh,
}
"""Activation layers, keyed by the names used in model configurations."""


def make_activation(owner: object, name: str) -> Layer:
    """Return a new activation layer for a name used in model configurations, such as "gelu". Raise ConfigError for an
    unknown name; the message names the class of `owner`."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"{type(owner).__name__}: activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]()


class Dropout(Layer):
    """Sets each element to 0 with probability p, and divides the other elements by 1 - p (Srivastava et al. 2014).

    The mask depends on the seed, the layer's path, the step and the index of the element in the global batch. It does
    not depend on how the batch is split over ranks. A ghost cell of a field gets the same mask as the original cell on
    the rank that owns the cell.

    Parameters
    ----------
    p : probability that an element is set to 0
    """

    takes_ghosts = True
    kernel_names = ("drop", "drop_backward")
    caches = True  # text generation with a cache never trains, so dropout is inactive there
    parts: FieldPartition | None = None

    def __init__(self, p: float = 0.5) -> None:
        require_fraction(self, p=p)
        self.p = float(p)

    def shard_over_ranks(self, request: ShardingContext) -> ShardedLayer:
        kind = request.kinds[0]
        if isinstance(kind, FieldPartition) and type(self) is Dropout:
            request.require_no_tensor_plan_mark(self)
            return ShardedLayer(bind_partition(self, kind), kind)
        if (
            type(self) is not Dropout
            or request.mark is not None
            or not isinstance(kind, ShardedSequence | ShardedFeatures)
        ):
            return super().shard_over_ranks(request)
        if isinstance(kind, ShardedSequence):
            return ShardedLayer(ShardedDropout(self.p, 1), kind)
        if kind.blocks != 1:
            location = f"{request.path!r} {self!r}"
            raise ConfigError(f"{location} reads {kind} in {kind.blocks} blocks: put it where they are closed")
        return ShardedLayer(ShardedDropout(self.p, -1, kind.total, kind.grain), kind)

    def forward(self, env: LayerContext, p: Params, x: Array) -> tuple[Array, Any]:
        if not env.training or self.p == 0.0:
            return x, ()
        y, keep = self._drop_elements(env, x)
        return y, (keep,)

    def backward_input(self, env: LayerContext, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return (kernels.drop_backward(env.xp, dy, saved[0], self.p) if saved else dy), ()

    def _drop_elements(self, env: LayerContext, x: Array) -> tuple[Array, Array]:
        """Return x after dropout, and the boolean mask of kept elements. If x is sharded, the mask is this rank's
        slice of the mask for the full array."""
        numbers = self._get_numbers(env, x)
        if isinstance(numbers, NumberRange):
            return kernels.drop(env.xp, x, numbers, self.p)
        keep = numbers.make_fractions(env.xp) >= self.p
        return apply_dropout_mask(x, keep, self.p), keep

    def _get_numbers(self, env: LayerContext, x: Array) -> Any:
        """Return random numbers for this rank's elements of x. If x is a shard, each element gets the same number that
        it would get if one rank held the full array."""
        if self.parts is None:
            return env.random.get_number_range(x.shape)
        return self.parts.get_random_numbers(env.random, tuple(x.shape), env.mesh.domain)


class ShardedDropout(Dropout):
    """`Dropout` of an array that is sharded over the tensor axis. Each rank uses its slice of the mask for the full
    array, so results do not depend on the number of ranks.

    Parameters
    ----------
    p : probability that an element is set to 0
    dim : the sharded dim
    total : size of `dim` in the full array; if None, `dim` must be the sequence dim, whose full size is taken from
        `LayerContext.sequence_offset`
    grain : number of consecutive elements of `dim` that stay on one rank, used only if `total` is given; see
        `ShardSpec`
    """

    def __init__(self, p: float = 0.5, dim: int = 1, total: int | None = None, grain: int = 1) -> None:
        super().__init__(p)
        self.dim, self.total, self.grain = dim, total, grain

    def _get_numbers(self, env: LayerContext, x: Array) -> Any:
        comm, dim, shape = env.mesh.tensor, self.dim % x.ndim, tuple(x.shape)
        if comm.size == 1:
            return env.random.get_number_range(shape)
        if self.total is None:
            return env.random.get_number_subarray(shape, {dim: env.sequence_offset(shape[dim])})
        start, _ = shard_bounds(self.total // self.grain, comm.rank, comm.size)
        return env.random.get_number_subarray(shape, {dim: (start * self.grain, self.total)})


def make_keep_mask(
    env: LayerContext, shape: tuple[int, ...], drop: float, cuts: Mapping[int, tuple[int, int]] | None = None
) -> Array:
    """Return a random boolean mask of the given shape. Each element is False with probability `drop`. Dim 0 of `shape`
    is the sample dim.

    If the array is sharded, `cuts` contains this rank's range along each sharded dim, as {dim: (first index, size of
    the full dim)}."""
    if cuts:
        return env.random.get_number_subarray(tuple(shape), cuts).make_fractions(env.xp) >= drop
    return env.random.uniform(env.xp, tuple(shape)) >= drop


def apply_dropout_mask(x: Array, keep: Array, drop: float) -> Array:
    """Return `x / (1 - drop)` where `keep` is True, and 0 elsewhere. The division preserves the expected value."""
    return kernels.drop_backward(namespace_of(x), x, keep, drop)
