"""Compile the kernels of a trainer before its first step, or load them from the cache, by calling each kernel with
small arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fsdpx.core.array import blas, kernels
from fsdpx.core.array.kernels import choice
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.parallel import flush_denormals
from fsdpx.core.base.messages import ProgressCallback
from fsdpx.optim.optimizer import make_zero_slots
from fsdpx.optim.segments import ShardSegment, ShardSegments

__all__ = [
    "OTHER_WARMUPS",
    "list_kernel_names",
    "list_warm_up_calls",
    "run_warm_up_calls_in_rotated_order",
    "warm_up_kernels",
]


def list_warm_up_calls(
    runs: Iterable[str], optimizers: Iterable[Any], dtypes: tuple[Any, Any, Any], norm: bool
) -> list[Callable[[], Any]]:
    """Return one function per kernel. Each function compiles the kernel, or loads it from the cache, by calling it with
    small CPU arrays.

    `runs` names the kernels of a model and its loss. `dtypes` holds the dtypes of computation, of gradients, and of
    the parameters that optimizers update. `norm` says whether the gradient norm is needed."""
    dtype, gradients, master = map(np.dtype, dtypes)
    calls = list_kernel_warm_up_calls([*runs, "add"], dtype)
    if norm:
        calls += list_kernel_warm_up_calls(["square_sum", "sum_squares_of_blocks"], gradients)
    return calls + [partial(_warm_up_optimizer, optimizer, master, gradients) for optimizer in optimizers]


def run_warm_up_calls_in_rotated_order(
    calls: Sequence[Callable[[], Any]],
    share: tuple[int, int] = (0, 1),
    count: ProgressCallback = lambda done, total: None,
) -> None:
    """Run warm-up calls. `share` is (index of this rank on its host, number of ranks on the host). Each rank starts at
    a different call, and later loads the kernels that other ranks have compiled in the meantime. `count` is a progress
    callback (calls done, total)."""
    rank, ranks = share
    first = rank * len(calls) // ranks
    count(0, len(calls))
    with flush_denormals(), blas.limit_threads():
        for done, call in enumerate([*calls[first:], *calls[:first]], 1):
            call()
            count(done, len(calls))


def _warm_up_optimizer(optimizer: Any, dtype: np.dtype, gradients: np.dtype) -> None:
    """Compile an optimizer's kernels by updating a parameter that has one element."""
    p, g = np.zeros(1, dtype), np.zeros(1, gradients)
    segments = ShardSegments((ShardSegment("", 0, 1, 0, 1, (1,)),))
    slots = make_zero_slots(np, optimizer, segments, dtype)
    optimizer.update(np, p, g, slots, lr=0.0, step=1, segments=segments, scale=1.0)


OTHER_WARMUPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "linear": lambda x, w, s: _warm_up_linear(x, w, s),
    "float16": lambda x, w, s: _warm_up_conversion(x, "float16"),
    "bfloat16": lambda x, w, s: _warm_up_conversion(x, "bf16"),
}
"""Warm-up functions, by name, for operations that are not kernels but also need a warm-up. They take the same sample
arrays as functions of the type `choice.Sample`."""
VARIANTS = {
    **dict.fromkeys(("gated", "gated_backward"), ("gelu", "gelu tanh")),
    **dict.fromkeys(("gelu", "gelu_backward", "bias_gelu", "recompute_gelu_and_backward"), ("tanh",)),
}
"""For each kernel name, the variants of the kernel besides the default one."""


def list_kernel_names() -> list[str]:
    """Return the names of all kernels and of their variants."""
    names = [*choice.import_all_compiled_kernels(), *OTHER_WARMUPS]
    return names + [f"{name} {variant}" for name in names for variant in VARIANTS.get(name, ())]


def warm_up_kernels(names: Iterable[str], dtype: Any) -> None:
    """Compile or load the named kernels for `dtype`. A name may end in a variant, which becomes the kernel's last
    argument: "gated gelu tanh" is kernel "gated" with variant "gelu tanh". Unknown names and kernels that run as NumPy
    code are skipped."""
    for call in list_kernel_warm_up_calls(names, dtype):
        call()


def list_kernel_warm_up_calls(names: Iterable[str], dtype: Any) -> list[Callable[[], Any]]:
    """Return the calls that `warm_up_kernels` makes, one per kernel."""
    dtype = np.dtype(dtype)
    half_float = dtype.itemsize == 2
    x, w, s = np.zeros((2, 3), dtype), np.ones(3, dtype), np.ones(3, np.float32 if half_float else dtype)
    calls: list[Callable[[], Any]] = []
    for name in dict.fromkeys([*names, *([dtype.name] if half_float else [])]):
        known = name.partition(" ")[0]
        if name in OTHER_WARMUPS:
            calls.append(partial(OTHER_WARMUPS[name], x.copy(), w.copy(), s.copy()))
        elif choice.get_implementation_name(known) == "numba" and choice.SAMPLE_CALLS[known]:
            calls.append(partial(_warm_up_kernel, name, x.copy(), w.copy(), s.copy()))
    return calls


def _warm_up_kernel(name: str, *given: Any) -> None:
    known, _, variant = name.partition(" ")
    sample = choice.SAMPLE_CALLS[known]
    assert sample is not None
    calls = sample(*given)
    for arguments in calls if isinstance(calls, list) else [calls]:
        choice.KERNELS[known](np, *arguments, *([variant] if variant else []))


def _warm_up_linear(x: Any, w: Any, s: Any) -> None:
    """Warm up the matrix products of a Linear layer. They are not kernels; the chosen BLAS library runs them."""
    weight, y = np.zeros((3, 3), x.dtype), np.empty_like(x)
    kernels.sum_rows(np, x, s)
    if x.dtype.itemsize == 2:
        blas.load_half_matmul().multiply_half_into(y, x, weight, bias=w)
        blas.load_half_matmul().multiply_half_into(np.zeros((3, 3), np.float32), x.T, x)
        return
    kernels.add_bias(np, y, w)
    blas.linear_forward(y, x, weight, w)
    blas.gemm(y, x, weight)
    blas.linear_backward_params((weight, False), (w.copy(), False), y, x)
    blas.linear_backward(np.empty_like(x), (weight, False), (w.copy(), False), y, x, weight.copy())


def _warm_up_conversion(x: Any, name: str) -> None:
    h = kernels.cast_float_to_dtype(np, kernels.to_float32(np, x), parse_dtype(name))
    wide = kernels.to_float32(np, h)
    kernels.store(np, h, wide)
    kernels.add_widened(np, h, wide)
