"""Ranks of one machine: collectives in the memory that they share."""
