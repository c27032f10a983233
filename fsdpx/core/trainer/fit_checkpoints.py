"""History and checkpoints of `fit`: record losses, save a checkpoint when it is due, resume a run, and restore the
best weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.core.base.config import convert_folder_path_to_config
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.messages import log_on_rank0
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.core.base.option_names import DtypeName
from fsdpx.core.base.safe_files import can_write_folder, expanduser
from fsdpx.core.checkpoint.atomic_commit import iterate_checkpoints
from fsdpx.core.checkpoint.save import SaveChoices
from fsdpx.core.trainer.call_runner import CallRunner
from fsdpx.errors import CheckpointError, ConfigError

__all__ = ["CheckpointConfig", "FitCheckpointer", "FitHistory", "ResumePoint"]

Values = list[tuple[int, float]]


@dataclass
class FitHistory:
    """Losses, validations and progress of a run of `fit`.

    Attributes
    ----------
    losses : training loss of each step of this run
    validation : (step, loss) pairs
    metrics : maps metric names to (step, value) pairs
    epochs : number of complete epochs, counted from the start of the first run, for example 3 if training ends during
        the fourth epoch
    reason : why training ended; "" while training is running
    seconds : time spent on training steps and on loading their data, excluding validation
    samples_seen : number of samples processed by all ranks in this run, or the sum of the values that `count` returned
    earlier_steps : number of steps of earlier runs, if this run resumed from a checkpoint
    checkpoint : path of the last checkpoint that was saved or resumed from
    """

    losses: list[float] = field(default_factory=list)
    validation: Values = field(default_factory=list)
    metrics: dict[str, Values] = field(default_factory=dict)
    epochs: int = 0
    reason: str = ""
    seconds: float = 0.0
    samples_seen: int = 0
    earlier_steps: int = 0
    checkpoint: Path | None = None

    @property
    def steps(self) -> int:
        """Number of steps, counted from the start of the first run."""
        return self.earlier_steps + len(self.losses)

    @property
    def best_loss(self) -> float:
        """Lowest validation loss; inf without validation."""
        return min((_replace_nan_by_inf(loss) for _, loss in self.validation), default=math.inf)

    @property
    def best_step(self) -> int | None:
        """First step with the lowest validation loss; None without validation."""
        return next((step for step, loss in self.validation if loss == self.best_loss), None)

    @property
    def validations_since_best(self) -> int:
        """Number of validations since the best one."""
        losses = [_replace_nan_by_inf(loss) for _, loss in self.validation]
        return len(losses) - 1 - losses.index(self.best_loss) if losses else 0


def _replace_nan_by_inf(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


FOLDER_PREFIX = "step-"


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from, and the state of the earlier run.

    Attributes
    ----------
    path : path of the checkpoint
    first_epoch : epoch in which the first run began
    finished : why the earlier run ended; "" if it was interrupted
    fit : the state that `fit` saved; `first_epoch` and `finished` are copied from it
    """

    path: Path
    first_epoch: int
    finished: str
    fit: dict[str, Any]

    @classmethod
    def from_fit_state_and_fill_history(cls, path: Path, fit: Mapping[str, Any], history: FitHistory) -> ResumePoint:
        """Make the resume point from the state `fit` that `CheckpointConfig.save` wrote, and load the saved history
        into `history`."""
        history.earlier_steps, history.checkpoint = int(fit["done"]), path
        history.validation.extend((int(step), float(loss)) for step, loss in fit["validation"])
        for name, pairs in fit.get("metrics", {}).items():
            history.metrics[str(name)] = [(int(step), float(value)) for step, value in pairs]
        settings = {str(name): str(text) for name, text in fit.get("settings", {}).items()}
        return cls(path, int(fit["first"]), str(fit.get("finished", "")), {**fit, "settings": settings})


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoint settings of `fit(..., checkpoints=CheckpointConfig("run/checkpoints", every=500))`.

    Parameters
    ----------
    folder : folder that holds the checkpoints step-500, step-1000, ...
    every : number of steps between two checkpoints; a last checkpoint is written at the end
    keep : number of newest checkpoints to keep; if None, keep all. With `restore_best`, the best checkpoint is kept as
        well
    resume : if True, continue from the newest checkpoint, if there is one, and count epochs and steps from the start of
        the first run; if False, raise an error if the folder already has checkpoints
    background : write checkpoints while training continues; needs memory for a copy of this rank's shard
    dtype, shard_bytes : see `Trainer.save`
    """

    folder: str | PathLike[str]
    every: int = 500
    keep: int | None = 3
    resume: bool = True
    background: bool = False
    dtype: DtypeName | None = None
    shard_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if not (name == "keep" and value is None) and (type(value) is not int or value < 1):
                raise ConfigError(f"CheckpointConfig({name}={value!r}): a whole number, 1 or more")

    @classmethod
    def from_argument(cls, given: Any) -> CheckpointConfig:
        """Return the settings for the argument `checkpoints` of `fit`. If the argument is only a folder, all other
        settings have their defaults.

        Parameters
        ----------
        given : a `CheckpointConfig`, or a path
        """
        return convert_folder_path_to_config(cls, given, "fit(checkpoints={})", "every")

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of a step.

        Parameters
        ----------
        step : number of steps, counted from the start of the first run
        """
        return expanduser(self.folder) / f"{FOLDER_PREFIX}{step}"

    def find_latest(self) -> Path | None:
        """Return the path of the newest complete checkpoint in the folder; None if there is none."""
        folders = list(iterate_checkpoints(expanduser(self.folder), FOLDER_PREFIX))
        return folders[-1][1] if folders else None

    def require_writable_and_find_latest(self) -> Path | None:
        """Return `find_latest()`. Raise CheckpointError if the folder cannot be written, so that a run fails at the
        start rather than at its first checkpoint."""
        if not can_write_folder(folder := expanduser(self.folder)):
            raise CheckpointError(f"{folder}: no checkpoints can be saved there: it is read-only, or no folder")
        return self.find_latest()

    def resume_latest(self, call_runner: CallRunner, loader: Any, history: FitHistory) -> ResumePoint | None:
        """Load the newest checkpoint and return the resume point of the run, or None if there is no checkpoint.
        Collective.

        Parameters
        ----------
        call_runner : the trainer's call runner
        loader : a `data.DataLoader`, which is set to the saved position
        history : history of the run, into which the saved history is loaded

        Raises
        ------
        ConfigError : if the loader cannot save its position
        CheckpointError : if the folder cannot be written, if it has a checkpoint although `resume` is False, or if its
            newest checkpoint was not saved by `fit`
        """
        for method in ("state_dict", "load_state_dict", "epoch"):
            if not hasattr(loader, method):
                raise ConfigError(
                    f"fit(checkpoints=...): the loader is a {type(loader).__name__} without {method}, so a "
                    "resumed run would not know its position in the data; use a data.DataLoader"
                )
        call_runner.wait_for_background_save()
        path = call_runner.run_on_rank0(f"resume from {self.folder}", self.require_writable_and_find_latest)
        if path is None:
            return None
        if not self.resume:
            raise CheckpointError(
                f"{path} is of an earlier run, which the next start would take for the newest of this one: give "
                "CheckpointConfig(...) another folder, remove its checkpoints, or resume from them with resume=True"
            )
        fit = call_runner.load_checkpoint(path, loader, convert=self.dtype is not None).fit
        if fit is None:
            raise CheckpointError(f"{path} was not saved by fit: load it, and give fit another folder")
        try:
            begun = ResumePoint.from_fit_state_and_fill_history(path, fit, history)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: what fit saved there cannot be read: {error!r}") from None
        history.epochs = max(loader.epoch - begun.first_epoch, 0)
        return begun

    def save_checkpoint(
        self, call_runner: CallRunner, loader: Any, fit: Mapping[str, Any], background: bool, best: Path | None
    ) -> Path:
        """Write the checkpoint of the current step and return its path. Collective.

        Parameters
        ----------
        call_runner : the trainer's call runner
        loader : a `data.DataLoader`, whose position is saved
        fit : state that `fit` needs to resume; `fit["done"]` is the number of steps
        background : if True, copy the state, and write the copy in a thread
        best : path of a checkpoint that is kept even if it is old; None if there is no such checkpoint
        """
        path = self.path_of(fit["done"])
        choices = SaveChoices(self.dtype, self.shard_bytes, self.keep, None if best is None else best.name)
        call_runner.save_checkpoint(path, choices, loader, fit, background)
        return path


class FitCheckpointer:
    """Saves the checkpoints of a run of `fit`, resumes the run, and restores its best weights.

    Parameters
    ----------
    trainer : the trainer
    loader : loader of the training batches; must be a `data.DataLoader` if checkpoints are saved
    checkpoints : settings; if None, save no checkpoints
    history : history of this run
    best : if True, keep the weights that had the best validation loss, as a checkpoint or, if `fit` saves no
        checkpoints, as a copy in RAM (`CallRunner.copy_weights_and_get_restorer`)

    Attributes
    ----------
    first_epoch : epoch in which the first run began
    finished : why an earlier run ended; "" if there is no earlier run, or if the earlier run was interrupted
    """

    def __init__(
        self, trainer: Any, loader: Any, checkpoints: CheckpointConfig | None, history: FitHistory, best: bool
    ) -> None:
        self.trainer, self.loader, self.checkpoints, self.history, self.best = (
            trainer, loader, checkpoints, history, best
        )  # fmt: skip
        begun = None if checkpoints is None else checkpoints.resume_latest(trainer.call_runner, loader, history)
        self.first_epoch, self.finished = getattr(loader, "epoch", 0), ""
        self._written: Mapping[str, Any] | None = None
        self._best_copy: tuple[int, Callable[[], None]] | None = None
        if begun is not None:
            self.first_epoch, self.finished, self._written = begun.first_epoch, begun.finished, begun.fit

    def print_resume_point(self) -> None:
        """Print on rank 0 where the run resumes, and which settings have changed. Do nothing if the run did not
        resume."""
        path, history = self.history.checkpoint, self.history
        if self._written is None:
            return
        log_on_rank0(
            self.trainer.call_runner,
            f"resumes from {path}: step {history.steps}, epoch {self.loader.epoch - self.first_epoch + 1}",
        )
        if changed := _list_changed_settings(self._written.get("settings", {}), self._get_settings()):
            log_on_rank0(self.trainer.call_runner, f"changed since {path}: {'; '.join(changed)}")

    def save_if_due(self, better: bool = False) -> bool:
        """Save a checkpoint if one is due at this step, or if this step has the best validation loss so far
        (`better`). Return whether a checkpoint was saved. If `fit` saves no checkpoints, keep a copy of the best
        weights in RAM instead."""
        if better and self.best and self.checkpoints is None:
            self._best_copy = (self.history.steps, self.trainer.call_runner.copy_weights_and_get_restorer(self.trainer))
        if self.checkpoints is None or (self._written or {}).get("done") == self.history.steps:
            return False
        if self.history.steps % self.checkpoints.every and not (better and self.best):
            return False
        self._save_checkpoint(self._make_resume_state(), self.checkpoints.background)
        return True

    def save_last_step_and_wait(self, ended: str = "") -> bool:
        """Save a checkpoint of the last step, unless there is one already, and wait until all checkpoints are complete.
        Return whether a checkpoint was saved. `ended` says why the run ended; "" if the run will be resumed."""
        if self.checkpoints is None:
            return False
        state = self._make_resume_state() | {"finished": ended}
        new = state != self._written
        if new:
            self._save_checkpoint(state, background=False)
        try:
            self.trainer.call_runner.wait_for_background_save()
        except CheckpointError:
            self._save_checkpoint(state, background=False)  # try once more; if this also fails, it raises an error
        return new

    def restore_best_weights(self) -> None:
        """Restore the weights that had the best validation loss, if they were kept, and print which weights the trainer
        has now. Collective."""
        step = self.history.best_step
        if not self.best or step is None or step == self.history.steps:
            return
        description = f"step {step}, the best (validation loss {self.history.best_loss:.4f})"
        if self.checkpoints is None:
            if self._best_copy is not None and self._best_copy[0] == step:
                self._best_copy[1]()
                log_on_rank0(self.trainer.call_runner, f"the weights are those of {description}")
            return
        path = self.checkpoints.path_of(step)
        if not self.trainer.call_runner.run_on_rank0(f"look for {path}", path.exists):
            log_on_rank0(
                self.trainer.call_runner,
                f"{path} is not there, so the weights are the last ones and not those of {description}",
            )
            return
        self.trainer.load_parameters(path, convert=self.checkpoints.dtype is not None)
        log_on_rank0(self.trainer.call_runner, f"the weights are those of {description}: {path}")

    def _make_resume_state(self) -> dict[str, Any]:
        """Return the state of `fit` that a later run needs to resume. It is saved in the checkpoint."""
        history = self.history
        pairs = {name: [list(pair) for pair in values] for name, values in history.metrics.items()}
        return {
            "done": history.steps,
            "first": self.first_epoch,
            "validation": [list(pair) for pair in history.validation],
            "metrics": pairs,
            "settings": self._get_settings(),
            "finished": "",
        }

    def _get_settings(self) -> dict[str, str]:
        size = getattr(self.loader, "batch_size", None)
        return self.trainer.inspect.list_settings() | ({} if size is None else {"batch size": str(size)})

    def _save_checkpoint(self, state: Mapping[str, Any], background: bool) -> None:
        assert self.checkpoints is not None
        step = self.history.best_step if self.best else None
        best = None if step is None else self.checkpoints.path_of(step)
        self.history.checkpoint = self.checkpoints.save_checkpoint(
            self.trainer.call_runner, self.loader, state, background, best
        )
        self._written = state


def _list_changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return one line for each setting that has different values in the two runs."""
    return [f"{name} {before[name]} -> {text}" for name, text in now.items() if before.get(name, text) != text]
