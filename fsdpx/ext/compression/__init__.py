"""Compressed gradients: int8, top-k, PowerSGD."""
