"""Offload to disk of optimizer state, parameters, gradients and activations."""
