"""Real jobs in which one rank stops taking part: the report names who waits for what, and the job ends."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from trials import STEPS, TRAINER, Done, job, none_left

from fsdpx.core.comm.watched import detach_and_return_watchdog, start_watchdog_if_possible
from fsdpx.ext.watch.flight_recorder import FlightRecorder

pytestmark = pytest.mark.jobs

TIMEOUT = 2.0
AT = (
    "outside = lambda step: None\ncount = 0\n"
    "def observe(action):\n"
    "    global count\n"
    "    count += str(action) == 'B0.0'\n"
    "    if comm.rank == {rank} and str(action) == 'B0.0' and count == 2: {what}\n"
    "trainer.inspect.engine.add_observer(observe)\n"
)
WAITS = "SETTLE1 (page '2.weight..2.bias') for reduce_scatter of REDUCE1 2.weight..2.bias, for "


SLEEPS = "def outside(step):\n    if step == 2 and comm.rank == 1: time.sleep(60)\n"


def run(
    folder: Path, misbehave: str, ranks: int = 2, trainer: str = TRAINER, steps: str = STEPS, by_watchdog: bool = True,
    **variables: str,
) -> Done:  # fmt: skip
    """A job that is ended by its watchdog, or otherwise, of which nothing is left."""
    done = job(folder, trainer + misbehave + steps, ranks=ranks, FSDPX_TIMEOUT=str(TIMEOUT), **variables)
    assert none_left(folder)
    assert done.status == 124 if by_watchdog else done.status != 0, done.err
    assert "ended well" not in done.out
    return done


def test_a_rank_that_sleeps_outside_is_named_with_its_stack(tmp_path):
    done = run(tmp_path, SLEEPS, ranks=3)
    assert done.err.count("fsdpx watchdog: no rank has made progress for 2 s") == 1
    assert "ranks 0, 2 wait outside any action for all_gather of the batch, for " in done.err
    assert "rank 1 is outside any action for " in done.err
    assert "after UPDATE0 (page '0.weight..0.bias'); it stands at" in done.err
    assert "time.sleep(60)" in done.err
    assert done.seconds < TIMEOUT + 35  # of the 60 that the rank sleeps
    (kept,) = tmp_path.glob("fsdpx-flight-of-*.txt")
    assert str(kept) in done.err
    assert kept.read_text().count("UPDATE0 (page '0.weight..0.bias')") >= 6
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_wait_outside_of_fsdpx_gets_a_first_word(tmp_path):
    """The user's own barrier on rank 0 against a step on rank 1."""
    barrier = (
        "from mpi4py import MPI\nimport fsdpx.ext.watch.report\n"
        "def outside(step):\n"
        "    if step == 2: fsdpx.ext.watch.report.FIRST_REPORT_SECONDS = 0.5\n"
        "    if step == 2 and comm.rank == 0: MPI.COMM_WORLD.Barrier()\n"
    )
    done = run(tmp_path, barrier)
    line = (TRAINER + barrier).count("\n")
    assert done.err.count("still waiting") == 1
    assert re.search(
        r"^fsdpx watchdog: still waiting after 0\.5 s; the job goes on, and ends if nothing moves for 2 s\n"
        rf"  rank 0: outside of fsdpx, at \S*job\.py:{line} \(no progress since \d\d:\d\d:\d\d\)\n"
        r"  rank 1: waiting outside any action for all_gather of the batch, in call 4, step\n",
        done.err,
        re.MULTILINE,
    ), done.err


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_process_with_two_watchdogs_reports_once(tmp_path, place):
    """`init` starts a watchdog, and so does the trainer on some of the ranks; only the latter knows the actions."""
    sleeps = "import fsdpx.ext.watch.report\n"
    sleeps += AT.format(rank=1, what="time.sleep(60)") if place == "inside" else ""
    sleeps += "def outside(step):\n    if step == 1: fsdpx.ext.watch.report.FIRST_REPORT_SECONDS = 0.5\n"
    sleeps += "    if step == 1 and comm.rank == 1: time.sleep(60)\n" if place == "outside" else ""
    done = run(tmp_path, sleeps, trainer=TRAINER.replace("comm = fsdpx.init()", "comm = fsdpx.init().split(0)"))
    assert done.err.count("still waiting after 0.5 s") == 1, done.err
    assert done.err.count("no rank has made progress for 2 s") == 1, done.err
    waits = "outside any action for all_gather of the batch" if place == "outside" else f"in action {WAITS}"
    assert f"rank 0 waits {waits}" in done.err
    assert ("after UPDATE0" if place == "outside" else "in action B0.0") in done.err
    assert "in call 1, distribute" not in done.err


def test_a_report_that_is_not_heard_is_made_again(tmp_path):
    """The rank whose turn it is is on the other side of a network that is cut: its end of the job comes never."""
    deaf = "from fsdpx.ext.watch.watchdog import Watchdog\n"
    deaf += "if comm.rank == 0: Watchdog._print_and_abort_job = lambda *_: time.sleep(60)\n"
    done = run(tmp_path, deaf + SLEEPS, ranks=3)
    assert done.err.count("fsdpx watchdog: no rank has made progress for 2 s") == 1
    assert done.seconds < TIMEOUT + 35


def test_a_stopped_rank_counts_as_dead(tmp_path):
    """The one who reports if it can; another one: the last test with ranks of a pipe."""
    done = run(tmp_path, AT.format(rank=0, what="os.kill(os.getpid(), signal.SIGSTOP)"), ranks=3)
    assert f"ranks 1-2 wait in action {WAITS}" in done.err
    assert "rank 0 is stopped (process " in done.err
    assert "got SIGSTOP); it was in action B0.0 (unit '0')" in done.err


def test_a_rank_that_hangs_inside_an_action(tmp_path):
    done = run(tmp_path, AT.format(rank=1, what="time.sleep(60)"))
    assert f"rank 0 waits in action {WAITS}" in done.err
    assert "rank 1 is in action B0.0 (unit '0'), for " in done.err
    assert "in observe" in done.err


def test_a_killed_rank_ends_the_job_and_leaves_the_records(tmp_path):
    done = run(tmp_path, AT.format(rank=1, what="os.kill(os.getpid(), signal.SIGKILL)"), by_watchdog=False)
    assert done.seconds < 40  # the others would wait for ever
    assert len(list((tmp_path / "tmp").glob("fsdpx-flight-*/rank-*.flight"))) == 2


def test_a_rank_that_raises_is_still_the_only_thing_said(tmp_path):
    done = run(tmp_path, AT.format(rank=1, what="raise KeyError('lost')"), by_watchdog=False)
    assert "KeyError: 'lost'\non rank 1, in action B0.0 (unit '0')" in done.err
    assert "fsdpx watchdog:" not in done.err


def test_slow_ranks_are_not_stuck(tmp_path):
    """Each step waits longer than half the timeout, all steps together much longer than the timeout."""
    slow = f"def outside(step):\n    if comm.rank == step % 2: time.sleep({1.05 * TIMEOUT})\n"
    steps = STEPS.replace("batches[:6]", "batches[:3]")
    done = job(tmp_path, TRAINER + slow + steps, ranks=2, FSDPX_TIMEOUT=str(2 * TIMEOUT))  # a busy machine is 2 s late
    assert done.status == 0, done.err
    assert "ended well" in done.out
    assert [line for line in done.err.splitlines() if "compiling kernels" not in line] == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_watchdog_can_be_left_out(tmp_path):
    done = run(tmp_path, SLEEPS, by_watchdog=False, FSDPX_WATCH="0")
    assert "CommTimeout: " in done.err
    assert "of the batch on rank" in done.err
    assert "fsdpx watchdog:" not in done.err


FIELD = """
import os, signal, sys, time
import numpy as np
import fsdpx
from fsdpx import nn, optim

comm = fsdpx.init()
grid = fsdpx.Grid(comm, (4, 5), dims=(3, 1))
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 3, padding=1))
trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(lr=0.01), comm=comm, domain=grid)
batches, mine = [(np.ones((4, 5, 1), np.float32),) * 2] * 20, slice(None)
"""


def test_a_rank_that_stops_between_halos_is_named(tmp_path):
    """Its neighbor waits for cells; the watchdog says for whose, in which layer."""
    stop = AT.format(rank=0, what="os.kill(os.getpid(), signal.SIGSTOP)").replace("B0.0", "F0.0")  # after it
    done = run(tmp_path, stop, ranks=3, trainer=FIELD)
    assert "rank 0 is stopped (process " in done.err
    assert "rank 1 waits in action B0.0 (unit '0..2') for recv of 2, for " in done.err  # the second convolution


def test_a_trainer_waits_for_ranks_of_an_axis(tmp_path):
    """The same over messages of MPI instead of shared memory, in a pipeline."""
    pipe = TRAINER.replace("group_bytes=0,", "group_bytes=0, mesh=fsdpx.Mesh(pipe=3), microbatches=2,")
    steps = STEPS.replace("x[mine], y[mine]", "x, y")
    stop = AT.format(rank=1, what="os.kill(os.getpid(), signal.SIGSTOP)").replace("B0.0", "F1.1")
    done = run(tmp_path, stop, ranks=3, trainer=pipe, steps=steps, FSDPX_NODE="0")
    assert "rank 0 waits in action B0.0 (unit '0') for recv of RECV1.0 gradient of '0', for " in done.err
    assert "rank 2 waits in action F2.1 (unit '2') for recv of RECV2.1 output of '1', for " in done.err
    assert "rank 1 is stopped (process " in done.err
    assert "it was in action F1.1 (unit '1'), needs RECV0.1 (from rank 0 to rank 1 of the pipe), for " in done.err


class Pair(SimpleNamespace):
    """A communicator of two ranks, of which the other one only leaves a record; watchdogs have a weak reference to it,
    which plain namespaces do not allow."""


@pytest.mark.parametrize("started_by_run", [False, True])
def test_who_dies_before_it_has_let_go_is_buried_later(tmp_path, monkeypatch, started_by_run):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if started_by_run:
        monkeypatch.setenv("FSDPX_RUN", str(tmp_path))
    calls = {"all_gather_value": lambda obj: [obj, obj], "get_failed_ranks": lambda: ()}
    comm = Pair(rank=0, size=2, timeout=60.0, watched_by=None, **calls)
    dog = start_watchdog_if_possible(comm)
    record = dog.folder / "rank-00001.flight"
    FlightRecorder(record, 1, 2, "here")
    assert detach_and_return_watchdog(comm) is dog
    assert list(dog.folder.iterdir()) == [record]
    dog.remove_dead_records(())
    assert record.exists()  # it lives, as far as is known here
    dog.remove_dead_records((1,))
    assert dog.folder.exists() == started_by_run  # `fsdpx run` reads it first
    assert detach_and_return_watchdog(comm) is None


def test_what_befalls_forked_children_does_not_concern_the_job():
    script = Path(__file__).with_name("forks.py")
    words = [sys.executable, "-W", "ignore", "-m", "fsdpx", "run", "-n", "2", "--max-restarts", "0", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert "[0, 1] 1 0 -15\n" in done.stdout, done
    assert done.stdout.count("2 ranks go on") == 2, done
    assert done.stderr.count("ValueError: of a child") == 3, done
    assert "rank 0/" not in done.stderr, done
    assert done.returncode == 0, done
