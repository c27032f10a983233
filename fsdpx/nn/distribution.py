"""`Layer.as_distributed`. The stub file next to this one declares its options and result for type checkers."""

from importlib import import_module
from typing import Any


def as_distributed(self: Any, **options: Any) -> Any:
    """Return a `fsdpx.Trainer` for this model; the options are those of `fsdpx.distribute`. Collective."""
    return import_module("fsdpx").distribute(self, **options)  # at runtime, because layers must not import the trainer
