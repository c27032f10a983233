"""What a trainer runs is made ready before its first step, compiled or loaded from the cache, by calls with a few
numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fsdpx.core.array import blas, kernels
from fsdpx.core.array.kernels import choice
from fsdpx.core.array.namespace import dtype as dtype_of
from fsdpx.core.array.parallel import flushed
from fsdpx.core.base.messages import Count
from fsdpx.optim.optimizer import zeros
from fsdpx.optim.segments import Segment, Segments

__all__ = ["OTHERS", "every", "make_ready", "warm_calls", "warm_kernels"]


def warm_calls(
    runs: Iterable[str], optimizers: Iterable[Any], dtypes: tuple[Any, Any, Any], norm: bool
) -> list[Callable[[], Any]]:
    """Calls with a few numbers on the CPU, each of which compiles or loads a kernel.

    runs: names of the kernels of a model and its loss. dtypes: of what is computed, of gradients, and of what the
    optimizers update. norm: the gradient's norm is wanted."""
    dtype, gradients, master = map(np.dtype, dtypes)
    calls = kernel_calls([*runs, "add"], dtype)
    if norm:
        calls += kernel_calls(["square_sum", "square_sums"], gradients)
    return calls + [partial(_warm_optimizer, optimizer, master, gradients) for optimizer in optimizers]


def make_ready(
    calls: Sequence[Callable[[], Any]], share: tuple[int, int] = (0, 1), count: Count = lambda done, total: None
) -> None:
    """Make the calls. share: this rank of how many on its host: each begins with other ones, and loads what others have
    compiled meanwhile. count: is told how many are done, of how many."""
    rank, ranks = share
    first = rank * len(calls) // ranks
    count(0, len(calls))
    with flushed(), blas.limited():
        for done, call in enumerate([*calls[first:], *calls[:first]], 1):
            call()
            count(done, len(calls))


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
VARIANTS = {
    **dict.fromkeys(("gated", "gated_backward"), ("gelu", "gelu tanh")),
    **dict.fromkeys(("gelu", "gelu_backward", "bias_gelu", "gelu_recompute"), ("tanh",)),
}
"""The forms of kernels that have several, beside the usual one."""


def every() -> list[str]:
    """The names of all kernels and their forms."""
    names = [*choice.names(), *OTHERS]
    return names + [f"{name} {variant}" for name in names for variant in VARIANTS.get(name, ())]


def warm_kernels(names: Iterable[str], dtype: Any) -> None:
    """Compile or load the kernels of these names for `dtype`; of "gated gelu tanh" the form "gelu tanh", as the last
    argument. Unknown names, and kernels that run as plain code, cost nothing."""
    for call in kernel_calls(names, dtype):
        call()


def kernel_calls(names: Iterable[str], dtype: Any) -> list[Callable[[], Any]]:
    """The calls that `warm_kernels` makes, one for each kernel."""
    dtype = np.dtype(dtype)
    half_float = dtype.itemsize == 2
    x, w, s = np.zeros((2, 3), dtype), np.ones(3, dtype), np.ones(3, np.float32 if half_float else dtype)
    found: list[Callable[[], Any]] = []
    for name in dict.fromkeys([*names, *([dtype.name] if half_float else [])]):
        known = name.partition(" ")[0]
        if name in OTHERS:
            found.append(partial(OTHERS[name], x.copy(), w.copy(), s.copy()))
        elif choice.chosen(known) == "numba" and choice.SAMPLES[known]:
            found.append(partial(_warm_kernel, name, x.copy(), w.copy(), s.copy()))
    return found


def _warm_kernel(name: str, *given: Any) -> None:
    known, _, variant = name.partition(" ")
    sample = choice.SAMPLES[known]
    assert sample is not None
    calls = sample(*given)
    for arguments in calls if isinstance(calls, list) else [calls]:
        choice.KERNELS[known](np, *arguments, *([variant] if variant else []))


def _linear(x: Any, w: Any, s: Any) -> None:
    """The products of a Linear, which are not kernels but run by the chosen BLAS."""
    weight, y = np.zeros((3, 3), x.dtype), np.empty_like(x)
    kernels.sum_rows(np, x, s)
    if x.dtype.itemsize == 2:
        blas.halves().product(y, x, weight, bias=w)
        blas.halves().product(np.zeros((3, 3), np.float32), x.T, x)
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
