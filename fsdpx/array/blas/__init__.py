"""Matrix products by the best BLAS library that is here, straight into the arrays where they are wanted."""

from fsdpx.array.blas.choice import available, choose, chosen, pointer, threads
from fsdpx.array.blas.measure import measure
from fsdpx.array.blas.products import affine, gemm, line, line_backward, linear_backward, linear_gradients

__all__ = [
    "affine", "available", "choose", "chosen", "gemm", "line", "line_backward", "linear_backward", "linear_gradients",
    "measure", "pointer", "threads",
]  # fmt: skip
