"""What this rank holds: its ledger, its placement, its options."""
