"""Matrix products computed with the selected BLAS library, and written to or added to an output array."""

from functools import cache
from typing import Any

from fsdpx.core.array.blas.libraries import (
    list_available_blas_libraries,
    select_library,
    get_selected_library,
    get_gemm_address,
    describe_library_files,
    get_product_threads,
    set_product_threads,
)
from fsdpx.core.array.blas.measure import measure_gflops_of_each_library
from fsdpx.core.array.blas.pools import set_thread_limit, limit_threads
from fsdpx.core.array.blas.products import linear_forward, gemm, linear_backward, linear_backward_params
from fsdpx.core.base.extensions import import_declared_extension

__all__ = [
    "describe_library_files", "gemm", "get_gemm_address", "get_product_threads", "get_selected_library",
    "limit_threads", "linear_backward", "linear_backward_params", "linear_forward", "list_available_blas_libraries",
    "load_half_matmul", "measure_gflops_of_each_library", "select_library", "set_product_threads", "set_thread_limit",
]  # fmt: skip


@cache
def load_half_matmul() -> Any:
    """Return the extension module that multiplies 16-bit matrices."""
    return import_declared_extension("half", "matmul")
