"""Adapters of low rank (LoRA)."""
