"""Activations, and gated ones."""

from __future__ import annotations

import math
from typing import Any

from fsdpx.array.kernels.dispatch import kernel
from fsdpx.array.kernels.dropout import density, integral
from fsdpx.errors import ConfigError

__all__ = [
    "CUBIC", "FORMS", "SLOPE", "gated", "gated_backward", "gelu", "gelu_backward", "relu", "relu_backward", "sigmoid",
    "silu", "silu_backward",
]  # fmt: skip

FORMS = ("silu", "gelu", "gelu tanh")
"""SwiGLU, GEGLU, and GEGLU with the tanh form of GELU."""


@kernel()
def gated(xp: Any, a: Any, b: Any, form: str = "silu") -> Any:
    """act(a) b, element by element (Shazeer 2020); form: one of `FORMS`."""
    return _activated(xp, a, form) * b


@kernel(narrow=2)
def gated_backward(xp: Any, a: Any, b: Any, dy: Any, form: str = "silu") -> tuple[Any, Any]:
    """The gradients of a and b: dy b act'(a), and dy act(a)."""
    plain = (silu_backward if form == "silu" else gelu_backward).__wrapped__  # type: ignore[attr-defined]
    da = plain(xp, a, dy * b) if form == "silu" else plain(xp, a, dy * b, approximate(form))
    return da, dy * _activated(xp, a, form)


def approximate(form: str) -> str:
    """The name that `gelu` has for a form."""
    if form not in FORMS:
        raise ConfigError(f"gated: form must be one of {', '.join(map(repr, FORMS))}, got {form!r}")
    return "tanh" if form == "gelu tanh" else "none"


def _activated(xp: Any, a: Any, form: str) -> Any:
    if form == "silu":
        return silu.__wrapped__(xp, a)  # type: ignore[attr-defined]
    return gelu.__wrapped__(xp, a, approximate(form))  # type: ignore[attr-defined]


CUBIC = 0.044715
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # 1/2 (1 + tanh(u)) = sigmoid(2u): no cancellation for large negative u
DENSITY = 1.0 / math.sqrt(2.0 * math.pi)


@kernel()
def relu(xp: Any, x: Any) -> Any:
    """max(x, 0)."""
    return xp.maximum(x, 0)


@kernel()
def relu_backward(xp: Any, y: Any, dy: Any) -> Any:
    """dy where y, the result of `relu`, is above 0, else 0."""
    return xp.where(y > 0, dy, xp.zeros((), dtype=dy.dtype))


@kernel()
def sigmoid(xp: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)), without overflow: exp is only taken of -|x|."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x < 0, e, 1.0) / (e + 1.0)


@kernel()
def silu(xp: Any, x: Any) -> Any:
    """x sigmoid(x) (Elfwing et al. 2018)."""
    return x * sigmoid.__wrapped__(xp, x)  # type: ignore[attr-defined]


@kernel()
def silu_backward(xp: Any, x: Any, dy: Any) -> Any:
    """dy (s + x s (1 - s)) with s = sigmoid(x)."""
    s = sigmoid.__wrapped__(xp, x)  # type: ignore[attr-defined]
    return dy * (s + x * s * (1.0 - s))


@kernel()
def gelu(xp: Any, x: Any, approximate: str = "none") -> Any:
    """x Phi(x), or with approximate="tanh" x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks, Gimpel 2016)."""
    if exact(approximate):
        return x * integral(xp, x, density(xp, x))
    return x * sigmoid.__wrapped__(xp, _argument(x))  # type: ignore[attr-defined]


@kernel()
def gelu_backward(xp: Any, x: Any, dy: Any, approximate: str = "none") -> Any:
    """dy d gelu / dx: dy (Phi(x) + x phi(x)), or of the tanh form dy (s + x s (1 - s) u') with s = sigmoid(u)."""
    if exact(approximate):
        bell = density(xp, x)
        return dy * (integral(xp, x, bell) + x * bell * DENSITY)
    s = sigmoid.__wrapped__(xp, _argument(x))  # type: ignore[attr-defined]
    slope = (x * x * (3.0 * CUBIC) + 1.0) * SLOPE
    return dy * (s + x * s * (1.0 - s) * slope)


def exact(approximate: str) -> bool:
    """Whether the GELU is the exact one, and not its tanh form."""
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    return approximate == "none"


def _argument(x: Any) -> Any:
    """u of 1/2 (1 + tanh(u / 2)) = sigmoid(u)."""
    return x * (x * x * CUBIC + 1.0) * SLOPE
