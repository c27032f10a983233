"""The MPI backend, through mpi4py. Importing this package does not load MPI."""
