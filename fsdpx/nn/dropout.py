"""Dropout: elements set to zero at random when training, the others scaled up."""

from collections.abc import Mapping
from typing import Any

from fsdpx.array import kernels
from fsdpx.array.namespace import namespace_of
from fsdpx.nn.cut import share
from fsdpx.nn.layer import Array, Env, Layer, Params, fraction

__all__ = ["CutDropout", "Dropout", "apply_mask", "keep_mask"]


class Dropout(Layer):
    """Each element is kept with probability 1 - p and then divided by 1 - p (Srivastava et al. 2014).

    The mask depends on the seed, the layer's path, the step and the element's place in the global batch, not on how
    the batch is cut among ranks.

    Parameters
    ----------
    p : probability that an element is set to 0
    """

    runs = ("drop", "drop_backward")
    caches = True  # it does nothing when not training

    def __init__(self, p: float = 0.5) -> None:
        fraction(self, p=p)
        self.p = float(p)

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        if not env.training or self.p == 0.0:
            return x, ()
        y, keep = self._drop(env, x)
        return y, (keep,)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        return (kernels.drop_backward(env.xp, dy, saved[0], self.p) if saved else dy), ()

    def _drop(self, env: Env, x: Array) -> tuple[Array, Array]:
        """The result and the mask."""
        return kernels.drop(env.xp, x, env.random.stretch(x.shape), self.p)


class CutDropout(Dropout):
    """`Dropout` of an array that is cut over the tensor axis, with the mask that a single rank would have.

    Parameters
    ----------
    p : probability that an element is set to 0
    dim : the dim that is cut
    total : size of `dim` in the full array; None: it is the sequence, cut as `Env.place` has it
    grain : with `total`: elements that stay on one rank, as `Cut` has it
    """

    def __init__(self, p: float = 0.5, dim: int = 1, total: int | None = None, grain: int = 1) -> None:
        super().__init__(p)
        self.dim, self.total, self.grain = dim, total, grain

    def _drop(self, env: Env, x: Array) -> tuple[Array, Array]:
        if env.mesh.tensor.size == 1:
            return super()._drop(env, x)
        keep = keep_mask(env, x.shape, self.p, self._place(env, x))
        return apply_mask(x, keep, self.p), keep

    def _place(self, env: Env, x: Array) -> dict[int, tuple[int, int]]:
        comm, dim = env.mesh.tensor, self.dim % x.ndim
        if self.total is None:
            return {dim: env.place(x.shape[dim])}
        start, _ = share(self.total // self.grain, comm.rank, comm.size)
        return {dim: (start * self.grain, self.total)}


def keep_mask(
    env: Env, shape: tuple[int, ...], drop: float, cuts: Mapping[int, tuple[int, int]] | None = None
) -> Array:
    """True where an element is kept; dim 0 of `shape` is samples. cuts: as in `Random.subarray`."""
    if cuts:
        return env.random.subarray(tuple(shape), cuts).fractions(env.xp) >= drop
    return env.random.uniform(env.xp, tuple(shape)) >= drop


def apply_mask(x: Array, keep: Array, drop: float) -> Array:
    """`x` where kept, scaled so that its mean stays."""
    return kernels.drop_backward(namespace_of(x), x, keep, drop)
