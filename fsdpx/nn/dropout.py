"""Dropout: elements set to zero at random when training, the others scaled up."""

from collections.abc import Mapping
from typing import Any

from fsdpx.nn.check import fraction
from fsdpx.nn.layer import Array, Env, Layer

__all__ = ["Dropout", "apply_mask", "keep_mask"]


class Dropout(Layer):
    """Each element is kept with probability 1 - p and then divided by 1 - p (Srivastava et al. 2014).

    Whether an element is kept depends on the seed, the layer's path, the step and the element's place in the
    global batch, never on how the batch is cut among ranks.
    """

    def __init__(self, p: float = 0.5) -> None:
        fraction(self, p=p)
        self.p = float(p)

    def forward(self, env: Env, p: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        if not env.training or self.p == 0.0:
            return x, ()
        keep = keep_mask(env, x.shape, self.p)
        return apply_mask(x, keep, self.p), (keep,)

    def backward_input(self, env: Env, p: Mapping[str, Array], saved: Any, dy: Array) -> tuple[Array, Any]:
        return (apply_mask(dy, saved[0], self.p) if saved else dy), ()


def keep_mask(env: Env, shape: tuple[int, ...], drop: float) -> Array:
    """True where an element is kept; dim 0 of `shape` is samples."""
    return env.random.uniform(env.xp, tuple(shape)) >= drop


def apply_mask(x: Array, keep: Array, drop: float) -> Array:
    """`x` where kept, scaled so that its mean stays."""
    y = x * keep
    if drop < 1.0:
        y *= 1.0 / (1.0 - drop)
    return y
