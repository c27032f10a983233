"""Checkpoints: folders of standard safetensors files that all ranks write and read in parallel."""
