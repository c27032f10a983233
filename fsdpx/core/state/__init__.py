"""The training state of one rank: placement, parameters, gradients and optimizer state, and a table of the rank's
arrays."""
