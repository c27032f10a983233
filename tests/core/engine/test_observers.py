"""Observers of the engine: each is told what it has a method for, in the order in which things happen."""

import numpy as np
import pytest

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.engine.clock import LOADING, SAVING, WAITING
from fsdpx.core.engine.observer import Hooks, Observer, collect_hooks

X, Y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)


class Everything(Observer):
    """Keeps the name of each method that is called, with what tells calls apart."""

    def __init__(self):
        self.told = []

    def on_collective_call(self, call):
        self.told.append(("enter", call))

    def on_program_begin(self, program, state):
        self.told.append(("begin_program", program.kind, state.steps))

    def wrap_units(self, units):
        self.told.append(("timed", len(units)))
        return units

    def on_action_begin(self, words, now):
        self.told.append(("begin", words.split()[0]))

    def on_action_done(self, action):
        self.told.append(("look", str(action)))

    def on_action_end(self, planned, begin, ready, end, nbytes, values):
        assert begin <= ready <= end
        self.told.append(("acted", str(planned.action)))

    def on_outside_program(self, what, begin, end, nbytes):
        self.told.append(("outside", what))

    def on_action_failed(self, words, error):
        self.told.append(("failed", words.split()[0], str(error)))

    def reset_counts(self):
        self.told.append(("reset",))

    def write_files(self):
        self.told.append(("write",))


def make(**options):
    model = nn.Sequential(nn.Linear(3, 2))
    return fsdpx.distribute(model, loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), tune=False, **options)


def test_an_observer_is_told_everything_in_order():
    trainer = make()
    seen = trainer.inspect.engine.add_observer(Everything())
    trainer.step(X, Y)
    each = [(what, str(action)) for action in trainer.program.actions for what in ("begin", "look", "acted")]
    assert [row for row in seen.told if row[0] in ("begin", "look", "acted")] == each
    assert seen.told[0] == ("enter", "step")
    assert [row[0] for row in seen.told[:4]] == ["enter", "outside", "begin_program", "timed"]
    trainer.inspect.reset_counters()
    assert seen.told[-1] == ("reset",)
    trainer.close()
    assert ("write",) in seen.told


def test_what_breaks_an_action_off_is_told_and_the_action_counts_as_not_done():
    trainer = make()
    engine = trainer.inspect.engine
    seen = engine.add_observer(Everything())

    def fail(action):
        if action.op == "UPDATE":
            raise RuntimeError("stopped here")

    engine.add_observer(fail)
    with pytest.raises(RuntimeError, match="stopped here"):
        trainer.step(X, Y)
    (at,) = (str(action) for action in trainer.program.actions if action.op == "UPDATE")
    assert seen.told[-2:] == [("look", at), ("failed", at, "stopped here")]
    assert ("acted", at) not in seen.told


def test_who_is_ignored_hears_nothing_and_the_clock_goes_on():
    trainer = make()
    engine = trainer.inspect.engine
    seen = engine.add_observer(Everything())
    engine.remove_observers(seen)
    trainer.step(X, Y)
    assert seen.told == []
    assert engine.observers == (engine.clock,)
    assert engine.clock.get_timings()["UPDATE"].calls == 1


def test_methods_that_an_observer_does_not_have_are_not_called():
    class Looks(Observer):
        def on_action_done(self, action):
            """Look at nothing."""

    looks = Looks()
    hooks = collect_hooks([Observer(), looks])
    assert hooks.on_action_done == (looks.on_action_done,)
    assert not any(getattr(hooks, name) for name in Hooks.__slots__ if name != "on_action_done")


def test_predictions_take_no_short_cut_past_an_observer():
    trainer = make()
    for _ in range(2):
        trainer.predict(X)  # from now on the layers alone would run
    seen = []
    trainer.inspect.engine.add_observer(lambda action: seen.append(action.op))
    trainer.predict(X)
    assert "E" in seen


class Beside(Observer):
    def __init__(self):
        self.told = []

    def on_outside_program(self, what, begin, end, nbytes):
        assert begin < end
        self.told.append((what, nbytes))


def test_saving_and_loading_are_told_with_their_bytes(tmp_path):
    """On each rank those of its part, and half of what is verified; a dict of arrays is read from no file. The clock
    and the report add them up."""

    def run(comm):
        trainer = make(comm=comm, strategy="fsdp", precision="float64")
        seen = trainer.inspect.engine.add_observer(Beside())
        trainer.step(X, Y)
        seen.told.clear()
        trainer.save(tmp_path / "one")
        trainer.save(tmp_path / "two", background=True)
        trainer.call_runner.wait_for_background_save()
        trainer.load(tmp_path / "one")
        trainer.load_parameters(tmp_path / "two")
        trainer.load_parameters(trainer.parameters())
        times = trainer.report().times
        return seen.told, {name: (times[name].calls, times[name].nbytes) for name in (SAVING, WAITING, LOADING)}

    found = fsdpx.spawn(run, 2)
    own = [dict(told)[SAVING] for told, _ in found]
    assert sum(own) == 8 * (3 * 2 + 2)
    assert min(own) > 0
    for n, (told, times) in zip(own, found, strict=True):
        read = n + sum(own) // 2
        assert told == [(SAVING, n), (SAVING, n), (WAITING, 0), (LOADING, read), (LOADING, read), (LOADING, 0)]
        assert times == {SAVING: (2, 2 * n), WAITING: (1, 0), LOADING: (3, 2 * read)}


def test_a_save_that_fails_is_told_as_well(tmp_path):
    trainer = make()
    seen = trainer.inspect.engine.add_observer(Beside())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(fsdpx.errors.CheckpointError):
        trainer.save(tmp_path / "file" / "one")
    assert seen.told == [(SAVING, 0)]
