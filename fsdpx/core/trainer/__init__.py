"""The trainer: the object through which a user trains, evaluates, saves and loads a distributed model."""
