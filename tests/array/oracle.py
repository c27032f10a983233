"""Inputs of kernels and what PyTorch computes from them, in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

TOLERANCE = {"float64": 2e-14, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def tensor(array: np.ndarray | None, gradient: bool = True) -> Any:
    """`array` in float64, so that the oracle's own rounding does not count."""
    return None if array is None else torch.tensor(array.astype(np.float64), requires_grad=gradient)


@dataclass
class Draw:
    """Random arrays of one dtype."""

    dtype: np.dtype
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return (self.rng.normal(size=shape) * scale).astype(self.dtype)


def close(got: Any, want: Any, dtype: np.dtype, factor: float = 1.0) -> None:
    """Equal in the tolerance of `dtype`, relative to the largest element."""
    want = want.detach().numpy() if hasattr(want, "detach") else np.asarray(want)
    got = np.asarray(got)
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want).max(initial=0.0)
    largest = max(1.0, np.abs(want).max(initial=0.0))
    assert error <= TOLERANCE[np.dtype(dtype).name] * factor * largest
