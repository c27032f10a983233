"""GELU recomputed while it is differentiated: its result need not be saved from forward to backward."""

from typing import Any

from fsdpx.array.kernels.activation import gelu, gelu_backward
from fsdpx.array.kernels.dispatch import kernel

__all__ = ["gelu_recompute"]


@kernel(into=("dy",))
def gelu_recompute(xp: Any, x: Any, dy: Any, approximate: str = "none") -> Any:
    """gelu(x), with the bits of `gelu`; dy is replaced by the gradient of x in place."""
    dy[...] = gelu_backward.__wrapped__(xp, x, dy, approximate)  # type: ignore[attr-defined]
    return gelu.__wrapped__(xp, x, approximate)  # type: ignore[attr-defined]
