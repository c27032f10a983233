"""When training ends: after steps or epochs, without a better validation, or because a rank asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.trainer.history import History

__all__ = ["Limits", "Votes"]

STEPS, EPOCHS, PATIENCE, STOP = "steps", "epochs", "patience", "stop"


class Votes(Protocol):
    """The part of a trainer that agreeing on an end needs."""

    @property
    def apart(self) -> bool: ...
    def most(self, values: np.ndarray, what: str) -> np.ndarray: ...


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
        """Whether it is time after this step, or the last step."""
        return history.steps % self.every == 0 or history.steps == self.steps

    def reached(self, trainer: Votes, history: History) -> str:
        """After such a step: the same answer on all ranks. Collective."""
        if trainer.apart and self.patience is None and self.stop is None:  # then there is nothing to agree on
            return STEPS if history.steps == self.steps else ""
        asked = self.stop is not None and self.stop(history)
        votes = trainer.most(np.array([float(self._tired(history)), float(asked)]), "early stopping")
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
