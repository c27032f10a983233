"""Cross entropy row by row: forward allocates nothing of the size of the logits."""

from typing import Any

import numpy as np

from fsdpx.array.kernels.compiled.arrays import owned
from fsdpx.array.kernels.compiled.jit import REORDER, jit
from fsdpx.array.kernels.compiled.rows import largest
from fsdpx.array.kernels.compiled.scalar import exp, widest
from fsdpx.array.parallel import over

__all__ = ["cross_entropy", "cross_entropy_backward"]


@jit
def _exponentials(x, top, out):
    widest()
    for j in range(x.size):
        out[j] = exp(x[j] - top)


@jit(fastmath=REORDER)
def _total64(x):
    result = 0.0
    for j in range(x.size):
        result += np.float64(x[j])
    return result


@jit
def _survey(target, classes, ignored):
    """(rows that count, first row with a bad target or -1)."""
    counted = 0
    for i in range(target.size):
        if target[i] != ignored:
            if not 0 <= target[i] < classes:
                return counted, i
            counted += 1
    return counted, -1


@jit
def _forward(logits, target, lse, each, ignored, smoothing):
    widest()
    classes = logits.shape[1]
    scratch = np.empty(classes, logits.dtype)
    for i in range(logits.shape[0]):
        top = largest(logits[i])
        _exponentials(logits[i], top, scratch)
        lse[i] = top + logits.dtype.type(np.log(_total64(scratch)))
        if target[i] == ignored:
            each[i] = 0.0
            continue
        loss = np.float64(lse[i] - logits[i, target[i]])
        if smoothing != 0.0:
            mean = _total64(logits[i]) / classes
            loss = (1.0 - smoothing) * loss + smoothing * (np.float64(lse[i]) - mean)
        each[i] = loss


@jit
def _backward(logits, target, lse, gradient, seed, ignored, wanted, share):
    widest()
    for i in range(logits.shape[0]):
        if target[i] == ignored:
            gradient[i, :] = 0
            continue
        for j in range(logits.shape[1]):
            gradient[i, j] = (exp(logits[i, j] - lse[i]) - share) * seed
        picked = exp(logits[i, target[i]] - lse[i])
        gradient[i, target[i]] = (picked - wanted - share) * seed


def _checked(logits: Any, target: Any, ignored: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Both in the layout of the loops, and the number of rows that count; IndexError for a bad target."""
    logits, target = np.ascontiguousarray(logits), owned(target, np.int64)
    counted, row = _survey(target, logits.shape[1], ignored)
    if row >= 0:
        raise IndexError(f"cross_entropy: target {target[row]} of row {row} is not in [0, {logits.shape[1]})")
    return logits, target, counted


def cross_entropy(
    xp: Any, logits: Any, target: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[float, float, np.ndarray]:
    logits, target, counted = _checked(logits, target, ignore_index)
    lse, each = np.empty(logits.shape[0], logits.dtype), np.empty(logits.shape[0], np.float64)
    over(_forward, (logits, target, lse, each), ignore_index, float(label_smoothing))
    return float(np.sum(each)), float(counted), lse


def cross_entropy_backward(
    xp: Any, logits: Any, target: Any, lse: Any, seed: float, ignore_index: int = -100, label_smoothing: float = 0.0
) -> np.ndarray:
    logits, target, _ = _checked(logits, target, ignore_index)
    gradient, kind = np.empty_like(logits), logits.dtype.type
    share, wanted = kind(label_smoothing / max(logits.shape[1], 1)), kind(1.0 - label_smoothing)
    over(_backward, (logits, target, lse, gradient), kind(seed), ignore_index, wanted, share)
    return gradient
