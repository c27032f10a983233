"""Exchange of fields and weights between solvers and trainers that run on different ranks of one MPI job."""
