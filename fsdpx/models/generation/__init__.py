"""Text generation: runs the model, samples tokens from its logits, and stops texts at end tokens."""
