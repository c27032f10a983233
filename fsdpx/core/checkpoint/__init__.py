"""Checkpoints: folders of standard safetensors files, which all ranks write and read in parallel."""
