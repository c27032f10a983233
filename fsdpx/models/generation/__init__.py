"""Text generation: choosing tokens, stopping texts, and running the model."""
