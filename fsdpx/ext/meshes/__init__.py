"""Meshes and graphs that are partitioned over ranks, and graph networks that run on them."""
