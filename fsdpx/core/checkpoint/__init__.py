"""Checkpoints: a folder of standard safetensors files that all ranks write and read in parallel."""
