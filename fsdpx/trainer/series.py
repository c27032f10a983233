"""What happened step by step: the history of `fit`, and series of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.checkpoint.commit import numbered
from fsdpx.checkpoint.save import Choices
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.trainer.host import TrainerHost

__all__ = ["Begun", "Checkpoints", "History"]

Values = list[tuple[int, float]]


@dataclass
class History:
    """The history of a run. losses: one per step. validation: (step, loss) pairs. metrics: by name, (step, value)
    pairs. epochs: whole ones since the very start. reason: why training ended, empty before. seconds: in training steps
    and their data, validation left out. seen: samples (or what `count` counts) of all ranks in this run. before: steps
    that earlier runs made, if this one goes on from a checkpoint. checkpoint: the last one that was saved or
    resumed."""

    losses: list[float] = field(default_factory=list)
    validation: Values = field(default_factory=list)
    metrics: dict[str, Values] = field(default_factory=dict)
    epochs: int = 0
    reason: str = ""
    seconds: float = 0.0
    seen: int = 0
    before: int = 0
    checkpoint: Path | None = None

    @property
    def steps(self) -> int:
        """Steps made since the very start."""
        return self.before + len(self.losses)

    @property
    def best(self) -> float:
        """Lowest validation loss, inf without validation."""
        return min((_or_inf(loss) for _, loss in self.validation), default=math.inf)

    @property
    def best_step(self) -> int | None:
        """The first step with the lowest validation loss."""
        return next((step for step, loss in self.validation if loss == self.best), None)

    @property
    def since_best(self) -> int:
        """Validations after the best one."""
        losses = [_or_inf(loss) for _, loss in self.validation]
        return len(losses) - 1 - losses.index(self.best) if losses else 0


def _or_inf(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


NAME = "step-"


@dataclass(frozen=True)
class Begun:
    """Where a run goes on. path: of the checkpoint. first: the epoch in which the run began. finished: why it had come
    to its end, "" if it had not. fit: all of that, as it was saved."""

    path: Path
    first: int
    finished: str
    fit: dict[str, Any]

    @classmethod
    def of(cls, path: Path, fit: Mapping[str, Any], history: History) -> Begun:
        """From the data that `Checkpoints.save` wrote; the run's history is put into `history`."""
        history.before, history.checkpoint = int(fit["done"]), path
        history.validation.extend((int(step), float(loss)) for step, loss in fit["validation"])
        for name, pairs in fit.get("metrics", {}).items():
            history.metrics[str(name)] = [(int(step), float(value)) for step, value in pairs]
        settings = {str(name): str(text) for name, text in fit.get("settings", {}).items()}
        return cls(path, int(fit["first"]), str(fit.get("finished", "")), {**fit, "settings": settings})


@dataclass(frozen=True)
class Checkpoints:
    """For `fit(..., checkpoints=Checkpoints("run/checkpoints", every=500))`.

    Parameters
    ----------
    folder : holds step-500, step-1000, ...
    every : steps between two; there is one at the end, too
    keep : how many of the last ones stay, None for all; with `restore_best` the best one stays as well
    resume : a run begins at the newest one, if there is one; epochs and steps are counted from the very start. False:
        a folder that has checkpoints already is refused
    background : write while training goes on, for a copy of the shard in memory
    dtype, shard_bytes : as in `Trainer.save`
    """

    folder: str | PathLike[str]
    every: int = 500
    keep: int | None = 3
    resume: bool = True
    background: bool = False
    dtype: str | None = None
    shard_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if not (name == "keep" and value is None) and (type(value) is not int or value < 1):
                raise ConfigError(f"Checkpoints({name}={value!r}): a whole number, 1 or more")

    @classmethod
    def of(cls, given: Any) -> Checkpoints:
        """From the folder alone: the rest by default."""
        if isinstance(given, str | PathLike):
            return cls(given)
        if not isinstance(given, cls):
            raise ConfigError(f"fit(checkpoints={given!r}): a folder, or fsdpx.Checkpoints(folder, every=...)")
        return given

    def path(self, step: int) -> Path:
        return Path(self.folder) / f"{NAME}{step}"

    def latest(self) -> Path | None:
        """The newest that is whole, or None."""
        found = list(numbered(Path(self.folder), NAME))
        return found[-1][1] if found else None

    def begin(self, host: TrainerHost, loader: Any, history: History) -> Begun | None:
        """Go on from the newest one, if there is one and `resume` says so; its history comes into `history`.
        Collective."""
        for method in ("state_dict", "load_state_dict", "epoch"):
            if not hasattr(loader, method):
                raise ConfigError(
                    f"fit(checkpoints=...): the loader is a {type(loader).__name__} without {method}, so a run that "
                    "goes on would not know its place in the data; use a data.DataLoader"
                )
        host.wait_saved()
        path = host.alone(f"resume from {self.folder}", self.latest)
        if path is None:
            return None
        if not self.resume:
            raise CheckpointError(
                f"{path} is of an earlier run, which the next start would take for the newest of this one: give "
                "Checkpoints(...) another folder, remove its checkpoints, or go on from them with resume=True"
            )
        fit = host.resume(path, loader, convert=self.dtype is not None).fit
        if fit is None:
            raise CheckpointError(f"{path} was not saved by fit: load it, and give fit another folder")
        try:
            begun = Begun.of(path, fit, history)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: what fit saved there cannot be read: {error!r}") from None
        history.epochs = max(loader.epoch - begun.first, 0)
        return begun

    def save(self, host: TrainerHost, loader: Any, fit: Mapping[str, Any], background: bool, best: Path | None) -> Path:
        """Write the checkpoint of this step. best: stays, however old. Collective."""
        path = self.path(fit["done"])
        choices = Choices(self.dtype, self.shard_bytes, self.keep, None if best is None else best.name)
        host.checkpoint(path, choices, loader, fit, background)
        return path
