"""Training on fields of PDE solvers, where each sample is partitioned over ranks by domain decomposition."""
