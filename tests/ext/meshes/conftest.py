"""Whole trainings: gradients begin as NaN."""

from poison import poison as poison
