"""The training loop: epochs over a loader, validation, early stopping that all ranks agree on, a progress line."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from fsdpx.errors import CheckpointError, ConfigError, DataError, NumericsError
from fsdpx.trainer.history import History
from fsdpx.trainer.series import Checkpoints, Resumable
from fsdpx.watch.preempt import Preemption

__all__ = ["Trains", "fit"]


class Trains(Resumable, Protocol):
    """What the loop needs of a trainer."""

    @property
    def steps(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def weight(self) -> float: ...
    def step(self, x: Any, y: Any) -> float: ...
    def evaluate(self, x: Any, y: Any) -> float: ...
    def no_batch(self) -> None: ...
    def most(self, values: np.ndarray, what: str) -> np.ndarray: ...


def fit(
    trainer: Trains,
    loader: Iterable[Any],
    *,
    epochs: int = 1,
    steps: int | None = None,
    validation: Iterable[Any] | None = None,
    every: int = 50,
    patience: int | None = None,
    stop: Callable[[History], bool] | None = None,
    progress: bool = True,
    count: Callable[[Any], int] | None = None,
    unit: str = "samples",
    checkpoints: Checkpoints | None = None,
    preempt: Preemption | None = None,
) -> History:
    """Train on (x, y) batches. Collective.

    Parameters
    ----------
    loader : batches of this data rank; with `set_epoch`, told of each epoch
    epochs, steps : whichever ends first
    validation : batches whose mean loss is taken every `every` steps and at the end
    every : steps between two validations
    patience : end after so many validations without a new best
    stop : asked after each validation, or `every` steps; if it is true on any rank, all ranks end together
    progress : print a line of progress on rank 0
    count : what a batch counts as on that line (default: its samples times the data ranks)
    unit : the word for what is counted
    checkpoints : `fsdpx.Checkpoints(...)`: where to save; started again, an interrupted run goes on where it was
    preempt : `fsdpx.Preemption(...)`: save and end when a signal asks; made where there are checkpoints, unless False
    """
    _demand_positive(steps, epochs, every, patience, validation)
    history = History()
    saves = _Saves(trainer, loader, checkpoints, history)
    line = _Line(trainer, progress, unit, steps, history.before)
    if steps is not None and history.steps >= steps:
        history.reason = f"{steps} steps done"
        return line.close(history)
    for epoch in range(getattr(loader, "epoch", 0), saves.first + epochs):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches, before = iter(loader), len(history.losses)
        while (batch := _next(trainer, batches, history)) is not None:
            x, y = batch
            _step(trainer, x, y, history)
            line.step(history.losses[-1], (count or _samples)(x) * trainer.parts)
            done = history.steps
            last = steps is not None and done >= steps
            ended = (done % every == 0 or last) and _end(trainer, history, validation, patience, stop, line)
            if last and not ended:
                history.reason = f"{steps} steps done"
            saves.step(ended or last)
            if ended or last:
                return line.close(history)
            if preempt is not None:
                preempt.check(trainer, also=partial(saves.step, True))
        if len(history.losses) == before:
            raise DataError(f"fit: the loader gives no batch in epoch {epoch}; a generator serves one epoch only")
        history.epochs += 1
    if validation is not None and (not history.validation or history.validation[-1][0] != history.steps):
        _validate(trainer, history, validation, line)
    saves.step(True)
    return line.close(history)


def _demand_positive(steps: int | None, epochs: int, every: int, patience: int | None, validation: Any) -> None:
    if steps is not None and steps < 1:
        raise ConfigError(f"fit(steps={steps}): at least 1, or None for whole epochs")
    if epochs < 1 or every < 1 or (patience is not None and (patience < 1 or validation is None)):
        raise ConfigError(
            f"fit(epochs={epochs}, every={every}, patience={patience}): all at least 1; patience needs validation"
        )


class _Saves:
    """When `fit` saves, and where it goes on. first: the epoch in which the run began."""

    def __init__(self, trainer: Trains, loader: Any, checkpoints: Checkpoints | None, history: History) -> None:
        self.trainer, self.loader, self.checkpoints, self.history = trainer, loader, checkpoints, history
        begun = None if checkpoints is None else checkpoints.begin(trainer, loader, history)
        self.first = getattr(loader, "epoch", 0) if begun is None else begun
        self.saved = history.before

    def step(self, last: bool) -> None:
        """After a step: save if it is time, or the last."""
        if self.checkpoints is None:
            return
        done = self.history.steps
        if done > self.saved and (last or done % self.checkpoints.every == 0):
            self._save(self.checkpoints.background and not last)
            self.saved = done
        if last:
            try:
                self.trainer.wait_saved()
            except CheckpointError:
                self._save(background=False)  # raises again, unless what was wrong has passed

    def _save(self, background: bool) -> None:
        assert self.checkpoints is not None
        self.checkpoints.save(self.trainer, self.loader, self.history, self.first, background)


def _next(trainer: Trains, batches: Iterator[Any], history: History) -> Any:
    """The next batch, or None on all ranks together; DataError on all of them if only some have one."""
    begin = perf_counter()
    batch = next(batches, None)
    if batch is None:
        trainer.no_batch()
    history.seconds += perf_counter() - begin
    return batch


def _step(trainer: Trains, x: Any, y: Any, history: History) -> None:
    begin = perf_counter()
    loss = trainer.step(x, y)
    history.seconds += perf_counter() - begin
    if not math.isfinite(loss):
        raise NumericsError(
            f"the loss is {loss} at step {trainer.steps}: distribute(..., check_finite=True) names its origin"
        )
    history.losses.append(loss)


def _samples(x: Any) -> int:
    return len(next(iter(x.values())) if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x)


def _end(
    trainer: Trains,
    history: History,
    validation: Iterable[Any] | None,
    patience: int | None,
    stop: Callable[[History], bool] | None,
    line: _Line,
) -> bool:
    """Whether to end now: the same answer on all ranks."""
    if validation is not None:
        _validate(trainer, history, validation, line)
    tired = patience is not None and _since_best(history) >= patience
    asked = stop is not None and stop(history)
    votes = trainer.most(np.array([float(tired), float(asked)]), "early stopping")
    if votes[0]:
        history.reason = f"no better validation loss in {patience} validations"
    elif votes[1]:
        history.reason = "stop() said so"
    return bool(votes.any())


def _since_best(history: History) -> int:
    losses = [loss for _, loss in history.validation]
    return len(losses) - 1 - losses.index(min(losses))


def _validate(trainer: Trains, history: History, batches: Iterable[Any], line: _Line) -> None:
    """Mean of the batches' mean losses, each weighed by its weight."""
    losses, weights = [], []
    for x, y in batches:
        losses.append(trainer.evaluate(x, y))
        weights.append(trainer.weight)
    if not losses:
        raise ConfigError("fit: the validation loader gives no batch")
    value = math.fsum(a * w for a, w in zip(losses, weights, strict=True)) / math.fsum(weights)
    history.validation.append((history.steps, value))
    line.validated(value)


class _Line:
    """Progress on rank 0: one line that moves on a terminal, a line every few seconds elsewhere."""

    def __init__(self, trainer: Trains, wanted: bool, unit: str, steps: int | None, done: int = 0) -> None:
        self.trainer, self.unit, self.steps = trainer, unit, steps
        self.wanted = wanted
        self.terminal = sys.stderr.isatty()
        self.done, self.counted, self.start = done, 0, perf_counter()
        self.first = done + 1
        self.shown, self.shown_count = self.start, 0
        self.validation = ""

    @property
    def on(self) -> bool:
        """Rank 0 may be another one than at the beginning."""
        return self.wanted and self.trainer.rank == 0

    def step(self, loss: float, count: int) -> None:
        self.done += 1
        self.counted += count
        now = perf_counter()
        if not self.on or (now - self.shown < (0.2 if self.terminal else 5.0) and self.done != self.first):
            return
        rate = (self.counted - self.shown_count) / max(now - self.shown, 1e-9)
        self.shown, self.shown_count = now, self.counted
        of = f"/{self.steps}" if self.steps else ""
        rate_text = f"  {rate:,.0f} {self.unit}/s" if self.done > self.first else ""
        self._write(f"step {self.done}{of}  loss {loss:.4f}{rate_text}{self.validation}")

    def validated(self, loss: float) -> None:
        self.validation = f"  validation {loss:.4f}"
        if self.on and not self.terminal:
            self._write(f"step {self.done}  validation loss {loss:.4f}")

    def close(self, history: History) -> History:
        if self.on and self.terminal:
            sys.stderr.write("\n")
        return history

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" if self.terminal else text + "\n")
        sys.stderr.flush()
