"""16-bit arithmetic: matrix products, and updates of parameters held in 16 bits."""

from fsdpx.ext.half import matmul

__all__ = ["matmul"]
