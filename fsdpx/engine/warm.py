"""What a trainer runs is made ready before its first step, compiled or loaded from the cache, by calls with a few
numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fsdpx.array import blas, kernels
from fsdpx.array.kernels import choice
from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.array.parallel import flushed
from fsdpx.nn.layer import Layer, runs_of
from fsdpx.optim.optimizer import zeros
from fsdpx.optim.segments import Segment, Segments

__all__ = ["OTHERS", "warm", "warm_kernels"]


def warm(xp: Any, model: Layer, loss: Any, optimizer: Any, dtypes: tuple[Any, Any, Any], norm: bool) -> None:
    """Run each kernel once on a few numbers. dtypes: of what is computed, of gradients, and of what is updated, by an
    optimizer if there is one. norm: the gradient's norm is wanted. On the CPU only."""
    dtype, gradients, master = map(np.dtype, dtypes)
    if xp is not np:
        return
    with flushed():
        warm_kernels([*runs_of(model), *getattr(loss, "runs", ()), "add"], dtype)
        if norm:
            warm_kernels(["square_sum", "square_sums"], gradients)
        if optimizer is not None:
            _warm_optimizer(optimizer, master, gradients)


def _warm_optimizer(optimizer: Any, dtype: np.dtype, gradients: np.dtype) -> None:
    """One update of one number, of a parameter without a name."""
    p, g = np.zeros(1, dtype), np.zeros(1, gradients)
    segments = Segments((Segment("", 0, 1, 0, 1, (1,)),))
    slots = zeros(np, optimizer, segments, dtype)
    optimizer.update(np, p, g, slots, lr=0.0, step=1, segments=segments, scale=1.0)


OTHERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "linear": lambda x, w, s: _linear(x, w, s),
    "float16": lambda x, w, s: _through(x, "float16"),
    "bfloat16": lambda x, w, s: _through(x, "bf16"),
}
"""What is warmed beside kernels, by calls with what `choice.Sample` gets."""


def warm_kernels(names: Iterable[str], dtype: Any) -> None:
    """Compile or load the kernels of these names for `dtype`; of "gated gelu tanh" the form "gelu tanh", as the last
    argument. Unknown names, and kernels that run as plain code, cost nothing."""
    dtype = np.dtype(dtype)
    half_float = dtype.itemsize == 2
    x, w, s = np.zeros((2, 3), dtype), np.ones(3, dtype), np.ones(3, np.float32 if half_float else dtype)
    for name in dict.fromkeys([*names, *([dtype.name] if half_float else [])]):
        known, _, variant = name.partition(" ")
        given = x.copy(), w.copy(), s.copy()
        if name in OTHERS:
            OTHERS[name](*given)
        elif choice.chosen(known) == "numba" and (sample := choice.SAMPLES[known]):
            calls = sample(*given)
            for arguments in calls if isinstance(calls, list) else [calls]:
                getattr(kernels, known)(np, *arguments, *([variant] if variant else []))


def _linear(x: Any, w: Any, s: Any) -> None:
    """The products of a Linear, which are not kernels but run by the chosen BLAS."""
    weight, y = np.zeros((3, 3), x.dtype), np.empty_like(x)
    kernels.sum_rows(np, x, s)
    if x.dtype.itemsize == 2:
        blas.halves.product(y, x, weight, bias=w)
        blas.halves.product(np.zeros((3, 3), np.float32), x.T, x)
        return
    kernels.add_bias(np, y, w)
    blas.affine(y, x, weight, w)
    blas.gemm(y, x, weight)
    blas.linear_gradients((weight, False), (w.copy(), False), y, x)
    blas.linear_backward(np.empty_like(x), (weight, False), (w.copy(), False), y, x, weight.copy())


def _through(x: Any, name: str) -> None:
    h = kernels.narrowed(np, kernels.widened(np, x), dtype_of(name))
    wide = kernels.widened(np, h)
    kernels.store(np, h, wide)
    kernels.add_widened(np, h, wide)
