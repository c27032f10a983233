"""The progress display of `fit` on rank 0: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import math
from datetime import timedelta
from time import perf_counter
from typing import Any

from fsdpx.core.base.messages import is_stderr_terminal, log_line
from fsdpx.core.trainer.fit_checkpoints import FitHistory
from fsdpx.ext.observe.log import ThroughputMeter

__all__ = ["ProgressBar"]

LINE_INTERVAL_SECONDS = 5.0
"""Time between two progress lines if there is no terminal."""
REFRESH_SECONDS = 0.2
"""Time between two updates of the bar."""


class ProgressBar:
    """A `fit` callback that prints the progress of training on rank 0.

    `total` is the number of the last step, counted from the start of training, and `epochs` is the number of epochs.
    Each is None if it is unknown."""

    def __init__(self, unit: str, total: int | None, epochs: int | None, history: FitHistory) -> None:
        self.unit, self.total, self.epochs = unit, total, epochs
        self._rate, self._shown, self._first = ThroughputMeter(), 0.0, history.earlier_steps + 1
        self._start = perf_counter()
        self._bar: Any = None  # becomes a rich.progress.Progress if stderr is a terminal

    def on_step_end(self, trainer: Any, history: FitHistory) -> None:
        now, wait = perf_counter(), REFRESH_SECONDS if self._bar else LINE_INTERVAL_SECONDS
        done = history.steps in (self._first, self.total)
        if trainer.call_runner.rank > 0 or (
            now - self._shown < wait and not done
        ):  # the rank is read every time, because elastic training may change it
            return
        self._shown = now
        if self._bar is None and is_stderr_terminal():
            self._bar = _start_progress_bar(self.total, history.earlier_steps)
        if self._bar is None:
            log_line(
                f"{self._format_step(history)}  "
                f"{self._format_values(trainer, history)}{self._format_time_left(history)}"
            )
        else:
            values = self._format_values(trainer, history)
            self._bar.update(0, completed=history.steps, epoch=self._format_epoch(history), values=values)
            self._bar.refresh()

    def on_validation_end(self, trainer: Any, history: FitHistory) -> None:
        if trainer.call_runner.rank == 0:
            found = {"validation loss": history.validation, **history.metrics}
            shown = [f"{name} {pairs[-1][1]:.4f}" for name, pairs in found.items() if pairs]
            log_line("  ".join([self._format_step(history), *shown]))

    def on_save(self, trainer: Any, history: FitHistory) -> None:
        if trainer.call_runner.rank == 0:
            best = ", the best so far" if history.best_step == history.steps else ""
            log_line(f"{self._format_step(history)}  saved {history.checkpoint}{best}")

    def on_train_end(self, trainer: Any, history: FitHistory) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _format_step(self, history: FitHistory) -> str:
        return f"{self._format_epoch(history)}  step {history.steps}" + (f"/{self.total}" if self.total else "")

    def _format_epoch(self, history: FitHistory) -> str:
        number = history.epochs + 1
        return f"epoch {number}" if self.epochs is None else f"epoch {min(number, self.epochs)}/{self.epochs}"

    def _format_values(self, trainer: Any, history: FitHistory) -> str:
        """Return loss, throughput, learning rate and gradient norm as text, leaving out unknown values. The throughput
        of the first step is also left out, because its time includes the startup."""
        last, rate = trainer.inspect.last_update, self._rate.measure_rate(history)
        words = [f"loss {history.losses[-1]:.4f}"]
        words += [f"{rate:,.0f} {self.unit}/s"] if history.steps > self._first else []
        words += [f"lr {last.lr:.3g}"]
        words += [] if math.isnan(last.norm) else [f"norm {last.norm:.3g}"]
        return "  ".join(words)

    def _format_time_left(self, history: FitHistory) -> str:
        here = len(history.losses)
        if self.total is None or here < 2:
            return ""
        seconds = (perf_counter() - self._start) / here * (self.total - history.steps)
        return f"  {timedelta(seconds=round(seconds))} left"


def _start_progress_bar(total: int | None, done: int) -> Any:
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
