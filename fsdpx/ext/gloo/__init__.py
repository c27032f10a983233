"""Gloo, the backend of ranks that a torch.distributed launcher has started."""
