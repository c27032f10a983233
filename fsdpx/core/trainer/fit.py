"""The training loop `fit`: its arguments, epochs, validation and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from os import PathLike
from time import perf_counter
from typing import Any, Literal, Protocol, runtime_checkable

from fsdpx.core.base.arguments import require_arguments_match_type_hints
from fsdpx.core.base.config import to_python_number
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.extensions import import_declared_extension
from fsdpx.core.base.hooks import STOP_SIGNALS
from fsdpx.core.base.messages import log_on_rank0
from fsdpx.core.state.placement import Placement
from fsdpx.core.trainer.call_runner import CallRunner, raise_option_name_errors_on_all_ranks
from fsdpx.core.trainer.callbacks import EPOCHS, CallbackList, FitLimits, Metric, MetricSums
from fsdpx.core.trainer.fit_checkpoints import CheckpointConfig, FitCheckpointer, FitHistory
from fsdpx.core.trainer.loader_sharding import ShardingLoader, check_loader_sharding_on_all_ranks
from fsdpx.core.trainer.recipe import require_loss_and_optimizer
from fsdpx.errors import ConfigError, DataError, NumericsError
from fsdpx.nn.layer import iterate_layers

__all__ = ["fit"]

_END = object()  # not None, so that a loader that wrongly yields None is not mistaken for the end of an epoch


COUNT_ARGUMENTS = ("epochs", "steps", "every", "patience")
TYPE_CHECKED_ONLY = (
    "validation", "metrics", "restore_best", "log", "tensorboard", "progress", "count", "unit",
)  # fmt: skip
"""Arguments of `fit` that are only checked against their type hints."""


@runtime_checkable
class StopRequest(Protocol):
    """Context manager that can end a run between two steps, for example after a signal. `fsdpx.Preemption` is one."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: Any) -> None: ...

    def check(self, trainer: Any, also: Callable[[], object] | None = None) -> None:
        """Do nothing if training should continue. Otherwise, call `also` to save a checkpoint, and raise the exception
        that ends the run. Collective: `fit` calls this method on all ranks between two steps."""


@raise_option_name_errors_on_all_ranks
def fit(
    trainer: Any,
    loader: Iterable[Any],
    *,
    epochs: int | None = 1,
    steps: int | None = None,
    validation: Iterable[Any] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    every: int = 50,
    patience: int | None = None,
    restore_best: bool | None = None,
    stop: Callable[[FitHistory], bool] | None = None,
    callbacks: Any = (),
    log: str | PathLike[str] | None = None,
    tensorboard: bool | None = None,
    progress: bool = True,
    count: Callable[[Any], int] | None = None,
    unit: str = "samples",
    checkpoints: CheckpointConfig | str | PathLike[str] | None = None,
    preempt: StopRequest | Literal[False] | None = None,
) -> FitHistory:
    """Train on (x, y) batches and return the history of the run. Collective.

    Parameters
    ----------
    trainer : result of `fsdpx.distribute`; omitted in `trainer.fit(...)`
    loader : iterable over the batches of this data rank, such as `DataLoader(comm=trainer.data_group)`; if it has a
        method `set_epoch`, that method is called before each epoch
    epochs, steps : training ends after this many epochs or steps, whichever comes first; with epochs=None, only `steps`
        counts
    validation : batches whose mean loss is computed every `every` steps and at the end
    metrics : dict that maps names to functions (output, target), whose arguments are NumPy arrays with this rank's
        samples of a validation batch. A function returns an array with one value per sample, or (sum, count); the mean
        over the samples of all ranks is recorded. A loss such as `nn.VRMSE()` can also be a metric
    every : number of steps between two validations
    patience : end training after this many validations without a new best loss
    restore_best : at the end, restore the weights that had the best validation loss (default: only with `patience`)
    stop : function(history), called after each validation, or every `every` steps if there is no validation; if it
        returns true on any rank, all ranks end together
    callbacks : function(trainer, history) to call after each step; or an object with some of the methods
        on_train_begin, on_step_end, on_validation_end, on_save, on_epoch_end, on_train_end; or a list of these.
        Callbacks are called on all ranks. If a run has finished and the script is started again, no callback is called
    log : folder for metrics.csv, metrics.jsonl, log.txt (the printed messages) and TensorBoard events
    tensorboard : if True, write TensorBoard events, and raise an error if tensorboardX is missing; if False, write no
        events (default: write events if tensorboardX is installed)
    progress : show progress on rank 0: a bar on a terminal, otherwise a line every few seconds
    count : function(x) that returns the number of items, such as tokens, in the inputs `x` of a batch. Rates and
        `history.samples_seen` use this number times the number of data ranks (default: the number of samples)
    unit : name of what `count` counts, such as "tokens"
    checkpoints : `fsdpx.CheckpointConfig(...)`, or just the folder to save to. If the script is started again, an
        interrupted run resumes, and a finished run does nothing
    preempt : `fsdpx.Preemption(...)` to save and end on a signal, or False to ignore signals (default:
        `fsdpx.Preemption` if there are checkpoints)

    Returns
    -------
    FitHistory : losses, validation losses and metrics by step, and the reason why training ended

    Raises
    ------
    ConfigError : on all ranks, for arguments that are invalid or differ between ranks, or if the validation loader is
        empty
    DataError : on all ranks, if `loader` yields no batch in an epoch, fewer batches on some ranks than on others, or a
        batch that is not a pair (x, y)
    CheckpointError : on all ranks, if a checkpoint cannot be written, or training cannot resume from it
    NumericsError : if the loss is NaN or Inf
    """
    call_runner = trainer.call_runner
    limits, saved = _agree_on_arguments(call_runner, locals())
    asked = preempt or None
    if preempt is None and checkpoints is not None:
        react = import_declared_extension("fit", "preemption")
        asked = react(signals=(*STOP_SIGNALS, "INT"))  # save a checkpoint on Ctrl-C as well as on the usual signals
    check_loader_sharding_on_all_ranks(call_runner, loader, validation)
    history = FitHistory()
    best = patience is not None if restore_best is None else restore_best
    saves = FitCheckpointer(trainer, loader, saved, history, best)
    routing = import_declared_extension("fit", "routing")() if _has_experts(call_runner.placement) else None
    listeners = []
    if progress:
        listeners.append(
            import_declared_extension("fit", "progress")(
                unit, _count_total_steps(loader, limits), limits.epochs, history
            )
        )
    if log is not None:
        columns = (*(metrics or ()), *(() if routing is None else routing.metrics))
        listeners.append(import_declared_extension("fit", "log")(log, columns, tensorboard))
    with call_runner.raising_errors_on_all_ranks("fit"):
        events = CallbackList(trainer, history, listeners, callbacks)
    loop = _FitLoop(
        trainer, loader, limits, history, saves,
        _Validation(trainer, validation, loader, metrics or {}, history, routing),
        events, count or _count_samples, asked,
    )  # fmt: skip
    with asked or nullcontext():
        return loop.run_epochs()


def _agree_on_arguments(call_runner: CallRunner, given: Mapping[str, Any]) -> tuple[FitLimits, CheckpointConfig | None]:
    """Check the arguments of `fit` (`given`), and return the stopping criteria and the checkpoint settings. Raise the
    same ConfigError on all ranks if arguments are invalid or differ between ranks. Collective."""
    with call_runner.raising_errors_on_all_ranks("fit"):
        require_arguments_match_type_hints(fit, (), {name: given[name] for name in TYPE_CHECKED_ONLY}, "fit")
        require_loss_and_optimizer("fit", call_runner.session.loss, call_runner.placement.optimizer)
        epochs, steps, every, patience = (to_python_number(given[name]) for name in COUNT_ARGUMENTS)
        limits = FitLimits(epochs, steps, every, patience, given["stop"])
        limits.require_valid(given["validation"], given["metrics"], given["restore_best"])
        loader, checkpoints = given["loader"], given["checkpoints"]
        if not isinstance(loader, Iterable) or getattr(loader, "shape", None) == ():
            raise ConfigError(f"fit: a loader of (x, y) batches is needed, such as data.DataLoader, not {loader!r}")
        saved, preempt = None if checkpoints is None else CheckpointConfig.from_argument(checkpoints), given["preempt"]
        if not (preempt is None or preempt is False or isinstance(preempt, StopRequest)):
            raise ConfigError(f"fit(preempt={preempt!r}): fsdpx.Preemption(...), or False, is needed")
    said = {name: "None" if given[name] is None else "given" for name in ("validation", "log", "checkpoints")}
    numbers = {name: getattr(limits, name) for name in COUNT_ARGUMENTS}
    call_runner.agree_on_arguments("fit", said | numbers | {"metrics": sorted(given["metrics"] or ())})
    return limits, saved


@dataclass(frozen=True)
class _FitLoop:
    """The training loop of one call of `fit`."""

    trainer: Any
    loader: Any
    limits: FitLimits
    history: FitHistory
    saves: FitCheckpointer
    validation: _Validation
    events: CallbackList
    count: Callable[[Any], int]
    preempt: StopRequest | None

    def run_epochs(self) -> FitHistory:
        """Train, unless an earlier run has already finished, and return the history. Collective."""
        history, saves, limits = self.history, self.saves, self.limits
        ended = limits.find_reason_to_end_at_resume(
            history, getattr(self.loader, "epoch", 0) - saves.first_epoch, saves.finished
        )
        if ended:
            checkpoint_step = history.checkpoint
            log_on_rank0(
                self.trainer.call_runner,
                f"finished: {limits.describe_end_reason(ended)} at {checkpoint_step}; nothing is trained or saved",
            )
        else:
            with self.events:  # opens the log file, so that messages are also written to it
                saves.print_resume_point()
                ended = self._train_epochs_until_end()
                self.trainer.call_runner.wait_for_last_step()
                self.trainer.inspect.save_trace()
                if saves.save_last_step_and_wait(ended):
                    self.events.call_listeners("on_save")
        history.reason = limits.describe_end_reason(ended)
        saves.restore_best_weights()
        return history

    def _train_epochs_until_end(self) -> str:
        """Train epoch after epoch until a stopping criterion is met, and return the reason."""
        epochs, first = self.limits.epochs, getattr(self.loader, "epoch", 0)
        epoch = first
        while epochs is None or epoch < self.saves.first_epoch + epochs:
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(epoch)
            before = len(self.history.losses)
            for x, y in self._iterate_batches():
                self._train_on_batch(x, y)
                if ended := self._validate_and_save_if_due():
                    if self._was_last_batch(epoch, len(self.history.losses) - before):
                        self._end_epoch()
                    return ended
            if len(self.history.losses) == before:
                once = "; a generator or iterator serves one epoch only" if isinstance(self.loader, Iterator) else ""
                raise DataError(f"fit: the loader gives no batch in epoch {self.history.epochs + 1}{once}")
            self._end_epoch()
            epoch += 1
        if self.validation.run_validation():
            self.events.call_listeners("on_validation_end")
        return EPOCHS

    def _was_last_batch(self, epoch: int, count: int) -> bool:
        """Return whether the most recent training batch was the last one of the epoch. `count` is the number of batches
        that this pass over the loader has yielded so far. Return False if the loader cannot tell without reading
        another batch."""
        # ask the loader for its epoch instead of counting batches, because a resumed epoch may start in the middle
        if hasattr(self.loader, "state_dict") and hasattr(self.loader, "epoch"):
            return bool(self.loader.state_dict().get("epoch", epoch) > epoch)
        return hasattr(self.loader, "__len__") and len(self.loader) == count

    def _end_epoch(self) -> None:
        self.history.epochs += 1
        self.events.call_listeners("on_epoch_end")

    def _iterate_batches(self) -> Iterator[Any]:
        """Yield the batches of one epoch. Raise DataError on all ranks if some ranks run out of batches before the
        other ranks do."""
        batches = iter(self.loader)
        while True:
            begin = perf_counter()
            batch = next(batches, _END)
            if batch is _END:
                self.trainer.call_runner.agree_on_end_of_batches()
            self.history.seconds += perf_counter() - begin
            if batch is _END:
                return
            with self.trainer.call_runner.raising_errors_on_all_ranks("step"):
                pair = _require_xy_pair("", batch)
            yield pair

    def _train_on_batch(self, x: Any, y: Any) -> None:
        """Train on one batch, and record its loss, time and number of samples. Raise NumericsError if the loss is NaN
        or Inf."""
        begin = perf_counter()
        loss = self.trainer.step(x, y)
        self.history.seconds += perf_counter() - begin
        if not math.isfinite(loss):
            raise NumericsError(
                f"the loss is {loss} at step {self.trainer.global_step}: distribute(..., check_finite=True) names its "
                "origin"
            )
        self.history.losses.append(loss)
        self.history.samples_seen += self.count(x) * self.trainer.call_runner.batch_part_count

    def _validate_and_save_if_due(self) -> str:
        """Call the callbacks of this step, then validate and save if due. Return why the run ends after this step, or
        "" if the run continues."""
        history, ended, better = self.history, "", False
        self.events.call_listeners("on_step_end")
        if self.limits.is_validation_step(history):
            if self.validation.run_validation():
                better = history.best_step == history.steps
                self.events.call_listeners("on_validation_end")
            ended = self.limits.agree_on_end_reason(self.trainer.call_runner, history)
        saved = not ended and self.saves.save_if_due(better)
        if saved:
            self.events.call_listeners("on_save")
        if not ended and self.preempt is not None and (saved or self.trainer.call_runner.is_in_sync):
            self.preempt.check(self.trainer, also=self.saves.save_last_step_and_wait)
        return ended


@dataclass(frozen=True)
class _Validation:
    """Computes the validation loss and metrics in one call of `fit`."""

    trainer: Any
    batches: Any
    training: Any
    metrics: Mapping[str, Metric]
    history: FitHistory
    routing: Any

    def run_validation(self) -> bool:
        """Compute the loss and the metrics on the validation batches, and record their means in the history. The loss
        of each batch is weighted by its loss weight. The metrics include those of expert load. Return False if there
        are no validation batches or this step has already been validated."""
        history, metrics = self.history, MetricSums(self.metrics, self.trainer.call_runner.placement)
        if self.batches is None or (history.validation and history.validation[-1][0] == history.steps):
            return False
        losses, weights = [], []
        same = self.batches is self.training and isinstance(self.batches, ShardingLoader)
        batches = self.batches.iterate_independently() if same else self.batches
        for batch in batches:
            with self.trainer.call_runner.raising_errors_on_all_ranks("evaluate"):
                x, y = _require_xy_pair("validation ", batch)
            losses.append(self.trainer.evaluate(x, y))
            weights.append(self.trainer.inspect.loss_weight)
            if self.metrics:
                metrics.add_batch(self.trainer.predict(x), y, x)
        if not losses:
            raise ConfigError("fit: the validation loader gives no batch")
        value = math.fsum(a * w for a, w in zip(losses, weights, strict=True)) / math.fsum(weights)
        history.validation.append((history.steps, value))
        metric_values = metrics.all_gather_means(self.trainer.call_runner.data_group) if self.metrics else {}
        if self.routing is not None:
            metric_values |= self.routing.compute_metrics_since_last_call(self.trainer.inspect.gather_expert_load())
        for name, mean in metric_values.items():
            history.metrics.setdefault(name, []).append((history.steps, mean))
        return True


def _require_xy_pair(which: str, batch: Any) -> Any:
    """Return the batch. Raise DataError unless it is a pair (x, y). `which` ("validation " or "") names the loader of
    the batch in the error message."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        several = isinstance(batch, tuple | list)
        description = f"{len(batch)} values" if several else "None" if batch is None else type(batch).__name__
        raise DataError(f"fit: the {which}loader gives a batch that is {description} and not (x, y)")
    return batch


def _has_experts(placement: Placement) -> bool:
    """Return whether the model has a mixture-of-experts layer."""
    return any(layer.routes for node in placement.model.nodes for _, layer in iterate_layers(node.layer))


def _count_total_steps(loader: Any, limits: FitLimits) -> int | None:
    """Return the number of steps after which the run ends, counted from the start of the first run; None if this number
    is not known in advance."""
    totals = [] if limits.steps is None else [limits.steps]
    if limits.epochs is not None and hasattr(loader, "__len__"):
        totals.append(limits.epochs * len(loader))
    return min(totals, default=None)


def _count_samples(x: Any) -> int:
    """Return the number of samples in the inputs of a batch."""
    return len(next(iter(x.values())) if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x)
