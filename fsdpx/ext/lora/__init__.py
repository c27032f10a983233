"""Low-rank adapters (LoRA) for finetuning."""
