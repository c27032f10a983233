"""Low-rank adapters (LoRA)."""
