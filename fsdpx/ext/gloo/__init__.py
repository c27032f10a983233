"""Gloo backend: communication without MPI, for ranks that torchrun or another torch.distributed launcher started."""
