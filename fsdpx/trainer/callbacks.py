"""What `fit` calls: metrics, and callbacks of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np

from fsdpx.array.namespace import to_host
from fsdpx.comm.communicator import Communicator
from fsdpx.errors import ConfigError
from fsdpx.trainer.series import History

__all__ = ["EVENTS", "Events", "Metric", "Metrics", "on_host"]

Metric = Callable[[Any, Any], Any]
"""(output, target) of this rank's samples -> an array of values, of which the mean is taken; or (sum, count)."""


class Metrics:
    """Sums over the batches of one validation."""

    def __init__(self, functions: Mapping[str, Metric]) -> None:
        self.functions = functions
        self._sums = np.zeros((len(functions), 2))  # sum and count
        self._problem: tuple[str, Exception] | None = None

    def add(self, output: Any, target: Any) -> None:
        """One batch; an error is kept for `mean`, where all ranks meet."""
        for k, (name, function) in enumerate(self.functions.items()):
            try:
                self._sums[k] += _sum_and_count(function(output, target))
            except Exception as error:
                self._problem = self._problem or (f"metric {name!r}: {error}", error)

    def mean(self, data: Communicator) -> dict[str, float]:
        """By name, over all samples; the same on every rank of `data`, the ranks with different samples. Collective.

        ConfigError on all of them if a metric failed on one."""
        text, cause = self._problem or (None, None)
        everyone = data.all_gather_plain((self._sums, text))
        for rank, (_, problem) in enumerate(everyone):
            if problem is not None:
                raise ConfigError(f"rank {rank}: {problem}") from cause
        with np.errstate(all="ignore"):
            sums = sum(found for found, _ in everyone)
            return dict(zip(self.functions, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))


def on_host(output: Any) -> Any:
    """The model's output as NumPy arrays: one, or a tuple."""
    return tuple(map(to_host, output)) if isinstance(output, tuple) else to_host(output)


def _sum_and_count(found: Any) -> tuple[float, float]:
    if isinstance(found, tuple) and len(found) == 2:
        return float(found[0]), float(found[1])
    values = np.asarray(to_host(found))
    if values.ndim == 0:
        raise ConfigError(
            "it returned one number, which cannot be averaged over ranks: return an array with a value per sample, "
            "or (sum, count)"
        )
    return float(values.sum(dtype=np.float64)), float(values.size)


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
