"""Meshes and graphs that are partitioned over ranks, and graph networks on them."""
