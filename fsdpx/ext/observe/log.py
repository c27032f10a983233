"""The training log of `fit`: metrics.csv, metrics.jsonl, log.txt and TensorBoard events in one folder, written by rank
0."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import secrets
from contextlib import ExitStack
from importlib.util import find_spec
from os import PathLike
from typing import Any, TextIO

from fsdpx.core.base import safe_files
from fsdpx.core.base.messages import LOGGER, log_on_rank0
from fsdpx.core.checkpoint.atomic_commit import lock_file
from fsdpx.core.trainer.fit_checkpoints import FitHistory
from fsdpx.errors import CheckpointError, ConfigError, install_hint
from fsdpx.ext.observe.folder import iterate_json_lines

__all__ = ["ThroughputMeter", "TrainingLog"]

LOCK_NAME = ".lock"
STEP_COLUMNS = ("loss", "learning_rate", "gradient_norm", "rate")


class ThroughputMeter:
    """Measures the training throughput in samples, or other units, per second."""

    def __init__(self) -> None:
        self._seen, self._seconds = 0, 0.0

    def measure_rate(self, history: FitHistory) -> float:
        """Return the throughput since the last call, in samples (or other units) per second."""
        seen, seconds = history.samples_seen - self._seen, history.seconds - self._seconds
        self._seen, self._seconds = history.samples_seen, history.seconds
        return seen / max(seconds, 1e-9)


class TrainingLog:
    """A `fit` callback that logs one row after each step and each validation.

    A run that resumes from a checkpoint keeps the existing rows up to that checkpoint. Any other run starts with empty
    files."""

    def __init__(self, folder: str | PathLike[str], metrics: tuple[str, ...], tensorboard: bool | None = None) -> None:
        """Prepare a log in `folder`, with a column for each of `metrics`. If `tensorboard` is None, TensorBoard events
        are written only if tensorboardX is installed; if it is True, ConfigError is raised unless tensorboardX is
        installed."""
        self.folder, self._tensorboard = safe_files.expanduser(folder), tensorboard
        if tensorboard and find_spec("tensorboardX") is None:
            raise ConfigError(
                f"fit(tensorboard=True): TensorBoard's events need tensorboardX: {install_hint('tensorboard')}"
            )
        own = ("step", "epoch", *STEP_COLUMNS, "validation_loss")
        if taken := [name for name in metrics if name in own]:
            raise ConfigError(
                f"fit(metrics=...): the log has columns named {', '.join(map(repr, taken))}: choose other names"
            )
        self._columns = (*own, *metrics)
        self._lock: int | None = None  # descriptor of rank 0's lock, which keeps other jobs from writing to the folder
        self._rate = ThroughputMeter()
        self._files: tuple[TextIO, ...] | None = None
        self._board: Any = None
        self._text_log: logging.StreamHandler[TextIO] | None = None

    def on_train_begin(self, trainer: Any, history: FitHistory) -> None:
        try:
            trainer.call_runner.run_on_rank0(
                f"log {self.folder}", lambda: self._lock_and_truncate(history.earlier_steps)
            )
        except CheckpointError as error:
            raise ConfigError(f"fit(log=...): {error}") from error
        if trainer.call_runner.rank == 0:
            self._open_files(trainer, history)

    def on_step_end(self, trainer: Any, history: FitHistory) -> None:
        values = (
            history.losses[-1],
            trainer.inspect.last_update.lr,
            trainer.inspect.last_update.norm,
            self._rate.measure_rate(history),
        )
        self._write_row(trainer, history, dict(zip(STEP_COLUMNS, values, strict=True)))

    def on_validation_end(self, trainer: Any, history: FitHistory) -> None:
        metrics = {name: pairs[-1][1] for name, pairs in history.metrics.items()}
        self._write_row(trainer, history, {"validation_loss": history.validation[-1][1], **metrics})

    def on_train_end(self, trainer: Any, history: FitHistory) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:  # the lock is released first, because closing the files may fail
            (self.folder / LOCK_NAME).unlink(missing_ok=True)
            os.close(lock)
        for file in self._files or ():
            file.close()
        if self._text_log is not None:
            LOGGER.removeHandler(self._text_log)
            self._text_log.close()
            self._text_log.stream.close()
        if self._board is not None:
            self._board.close()

    def _lock_and_truncate(self, before: int) -> None:
        """Lock the log folder against other jobs, and remove the rows after step `before` from its files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_file(self.folder / LOCK_NAME, f"{self.folder}: another job is writing its log there")
        table, lines = self.folder / "metrics.csv", self.folder / "metrics.jsonl"
        found = iterate_json_lines(lines) if before and lines.exists() else ()
        rows = [row for row in found if row.get("step", before + 1) <= before]
        safe_files.write_file(lines, "".join(json.dumps(row) + "\n" for row in rows), safe_files.READABLE)
        writer = csv.DictWriter(out := io.StringIO(newline=""), self._columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        safe_files.write_file(table, out.getvalue(), safe_files.READABLE)
        if not before:
            safe_files.write_file(self.folder / "log.txt", "", safe_files.READABLE)

    def _open_files(self, trainer: Any, history: FitHistory) -> None:
        """Open the log files for appending. In elastic training, another rank reopens the files if rank 0 leaves."""
        with ExitStack() as opened:
            table, lines, text = (
                opened.enter_context(os.fdopen(safe_files.open_for_append(self.folder / name), "a", 1, newline=newline))
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
            log_on_rank0(trainer.call_runner, f"log {self.folder}: {also}")
        else:
            # random, so that no other user can guess the file name and create a symlink with it
            unguessed = f".{secrets.token_hex(8)}"
            self._board = SummaryWriter(str(self.folder), purge_step=history.steps + 1, filename_suffix=unguessed)

    def _write_row(self, trainer: Any, history: FitHistory, values: dict[str, float]) -> None:
        if trainer.call_runner.rank > 0:
            return
        if self._files is None:
            self._open_files(trainer, history)
        assert self._files is not None
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        row = {"step": history.steps, "epoch": history.epochs + 1, **values}
        csv.DictWriter(self._files[0], self._columns, restval="").writerow(row)
        self._files[1].write(json.dumps(row) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, history.steps)
