"""Metrics, callbacks and stopping criteria of `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.array.random import Random
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.state.placement import Placement
from fsdpx.core.trainer.batch import has_sample_dim, has_target_per_output, to_device_array
from fsdpx.core.trainer.call_runner import CallRunner
from fsdpx.core.trainer.fit_checkpoints import FitHistory
from fsdpx.errors import ConfigError, DataError, FsdpxError
from fsdpx.nn.container import unwrap_single
from fsdpx.nn.layer import LayerContext
from fsdpx.nn.losses import Loss

__all__ = ["EVENTS", "CallbackList", "FitLimits", "Metric", "MetricSums", "to_host_output"]

Metric = Callable[[Any, Any], Any] | Loss
"""A loss, or a function(output, target) whose arguments are NumPy arrays with this rank's samples. The function returns
either (sum, count) or an array with one value per sample, which is then averaged."""


class MetricSums:
    """Accumulates each metric over the batches of one validation run.

    Parameters
    ----------
    functions : maps names to metrics
    placement : the trainer's placement. If it partitions fields (option `domain`), a metric function gets this rank's
        part of the fields and returns (sum, count) over its cells
    """

    def __init__(self, functions: Mapping[str, Metric], placement: Placement) -> None:
        self.functions, self._placement, self._layout = functions, placement, placement.sample_layout
        self._sums = np.zeros((len(functions), 2))  # one row per metric, with columns (sum, count)
        self._problem: tuple[str, Exception] | None = None

    def add_batch(self, output: Any, target: Any, x: Any) -> None:
        """Add the metrics of one batch, whose inputs are `x`. If a metric raises an error, store the error;
        `all_gather_means` then raises it on all ranks. Collective if a metric is a loss and fields are partitioned
        (option `domain`)."""
        several, batched = isinstance(output, tuple), True
        target = tuple(target) if has_target_per_output(self._placement, target) else target
        if not self._layout.has_complete_samples:
            targets = target if several and isinstance(target, tuple | list) else (target,)
            local = (self._layout.take_local_target(np.asarray(to_host(t)), i) for i, t in enumerate(targets))
            target, batched = unwrap_single(tuple(local)), has_sample_dim(self._placement, x)
        for k, (name, function) in enumerate(self.functions.items()):
            try:
                if isinstance(function, Loss):
                    self._sums[k] += self._compute_loss_sum_and_weight(function, output, target, batched)
                else:
                    self._sums[k] += _convert_to_sum_and_count(
                        function(to_host_output(output), target), not self._layout.has_complete_samples
                    )
            except Exception as error:
                self._problem = self._problem or (f"metric {name!r}: {error}", error)

    def _compute_loss_sum_and_weight(
        self, loss: Loss, output: Any, target: Any, batched: bool
    ) -> tuple[float, float]:
        """Return the summed loss of a batch and its weight. The weight is the number of samples, or of the other items
        that the loss counts. If fields are partitioned (option `domain`), first check collectively that the loss
        accepts the arrays of every rank. `batched` says whether the caller's arrays have a sample dimension."""
        placement, problem = self._placement, None
        y, t = (self._convert_to_model_output_layout(values, batched) for values in (output, target))
        loss = self._layout.bind_loss(loss)
        try:
            shapes: Any = tuple(tuple(one.shape) for one in y) if isinstance(y, tuple) else tuple(y.shape)
            loss.validate(shapes, t)
        except FsdpxError as error:
            problem = error
        if not self._layout.has_complete_samples:
            problems = enumerate(placement.axes.data.all_gather_value(None if problem is None else str(problem)))
            problem = problem or next((DataError(f"rank {rank}: {text}") for rank, text in problems if text), None)
        if problem is not None:
            raise problem
        return loss.forward(LayerContext(placement.xp, placement.axes, Random(0), training=False), y, t)[:2]

    def _convert_to_model_output_layout(self, values: Any, batched: bool) -> Any:
        """Convert the caller's outputs or targets (an array or a tuple of arrays) to the layout of the model's
        outputs."""
        several = isinstance(values, tuple)
        arrays = [to_device_array(self._placement, one) for one in (values if several else (values,))]
        found = [self._layout.to_model_output(one, "the target", i, batched) for i, one in enumerate(arrays)]
        return tuple(found) if several else found[0]

    def all_gather_means(self, data: Communicator) -> dict[str, float]:
        """Return the mean of each metric over the samples of all ranks, as a dict keyed by name; every rank gets the
        same values. Collective.

        Parameters
        ----------
        data : communicator of the ranks that hold different samples

        Raises
        ------
        ConfigError : on all ranks, if a metric failed on one rank or ranks have different metrics
        """
        text, cause = self._problem or (None, None)
        ranks = data if self._layout.has_complete_samples else self._placement.axes.data
        everyone = ranks.all_gather_value((self._sums, text, [*self.functions]))
        for rank, (_, problem, names) in enumerate(everyone):
            if problem is not None:
                raise ConfigError(f"rank {rank}: {problem}") from cause
            if names != everyone[0][2]:
                raise ConfigError(f"fit(metrics=...): rank 0 has {everyone[0][2]}, rank {rank} has {names}")
        with np.errstate(all="ignore"):
            sums = sum(found for found, *_ in everyone)
            return dict(zip(self.functions, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))


def to_host_output(output: Any) -> Any:
    """Copy the model's output to the host: to a NumPy array, or a tuple of NumPy arrays."""
    return tuple(map(to_host, output)) if isinstance(output, tuple) else to_host(output)


def _convert_to_sum_and_count(value: Any, is_sharded: bool) -> tuple[float, float]:
    """Convert the return value of a metric function to (sum, count). `value` is an array with one value per sample, or
    already (sum, count). If fields are partitioned over ranks (`is_sharded`), only (sum, count) is allowed."""
    if isinstance(value, tuple) and len(value) == 2:
        return float(value[0]), float(value[1])
    if is_sharded:
        raise ConfigError(
            "with domain= a rank has parts of samples: return (sum, count) over its cells, or give a loss, as "
            "nn.VRMSE()"
        )
    values = np.asarray(to_host(value))
    if values.ndim == 0:
        raise ConfigError(
            "it returned one number, which cannot be averaged over ranks: return an array with a value per sample, "
            "or (sum, count)"
        )
    return float(values.sum(dtype=np.float64)), float(values.size)


EVENTS = ("on_train_begin", "on_step_end", "on_validation_end", "on_save", "on_epoch_end", "on_train_end")
"""Names of the methods that a callback may have; each is called with (trainer, history)."""


class CallbackList:
    """Calls the callbacks of one run of `fit`: the loggers of `fit` itself and the user's callbacks. Each event calls
    all of them in order, on every rank. `on_train_end` is called even after an error.

    Parameters
    ----------
    trainer, history : arguments passed to the callbacks
    own : loggers of `fit`, which are called first
    given : the user's callback or callbacks
    """

    def __init__(self, trainer: Any, history: FitHistory, own: Sequence[Any], given: Any) -> None:
        self.trainer, self.history = trainer, history
        self._listeners = [*own, *map(_make_callback_object, given if isinstance(given, Iterable) else [given])]
        self._ends = ExitStack()

    def __enter__(self) -> CallbackList:
        with self._ends as begun:
            for listener in self._listeners:
                begun.callback(self._call_listener, listener, "on_train_end")
                self._call_listener(listener, "on_train_begin")
            self._ends = begun.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.__exit__(kind, error, trace)

    def call_listeners(self, event: str) -> None:
        """Call the method named `event`, such as "on_step_end", of every callback that has one."""
        for listener in self._listeners:
            self._call_listener(listener, event)

    def _call_listener(self, listener: Any, event: str) -> None:
        method = getattr(listener, event, None)
        if method is not None:
            method(self.trainer, self.history)


def _make_callback_object(callback: Any) -> Any:
    """Return the user's callback as an object with methods; a function becomes the method `on_step_end`. Raise
    ConfigError if the callback is neither a function nor an object with one of the methods in EVENTS, or if it has an
    unknown method whose name begins with "on_"."""
    methods = [name for name in dir(callback) if name.startswith("on_")]
    unknown = [name for name in methods if name not in EVENTS]
    if unknown or not (methods or callable(callback)):
        kind = f"{type(callback).__name__} has {', '.join(unknown) or 'none of them'}"
        raise ConfigError(f"fit(callbacks=...): a function, or an object with some of {', '.join(EVENTS)}; {kind}")
    return callback if methods else SimpleNamespace(on_step_end=callback)


STEPS, EPOCHS, PATIENCE, STOP = "steps", "epochs", "patience", "stop"


@dataclass(frozen=True)
class FitLimits:
    """The stopping criteria passed to `fit`. A run ends for one of the reasons STEPS, EPOCHS, PATIENCE and STOP; the
    reason "" means that the run continues."""

    epochs: int | None
    steps: int | None
    every: int
    patience: int | None
    stop: Callable[[FitHistory], bool] | None

    def require_valid(self, validation: Any, metrics: Any, restore_best: bool | None) -> None:
        """Raise ConfigError if a limit is too small, or if an option needs validation batches and there are none."""
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

    def find_reason_to_end_at_resume(self, history: FitHistory, epochs: int, earlier_reason: str) -> str:
        """Return why a resumed run ends without another step, or "" if training continues.

        `history` is the history of the earlier run, `epochs` the number of epochs that it completed, and
        `earlier_reason` the reason why it ended. If the earlier run was interrupted, `earlier_reason` is "", and the
        last validation of that run may be missing from `history`."""
        if self.steps is not None and history.steps >= self.steps:
            return STEPS
        if earlier_reason and self.epochs is not None and epochs >= self.epochs:
            return EPOCHS
        if earlier_reason == PATIENCE and self._is_out_of_patience(history):
            return PATIENCE
        return STOP if earlier_reason == STOP and self.stop is not None else ""

    def is_validation_step(self, history: FitHistory) -> bool:
        """Return whether validation is due after the current step. Validation is due every `every` steps and after the
        last step."""
        return history.steps % self.every == 0 or history.steps == self.steps

    def agree_on_end_reason(self, call_runner: CallRunner, history: FitHistory) -> str:
        """Return why the run ends after this validation step, or "" if the run continues. All ranks get the same
        result. Collective, with one exception: in asynchronous training without `patience` and `stop`, ranks do not
        communicate."""
        # if neither `patience` nor `stop` is given, all ranks end after the same step, so no message is needed
        if call_runner.has_own_speed and self.patience is None and self.stop is None:
            return STEPS if history.steps == self.steps else ""
        asked = self.stop is not None and self.stop(history)
        votes = call_runner.all_reduce_max(
            np.array([float(self._is_out_of_patience(history)), float(asked)]), "early stopping"
        )
        if votes.any():
            return PATIENCE if votes[0] else STOP
        return STEPS if history.steps == self.steps else ""

    def describe_end_reason(self, end: str) -> str:
        """Return a phrase that says why the run ended, for messages and `FitHistory.reason`."""
        return {
            STEPS: f"{self.steps} steps done",
            EPOCHS: "all epochs done",
            PATIENCE: f"no better validation loss in {self.patience} validations",
            STOP: "stop() said so",
        }.get(end, "")

    def _is_out_of_patience(self, history: FitHistory) -> bool:
        return self.patience is not None and history.validations_since_best >= self.patience
