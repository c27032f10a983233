"""The training state of one rank: its placement, parameters, gradients and optimizer state, and the table of all its
arrays."""
