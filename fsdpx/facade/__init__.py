"""What users call: distribute, dry_run and the functional API."""
