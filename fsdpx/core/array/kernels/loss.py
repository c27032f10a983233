"""Losses, and the gradient of an embedding lookup."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.array.kernels.activation import sigmoid
from fsdpx.core.array.kernels.dispatch import kernel
from fsdpx.core.array.kernels.squares import square_sum

__all__ = [
    "binary_entropy", "binary_entropy_backward", "cross_entropy", "cross_entropy_backward", "embedding_backward",
    "huber_error", "huber_error_backward", "huber_error_gradient_and_sum", "squared_error", "squared_error_backward",
    "squared_error_gradient_and_sum",
]  # fmt: skip


@kernel(narrow=0, into=("gw",))
def embedding_backward(xp: Any, gw: Any, index: Any, dy: Any) -> None:
    """Add row i of dy (n, d) to row index[i] of the weight gradient gw (rows, d), for every i and in a fixed order.
    For 16-bit gw, the sum is computed in float32 and rounded once."""
    wide = xp.zeros(gw.shape, dtype=np.float32) if gw.dtype.itemsize == 2 else gw
    if xp.__name__ == "cupy":
        # CuPy's `add.at` adds in a random order, so its results would not be reproducible
        _sort_and_scatter_add_rows(xp, wide, index, dy)
    else:
        xp.add.at(wide, index, _convert_dtype(dy, wide.dtype))
    if wide is not gw:
        gw += wide


def _sort_and_scatter_add_rows(xp: Any, gw: Any, index: Any, dy: Any) -> None:
    """Add row i of dy to row index[i] of gw in a fixed order: sort rows by index, sum runs of equal indices in doubling
    steps (Hillis and Steele 1986), and add the last row of each run to gw."""
    order = xp.argsort(index, kind="stable")
    rows, sums = index[order], _convert_dtype(dy[order], gw.dtype)
    step = 1
    while step < rows.shape[0]:
        same = (rows[step:] == rows[:-step])[:, None]
        sums = xp.concatenate([sums[:step], sums[step:] + xp.where(same, sums[:-step], 0)])
        step *= 2
    last = xp.concatenate([rows[1:] != rows[:-1], xp.ones(min(1, rows.shape[0]), dtype=bool)])
    gw[rows[last]] += sums[last]


def _convert_dtype(array: Any, dtype: Any) -> Any:
    return array.astype(dtype, copy=False)


@kernel(narrow=0)
def binary_entropy(xp: Any, y: Any, target: Any) -> float:
    """Return the binary cross entropy of logits y, summed in float64: the sum of
    `max(y, 0) - y * target + log(1 + exp(-|y|))`."""
    each = xp.maximum(y, 0) - y * target + xp.log1p(xp.exp(-xp.abs(y)))
    return float(xp.sum(each, dtype=np.float64))


@kernel()
def binary_entropy_backward(xp: Any, y: Any, target: Any, factor: float) -> Any:
    """Return `factor` times the gradient of `binary_entropy`, that is, `factor * (sigmoid(y) - target)`, in the dtype
    of y."""
    return ((sigmoid(xp, y) - target) * factor).astype(y.dtype, copy=False)


@kernel(narrow=0)
def cross_entropy(
    xp: Any, logits: Any, target: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[float, float, Any]:
    """Return the cross entropy of logits and integer targets, summed over rows, with label smoothing e.

    The loss is the sum of `-wanted * log(softmax(logits))` over all rows and classes, where
    `wanted = (1 - e) * onehot(target) + e / classes`.

    Parameters
    ----------
    logits : (n, classes)
    target : (n,) integers in [0, classes), or ignore_index for ignored rows
    ignore_index : target of the rows that are left out of the sum
    label_smoothing : the amount e of label smoothing

    Returns
    -------
    tuple
        the summed loss in float64, the number of rows that are not ignored, and the log-sum-exp (n,) of each row
    """
    top = xp.max(logits, axis=1, keepdims=True)
    top = xp.where(top == -np.inf, logits.dtype.type(0), top)
    counted = target != ignore_index
    picked = xp.take_along_axis(logits, xp.where(counted, target, 0)[:, None], axis=1)[:, 0]
    # suppress the warnings for log(0), which occurs if all logits of a row are -inf
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = (xp.log(xp.sum(xp.exp(logits - top), axis=1, keepdims=True)) + top)[:, 0]
        each = (lse - picked).astype(np.float64)
    if label_smoothing:
        mean = xp.mean(logits, axis=1, dtype=np.float64)
        each = (1.0 - label_smoothing) * each + label_smoothing * (lse - mean)
    total = xp.sum(xp.where(counted, each, 0.0))
    return float(total), float(xp.sum(counted)), lse


@kernel()
def cross_entropy_backward(
    xp: Any, logits: Any, target: Any, lse: Any, seed: float, ignore_index: int = -100, label_smoothing: float = 0.0,
    classes: int = 0,
) -> Any:  # fmt: skip
    """Return `seed` times the gradient of `cross_entropy`, that is, `seed * (softmax(logits) - wanted)`, and 0 in
    ignored rows. `lse` is the third result of `cross_entropy`.

    If the columns of the logits cover only a slice of the classes, `classes` is the total number of classes, and a
    target outside the slice is given as the number of columns. If `classes` is 0, the logits cover all classes.
    """
    counted = target != ignore_index
    onehot = xp.arange(logits.shape[1])[None, :] == xp.where(counted, target, 0)[:, None]
    share = label_smoothing / max(classes, logits.shape[1], 1)
    gradient = xp.exp(logits - lse[:, None]) - onehot * (1.0 - label_smoothing) - share
    return xp.where(counted[:, None], gradient * seed, 0.0).astype(logits.dtype, copy=False)


@kernel(narrow=0)
def squared_error(xp: Any, y: Any, target: Any) -> float:
    """Return the sum of `(y - target)^2` for two arrays of equal shape, summed in float64."""
    return square_sum.fallback(xp, (y - target).reshape(-1))  # type: ignore[attr-defined]


@kernel()
def squared_error_backward(xp: Any, y: Any, target: Any, factor: float) -> Any:
    """Return `factor * (y - target)`, in the dtype of y. With factor 2, this is the gradient of `squared_error`."""
    return ((y - target) * factor).astype(y.dtype, copy=False)


@kernel()
def squared_error_gradient_and_sum(xp: Any, y: Any, target: Any, factor: float) -> tuple[Any, float]:
    """Return the results of `squared_error_backward` and `squared_error`. The compiled version computes both in one
    pass over memory."""
    return squared_error_backward(xp, y, target, factor), squared_error(xp, y, target)


@kernel(narrow=0)
def huber_error(xp: Any, y: Any, target: Any, delta: float) -> float:
    """Return the sum of Huber's errors for two arrays of equal shape, in float64. With d = |y - target|, the error is
    d^2 / 2 where d <= delta, and delta * (d - delta / 2) elsewhere. If `delta` is 0, the error is d instead, the limit
    of Huber's error divided by delta."""
    apart = xp.abs(y - target)
    near = xp.minimum(apart, delta)
    return float((near * (apart - near * 0.5) if delta else apart).sum(dtype=np.float64))


@kernel()
def huber_error_backward(xp: Any, y: Any, target: Any, delta: float, factor: float) -> Any:
    """Return the gradient of `huber_error` times `factor`, in the dtype of y."""
    slopes = xp.clip(y - target, -delta, delta) if delta else xp.sign(y - target)
    return (slopes * factor).astype(y.dtype, copy=False)


@kernel()
def huber_error_gradient_and_sum(xp: Any, y: Any, target: Any, delta: float, factor: float) -> tuple[Any, float]:
    """Return `huber_error_backward` and `huber_error`. The compiled code computes both in one pass over memory."""
    return huber_error_backward(xp, y, target, delta, factor), huber_error(xp, y, target, delta)
