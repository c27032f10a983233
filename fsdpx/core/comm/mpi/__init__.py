"""Ranks as MPI processes, through mpi4py. Importing this package loads no MPI."""
