"""Elastic training: continue when ranks die, leave or join."""
