"""Matrix products by the chosen BLAS library, written or added in place."""

from functools import cache
from typing import Any

from fsdpx.core.array.blas.libraries import (
    list_available,
    choose_library,
    get_chosen_library,
    gemm_address,
    describe_files,
    set_or_get_threads,
)
from fsdpx.core.array.blas.measure import measure_libraries
from fsdpx.core.array.blas.pools import set_thread_limit, limit_threads
from fsdpx.core.array.blas.products import linear_forward, gemm, linear_backward, linear_gradients
from fsdpx.core.base.extensions import load_extension

__all__ = [
    "choose_library",
    "describe_files",
    "gemm",
    "gemm_address",
    "get_chosen_library",
    "limit_threads",
    "linear_backward",
    "linear_forward",
    "linear_gradients",
    "list_available",
    "load_half_matmul",
    "measure_libraries",
    "set_or_get_threads",
    "set_thread_limit",
]  # fmt: skip


@cache
def load_half_matmul() -> Any:
    """Return the extension module that multiplies 16-bit matrices."""
    return load_extension("half", "matmul")
