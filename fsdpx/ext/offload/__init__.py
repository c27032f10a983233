"""Optimizer state and parameters on disk."""
