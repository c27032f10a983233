"""Solvers and trainers on different ranks of one MPI job that exchange fields and weights."""
