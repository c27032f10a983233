"""Progress lines, notices, and what ends a run early."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any, TextIO

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.trainer.host import TrainerHost
from fsdpx.trainer.series import History

__all__ = ["LOGGER", "SILENCE", "Limits", "ProgressBar", "Rate", "line", "say"]

SILENCE = 1.0
"""Seconds that something may take before it is named."""


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes each line in one piece to the current standard error."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


LOGGER = logging.getLogger("fsdpx")
"""All messages go through it; `logging.getLogger("fsdpx").handlers` may be replaced."""
LOGGER.addHandler(_StandardError())
LOGGER.setLevel(logging.INFO)
LOGGER.propagate = False


def line(text: str) -> None:
    """A line on standard error, and wherever else the logger of fsdpx writes."""
    LOGGER.info("%s", text)


def say(who: Any, text: str) -> None:
    """A line on rank 0 of a trainer's host or of a communicator."""
    if who.rank == 0:
        line(f"fsdpx: {text}")


STEPS, EPOCHS, PATIENCE, STOP = "steps", "epochs", "patience", "stop"


@dataclass(frozen=True)
class Limits:
    """As in `fit`. An end is one of the words above, "" is none."""

    epochs: int | None
    steps: int | None
    every: int
    patience: int | None
    stop: Callable[[History], bool] | None

    def demand(self, validation: Any, metrics: Any, restore_best: bool | None) -> None:
        """ConfigError for numbers that are too small, and for options that need validation where there is none."""
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"fit(steps={self.steps}): at least 1, or None for whole epochs")
        if self.epochs is None and self.steps is None:
            raise ConfigError("fit(epochs=None): then steps=... says when training ends")
        for name in ("epochs", "every", "patience"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ConfigError(f"fit({name}={number}): at least 1")
        if self.patience is not None and validation is None:
            raise ConfigError(f"fit(patience={self.patience}): patience needs validation=..., and none is given")
        if validation is None and (metrics or restore_best):
            raise ConfigError("fit: metrics and restore_best are about validation=..., and none is given")

    def over(self, history: History, epochs: int, before: str) -> str:
        """The end of a run that is begun again after `epochs` of them. before: how the earlier start ended, "" if it
        was interrupted: the last validation may be missing then."""
        if self.steps is not None and history.steps >= self.steps:
            return STEPS
        if before and self.epochs is not None and epochs >= self.epochs:
            return EPOCHS
        if before == PATIENCE and self._tired(history):
            return PATIENCE
        return STOP if before == STOP and self.stop is not None else ""

    def validates(self, history: History) -> bool:
        """Whether to validate after this step: when it is time, or after the last one."""
        return history.steps % self.every == 0 or history.steps == self.steps

    def reached(self, host: TrainerHost, history: History) -> str:
        """After such a step: the same answer on all ranks. Collective."""
        if host.apart and self.patience is None and self.stop is None:  # then there is nothing to agree on
            return STEPS if history.steps == self.steps else ""
        asked = self.stop is not None and self.stop(history)
        votes = host.most(np.array([float(self._tired(history)), float(asked)]), "early stopping")
        if votes.any():
            return PATIENCE if votes[0] else STOP
        return STEPS if history.steps == self.steps else ""

    def words(self, end: str) -> str:
        return {
            STEPS: f"{self.steps} steps done",
            EPOCHS: "all epochs done",
            PATIENCE: f"no better validation loss in {self.patience} validations",
            STOP: "stop() said so",
        }.get(end, "")

    def _tired(self, history: History) -> bool:
        return self.patience is not None and history.since_best >= self.patience


SECONDS = 5.0
"""Seconds between two lines where there is no terminal."""
REFRESH = 0.2
"""Seconds between two updates of the bar."""


class Rate:
    """Samples (or other units) per second of training since the last call."""

    def __init__(self) -> None:
        self._seen, self._seconds = 0, 0.0

    def of(self, history: History) -> float:
        seen, seconds = history.seen - self._seen, history.seconds - self._seconds
        self._seen, self._seconds = history.seen, history.seconds
        return seen / max(seconds, 1e-9)


class ProgressBar:
    """A callback of `fit`. total: steps since the very start, if known. epochs: in all, if known."""

    def __init__(self, unit: str, total: int | None, epochs: int | None, history: History) -> None:
        self.unit, self.total, self.epochs = unit, total, epochs
        self._rate, self._shown, self._first = Rate(), 0.0, history.before + 1
        self._start = perf_counter()
        self._bar: Any = None  # of rich, on a terminal

    def on_step_end(self, trainer: Any, history: History) -> None:
        now, wait = perf_counter(), REFRESH if self._bar else SECONDS
        done = history.steps in (self._first, self.total)
        if trainer.host.rank > 0 or (now - self._shown < wait and not done):  # rank 0 may be another one than before
            return
        self._shown = now
        if self._bar is None and sys.stderr.isatty():
            self._bar = _bar(self.total, history.before)
        if self._bar is None:
            line(f"{self._place(history)}  {self._values(trainer, history)}{self._left(history)}")
        else:
            values = self._values(trainer, history)
            self._bar.update(0, completed=history.steps, epoch=self._epoch(history), values=values)
            self._bar.refresh()

    def on_validation_end(self, trainer: Any, history: History) -> None:
        if trainer.host.rank == 0:
            line(f"{self._place(history)}  {_validation(history)}")

    def on_save(self, trainer: Any, history: History) -> None:
        if trainer.host.rank == 0:
            best = ", the best so far" if history.best_step == history.steps else ""
            line(f"{self._place(history)}  saved {history.checkpoint}{best}")

    def on_train_end(self, trainer: Any, history: History) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _place(self, history: History) -> str:
        return f"{self._epoch(history)}  step {history.steps}" + (f"/{self.total}" if self.total else "")

    def _epoch(self, history: History) -> str:
        number = history.epochs + 1
        return f"epoch {number}" if self.epochs is None else f"epoch {min(number, self.epochs)}/{self.epochs}"

    def _values(self, trainer: Any, history: History) -> str:
        """Loss, rate, learning rate and gradient norm, as far as they are known; the first step's rate means
        nothing."""
        last, rate = trainer.inspect.last, self._rate.of(history)
        words = [f"loss {history.losses[-1]:.4f}"]
        words += [f"{rate:,.0f} {self.unit}/s"] if history.steps > self._first else []
        words += [f"lr {last.rate:.3g}"]
        words += [] if math.isnan(last.norm) else [f"norm {last.norm:.3g}"]
        return "  ".join(words)

    def _left(self, history: History) -> str:
        here = len(history.losses)
        if self.total is None or here < 2:
            return ""
        seconds = (perf_counter() - self._start) / here * (self.total - history.steps)
        return f"  {timedelta(seconds=round(seconds))} left"


def _validation(history: History) -> str:
    found = [f"validation loss {history.validation[-1][1]:.4f}"]
    return "  ".join(found + [f"{name} {pairs[-1][1]:.4f}" for name, pairs in history.metrics.items() if pairs])


def _bar(total: int | None, done: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.fields[epoch]}"), BarColumn(bar_width=20), MofNCompleteColumn(),
        TextColumn("{task.fields[values]}"), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    bar.add_task("", total=total, completed=done, epoch="", values="")
    bar.start()
    return bar
