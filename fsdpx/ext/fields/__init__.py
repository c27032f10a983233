"""Fields of solvers: each sample is cut over the ranks that hold its parts."""
