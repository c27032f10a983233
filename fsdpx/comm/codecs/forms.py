"""Which form of a codec's kernels runs: plain array code, or Numba code of the same bits."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.array.kernels import choice

__all__ = ["compiled"]


def compiled(xp: Any, module: str, name: str) -> Callable[..., Any] | None:
    """The Numba code `name` of a file beside this one, if it may run."""
    if xp is not np or choice.active == "plain" or not choice.installed():
        return None
    body: Callable[..., Any] = getattr(importlib.import_module(f".{module}", __package__), name)
    return body
