"""16-bit arithmetic on CPUs: matrix products, and optimizer updates for parameters stored in bfloat16."""

from fsdpx.ext.half import matmul

__all__ = ["matmul"]
