"""Elastic training: when ranks die, leave or join, training continues from state held in the memory of the ranks."""
