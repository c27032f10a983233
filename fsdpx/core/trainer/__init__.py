"""The trainer: the object that a user holds, a model being trained on all ranks."""
