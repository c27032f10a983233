"""The listeners of `fit`: the progress bar, the log, and the user's callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.trainer.history import History

__all__ = ["EVENTS", "Events"]

EVENTS = ("on_train_begin", "on_step_end", "on_validation_end", "on_save", "on_epoch_end", "on_train_end")
"""Methods that a callback may have; each is called with (trainer, history)."""


class Events:
    """Calls every listener, in order, on every rank. on_train_end is called however training ends."""

    def __init__(self, trainer: Any, history: History, own: Sequence[Any], given: Sequence[Any]) -> None:
        self.trainer, self.history = trainer, history
        self._listeners = [*own, *map(_checked, given)]
        self._ends = ExitStack()

    def __enter__(self) -> Events:
        for listener in self._listeners:
            self._ends.callback(self._call, listener, "on_train_end")
            self._call(listener, "on_train_begin")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.__exit__(kind, error, trace)

    def tell(self, event: str) -> None:
        for listener in self._listeners:
            self._call(listener, event)

    def _call(self, listener: Any, event: str) -> None:
        method = getattr(listener, event, None)
        if method is not None:
            method(self.trainer, self.history)


class _Each:
    """A function, called after each step."""

    def __init__(self, function: Callable[[Any, History], object]) -> None:
        self.on_step_end = function


def _checked(callback: Any) -> Any:
    """ConfigError for callbacks that would never be called."""
    methods = [name for name in dir(callback) if name.startswith("on_")]
    unknown = [name for name in methods if name not in EVENTS]
    if unknown or not (methods or callable(callback)):
        kind = f"{type(callback).__name__} has {', '.join(unknown) or 'none of them'}"
        raise ConfigError(f"fit(callbacks=...): a function, or an object with some of {', '.join(EVENTS)}; {kind}")
    return callback if methods else _Each(callback)
