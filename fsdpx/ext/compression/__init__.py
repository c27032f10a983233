"""Codecs that compress gradients: int8, top-k, PowerSGD."""
