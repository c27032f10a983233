"""Dropout. The random number that decides whether an element is dropped depends only on the position of the element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpx.core.array.kernels.dispatch import kernel
from fsdpx.core.array.random import NumberRange

__all__ = ["drop", "drop_backward"]


def make_keep_mask(xp: Any, numbers: NumberRange, shape: tuple[int, ...], p: float) -> Any:
    """Return a mask of the elements that dropout keeps. An element is kept if its random number is at least p, that
    is, with probability 1 - p."""
    return numbers.make_fractions(xp).reshape(shape) >= p


@kernel(compiled_in="normal")
def drop(xp: Any, x: Any, numbers: NumberRange, p: float) -> tuple[Any, Any]:
    """Apply dropout: return an array that is x / (1 - p) where elements are kept and 0 elsewhere, and the mask of kept
    elements. Element i is compared with random number i."""
    keep = make_keep_mask(xp, numbers, x.shape, p)
    return drop_backward.__wrapped__(xp, x, keep, p), keep  # type: ignore[attr-defined]


@kernel(compiled_in="normal")
def drop_backward(xp: Any, dy: Any, keep: Any, p: float) -> Any:
    """Return the gradient of `drop`: dy / (1 - p) where the mask `keep` is True, and 0 elsewhere. With x in place of
    dy, this function computes the forward pass with a given mask."""
    dx = dy * keep
    dx *= dropout_scale(p)
    return dx


def dropout_scale(p: float) -> float:
    """Return 1 / (1 - p), the factor for kept elements that preserves the mean. Return 1 if p is 1, because no element
    is kept then."""
    return 1.0 / (1.0 - p) if p < 1.0 else 1.0


def dropout_threshold(p: float) -> int:
    """Return the smallest 24-bit random number n that keeps an element, that is, the smallest n with `n * 2^-24 >= p`
    in float32."""
    return math.ceil(float(np.float32(p)) * 2.0**24)
