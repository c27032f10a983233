"""Arithmetic in 16 bits: products, and updates of parameters that are held in them."""

from fsdpx.ext.half import matmul

__all__ = ["matmul"]
