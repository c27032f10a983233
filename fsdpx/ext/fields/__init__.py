"""Fields of solvers: each sample is partitioned over the ranks that hold its parts."""
