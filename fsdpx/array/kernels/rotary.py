"""Rotary positions: pairs of features are turned by an angle that grows with the position."""

from typing import Any

from fsdpx.array.kernels.dispatch import kernel
from fsdpx.array.namespace import joined

__all__ = ["rotate"]


@kernel()
def rotate(xp: Any, x: Any, cos: Any, sin: Any) -> Any:
    """(a cos - b sin, b cos + a sin) for the halves a, b of the last dim (Su et al. 2021, in the order of Llama).

    x: (B, T, H, D); cos, sin: (T, D / 2) of the dtype that is computed in. The gradient is `rotate` with -sin."""
    half = x.shape[3] // 2
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    a, b = x[..., :half], x[..., half:]
    return joined(xp, (a * c - b * s, b * c + a * s))
