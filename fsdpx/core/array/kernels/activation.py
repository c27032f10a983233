"""Elementwise kernels: activations, gated activations, and their fusion with residual and bias addition.

`recompute_gelu_and_backward` computes GELU again in the backward pass, so that the result of the forward pass need not
be saved."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel
from fsdpx.errors import ConfigError

__all__ = [
    "add", "add_bias", "bias_gelu", "gated", "gated_backward", "gelu", "gelu_backward",
    "recompute_gelu_and_backward", "relu", "relu_backward", "sigmoid", "silu", "silu_backward", "sum_rows",
]  # fmt: skip

SHIFT32, SHIFT64 = 2.9040000438690186, 4.0
LIMIT = 40.0  # unnormalized_gaussian_density(LIMIT) is 0
TAIL64 = (
    0.7552851304157514, -0.607896641971893, 0.3871374007422266, -0.1865218579595787, 0.06039657489036092,
    -0.007540188968891619, -0.0034796923566515025, 0.0016308184854735856, 0.00013334420916014778,
    -0.00023109513778728935, -1.907676030719098e-06, 3.514560235904452e-05, 7.146021531267462e-07,
    -5.922893777541928e-06, -6.249551077565178e-07, 1.026984070143193e-06, 2.647337281979868e-07,
    -1.622316320853567e-07, -7.878360342693638e-08, 1.9569608939974048e-08, 1.60673869573294e-08,
    -1.277235143295772e-09, -1.6886576966786735e-09,
)  # fmt: skip
TAIL32 = (
    0.7254358530044556, -0.4965156018733978, 0.21206937730312347, -0.03502287343144417, -0.013455594889819622,
    0.005713015794754028, 0.0017137873219326138, -0.000724705692846328, -0.0003135260776616633,
)  # fmt: skip


def evaluate_polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """Evaluate a polynomial at x by Horner's rule, in the dtype of x. The first coefficient is the constant term."""
    result = x * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        result *= x
        result += c
    return result


def unnormalized_gaussian_density(xp: Any, x: Any) -> Any:
    """Return exp(-x^2 / 2), the Gaussian density without its constant factor.

    The rounding error of x^2 would matter in the tail. To avoid it, x^2 is split into an exact square and a small
    remainder, and their exponentials are multiplied (Cody 1969).
    """
    x = xp.clip(x, -LIMIT, LIMIT)
    near = xp.rint(x * 16.0) * 0.0625
    return xp.exp(near * near * -0.5) * xp.exp((x - near) * (x + near) * -0.5)


def gaussian_tail(xp: Any, x: Any, bell: Any) -> Any:
    """Return Phi(-|x|), the tail probability of the normal distribution, given `bell =
    unnormalized_gaussian_density(x)`."""
    shift, coefficients = (SHIFT32, TAIL32) if x.dtype == np.float32 else (SHIFT64, TAIL64)
    inverse = 1.0 / (xp.abs(x) + shift)
    t = 1.0 - (2.0 * shift) * inverse
    return evaluate_polynomial(t, coefficients) * inverse * bell


def gaussian_cdf(xp: Any, x: Any, bell: Any) -> Any:
    """Return Phi(x), the normal cumulative distribution function, given `bell = unnormalized_gaussian_density(x)`."""
    below = gaussian_tail(xp, x, bell)
    return xp.where(x < 0, below, 1.0 - below)


GATED_FORMS = ("silu", "gelu", "gelu tanh")
"""Names of the activations that `gated` accepts. They stand for SwiGLU, GEGLU, and GEGLU with the tanh form of GELU."""


@kernel()
def gated(xp: Any, a: Any, b: Any, form: str = "silu") -> Any:
    """Return the result of a gated activation, `act(a) * b`, elementwise (Shazeer 2020). `form`, one of `GATED_FORMS`,
    names the function act."""
    return _apply_activation(xp, a, form) * b


@kernel(narrow=2)
def gated_backward(xp: Any, a: Any, b: Any, dy: Any, form: str = "silu") -> tuple[Any, Any]:
    """Return the gradients of `gated` with respect to a and b: `dy * b * act'(a)` and `dy * act(a)`."""
    plain = (silu_backward if form == "silu" else gelu_backward).__wrapped__  # type: ignore[attr-defined]
    da = plain(xp, a, dy * b) if form == "silu" else plain(xp, a, dy * b, get_gelu_approximation(form))
    return da, dy * _apply_activation(xp, a, form)


def get_gelu_approximation(form: str) -> str:
    """Return the argument `approximate` of `gelu` for the activation named `form`; raise ConfigError for an unknown
    name."""
    if form not in GATED_FORMS:
        raise ConfigError(f"gated: form must be one of {', '.join(map(repr, GATED_FORMS))}, got {form!r}")
    return "tanh" if form == "gelu tanh" else "none"


def _apply_activation(xp: Any, a: Any, form: str) -> Any:
    if form == "silu":
        return silu.__wrapped__(xp, a)  # type: ignore[attr-defined]
    return gelu.__wrapped__(xp, a, get_gelu_approximation(form))  # type: ignore[attr-defined]


CUBIC = 0.044715
# `SLOPE` includes a factor of 2, because `(1 + tanh(u)) / 2` is computed as `sigmoid(2 * u)` to avoid cancellation
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)


@kernel()
def relu(xp: Any, x: Any) -> Any:
    """Return max(x, 0)."""
    return xp.maximum(x, 0)


@kernel()
def relu_backward(xp: Any, y: Any, dy: Any) -> Any:
    """Return the gradient of `relu`: dy where the result y of `relu` is positive, and 0 elsewhere."""
    return xp.where(y > 0, dy, xp.zeros((), dtype=dy.dtype))


@kernel()
def sigmoid(xp: Any, x: Any) -> Any:
    """Return 1 / (1 + exp(-x)). It is computed from exp(-|x|), which cannot overflow."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x < 0, e, 1.0) / (e + 1.0)


@kernel()
def silu(xp: Any, x: Any) -> Any:
    """Return `x * sigmoid(x)` (Elfwing et al. 2018)."""
    return x * sigmoid.__wrapped__(xp, x)  # type: ignore[attr-defined]


@kernel()
def silu_backward(xp: Any, x: Any, dy: Any) -> Any:
    """Return the gradient of `silu`: `dy * (s + x * s * (1 - s))`, where `s = sigmoid(x)`."""
    s = sigmoid.__wrapped__(xp, x)  # type: ignore[attr-defined]
    return dy * (s + x * s * (1.0 - s))


@kernel()
def gelu(xp: Any, x: Any, approximate: str = "none") -> Any:
    """Return GELU(x), which is `x * Phi(x)` or, with approximate="tanh",
    `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))` (Hendrycks, Gimpel 2016)."""
    if is_exact_gelu(approximate):
        return x * gaussian_cdf(xp, x, unnormalized_gaussian_density(xp, x))
    return x * sigmoid.__wrapped__(xp, _tanh_argument(x))  # type: ignore[attr-defined]


@kernel()
def gelu_backward(xp: Any, x: Any, dy: Any, approximate: str = "none") -> Any:
    """Return the gradient of `gelu`: `dy * (Phi(x) + x * phi(x))`.

    For the tanh form, it is `dy * (s + x * s * (1 - s) * u')`, where `u = 2 * sqrt(2 / pi) * (x + 0.044715 * x^3)` and
    `s = sigmoid(u)`."""
    if is_exact_gelu(approximate):
        bell = unnormalized_gaussian_density(xp, x)
        return dy * (gaussian_cdf(xp, x, bell) + x * bell * DENSITY)
    s = sigmoid.__wrapped__(xp, _tanh_argument(x))  # type: ignore[attr-defined]
    slope = (x * x * (3.0 * CUBIC) + 1.0) * SLOPE
    return dy * (s + x * s * (1.0 - s) * slope)


@cache
def is_exact_gelu(approximate: str) -> bool:
    """Return True if `approximate` is "none" (exact GELU) and False if it is "tanh"; raise ConfigError for other
    values."""
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    return approximate == "none"


def _tanh_argument(x: Any) -> Any:
    """Return `u = 2 * sqrt(2 / pi) * (x + 0.044715 * x^3)`. The tanh form of GELU is `x * sigmoid(u)`, which equals
    `x / 2 * (1 + tanh(u / 2))`."""
    return x * (x * x * CUBIC + 1.0) * SLOPE


@kernel()
def add(xp: Any, a: Any, b: Any) -> Any:
    """Return a + b for two arrays of equal shape."""
    return a + b


@kernel(narrow=0, into=("y",))
def add_bias(xp: Any, y: Any, bias: Any) -> None:
    """Add `bias` to y in place. The shape of `bias` matches the last dims of y."""
    y += bias


@kernel(into=("h",))
def bias_gelu(xp: Any, h: Any, bias: Any, approximate: str = "none") -> Any:
    """Add `bias` (features,) to h in place and return gelu(h). `bias` may be None."""
    if bias is not None:
        h += bias
    return gelu(xp, h, approximate)


@kernel(narrow=0, into=("out",))
def sum_rows(xp: Any, rows: Any, out: Any, accumulate: bool = True) -> None:
    """Sum an array (n, ...) over its first dim. Add the sum to `out`, or overwrite `out` if `accumulate` is false.
    16-bit numbers are summed in float32 and rounded once."""
    total = xp.sum(rows, axis=0)
    if accumulate:
        out += total
    else:
        out[...] = total


@kernel(into=("dy",))
def recompute_gelu_and_backward(xp: Any, x: Any, dy: Any, approximate: str = "none") -> Any:
    """Return gelu(x), bitwise equal to the result of the forward pass, and overwrite dy with the gradient with respect
    to x."""
    dy[...] = gelu_backward.__wrapped__(xp, x, dy, approximate)  # type: ignore[attr-defined]
    return gelu.__wrapped__(xp, x, approximate)  # type: ignore[attr-defined]
