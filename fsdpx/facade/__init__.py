"""The API for users: distribute, dry_run and the functional API."""
