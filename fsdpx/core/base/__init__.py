"""What everything stands on: options, environment, files, messages."""
