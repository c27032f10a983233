"""Ranks that torch.distributed has started, and its Gloo."""
