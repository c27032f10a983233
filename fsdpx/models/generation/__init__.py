"""Text generation: samples tokens from logits, stops texts at end tokens, and runs the model."""
