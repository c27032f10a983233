"""What `fit` calls and asks: metrics, callbacks of the user, progress lines, the log (metrics.csv, metrics.jsonl,
TensorBoard's events and the messages, in one folder, by rank 0), and what ends a run early."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from os import PathLike
from time import perf_counter
from types import SimpleNamespace, TracebackType
from typing import Any, TextIO

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.array.random import Random
from fsdpx.core.base import safe_files
from fsdpx.core.base.messages import LOGGER, line, on_terminal, say
from fsdpx.core.checkpoint.atomic_commit import hold
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.state.placement import Placement
from fsdpx.core.trainer.batch import array_of
from fsdpx.core.trainer.call_runner import TrainerHost
from fsdpx.core.trainer.fit_checkpoints import History
from fsdpx.errors import CheckpointError, ConfigError, DataError, FsdpxError, install_hint
from fsdpx.ext.observe.folder import rows_of
from fsdpx.nn.layer import Env
from fsdpx.nn.losses import Loss

__all__ = ["EVENTS", "Events", "Limits", "Log", "Metric", "Metrics", "ProgressBar", "Rate", "on_host"]

LOCK = ".lock"
STEP = ("loss", "learning_rate", "gradient_norm", "rate")


class Log:
    """A callback of `fit`: a row after each step, and one after each validation. A run that goes on from a checkpoint
    keeps the rows up to it; any other run starts new files."""

    def __init__(self, folder: str | PathLike[str], metrics: tuple[str, ...], tensorboard: bool | None = None) -> None:
        """tensorboard: True: its events are wanted, ConfigError without the package; None: if it is installed."""
        self.folder, self._tensorboard = safe_files.home(folder), tensorboard
        if tensorboard and find_spec("tensorboardX") is None:
            raise ConfigError(
                f"fit(tensorboard=True): TensorBoard's events need tensorboardX: {install_hint('tensorboard')}"
            )
        own = ("step", "epoch", *STEP, "validation_loss")
        if taken := [name for name in metrics if name in own]:
            raise ConfigError(
                f"fit(metrics=...): the log has columns named {', '.join(map(repr, taken))}: choose other names"
            )
        self._columns = (*own, *metrics)
        self._lock: int | None = None  # on rank 0: holds off other jobs
        self._rate = Rate()
        self._files: tuple[TextIO, ...] | None = None
        self._board: Any = None  # of tensorboardX
        self._text_log: logging.StreamHandler[TextIO] | None = None

    def on_train_begin(self, trainer: Any, history: History) -> None:
        try:
            trainer.host.alone(f"log {self.folder}", lambda: self._begin(history.before))
        except CheckpointError as error:
            raise ConfigError(f"fit(log=...): {error}") from error
        if trainer.host.rank == 0:
            self._open(trainer, history)

    def on_step_end(self, trainer: Any, history: History) -> None:
        values = (history.losses[-1], trainer.inspect.last.rate, trainer.inspect.last.norm, self._rate.of(history))
        self._write(trainer, history, dict(zip(STEP, values, strict=True)))

    def on_validation_end(self, trainer: Any, history: History) -> None:
        metrics = {name: pairs[-1][1] for name, pairs in history.metrics.items()}
        self._write(trainer, history, {"validation_loss": history.validation[-1][1], **metrics})

    def on_train_end(self, trainer: Any, history: History) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:  # first: closing a file may fail
            (self.folder / LOCK).unlink(missing_ok=True)
            os.close(lock)
        for file in self._files or ():
            file.close()
        if self._text_log is not None:
            LOGGER.removeHandler(self._text_log)
            self._text_log.close()
            self._text_log.stream.close()
        if self._board is not None:
            self._board.close()

    def _begin(self, before: int) -> None:
        """The files with the rows that stay."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = hold(self.folder / LOCK, f"{self.folder}: another job is writing its log there")
        table, lines = self.folder / "metrics.csv", self.folder / "metrics.jsonl"
        found = rows_of(lines) if before and lines.exists() else ()
        rows = [row for row in found if row.get("step", before + 1) <= before]
        safe_files.write(lines, "".join(json.dumps(row) + "\n" for row in rows), safe_files.READABLE)
        writer = csv.DictWriter(out := io.StringIO(newline=""), self._columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        safe_files.write(table, out.getvalue(), safe_files.READABLE)
        if not before:
            safe_files.write(self.folder / "log.txt", "", safe_files.READABLE)

    def _open(self, trainer: Any, history: History) -> None:
        """On the rank that writes; in elastic training it may be another one later."""
        with ExitStack() as opened:
            table, lines, text = (
                opened.enter_context(os.fdopen(safe_files.append(self.folder / name), "a", 1, newline=newline))
                for name, newline in (("metrics.csv", ""), ("metrics.jsonl", ""), ("log.txt", None))
            )
            opened.pop_all()
        self._files, self._text_log = (table, lines), logging.StreamHandler(text)
        self._text_log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        LOGGER.addHandler(self._text_log)
        if self._tensorboard is False:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            also = f"CSV and JSON lines; for TensorBoard {install_hint('tensorboard')}"
            say(trainer.host, f"log {self.folder}: {also}")
        else:
            unguessed = f".{secrets.token_hex(8)}"  # it follows a link that has the name of its file
            self._board = SummaryWriter(str(self.folder), purge_step=history.steps + 1, filename_suffix=unguessed)

    def _write(self, trainer: Any, history: History, values: dict[str, float]) -> None:
        if trainer.host.rank > 0:
            return
        if self._files is None:
            self._open(trainer, history)
        assert self._files is not None
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        row = {"step": history.steps, "epoch": history.epochs + 1, **values}
        csv.DictWriter(self._files[0], self._columns, restval="").writerow(row)
        self._files[1].write(json.dumps(row) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, history.steps)


Metric = Callable[[Any, Any], Any] | Loss
"""(output, target) of this rank's samples -> an array of values, of which the mean is taken; or (sum, count). Or a
loss."""


class Metrics:
    """Sums over the batches of one validation.

    place: of the trainer. Where its ranks have parts of fields, `mean` is over all of them, and a function gives the
    sum and count of the cells of a part."""

    def __init__(self, functions: Mapping[str, Metric], place: Placement) -> None:
        self.functions, self._place = functions, place
        self._sums = np.zeros((len(functions), 2))  # sum and count
        self._problem: tuple[str, Exception] | None = None

    def add(self, output: Any, target: Any) -> None:
        """One batch; an error is kept for `mean`, where all ranks meet. Losses over parts of fields communicate."""
        if (field := self._place.field) is not None:
            target = field.target(np.asarray(to_host(target)))
        for k, (name, function) in enumerate(self.functions.items()):
            try:
                if isinstance(function, Loss):
                    self._sums[k] += self._compared(function, output, target)
                else:
                    self._sums[k] += _sum_and_count(function(on_host(output), target), self._place.field is not None)
            except Exception as error:
                self._problem = self._problem or (f"metric {name!r}: {error}", error)

    def _compared(self, loss: Loss, output: Any, target: Any) -> tuple[float, float]:
        """Total and weight of a loss. Over parts of fields the ranks compare first whether it fits on all of them."""
        place, problem = self._place, None
        y, t = (array_of(place, a) for a in (output, target))
        if place.field is not None:
            loss, outputs = loss.over(place.field.outputs), place.field.outputs
            y, t = (place.field.grid.entering(a, outputs, "the target") for a in (y, t))
        try:
            loss.validate(tuple(y.shape), t)
        except FsdpxError as error:
            problem = error
        if place.field is not None:
            found = enumerate(place.axes.data.all_gather_plain(None if problem is None else str(problem)))
            problem = problem or next((DataError(f"rank {rank}: {text}") for rank, text in found if text), None)
        if problem is not None:
            raise problem
        return loss.forward(Env(place.xp, place.axes, Random(0), training=False), y, t)[:2]

    def mean(self, data: Communicator) -> dict[str, float]:
        """By name, over all samples; the same on every rank of `data`, the ranks with different samples. Collective.

        ConfigError on all of them if a metric failed on one."""
        text, cause = self._problem or (None, None)
        ranks = data if self._place.field is None else self._place.axes.data
        everyone = ranks.all_gather_plain((self._sums, text, [*self.functions]))
        for rank, (_, problem, names) in enumerate(everyone):
            if problem is not None:
                raise ConfigError(f"rank {rank}: {problem}") from cause
            if names != everyone[0][2]:
                raise ConfigError(f"fit(metrics=...): rank 0 has {everyone[0][2]}, rank {rank} has {names}")
        with np.errstate(all="ignore"):
            sums = sum(found for found, *_ in everyone)
            return dict(zip(self.functions, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))


def on_host(output: Any) -> Any:
    """The model's output as NumPy arrays: one, or a tuple."""
    return tuple(map(to_host, output)) if isinstance(output, tuple) else to_host(output)


def _sum_and_count(found: Any, parts: bool) -> tuple[float, float]:
    if isinstance(found, tuple) and len(found) == 2:
        return float(found[0]), float(found[1])
    if parts:
        raise ConfigError(
            "with space= a rank has parts of samples: return (sum, count) over its cells, or give a loss, as nn.VRMSE()"
        )
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

    def __init__(self, trainer: Any, history: History, own: Sequence[Any], given: Any) -> None:
        self.trainer, self.history = trainer, history
        self._listeners = [*own, *map(_checked, given if isinstance(given, Iterable) else [given])]
        self._ends = ExitStack()

    def __enter__(self) -> Events:
        with self._ends as begun:
            for listener in self._listeners:
                begun.callback(self._call, listener, "on_train_end")
                self._call(listener, "on_train_begin")
            self._ends = begun.pop_all()
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


def _checked(callback: Any) -> Any:
    """ConfigError for callbacks that would never be called."""
    methods = [name for name in dir(callback) if name.startswith("on_")]
    unknown = [name for name in methods if name not in EVENTS]
    if unknown or not (methods or callable(callback)):
        kind = f"{type(callback).__name__} has {', '.join(unknown) or 'none of them'}"
        raise ConfigError(f"fit(callbacks=...): a function, or an object with some of {', '.join(EVENTS)}; {kind}")
    return callback if methods else SimpleNamespace(on_step_end=callback)


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
        for name in ("epochs", "steps", "every", "patience"):
            number = getattr(self, name)
            if (number is not None or name == "every") and not (isinstance(number, int) and number >= 1):
                remedy = ", or None for whole epochs" if name == "steps" else ""
                raise ConfigError(f"fit({name}={number!r}): a whole number, at least 1{remedy}")
        if not (self.stop is None or callable(self.stop)):
            raise ConfigError(f"fit(stop={self.stop!r}): a function of the history, true where training is to end")
        if self.epochs is None and self.steps is None:
            raise ConfigError("fit(epochs=None): then steps=... says when training ends")
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
        if self._bar is None and on_terminal():
            self._bar = _bar(self.total, history.before)
        if self._bar is None:
            line(f"{self._place(history)}  {self._values(trainer, history)}{self._left(history)}")
        else:
            values = self._values(trainer, history)
            self._bar.update(0, completed=history.steps, epoch=self._epoch(history), values=values)
            self._bar.refresh()

    def on_validation_end(self, trainer: Any, history: History) -> None:
        if trainer.host.rank == 0:
            found = {"validation loss": history.validation, **history.metrics}
            shown = [f"{name} {pairs[-1][1]:.4f}" for name, pairs in found.items() if pairs]
            line("  ".join([self._place(history), *shown]))

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
