"""Random numbers by position: dropout and normal numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.array.kernels.dispatch import kernel
from fsdpx.array.random import Stretch

__all__ = ["SHIFT", "TAIL32", "TAIL64", "density", "drop", "drop_backward", "integral", "keep_mask", "tail"]

SHIFT = 4.0
LIMIT = 40.0  # density(LIMIT) is 0
TAIL64 = (
    0.7552851304157514, -0.607896641971893, 0.3871374007422266, -0.1865218579595787, 0.06039657489036092,
    -0.007540188968891619, -0.0034796923566515025, 0.0016308184854735856, 0.00013334420916014778,
    -0.00023109513778728935, -1.907676030719098e-06, 3.514560235904452e-05, 7.146021531267462e-07,
    -5.922893777541928e-06, -6.249551077565178e-07, 1.026984070143193e-06, 2.647337281979868e-07,
    -1.622316320853567e-07, -7.878360342693638e-08, 1.9569608939974048e-08, 1.60673869573294e-08,
    -1.277235143295772e-09, -1.6886576966786735e-09,
)  # fmt: skip
TAIL32 = (
    0.7552851438522339, -0.6078963875770569, 0.38713738322257996, -0.18652671575546265, 0.060396648943424225,
    -0.007512231357395649, -0.0034799545537680387, 0.0015637868782505393, 0.00013365338963922113,
    -0.00015732056635897607, -1.7310823068328318e-06,
)  # fmt: skip


def polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """Horner's rule, in the dtype of x."""
    result = x * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        result *= x
        result += c
    return result


def density(xp: Any, x: Any) -> Any:
    """exp(-x^2 / 2), without its constant, as exp of a square without rounding times exp of a small rest (Cody 1969):
    in the tail the rounding of x^2 would count."""
    x = xp.clip(x, -LIMIT, LIMIT)
    near = xp.rint(x * 16.0) * 0.0625
    return xp.exp(near * near * -0.5) * xp.exp((x - near) * (x + near) * -0.5)


def tail(xp: Any, x: Any, bell: Any) -> Any:
    """Phi(-|x|), given `bell = density(x)`."""
    inverse = 1.0 / (xp.abs(x) + SHIFT)
    t = 1.0 - (2.0 * SHIFT) * inverse
    return polynomial(t, TAIL32 if x.dtype == np.float32 else TAIL64) * inverse * bell


def integral(xp: Any, x: Any, bell: Any) -> Any:
    """Phi(x), given `bell = density(x)`."""
    below = tail(xp, x, bell)
    return xp.where(x < 0, below, 1.0 - below)


def keep_mask(xp: Any, numbers: Stretch, shape: tuple[int, ...], p: float) -> Any:
    """True, with probability 1 - p, where an element is kept: where its random number is p or more."""
    return numbers.fractions(xp).reshape(shape) >= p


@kernel()
def drop(xp: Any, x: Any, numbers: Stretch, p: float) -> tuple[Any, Any]:
    """x / (1 - p) where kept, else 0, and the mask; element i is compared with number i."""
    keep = keep_mask(xp, numbers, x.shape, p)
    return drop_backward.__wrapped__(xp, x, keep, p), keep  # type: ignore[attr-defined]


@kernel()
def drop_backward(xp: Any, dy: Any, keep: Any, p: float) -> Any:
    """dy / (1 - p) where kept, else 0; with a given mask this is also forward."""
    dx = dy * keep
    dx *= scale(p)
    return dx


def scale(p: float) -> float:
    """The factor that preserves the mean; 1 at p = 1, where no element is kept."""
    return 1.0 / (1.0 - p) if p < 1.0 else 1.0


def threshold(p: float) -> int:
    """The least 24-bit number that means "kept": `number 2^-24 >= p` in float32."""
    return math.ceil(float(np.float32(p)) * 2.0**24)
