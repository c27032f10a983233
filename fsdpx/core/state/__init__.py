"""The state of one rank: its placement, its ledger of arrays, its parameters and optimizer state."""
