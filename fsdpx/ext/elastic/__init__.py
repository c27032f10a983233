"""Elastic training, which continues from memory when ranks die, leave or join."""
