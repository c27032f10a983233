"""The repr of a layer or a loss: its constructor call, without arguments that are at their defaults."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

__all__ = ["describe"]


def describe(thing: Any) -> str:
    """`Linear(64, 128, bias=False)`, from the constructor's signature and the attributes of these names."""
    words = []
    kind: Any = type(thing)
    for name, argument in _arguments(kind).items():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD) or not hasattr(thing, name):
            continue
        value = getattr(thing, name)
        if argument.default is argument.empty:
            words.append(repr(value))
        elif value != argument.default:
            words.append(f"{name}={value!r}")
    return f"{type(thing).__name__}({', '.join(words)})"


@functools.cache
def _arguments(kind: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.__init__).parameters
