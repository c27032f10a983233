"""The memory layout of attention heads, on the host and on GPUs. Time is stored before heads, so that neither merging
heads nor splitting the result of a fused projection needs a copy."""

from typing import Any

__all__ = ["empty_attention_gradients", "empty_time_first"]


def empty_time_first(xp: Any, a: Any) -> Any:
    """Return an uninitialized array with the shape (B, H, T, D) of `a`, but stored in memory as (B, T, H, D)."""
    b, h, t, d = a.shape
    return xp.empty((b, t, h, d), dtype=a.dtype).swapaxes(1, 2)


def empty_attention_gradients(xp: Any, q: Any, k: Any) -> Any:
    """Allocate uninitialized gradients of q, k and v, in the layout that `attention_backward` returns.

    The result is one array (3, B, H, T, D), stored as (B, T, 3, H, D), or three arrays if k has fewer heads than q or a
    different length.
    """
    b, h, t, d = q.shape
    if k.shape[1:3] != q.shape[1:3]:
        return empty_time_first(xp, q), empty_time_first(xp, k), empty_time_first(xp, k)
    return xp.empty((b, t, 3, h, d), dtype=q.dtype).transpose(2, 0, 3, 1, 4)
