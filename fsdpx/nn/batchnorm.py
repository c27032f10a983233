"""BatchNorm: a norm over the samples of the whole global batch."""

import math
from typing import Any, ClassVar

import numpy as np

from fsdpx.array import kernels
from fsdpx.errors import ShapeError
from fsdpx.nn.check import fraction, positive
from fsdpx.nn.init import ones, zeros
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec
from fsdpx.nn.numeric import wide

__all__ = ["BatchNorm"]


class BatchNorm(Layer):
    """(x - mean) / sqrt(var + eps) * weight + bias per channel, dim 1 (Ioffe and Szegedy 2015).

    `(samples, num_features, ...)` of any number of dims. When training, mean and variance are those of the
    global batch: two all-reduces over the data axis in forward (the mean, then the squares about it, so that
    nothing cancels) and one in backward, of 8 (num_features + 1), 8 num_features and 16 num_features bytes.
    Ranks may hold different numbers of samples, or none. Evaluation uses the state `running_mean` and `running_var`
    (unbiased), which a training forward updates, but not one that is recomputed.

    Parameters
    ----------
    num_features : size of dim 1
    eps : added to the variance
    momentum : weight of the new statistics in the running ones
    affine : whether it has `weight` (ones at first) and `bias` (zeros), both `(num_features,)`
    """

    collective = True
    aliases: ClassVar = {"num_batches_tracked": None}
    runs = ("channel_affine", "channel_norm_backward", "channel_squares", "channel_sums", "channel_sums_with")

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        positive(self, num_features=num_features)
        fraction(self, momentum=momentum)
        self.num_features = num_features
        self.eps = float(eps)
        self.momentum = float(momentum)
        self.affine = bool(affine)

    def specs(self) -> dict[str, Spec]:
        shape = (self.num_features,)
        affine = {"weight": Spec(shape, ones, norm=True), "bias": Spec(shape, zeros, norm=True)} if self.affine else {}
        state = {"running_mean": Spec(shape, zeros, state=True), "running_var": Spec(shape, ones, state=True)}
        return affine | state

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        if x.ndim < 2 or x.shape[1] != self.num_features:
            wanted = f"(samples, {self.num_features}, ...)"
            raise ShapeError(f"{self!r} wants an input of shape {wanted}, got {tuple(x.shape)}")
        if env.training:
            mean, var, count = self._statistics(env, x)
            if not env.recomputing:
                self._move(p, mean, var, count)
        else:
            mean, var, count = p["running_mean"], p["running_var"], 0.0
        rstd = 1.0 / env.xp.sqrt(var.astype(np.float64) + self.eps)
        scale, shift = (rstd * p["weight"], p["bias"]) if self.affine else (rstd, env.xp.zeros_like(rstd))
        return kernels.channel_affine(env.xp, x, *_beside(x, mean, scale, shift)), (x, mean, rstd, count)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[Array, Any]:
        x, mean, rstd, count = saved
        sums = kernels.channel_sums_with(env.xp, dy, x, *_beside(x, mean, rstd))
        if env.training:
            whole = sums.copy()
            env.mesh.data.all_reduce(whole, what="BatchNorm backward").wait()
            whole /= max(count, 1.0)
        else:
            whole = env.xp.zeros_like(sums)
        along, across = whole[: self.num_features], whole[self.num_features :] * rstd
        scale = rstd * p["weight"] if self.affine else rstd
        channels = _beside(x, mean, scale, along, across)
        return kernels.channel_norm_backward(env.xp, dy, x, *channels), (sums,)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        (sums,) = kept
        if "bias" in g:
            g["bias"][...] += sums[: self.num_features].astype(g["bias"].dtype)
        if "weight" in g:
            g["weight"][...] += sums[self.num_features :].astype(g["weight"].dtype)

    def _statistics(self, env: Env, x: Array) -> tuple[Array, Array, float]:
        """Global mean and biased variance per channel in float64, and the number of elements of a channel."""
        here = env.xp.full((1,), float(x.shape[0] * math.prod(x.shape[2:])), dtype=np.float64)
        sums = env.xp.concatenate([kernels.channel_sums(env.xp, x), here])
        env.mesh.data.all_reduce(sums, what="BatchNorm mean").wait()
        count = float(sums[-1])
        mean = sums[:-1] / max(count, 1.0)
        squares = kernels.channel_squares(env.xp, x, *_beside(x, mean))
        env.mesh.data.all_reduce(squares, what="BatchNorm variance").wait()
        return mean, squares / max(count, 1.0), count

    def _move(self, p: Params, mean: Array, var: Array, count: float) -> None:
        if count == 0.0:
            return
        unbiased = var * (count / max(count - 1.0, 1.0))
        for running, now in ((p["running_mean"], mean), (p["running_var"], unbiased)):
            if running.dtype.itemsize < 4:  # rounded once
                moved = (1.0 - self.momentum) * running.astype(np.float64) + self.momentum * now
                running[...] = moved.astype(np.float32).astype(running.dtype)
                continue
            running *= 1.0 - self.momentum
            running += (self.momentum * now).astype(running.dtype)


def _beside(x: Array, *channels: Array) -> tuple[Array, ...]:
    """In the dtype in which x is computed."""
    return tuple(a.astype(wide(x.dtype), copy=False) for a in channels)
