"""Options, environment variables, safe file access and messages: the lowest layer of the core."""
