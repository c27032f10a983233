"""Lossy codecs that compress gradients before they are sent: int8, top-k and PowerSGD."""
