"""Ranks that leave by themselves, and jobs that are asked to stop."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import pairs
from trials import STEPS, TRAINER, job, none_left

from fsdpx import nn, optim, spawn
from fsdpx.errors import ConfigError
from fsdpx.ext.watch import rank_exits
from fsdpx.ext.watch.flight_recorder import FlightRecorder, read_record
from fsdpx.ext.watch.preempt import PREEMPTED_STATUS, JobPreempted, Preemption
from fsdpx.ext.watch.rank_exits import find_awaited_ended_rank, find_diverged_calls, have_all_scripts_ended

ENDS = "def outside(step):\n    if step == 3 and comm.rank == comm.size - 1: {how}\n"
SOON = """
from fsdpx.ext.watch import rank_exits, watchdog
for module in rank_exits, watchdog: module.EARLY_SECONDS, module.LATE_SECONDS = 0.2, 1.0
"""
SECONDS = 40.0
"""Generous: it takes 2 to 6, the default deadline is half an hour."""


def ended(folder: Path, status: int, program: str, ranks: int = 2) -> str:
    """The errors of a job that ends before its time, of which nothing is left."""
    done = job(folder, program, ranks=ranks)
    assert none_left(folder)
    assert done.status == status, done.err
    assert "ended well" not in done.out
    assert done.seconds < SECONDS, done.err
    return done.err


def steps_until(how: str) -> str:
    """A job whose last rank does something else than its fourth step."""
    return TRAINER + ENDS.format(how=how) + STEPS


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("sys.exit(3)", 3, "has ended with status 3"),
        ("raise SystemExit(5)", 1, "has come to the end of its script"),  # nobody is told this one
    ],
)
def test_a_script_that_comes_to_its_end_in_the_middle(tmp_path, how, status, said):
    err = ended(tmp_path, status, steps_until(how))
    assert "os._exit" not in err  # the end that the watchdog makes is not told as the script's
    (line,) = re.findall(r"^fsdpx watchdog: .*$", err, re.MULTILINE)
    assert re.fullmatch(
        rf"fsdpx watchdog: rank 1 {said}, after its call 4, step, and rank 0 waits for it in call 5 for all_gather "
        rf"of the batch on rank 0 of 2: the job ends with status {status}",
        line,
    ), line
    assert list((tmp_path / "tmp").glob("fsdpx-*")) == []


@pytest.mark.parametrize(("given", "status"), [(None, 0), (0, 0), (3, 3), (256 + 7, 7), ("no more", 1)])
def test_what_sys_exit_is_given_is_a_status(monkeypatch, given, status):
    monkeypatch.setattr(rank_exits, "_reported", [0])
    left = []
    rank_exits._wrap_sys_exit(left.append)(given)
    assert (rank_exits.get_sys_exit_status(), left) == (status, [given])


@pytest.mark.jobs
def test_a_loop_that_ends_early(tmp_path):
    steps = STEPS.replace("    outside(step)\n", "    if step == 3 and comm.rank == 0: break\n").partition("if comm")[0]
    err = ended(tmp_path, 1, TRAINER + steps)
    assert "rank 0 has come to the end of its script, after its call 4, step, and rank " in err


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("streams", "end"),
    [*pairs(["full", "closed", "gone"], ["raise RuntimeError('my own bug')", "os._exit(0)"]), ("gone", "os._exit(0)")],
)
def test_a_rank_that_cannot_write_ends_the_others_too(tmp_path, streams, end):
    """So that none waits for it, no rank can: the logs of all may lie on the same disk."""
    broken = {
        "full": "sys.stdout, sys.stderr = open('/dev/full', 'w'), open('/dev/full', 'w')\nprint('in the buffer')\n",
        "closed": "sys.stdout.close()\nsys.stderr.close()\n",
        "gone": "sys.stdout = sys.stderr = None\n",
    }
    err = ended(tmp_path, 1, f"import os, sys\n{broken[streams]}{steps_until(end)}")
    assert streams == "closed" or ("Error: my own bug" if "raise" in end else "calls os._exit(0) while") in err


BEHIND = """
import os, sys, time, fsdpx
from fsdpx.ext.watch.watchdog import Watchdog
made = Watchdog.__init__
def late(*arguments, **options):
    time.sleep(1)
    made(*arguments, **options)
if (os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) != "1": Watchdog.__init__ = late
"""
"""The other ranks have no watchdog yet when rank 1 could end."""


@pytest.mark.jobs
def test_before_distribute_and_outside_of_calls(tmp_path):
    """What others wait for is no call of a trainer: nobody can help them when all of them wait."""
    err = ended(tmp_path, 6, SOON + BEHIND + "comm = fsdpx.init()\nif comm.rank == 1: sys.exit(6)\nfsdpx.barrier()\n")
    assert "rank 1 has ended with status 6, before its first call, and rank " in err


@pytest.mark.jobs
def test_a_process_that_ends_at_once(tmp_path):
    """With status 0, all end with 1: above."""
    err = ended(tmp_path, 4, steps_until("os._exit(4)"))
    assert "fsdpx: rank 1 calls os._exit(4) while others may wait for it: all end with 4\n" in err


@pytest.mark.jobs
def test_a_rank_that_calls_something_else(tmp_path):
    """Every pair of calls: tests/core/trainer/test_calls.py."""
    err = ended(tmp_path, 1, steps_until("trainer.save('here')"), ranks=3)
    assert "DesyncError: ranks called different methods: ranks 0, 1: step; rank 2: save. All ranks" in err


@pytest.mark.jobs
@pytest.mark.parametrize("call", ["barrier()", "broadcast(np.ones(300000), 2)"])
def test_a_rank_that_calls_a_function_while_the_others_step(tmp_path, call):
    name = call.partition("(")[0]
    assert (
        f"fsdpx watchdog: ranks wait for each other in different calls: ranks 0, 1: step; rank 2: {name}. All ranks "
        "make the same calls, in the same order: the job ends with status 124\n"
    ) in ended(tmp_path, 124, SOON + steps_until(f"fsdpx.{call}"), ranks=3)


SPLIT = """
half = comm.split(comm.rank > 0)
if comm.rank == 0: sys.exit(0)
for n in range(4):
    time.sleep(0.5 * (comm.rank == 1))
    half.barrier().wait()
"""


@pytest.mark.jobs
def test_ranks_that_end_together_at_different_times_end_well(tmp_path):
    """Who has ended is not waited for: others may do what they like, and communicate among themselves."""
    done = job(tmp_path, SOON + TRAINER + "outside = lambda step: None\n" + STEPS + SPLIT, FSDPX_TIMEOUT="6")
    assert done.status == 0, done.err
    assert "ended well" in done.out
    assert list((tmp_path / "tmp").iterdir()) == []


# -- what is seen in the records ---------------------------------------------------------------------------------------


@pytest.fixture
def records(tmp_path):
    made = [FlightRecorder(tmp_path / f"rank-{rank:05}.flight", rank, 3, "here") for rank in range(3)]
    return made, sorted(tmp_path.glob("*.flight"))


def missed_by_rank_0(records: Any, seconds: float, all_ranks_local: bool = False) -> Any:
    """Whose end rank 0 sees that has waited so long."""
    made, paths = records
    return find_awaited_ended_rank(made[0], seconds, paths[1:], all_ranks_local=all_ranks_local)


def test_who_ends_before_a_call_is_missed_in_it(records):
    made, _ = records
    for record in made:
        record.on_collective_call("step")
    made[2].record_end(3)
    assert missed_by_rank_0(records, 60.0) is None  # it may have done its part of the first call
    made[0].on_collective_call("save")
    assert missed_by_rank_0(records, 0.5) is None
    found = missed_by_rank_0(records, 2.0)
    assert (found.rank, found.exit_status, found.calls, found.call) == (2, 3, 1, "step")


def test_who_dies_in_an_action_is_missed(records, monkeypatch):
    made, paths = records
    for record in made:
        record.on_collective_call("step")
        record.on_action_begin("F0.0", 1.0)
    assert missed_by_rank_0(records, 2.0) is None
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    monkeypatch.setattr(os, "getpid", lambda: gone.pid)
    again = FlightRecorder(paths[1], 1, 3, "here")
    again.on_collective_call("step")
    again.on_action_begin("F0.0", 1.0)
    found = missed_by_rank_0(records, 2.0)
    assert (found.rank, found.exit_status) == (1, None)
    again.on_action_end(None, 0.0, 0.0, 2.0, 0, ())
    assert missed_by_rank_0(records, 2.0) is None


def test_what_all_wait_for_together_will_not_come(records):
    made, _ = records
    made[2].record_end(0)
    assert missed_by_rank_0(records, 60.0, all_ranks_local=True) is None  # rank 1 does something
    made[1].record_current_wait(time.perf_counter(), "barrier")
    assert missed_by_rank_0(records, 60.0, all_ranks_local=True) is None  # it has just begun to wait
    made[1].record_current_wait(time.perf_counter() - 60, "barrier")
    assert missed_by_rank_0(records, 2.0, all_ranks_local=True) is None
    assert missed_by_rank_0(records, 60.0, all_ranks_local=True).rank == 2
    assert missed_by_rank_0(records, 60.0) is None  # ranks of another host may come


def test_the_last_one_sees_that_all_have_left(records):
    made, paths = records
    for record, path in zip(made, paths, strict=True):
        assert not have_all_scripts_ended(paths)
        record.record_end(0)
        assert read_record(path).exit_status == 0
    assert have_all_scripts_ended(paths)
    paths[0].unlink()  # it had closed before
    assert have_all_scripts_ended(paths)


def test_ranks_that_wait_in_different_calls_are_named(records):
    made, paths = records
    long_ago = time.perf_counter() - 60
    for record in made:
        record.on_collective_call("step")
        record.record_current_wait(long_ago, "all_gather")
    assert find_diverged_calls(paths) == {}
    for record, name in zip(made, ("step", "barrier", "step"), strict=True):
        record.on_collective_call(name)
    assert find_diverged_calls(paths) == {0: "step", 1: "barrier", 2: "step"}
    made[2].record_current_wait(time.perf_counter(), "all_gather")
    assert find_diverged_calls(paths) == {}  # it has just begun to wait
    made[2].record_current_wait(0.0, "")
    assert find_diverged_calls(paths) == {}  # it does something, and may help the others
    made[2].record_current_wait(long_ago, "all_gather")
    made[1].on_collective_call("step")
    assert find_diverged_calls(paths) == {0: "step", 1: "barrier", 2: "step"}  # it took what was sent for another call
    made[1].on_collective_call("step")
    assert find_diverged_calls(paths) == {}


X, Y = np.arange(24.0).reshape(4, 6), np.array([0, 1, 2, 0])


def trainer(comm=None):
    return nn.Linear(6, 3).as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), comm=comm)


def batches_with(act: Callable[[], Any], at: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Nine batches; something is done before one of them is given."""
    for i in range(9):
        if i == at:
            act()
        yield X, Y


@pytest.mark.parametrize("asked", [[0], [2], [1, 2]])
def test_all_ranks_end_after_the_step_in_which_some_were_asked(asked):
    saved = []

    def body(comm):
        t = trainer(comm)
        preempt = Preemption(save=lambda: saved.append((comm.rank, t.global_step)))
        batches = batches_with(preempt.request_stop, 4 if comm.rank in asked else -1)
        with pytest.raises(JobPreempted) as caught:
            t.fit(batches, preempt=preempt, progress=False)
        return caught.value.code, caught.value.rank, caught.value.step

    assert spawn(body, 3) == [(PREEMPTED_STATUS, asked[0], 5)] * 3
    assert sorted(saved) == [(rank, 5) for rank in range(3)]


def test_handlers_are_set_during_fit_and_put_back():
    before, saved, t = signal.getsignal(signal.SIGUSR1), [], trainer()
    batches = batches_with(lambda: os.kill(os.getpid(), signal.SIGUSR1), 2)
    said = "rank 0 was asked to stop by SIGUSR1; all ranks ended together after step 3"
    with pytest.raises(JobPreempted, match=said):
        t.fit(batches, preempt=Preemption(save=lambda: saved.append(t.global_step)), progress=False)
    assert saved == [3]
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_handler_of_the_program_is_called_too_and_put_back(number):
    heard = []
    own, before = (lambda number, frame: heard.append(number)), signal.getsignal(number)
    try:
        signal.signal(number, own)
        with Preemption() as preemption:
            signal.raise_signal(number)
            with pytest.raises(JobPreempted, match=f"asked to stop by {number.name}"):
                preemption.check(trainer())
        assert (heard, signal.getsignal(number)) == ([number], own)
        other = lambda number, frame: None  # noqa: E731
        with Preemption():
            signal.signal(number, other)
        assert signal.getsignal(number) is other
    finally:
        signal.signal(number, before)


QUITS = """
import faulthandler, signal, sys
from fsdpx import Preemption
from fsdpx.core.base.hooks import SignalHandler
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
numbers = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
if sys.argv[1:]: faulthandler.register(signal.SIGQUIT)
said = lambda: [(one.function, one.record[:8]) for one in map(SignalHandler.from_signal, numbers)]
before = said()
with Preemption() as preemption:
    assert signal.getsignal(signal.SIGTERM) == preemption._handle_signal
    signal.raise_signal(signal.SIGHUP)
    if sys.argv[1:]: signal.raise_signal(signal.SIGQUIT)
    assert not preemption._asked
assert said() == before
"""


@pytest.mark.jobs
@pytest.mark.parametrize("dumps", [["dumps"], []])
@pytest.mark.parametrize("ignored", ["", "trap '' INT QUIT; "])  # as a shell does for what it starts with &
def test_nohup_and_stacks_at_quit_stay_what_they_are(dumps, ignored):
    words = ["sh", "-c", f'{ignored}exec "$@"', "sh", sys.executable, "-c", QUITS, *dumps]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("most recent call first" in done.stderr) == bool(dumps), done.stderr


def test_nobody_asked_nothing_happens():
    assert len(trainer().fit([(X, Y)] * 3, preempt=Preemption(), progress=False).losses) == 3


@pytest.mark.parametrize("name", ["KILL", "NONE", "STOP", ""])
def test_signals_that_cannot_be_caught(name):
    with pytest.raises(ConfigError, match=f"'{name}' is no signal that can be caught; use USR1, USR2 or TERM"):
        Preemption(signals=[name])


def test_requeue_asks_slurm(tmp_path, monkeypatch, capsys):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $@ > {tmp_path}/said\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    preempt = Preemption(requeue=True)
    preempt.request_stop()
    with pytest.raises(JobPreempted):
        trainer().fit([(X, Y)] * 3, preempt=preempt, progress=False)
    assert (tmp_path / "said").read_text() == "requeue 17\n"
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(JobPreempted):
        trainer().fit([(X, Y)] * 3, preempt=preempt, progress=False)
    assert "this is no Slurm job (no SLURM_JOB_ID)" in capsys.readouterr().err


SIGNALED = """
from fsdpx import Preemption
from fsdpx.ext.watch.preempt import JobPreempted

def asked():
    for _ in range(20):
        yield batches[trainer.global_step % 20][0][mine], batches[trainer.global_step % 20][1][mine]
        if comm.rank == 1 and trainer.global_step == last + 2: os.kill(os.getpid(), number)

for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
    last, saved = trainer.global_step, []
    signal.signal(number, signal.SIG_DFL)  # nohup has ranks ignore some
    try:
        trainer.fit(asked(), preempt=Preemption(save=lambda: saved.append(trainer.global_step)), progress=False)
    except JobPreempted as error:
        print(comm.rank, number.name, error.code, saved[0] - last, f"{error};", flush=True)
"""


@pytest.mark.jobs
def test_a_signal_to_one_rank(tmp_path):
    """To the launcher, and to all: tests/launch/test_checkpoint_command_line.py."""
    done = job(tmp_path, TRAINER + SIGNALED, ranks=2)
    assert done.status == 0, done.err
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        pattern = rf"^[01] {number.name} {PREEMPTED_STATUS} (\d) rank 1 was asked to stop by {number.name}; all ranks "
        steps = re.findall(rf"{pattern}ended together after step \d+;$", done.out, re.MULTILINE)
        assert steps in (["2", "2"], ["3", "3"]), done
