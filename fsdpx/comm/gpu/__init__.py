"""Ranks that have GPUs: which one each takes, NCCL, and whether MPI takes their arrays."""
