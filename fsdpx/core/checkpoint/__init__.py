"""Checkpoints: a directory of standard safetensors files that all ranks write and read at once."""
