"""Collectives in memory shared by the ranks of a host."""
