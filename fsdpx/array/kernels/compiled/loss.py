"""Cross entropy row by row: logits are read, nothing of their size is made in forward."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.jit import REORDER, jit
from fsdpx.array.kernels.compiled.rows import largest
from fsdpx.array.kernels.compiled.scalar import exp

__all__ = ["cross_entropy", "cross_entropy_backward"]


@jit
def _exponentials(x, top, out):
    for j in range(x.size):
        out[j] = exp(x[j] - top)


@jit(fastmath=REORDER)
def _total64(x):
    result = 0.0
    for j in range(x.size):
        result += np.float64(x[j])
    return result


@jit
def _forward(logits, target, ignored, smoothing, lse):
    """(sum, rows that count, first row with a bad target or -1)."""
    result, counted, classes = 0.0, 0, logits.shape[1]
    scratch = np.empty(classes, logits.dtype)
    for i in range(logits.shape[0]):
        top = largest(logits[i])
        _exponentials(logits[i], top, scratch)
        lse[i] = top + logits.dtype.type(np.log(_total64(scratch)))
        if target[i] == ignored:
            continue
        if not 0 <= target[i] < classes:
            return result, counted, i
        counted += 1
        each = np.float64(lse[i] - logits[i, target[i]])
        if smoothing != 0.0:
            mean = _total64(logits[i]) / classes
            each = (1.0 - smoothing) * each + smoothing * (np.float64(lse[i]) - mean)
        result += each
    return result, counted, -1


@jit
def _backward(logits, target, lse, seed, ignored, wanted, share, gradient):
    """The first row with a bad target, or -1."""
    for i in range(logits.shape[0]):
        if target[i] == ignored:
            gradient[i, :] = 0
            continue
        if not 0 <= target[i] < logits.shape[1]:
            return i
        for j in range(logits.shape[1]):
            gradient[i, j] = (exp(logits[i, j] - lse[i]) - share) * seed
        picked = exp(logits[i, target[i]] - lse[i])
        gradient[i, target[i]] = (picked - wanted - share) * seed
    return -1


def _check(row: int, target: np.ndarray, classes: int) -> None:
    if row >= 0:
        raise IndexError(f"cross_entropy: target {target[row]} of row {row} is not in [0, {classes})")


def cross_entropy(
    xp: Any, logits: Any, target: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[float, float, np.ndarray]:
    logits, target = np.ascontiguousarray(logits), np.ascontiguousarray(target, dtype=np.int64)
    lse = np.empty(logits.shape[0], logits.dtype)
    total, counted, bad = _forward(logits, target, ignore_index, float(label_smoothing), lse)
    _check(bad, target, logits.shape[1])
    return float(total), float(counted), lse


def cross_entropy_backward(
    xp: Any,
    logits: Any,
    target: Any,
    lse: Any,
    seed: float,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> np.ndarray:
    logits, target = np.ascontiguousarray(logits), np.ascontiguousarray(target, dtype=np.int64)
    gradient, kind = np.empty_like(logits), logits.dtype.type
    share, wanted = kind(label_smoothing / max(logits.shape[1], 1)), kind(1.0 - label_smoothing)
    bad = _backward(logits, target, lse, kind(seed), ignore_index, wanted, share, gradient)
    _check(bad, target, logits.shape[1])
    return gradient
