"""Training on fields from PDE solvers. Each sample is partitioned over ranks by domain decomposition."""
