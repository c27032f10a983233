"""Offloading of optimizer state, parameters, gradients and activations to disk."""
