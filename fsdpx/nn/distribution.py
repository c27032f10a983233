"""`Layer.as_distributed`. The stub beside this file tells type checkers its options and its result."""

from importlib import import_module
from typing import Any


def as_distributed(self: Any, **options: Any) -> Any:
    """Return a `fsdpx.Trainer` of this model; the options are those of `fsdpx.distribute`. Collective."""
    return import_module("fsdpx").distribute(self, **options)  # at runtime: layers must not import the trainer
