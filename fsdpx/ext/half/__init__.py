"""Arithmetic in 16 bits: products, kernels and updates."""
