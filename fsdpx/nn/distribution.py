"""The method `Layer.as_distributed`. The stub file next to this module declares the options and the result of this
method for type checkers."""

from importlib import import_module
from typing import Any


def as_distributed(self: Any, **options: Any) -> Any:
    """Distribute this model over the ranks, and return a `fsdpx.Trainer`. The options are the same as for
    `fsdpx.distribute`. Collective."""
    return import_module("fsdpx").distribute(self, **options)  # layers must not import the trainer at import time
