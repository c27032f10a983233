"""The lowest layer of the core: user options, environment variables, safe file access and messages."""
