"""Matrix products by the chosen libraries, written or added in place."""

from functools import cache
from typing import Any

from fsdpx.core.array.blas.libraries import available, choose, chosen, pointer, present, threads
from fsdpx.core.array.blas.measure import measure
from fsdpx.core.array.blas.pools import limit, limited
from fsdpx.core.array.blas.products import affine, gemm, linear_backward, linear_gradients
from fsdpx.core.base.extensions import load_extension

__all__ = [
    "affine", "available", "choose", "chosen", "gemm", "halves", "limit", "limited", "linear_backward",
    "linear_gradients", "measure", "pointer", "present", "threads",
]  # fmt: skip


@cache
def halves() -> Any:
    """The module that multiplies matrices of 16 bits, an extension."""
    return load_extension("half", "matmul")
