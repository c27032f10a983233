"""Preemption: one rank is asked, all ranks save and end after the same step, with status 85."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from trials import MPIEXEC, TRAINER, environment, none_left

from fsdpx import nn, optim, spawn
from fsdpx.errors import ConfigError
from fsdpx.watch.preempt import PREEMPTED, Preempted, Preemption

X, Y = np.arange(24.0).reshape(4, 6), np.array([0, 1, 2, 0])


def trainer(comm=None):
    return nn.Linear(6, 3).as_distributed(loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), comm=comm)


@pytest.mark.parametrize("asked", [[0], [2], [1, 2]])
def test_all_ranks_end_after_the_step_in_which_some_were_asked(asked):
    saved = []

    def body(comm):
        t = trainer(comm)
        preempt = Preemption(save=lambda: saved.append((comm.rank, t.steps)))

        def batches():
            for i in range(9):
                if i == 4 and comm.rank in asked:
                    preempt.ask()
                yield X, Y

        with pytest.raises(Preempted) as caught:
            t.fit(batches(), preempt=preempt, progress=False)
        return caught.value.code, caught.value.rank, caught.value.step

    assert spawn(body, 3) == [(PREEMPTED, asked[0], 5)] * 3
    assert sorted(saved) == [(rank, 5) for rank in range(3)]


def test_handlers_are_set_during_fit_and_put_back(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    saved = []

    def batches():
        for i in range(9):
            if i == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            yield X, Y

    t = trainer()
    with pytest.raises(Preempted, match="rank 0 was asked to stop by SIGUSR1; all ranks ended together after step 3"):
        t.fit(batches(), preempt=Preemption(save=lambda: saved.append(t.steps)), progress=False)
    assert saved == [3]
    assert signal.getsignal(signal.SIGUSR1) == before


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
    preempt.ask()
    with pytest.raises(Preempted):
        trainer().fit([(X, Y)] * 3, preempt=preempt, progress=False)
    assert (tmp_path / "said").read_text() == "requeue 17\n"
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(Preempted):
        trainer().fit([(X, Y)] * 3, preempt=preempt, progress=False)
    assert "this is no Slurm job (no SLURM_JOB_ID)" in capsys.readouterr().err


LOOP = """
from fsdpx.watch.preempt import Preemption
def save():
    open(f"saved-{comm.rank}", "w").write(str(trainer.steps))
def endless():
    while True:
        if trainer.steps == 3: open(f"ready-{comm.rank}", "w").close()
        time.sleep(0.01)
        yield batches[trainer.steps % 20][0][mine], batches[trainer.steps % 20][1][mine]
open(f"pid-{comm.rank}", "w").write(str(os.getpid()))
trainer.fit(endless(), preempt=Preemption(save=save), progress=False)
"""


@pytest.mark.jobs
def test_a_signal_to_one_rank(tmp_path: Path) -> None:
    """To the launcher, and to all: tests/checkpoint/test_checkpoint_signals.py."""
    (tmp_path / "job.py").write_text(TRAINER + LOOP)
    job = subprocess.Popen(
        [str(MPIEXEC), "-n", "3", sys.executable, "job.py"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    while job.poll() is None and not (tmp_path / "ready-1").exists():
        time.sleep(0.02)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGUSR1)
    _, err = job.communicate(timeout=60)
    assert job.returncode == PREEMPTED, err
    steps = {(tmp_path / f"saved-{rank}").read_text() for rank in range(3)}
    assert len(steps) == 1
    assert "fsdpx: rank 1 was asked to stop by SIGUSR1; all ranks ended together after step " in err
    assert none_left(tmp_path)
