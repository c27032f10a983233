"""Kernels compiled, or loaded from the cache, before the first step: by a call with a few numbers each."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fsdpx.array import blas, kernels
from fsdpx.array.kernels import choice

__all__ = ["OTHERS", "warm"]

OTHERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "linear": lambda x, w, s: _linear(x, w, s),
    "float16": lambda x, w, s: _through(x, "float16"),
    "bfloat16": lambda x, w, s: _through(x, "bf16"),
}
"""What is warmed beside kernels, by calls with what `choice.Sample` gets."""


def warm(names: Iterable[str], dtype: Any) -> None:
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
    if x.dtype.itemsize == 2:
        blas.halves.product(y, x, weight, bias=w)
        blas.halves.product(np.zeros((3, 3), np.float32), x.T, x)
        kernels.sum_rows(np, x, s)
        return
    blas.affine(y, x, weight, w)
    blas.gemm(y, x, weight)
    blas.linear_gradients((weight, False), (w.copy(), False), y, x)
    blas.linear_backward(np.empty_like(x), (weight, False), (w.copy(), False), y, x, weight.copy())


def _through(x: Any, name: str) -> None:
    from fsdpx.array.namespace import dtype

    h = kernels.narrowed(np, kernels.widened(np, x), dtype(name))
    wide = kernels.widened(np, h)
    kernels.store(np, h, wide)
    kernels.add_widened(np, h, wide)
