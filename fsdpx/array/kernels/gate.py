"""Gates: one branch of a gated MLP through an activation, times the other."""

from typing import Any

from fsdpx.array.kernels.activation import gelu, gelu_backward, silu, silu_backward
from fsdpx.array.kernels.dispatch import kernel
from fsdpx.errors import ConfigError

__all__ = ["FORMS", "gated", "gated_backward"]

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
