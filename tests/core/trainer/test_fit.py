"""The loop around the step: metrics, callbacks, logs, progress, the best weights, and runs that are finished."""

import functools
import io
import json
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call

import numpy as np
import pytest
from bits import bits
from metric_rows import rows_of
from models import CASES, alike, make, own_part
from present import needs
from threads import on_ranks

from fsdpx import CheckpointConfig, Mesh, data, nn, optim, spawn
from fsdpx.core.base import environment, messages
from fsdpx.core.comm import Communicator
from fsdpx.core.engine.warmup import run_warm_up_calls_in_rotated_order
from fsdpx.core.state.tuning import Tuning
from fsdpx.core.trainer import assemble
from fsdpx.core.trainer.fit_checkpoints import FitHistory
from fsdpx.errors import CheckpointError, ConfigError, DataError, install_hint


def ranks(size: int, body: Any, *given: Any, **options: Any) -> list[Any]:
    return spawn(lambda comm: body(comm, *given, **options), size)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines of standard error; on a slow machine kernels are spoken of as well."""
    return [line for line in capsys.readouterr().err.splitlines() if "compiling kernels" not in line]


def batch(rows: int, seed: int = 0) -> Any:
    return CASES["mlp"].batch(np.random.default_rng(seed), rows)


def loader(trainer: Any, rows: int = 24, size: int = 8) -> data.DataLoader:
    return data.DataLoader(data.ArrayDataset(*batch(rows)), size, comm=trainer.data_group, shuffle=True)


def held(trainer: Any, rows: int = 7) -> list[Any]:
    """One global batch whose parts are not alike."""
    return [own_part(trainer.data_group, "mlp", rows, seed=1)]


def fit(
    comm: Communicator, *, rows: int = 24, validation: bool = False, made: Any = None, **options: Any
) -> FitHistory:
    """An epoch of three batches, unless `options` of fit say otherwise. made: options of the trainer."""
    trainer = make(comm, "mlp", **(made or {}))
    given = {"validation": held(trainer) if validation else None, "progress": False, **options}
    return trainer.fit(loader(trainer, rows), **given)


# -- metrics -----------------------------------------------------------------------------------------------------------


def square(output: Any, target: Any) -> Any:
    """One value per sample."""
    return ((output - target) ** 2).sum(axis=1)


def weighted(output: Any, target: Any) -> Any:
    return float(output.sum()), 2 * len(output)


@pytest.mark.parametrize(("size", "mesh"), [(1, None), (3, None), (4, Mesh(pipe=2)), (2, Mesh(shard=1, tensor=2))])
def test_metrics_are_means_over_the_global_batch(size: int, mesh: Mesh | None) -> None:
    def run(comm: Communicator) -> None:
        plan = {"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel} if mesh and mesh.tensor > 1 else None
        trainer = make(comm, "mlp", "fsdp", mesh=mesh, tensor_plan=plan)
        metrics, validation = {"square": square, "weighted": weighted}, held(trainer)
        history = trainer.fit(loader(trainer), metrics=metrics, validation=validation, progress=False)
        output = np.concatenate(trainer.data_group.all_gather_object(np.asarray(trainer.predict(validation[0][0]))))
        assert [step for step, _ in history.metrics["square"]] == [3]
        assert history.metrics["square"][0][1] == pytest.approx(square(output, target).mean(), rel=1e-12)
        assert history.metrics["weighted"][0][1] == pytest.approx(output.sum() / 14, rel=1e-12)

    _, target = batch(7, seed=1)
    spawn(run, size)


def test_a_count_is_exact_at_any_number_of_ranks() -> None:
    """Seven samples on three ranks: a mean of means would not be a seventh."""
    want = float((batch(7, seed=1)[1][:, 0] > 0).sum()) / 7
    assert 0 < want < 1
    for history in ranks(3, fit, validation=True, metrics={"right": lambda y, t: t[:, 0] > 0}):
        assert history.metrics["right"][0][1] == want


def test_metrics_that_do_not_fit(tmp_path: Path) -> None:
    def refused(size: int, metrics: Any, **options: Any) -> str:
        return alike(size, lambda comm: fit(comm, metrics=metrics(comm.rank), **{"validation": True, **options}))

    text = refused(2, lambda rank: {"mine": lambda y, t: float(y.mean())})
    assert re.match("ConfigError: .*metric 'mine': it returned one number, .*: return an array with a value", text)
    text = refused(1, lambda rank: {"mine": square}, validation=False)
    assert text.startswith("ConfigError: fit: metrics and restore_best are about validation=..., and none is given")
    text = refused(3, lambda rank: {"mine": lambda y, t: [1.0 / rank] * len(y)})
    assert text == "ConfigError: rank 0: metric 'mine': float division by zero"
    text = refused(2, lambda rank: {"ab"[rank]: square}, every=1)
    assert text == "ConfigError: ranks differ in metrics (rank 0: ['a']; rank 1: ['b']). Give all ranks the same"
    text = refused(1, lambda rank: {"loss": square, "mine": square}, log=tmp_path)
    assert text == "ConfigError: fit(metrics=...): the log has columns named 'loss': choose other names"


@needs("elastic")
def test_metrics_of_an_elastic_trainer() -> None:
    def run(comm: Communicator, **options: Any) -> Any:
        options |= {"precision": "float32", "optimizer": optim.SGD(lr=0.1), "reproducible_chunks": 4}
        trainer = make(comm, "mlp", **options)
        found = trainer.fit(
            loader(trainer), metrics={"s": square}, validation=held(trainer, 8), patience=1, every=1, epochs=4,
            progress=False,
        )  # fmt: skip
        return found.metrics["s"], bits(trainer)

    for (elastic, weights), (plain, same) in zip(ranks(2, run, elastic=True), ranks(2, run), strict=True):
        assert weights == same
        np.testing.assert_allclose(elastic, plain, rtol=1e-14)  # an elastic trainer adds up all samples on each rank


# -- callbacks ---------------------------------------------------------------------------------------------------------


def take_notes() -> SimpleNamespace:
    """A callback that notes in `seen` what it is called for."""
    seen: list[str] = []
    return SimpleNamespace(
        seen=seen,
        on_train_begin=lambda trainer, history: seen.append("begin"),
        on_step_end=lambda trainer, history: seen.append(f"step {history.steps}"),
        on_validation_end=lambda trainer, history: seen.append(f"validated {history.validation[-1][0]}"),
        on_epoch_end=lambda trainer, history: seen.append(f"epoch {history.epochs}"),
        on_train_end=lambda trainer, history: seen.append("end"),
    )


@on_ranks(2)
def test_callbacks_are_called_on_all_ranks(comm: Communicator) -> None:
    notes, rates = take_notes(), []
    callbacks = [notes, lambda t, history: rates.append((t.inspect.last_update.lr, t.parameters() != {}))]
    fit(comm, rows=16, epochs=2, validation=True, every=3, callbacks=callbacks)
    want = "begin, step 1, step 2, epoch 1, step 3, validated 3, step 4, epoch 2, validated 4, end"
    assert notes.seen == want.split(", ")
    assert rates == [(0.01, True)] * 4


@pytest.mark.parametrize("kind", ["loader", "list", "iterator"])
def test_an_epoch_counts_when_steps_end_with_its_last_batch(kind: str, tmp_path: Path) -> None:
    """An epoch has 3 batches, and `steps` ends the runs. An iterator does not know which of its batches is the last."""

    def run(comm: Communicator, steps: int, folder: Path) -> Any:
        trainer, notes = make(comm, "mlp"), take_notes()
        batches = {"list": list, "iterator": iter, "loader": lambda same: same}[kind](loader(trainer))
        options = {"checkpoints": folder if kind == "loader" else None, "every": 9, "progress": False}
        history = trainer.fit(batches, epochs=None, steps=steps, callbacks=notes, **options)
        return history.epochs, [word for word in notes.seen if word.startswith("epoch")]

    assert ranks(2, run, 3, tmp_path / "a")[0] == ((0, []) if kind == "iterator" else (1, ["epoch 1"]))
    if kind == "iterator":
        return
    assert ranks(2, run, 4, tmp_path / "b")[0] == (1, ["epoch 1"])
    assert ranks(2, run, 6, tmp_path / "c")[0] == (2, ["epoch 1", "epoch 2"])
    if kind == "loader":  # resumed after 4 and 6 steps
        assert ranks(2, run, 6, tmp_path / "b")[0] == (2, ["epoch 2"])
        assert ranks(2, run, 7, tmp_path / "c")[0] == (2, [])


@on_ranks(2)
def test_an_error_in_a_callback_still_ends_the_others(comm: Communicator) -> None:
    notes = take_notes()
    with pytest.raises(ValueError, match="mine"):
        fit(comm, callbacks=[notes, Mock(spec=["__call__"], side_effect=ValueError("mine"))])
    assert notes.seen == ["begin", "step 1", "end"]


@on_ranks(1)
def test_a_callback_that_cannot_begin_ends_those_that_have(comm: Communicator, tmp_path: Path) -> None:
    notes, fails = take_notes(), SimpleNamespace(on_train_begin=Mock(side_effect=ValueError("mine")))
    with pytest.raises(ValueError, match="mine"):
        fit(comm, log=tmp_path, callbacks=[notes, fails])
    fit(comm, log=tmp_path)  # the log is not locked
    assert notes.seen == ["begin", "end"]


def test_callbacks_that_would_never_be_called() -> None:
    class Wrong:
        def on_step(self, trainer: Any, history: FitHistory) -> None: ...

    trainer = make(spawn(lambda comm: comm, 1)[0], "mlp")
    for wrong, text in ((Wrong(), "Wrong has on_step"), (3, "int has none of them")):
        with pytest.raises(ConfigError, match=f"an object with some of on_train_begin, .*; {text}"):
            trainer.fit(loader(trainer), callbacks=[wrong])


# -- progress ----------------------------------------------------------------------------------------------------------


def test_a_line_has_all_that_is_known(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpx.ext.observe.progress.LINE_INTERVAL_SECONDS", 0.0)
    options = {"epochs": 2, "validation": True, "metrics": {"s": square}, "every": 3, "unit": "rows", "progress": True}
    ranks(2, fit, made={"clip_norm": 1.0}, **options)
    lines = said(capsys)
    number = r"[\d.,e+-]+"
    assert re.fullmatch(f"epoch 1/2  step 1/6  loss {number}  lr 0.01  norm {number}", lines[0])
    assert re.fullmatch(
        f"epoch 2/2  step 5/6  loss {number}  {number} rows/s  lr 0.01  norm {number}  0:00:0. left", lines[5]
    )
    assert re.fullmatch(f"epoch 1/2  step 3/6  validation loss {number}  s {number}", lines[3])
    assert len(lines) == 8


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a buffer two writes would let lines of other ranks come between."""
    writes: list[str] = []
    unbuffered = SimpleNamespace(write=writes.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr("fsdpx.ext.observe.progress.LINE_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr", unbuffered)
    trainer = make(spawn(lambda comm: comm, 1)[0], "mlp")
    trainer.fit(loader(trainer), validation=held(trainer), every=3)
    messages.log_on_rank0(trainer.call_runner, "done")
    found = [text for text in writes if "compiling" not in text]
    assert len(found) == 5
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in found)


def test_on_a_terminal_it_is_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    ranks(2, fit, made={"clip_norm": 1.0}, epochs=2, validation=True, every=3, progress=True)
    err = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().err)  # without colors
    assert re.search(r"epoch 2/2 .* 6/6 loss [\d.]+  [\d,]+ samples/s  lr 0.01  norm [\d.]+ 00:00", err)
    assert err.count("step 3/6  validation loss ") == 1


@pytest.mark.parametrize("closed", [False, True])
def test_without_standard_error_it_is_silent(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    """As of a process without a console, or of one whose launcher has closed it."""
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr("logging.raiseExceptions", False)
    monkeypatch.setattr("sys.stderr", gone if closed else None)
    assert ranks(1, fit, progress=True)[0].steps == 3


def test_the_rate_leaves_validation_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A clock that only validation moves: then steps take no time, and the rate is not of this world."""
    clock = [0.0]
    monkeypatch.setattr("fsdpx.core.trainer.fit.perf_counter", lambda: clock[0])
    monkeypatch.setattr("fsdpx.ext.observe.progress.LINE_INTERVAL_SECONDS", 0.0)
    trainer = make(spawn(lambda comm: comm, 1)[0], "mlp")

    class Slow:
        def __init__(self, seconds: float, steps: int) -> None:
            self.seconds, self.steps = seconds, steps

        def __iter__(self) -> Any:
            for _ in range(self.steps):
                clock[0] += self.seconds
                yield batch(8)

    history = trainer.fit(Slow(2.0, 3), validation=Slow(1000.0, 1), every=1)
    assert (history.seconds, history.samples_seen) == (6.0, 24)
    assert "4 samples/s" in capsys.readouterr().err


# -- what takes long ---------------------------------------------------------------------------------------------------


def test_what_takes_more_than_a_second_is_said(capsys, monkeypatch):
    """By rank 0, while it lasts; here less, and until the line itself is there."""
    monkeypatch.setattr(messages, "SILENCE_SECONDS", 0.05)
    spoken = threading.Event()

    def slowly(*given: Any) -> Tuning:
        spoken.clear()
        spoken.wait(60)
        return Tuning("numpy")

    monkeypatch.setattr(messages, "log_line", lambda text: (print(text), spoken.set()))
    monkeypatch.setattr(assemble, "run_warm_up_calls_in_rotated_order", slowly)
    monkeypatch.setattr(assemble, "agree_on_tuning", slowly)
    make(spawn(lambda comm: comm, 1)[0], "mlp")
    lines = [re.sub(r"\d+ s", "some s", line) for line in capsys.readouterr().out.splitlines()]
    kept = f"took some s; the result is kept in {environment.read_environment().cache}"
    compiled = ["fsdpx: compiling kernels ...", "fsdpx: compiling kernels took some s"]
    assert lines == ["fsdpx: measuring ...", f"fsdpx: measuring {kept}", *compiled]


@pytest.mark.parametrize("terminal", [False, True])
def test_how_far_it_is_is_said(monkeypatch, capsys, terminal):
    """On a terminal in one line; elsewhere in few, as it may be a file."""
    clock = [0.0]
    monkeypatch.setattr(messages, "perf_counter", lambda: clock[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    shown = messages.SlowTaskReporter("thinking")
    for done in range(100):
        shown.update_progress(done, 100)
        clock[0] += 1.0
        if done == 0:
            shown.show_progress()  # by a timer
    shown.report_end(str)
    err = capsys.readouterr().err
    if terminal:
        assert err.count("\n") == 1
        assert err.startswith("\r\x1b[Kfsdpx: thinking 0/100 ...\r\x1b[Kfsdpx: thinking 1/100 ...\r\x1b[K")
        assert err.endswith("\r\x1b[Kfsdpx: thinking took 100 s\n")
    else:
        spoken = [f"fsdpx: thinking {done}/100 ..." for done in (0, 4, 13, 40)]
        assert err.splitlines() == [*spoken, "fsdpx: thinking took 100 s"]


@pytest.mark.parametrize(("rank", "said"), [(0, ["kernels"]), (2, [])])
def test_trainers_of_single_ranks_are_spoken_of_by_the_first_of_the_job(monkeypatch, rank, said):
    heard = []

    @contextmanager
    def hear(speaks: bool, what: str, *_: Any) -> Any:
        heard.extend([what.split()[-1]] * speaks)
        yield lambda done, total: None

    monkeypatch.setattr(assemble, "reporting_if_slow", hear)
    for name, value in (("PMI_RANK", rank), ("PMI_SIZE", 3), ("MPI_LOCALRANKID", rank), ("MPI_LOCALNRANKS", 3)):
        monkeypatch.setenv(name, str(value))
    make(spawn(lambda comm: comm, 1)[0], "mlp")
    assert [what for what in heard if what == "kernels"] == said


def test_ranks_of_a_host_begin_with_different_kernels() -> None:
    made: list[int] = []
    calls = [functools.partial(made.append, number) for number in range(5)]
    for rank, order in enumerate([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0], [3, 4, 0, 1, 2]]):
        counted = Mock()
        made.clear()
        run_warm_up_calls_in_rotated_order(calls, (rank, 3), counted)
        assert made == order
        assert counted.call_args_list == [call(done, 5) for done in range(6)]


def test_what_is_quick_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(messages, "SILENCE_SECONDS", 1000)
    with messages.reporting_if_slow(True, "thinking"):
        pass
    assert capsys.readouterr().err == ""


# -- logs --------------------------------------------------------------------------------------------------------------


def logged(comm: Communicator, folder: Path, steps: int | None = None, **options: Any) -> FitHistory:
    options |= {"epochs": 3, "steps": steps, "every": 4, "log": folder / "log"}
    return fit(comm, made={"clip_norm": 1.0}, validation=True, metrics={"s": square}, **options)


def test_a_log_has_a_row_per_step_and_per_validation(tmp_path: Path) -> None:
    history = ranks(2, logged, tmp_path)[0]
    rows = rows_of(tmp_path / "log")
    steps, checks = [r for r in rows if "loss" in r], [r for r in rows if "validation_loss" in r]
    assert [r["loss"] for r in steps] == history.losses
    assert [(r["step"], r["validation_loss"]) for r in checks] == history.validation
    assert [(r["step"], r["s"]) for r in checks] == history.metrics["s"]
    assert steps[3].keys() == {"step", "epoch", "loss", "learning_rate", "gradient_norm", "rate"}
    assert [r["epoch"] for r in steps] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_log_goes_on_with_its_run(tmp_path: Path) -> None:
    """Steps after the checkpoint are made again, and are there once. A line that a death has cut is left out."""
    kept = CheckpointConfig(tmp_path / "run", every=100)
    ranks(2, logged, tmp_path, 5, checkpoints=kept)
    before = rows_of(tmp_path / "log")
    with (tmp_path / "log" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "epoch": 2, "loss": 9.0}) + '\n{"step": 7, "lo')
    ranks(3, logged, tmp_path, checkpoints=kept)
    rows = rows_of(tmp_path / "log")
    assert rows[: len(before)] == before
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 10))
    ranks(1, logged, tmp_path, 2)
    assert [r["step"] for r in rows_of(tmp_path / "log") if "loss" in r] == [1, 2], "another run begins anew"


def test_a_log_without_tensorboard_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    ranks(2, logged, tmp_path, 2)
    (line,) = said(capsys)
    assert line == f"fsdpx: log {tmp_path}/log: CSV and JSON lines; for TensorBoard {install_hint('tensorboard')}"
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["log.txt", "metrics.csv", "metrics.jsonl"]


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of tensorboardX."""
    opened = Mock()
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=opened))
    history = ranks(2, logged, tmp_path, 4)[0]
    opened.assert_called_once_with(str(tmp_path / "log"), purge_step=1, filename_suffix=ANY)
    assert re.fullmatch(r"\.[0-9a-f]{16}", opened.call_args.kwargs["filename_suffix"]), "another user can guess it"
    calls = (one.args for one in opened.return_value.add_scalar.call_args_list)
    added = {(name, step): value for name, value, step in calls}
    assert [added["loss", step] for step in range(1, 5)] == history.losses
    assert added["s", 4] == history.metrics["s"][0][1]
    opened.return_value.close.assert_called_once_with()


def test_real_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    ranks(2, logged, tmp_path, 4)
    (events,) = tmp_path.glob("log/events.out.tfevents.*")
    assert b"validation_loss" in events.read_bytes()


@pytest.mark.parametrize("size", [1, 2])
def test_the_training_data_may_be_the_validation(size: int, tmp_path: Path) -> None:
    """Its batches are counted once, and a run that goes on knows where it is."""

    def run(comm: Communicator) -> None:
        trainer = make(comm, "mlp")
        batches = loader(trainer)
        history = trainer.fit(batches, epochs=2, every=2, validation=batches, checkpoints=tmp_path, progress=False)
        assert (history.steps, batches.epoch, len(history.validation)) == (6, 2, 3)

    spawn(run, size)


@pytest.mark.parametrize(("given", "what"), [(None, "None"), ((1, 2, 3), "3 values"), (5, "int")])
def test_a_batch_that_is_none(given: Any, what: str) -> None:
    def act(comm: Communicator, validation: bool) -> None:
        trainer = make(comm, "mlp")
        good, bad = held(trainer), [*held(trainer), given]
        trainer.fit(good if validation else bad, validation=bad if validation else None, progress=False)

    for name, validation in (("loader", False), ("validation loader", True)):
        text = alike(1, functools.partial(act, validation=validation))
        assert text == f"DataError: fit: the {name} gives a batch that is {what} and not (x, y)"


def test_a_new_run_does_not_begin_among_old_checkpoints(tmp_path: Path) -> None:
    def run(comm: Communicator, resume: bool, steps: int) -> int:
        kept = CheckpointConfig(tmp_path, every=2, resume=resume)
        return fit(comm, epochs=None, steps=steps, checkpoints=kept).steps

    assert ranks(2, run, True, 4) == [4, 4]
    assert alike(2, lambda comm: run(comm, False, 2)) == (
        f"CheckpointError: {tmp_path}/step-4 is of an earlier run, which the next start would take for the newest of "
        "this one: give CheckpointConfig(...) another folder, remove its checkpoints, or resume from them with "
        "resume=True"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-4"]


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file")
    text = alike(3, lambda comm: logged(comm, tmp_path))
    assert text.startswith(f"ConfigError: fit(log=...): log {tmp_path}/log: rank 0: File exists (EEXIST)")


# -- the best weights, and runs that are finished ----------------------------------------------------------------------


def worse(
    comm: Communicator, folder: Path | None, lr: float = 0.02, strategy: str = "fsdp", samples: int = 8, **options: Any
) -> Any:
    """The validation loss falls for some steps, then rises: it is that of the weights with which training begins."""
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm(8), nn.Linear(8, 5))
    trainer = model.as_distributed(
        loss=nn.MSELoss(), optimizer=optim.SGD(lr=lr), comm=comm, precision="float64", strategy=strategy
    )
    check, kept = Falling(trainer), None if folder is None else CheckpointConfig(folder, every=2, keep=2)
    options = {"epochs": 40, "patience": 3, "progress": False, **options}
    history = trainer.fit(loader(trainer, size=samples), validation=check, every=2, checkpoints=kept, **options)
    return history, check.seen, bits(trainer), trainer.global_step


class Falling:
    """Validation that is best at step 4: its target is what the model says there."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.seen = trainer, list[Any]()

    def __iter__(self) -> Any:
        self.seen.append(bits(self.trainer))
        x, _ = own_part(self.trainer.data_group, "mlp", 8, seed=5)
        y = np.asarray(self.trainer.predict(x))
        return iter([(x, y + abs(self.trainer.global_step - 4))])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("saved", [False, True])
def test_early_stopping_ends_with_the_best_weights(strategy: str, saved: bool, tmp_path: Path) -> None:
    for history, seen, parameters, steps in ranks(2, worse, tmp_path if saved else None, strategy=strategy):
        assert (history.best_step, history.best_loss, history.steps, steps) == (4, pytest.approx(0, abs=1e-20), 10, 10)
        assert history.reason == "no better validation loss in 3 validations"
        assert parameters == seen[1]
        assert parameters != seen[4]


def test_the_last_weights_stay_where_they_are_wanted() -> None:
    _, seen, parameters, _ = ranks(2, worse, None, restore_best=False)[0]
    assert parameters == seen[4]
    _, seen, parameters, _ = ranks(2, worse, None, patience=None, epochs=2)[0]
    assert parameters == seen[2]
    _, seen, parameters, _ = ranks(2, worse, None, patience=None, restore_best=True, epochs=2)[0]
    assert parameters == seen[1], "without patience, too"


def test_a_finished_run_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best checkpoint is beside the last ones; started again, at any number of ranks, nothing changes."""
    _, _, best, _ = ranks(2, worse, tmp_path)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-4", "step-8"]
    best_is = f"fsdpx: the weights are those of step 4, the best (validation loss 0.0000): {tmp_path}/step-4"
    assert best_is in capsys.readouterr().err
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for history, _, parameters, _ in ranks(3, worse, tmp_path):
        assert history.losses == []
        assert (history.steps, history.best_step) == (10, 4)
        assert history.reason == "no better validation loss in 3 validations"
        assert parameters == best
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    first, second = said(capsys)
    reason = f"no better validation loss in 3 validations at {tmp_path}/step-10"
    assert first == f"fsdpx: finished: {reason}; nothing is trained or saved"
    assert second.startswith("fsdpx: the weights are those of step 4")


def test_more_patience_or_steps_take_a_finished_run_up_again(tmp_path: Path) -> None:
    ranks(2, worse, tmp_path)
    history, seen, parameters, _ = ranks(2, worse, tmp_path, patience=4)[0]
    assert (history.earlier_steps, history.steps, history.best_step) == (10, 12, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-12", "step-4"]
    assert parameters != seen[0]


def test_stop_and_epochs_finish_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = {"patience": None, "stop": lambda history: history.steps >= 6}
    assert [ranks(2, worse, tmp_path / "a", **stop)[0][0].reason for _ in range(2)] == ["stop() said so"] * 2
    for again in range(2):
        history = ranks(2, worse, tmp_path / "b", patience=None, epochs=2)[0][0]
        assert (history.reason, history.epochs, history.steps) == ("all epochs done", 2, 6)
        assert len(history.losses) == (0 if again else 6)
    notes = take_notes()
    ranks(1, worse, tmp_path / "b", patience=None, epochs=2, callbacks=[notes])
    assert notes.seen == [], "callbacks are told of training, and there is none"
    assert capsys.readouterr().err.count("nothing is trained or saved") == 3


def test_checkpoints_may_be_a_folder(tmp_path: Path) -> None:
    assert ranks(2, fit, checkpoints=str(tmp_path / "run"))[0].checkpoint == tmp_path / "run" / "step-3"
    assert ranks(2, fit, checkpoints=tmp_path / "run")[0].losses == [], "the run is finished"


@on_ranks(2)
def test_a_folder_that_cannot_be_written_is_named_before_training(comm: Communicator, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = make(comm, "mlp")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/runs: no checkpoints can be saved there"):
        trainer.fit(loader(trainer), progress=False, checkpoints=tmp_path / "file" / "runs")
    assert trainer.global_step == 0


def test_what_has_changed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2, worse, tmp_path, steps=3, patience=None)
    ranks(2, worse, tmp_path, steps=5, patience=None)
    assert said(capsys) == [f"fsdpx: resumes from {tmp_path / 'step-3'}: step 3, epoch 2"]
    ranks(3, worse, tmp_path, steps=7, lr=0.01, samples=6, strategy="ddp", patience=None)
    assert said(capsys) == [
        f"fsdpx: resumes from {tmp_path / 'step-5'}: step 5, epoch 2",
        f"fsdpx: changed since {tmp_path / 'step-5'}: learning rate 0.02 -> 0.01; batch size 8 -> 6",
    ]


def test_checkpoints_in_another_format_are_gone_on_from(tmp_path: Path) -> None:
    """The weights are rounded in the file, so they are those of the file afterwards."""
    options = {"checkpoints": CheckpointConfig(tmp_path, every=2, dtype="bf16"), "restore_best": True, "every": 1}
    for earlier, steps in ((0, 2), (2, 5)):
        history = ranks(2, fit, made={"precision": "float32"}, epochs=5, steps=steps, validation=True, **options)[0]
        assert (history.earlier_steps, history.steps) == (earlier, steps)


def test_a_changed_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(comm: Communicator, steps: int, rate: float, kind: Any) -> None:
        model = nn.Sequential(nn.Linear(12, 5), nn.Dropout(rate))
        trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=kind(lr=0.1), comm=comm)
        trainer.fit(loader(trainer), steps=steps, progress=False, checkpoints=CheckpointConfig(tmp_path))

    ranks(2, run, 1, 0.1, optim.Adam)
    ranks(2, run, 2, 0.2, optim.AdamW)
    changed = "layer 1 Dropout(p=0.1) -> Dropout(p=0.2); optimizer.weight_decay 0.0 -> 0.01; optimizer Adam -> AdamW"
    assert changed in capsys.readouterr().err


def test_saving_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2, worse, tmp_path, steps=5, progress=True)
    saved = [line for line in said(capsys) if " saved " in line]
    assert saved == [
        f"epoch 1/40  step 2/5  saved {tmp_path / 'step-2'}, the best so far",
        f"epoch 2/40  step 4/5  saved {tmp_path / 'step-4'}, the best so far",
        f"epoch 2/40  step 5/5  saved {tmp_path / 'step-5'}",
    ]


# -- data that each rank has cut already -------------------------------------------------------------------------------


class Own:
    """The samples of one rank, which are not those of another; `seen` are those that were asked for."""

    def __init__(self, rank: int, length: int, changing: bool = False) -> None:
        self.rank, self.length, self.changing, self.seen = rank, length, changing, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        self.seen.append(i)
        seed = [self.rank, i, len(self.seen) if self.changing else 0]
        return np.random.default_rng(seed).normal(size=3), np.int64(i % 2)


def trained_on(lengths: list[int], *, own: bool = False, changing: bool = False, validation: bool = False) -> list[Any]:
    """What `fit` says on each rank, or the samples that it has trained on, and warnings."""

    def run(comm: Communicator) -> Any:
        mine = Own(comm.rank, lengths[comm.rank], changing)
        trainer = nn.Linear(3, 2).as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1))
        whole = data.DataLoader(Own(0, 8), 8, comm=trainer.data_group)
        given = data.DataLoader(mine, 4, **({"rank": 0, "size": 1} if own else {"comm": trainer.data_group}))
        try:
            trainer.fit(whole if validation else given, validation=given if validation else None, progress=False)
        except DataError as error:
            return str(error)
        return sorted({*mine.seen})

    return spawn(run, len(lengths))


@pytest.mark.parametrize("validation", [False, True])
def test_datasets_of_different_length_are_refused_on_all_ranks(validation: bool) -> None:
    texts = trained_on([40, 37, 40], validation=validation)
    assert len({*texts}) == 1
    assert "differ in length: ranks 0, 2: 40 samples; rank 1: 37 samples. " in texts[0]
    assert "DataLoader(dataset, samples of this rank, rank=0, size=1)" in texts[0]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_data_that_each_rank_has_cut_is_named_and_has_a_way() -> None:
    with pytest.warns(RuntimeWarning, match=r"20 samples each and differ in the first one.*rank=0, size=1") as found:
        trained_on([20, 20])
    assert len([one for one in found if "differ in the first" in str(one.message)]) == 1
    assert trained_on([40, 37], own=True) == [[*range(40)], [*range(37)]]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_samples_that_change_by_themselves_are_not_compared() -> None:
    trained_on([20, 20], changing=True)


def test_own_data_gives_as_many_batches_on_every_rank() -> None:
    texts = trained_on([40, 20], own=True)
    assert len({*texts}) == 1
    assert "rank 0: 10 batches of its own; rank 1: 5 batches of its own. " in texts[0]


def test_own_data_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Also where the ranks have more and fewer samples."""

    def run(comm: Communicator, folder: Path, *stops: int) -> Any:
        for steps in stops:
            trainer = nn.Linear(3, 2).as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1))
            rows = 11 - comm.rank
            x = np.random.default_rng(comm.rank).normal(size=(rows, 3))
            mine = data.DataLoader(data.ArrayDataset(x, np.arange(rows) % 2), 4, rank=0, size=1, shuffle=True)
            trainer.fit(mine, epochs=None, steps=steps, checkpoints=folder, progress=False)
        return bits(trainer)

    assert ranks(2, run, tmp_path / "a", 7) == ranks(2, run, tmp_path / "b", 4, 7)


class Wrapped:
    """A loader of the user's own around one of fsdpx: no subclass, but with what one that shares samples out has."""

    def __init__(self, inner: data.DataLoader) -> None:
        self.dataset, self.sampler, self._inner = inner.dataset, inner.sampler, inner
        self.iterate_independently, self.hash_first_sample = inner.iterate_independently, inner.hash_first_sample

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Any:
        return iter(self._inner)


def test_loaders_of_the_users_own_are_compared_where_they_share_samples_out() -> None:
    def act(comm: Communicator) -> None:
        trainer = make(comm, "mlp")
        trainer.fit(Wrapped(loader(trainer, 16 + 8 * comm.rank)), progress=False)

    text = alike(2, act)
    assert text.startswith("DataError: ")
    assert "differ in length: rank 0: 16 samples; rank 1: 24 samples. " in text


class Third:
    """Ends a run after three steps, as `Preemption` does after a signal."""

    inside = False

    def __enter__(self) -> Any:
        self.inside = True
        return self

    def __exit__(self, *exc: Any) -> None:
        self.inside = False

    def check(self, trainer: Any, also: Any = None) -> None:
        assert self.inside
        if trainer.global_step == 3:
            also()
            raise SystemExit(7)


@on_ranks(2)
def test_what_ends_a_run_may_be_the_users_own(comm: Communicator, tmp_path: Path) -> None:
    trainer, third = make(comm, "mlp"), Third()
    saving = CheckpointConfig(tmp_path, every=100)
    with pytest.raises(SystemExit, match="7"):
        trainer.fit(loader(trainer, 64), checkpoints=saving, preempt=third, progress=False)
    again = make(comm, "mlp")
    again.fit(loader(again, 64), steps=4, checkpoints=saving, preempt=False, progress=False)
    assert (trainer.global_step, again.global_step, third.inside) == (3, 4, False)
    with pytest.raises(ConfigError, match=r"fit\(preempt=7\): fsdpx.Preemption\(...\), or False, is needed"):
        again.fit([], preempt=7, progress=False)
