"""Collectives that use memory shared by the ranks of a host."""
