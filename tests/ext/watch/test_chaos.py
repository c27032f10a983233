"""Ranks die at any action; the run goes on from its checkpoint and ends with the same bits."""

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trials import TRAINER, environment, none_left

from fsdpx import nn, optim, spawn
from fsdpx.errors import ConfigError
from fsdpx.testing.chaos import Fault, StepLog, draw_faults, inject_faults, parse_faults, run_until_survived

STEPS, EVERY = 4, 2
rng = np.random.default_rng(0)
BATCHES = [(rng.standard_normal((6, 6)), rng.integers(0, 3, 6)) for _ in range(STEPS)]


@functools.cache
def train_undisturbed(ranks: int, strategy: str = "fsdp") -> tuple[str, int, int]:
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), ranks, (), strategy)


def train(folder: Path, ranks: int, planned: tuple[Fault, ...], strategy: str = "fsdp") -> tuple[str, int, int]:
    """Steps with a checkpoint every EVERY: fingerprint, actions per rank, and the last start."""
    ledger = StepLog(folder / "ledger")

    def body(comm, start):
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
        trainer = model.as_distributed(
            loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=0.01), strategy=strategy, group_bytes=0, comm=comm
        )
        actions = []
        if (folder / "last").exists():
            trainer.load(folder / "last")
        comm.barrier().wait()
        trainer.inspect.engine.add_observer(actions.append)
        inject_faults(trainer, planned, start, threads=True)
        mine = slice(6 * comm.rank // comm.size, 6 * (comm.rank + 1) // comm.size)
        for step in range(trainer.global_step, STEPS):
            x, y = BATCHES[step]
            ledger.record_step(start, comm.rank, step, trainer.step(x[mine], y[mine]))
            if trainer.global_step % EVERY == 0:
                trainer.save(folder / "last")
        return trainer.inspect.compute_fingerprint(), len(actions)

    results, last = run_until_survived(lambda start: spawn(body, ranks, start))
    ledger.check_and_get_last_start_of_each_step(STEPS)
    assert len({fingerprint for fingerprint, _ in results}) == 1
    return (*results[0], last)


@settings(max_examples=examples(12))
@given(
    seed=st.integers(0, 2**32), ranks=st.integers(2, 3), starts=st.integers(1, 3),
    strategy=st.sampled_from(["ddp", "zero2", "fsdp"]),
)  # fmt: skip
def test_whatever_dies_the_bits_are_the_same(seed, ranks, starts, strategy):
    wanted, actions, _ = train_undisturbed(ranks, strategy)
    planned = draw_faults(seed, ranks, actions, starts=starts, per_start=2)
    with tempfile.TemporaryDirectory() as folder:
        got, _, last = train(Path(folder), ranks, planned, strategy)
        assert got == wanted
        assert last <= starts


def test_a_kill_costs_the_steps_since_the_checkpoint(tmp_path):
    each = train_undisturbed(2)[1] // STEPS
    train(tmp_path, 2, (Fault("kill", 1, 3 * each + 2),))
    assert StepLog(tmp_path / "ledger").check_and_get_last_start_of_each_step(STEPS) == [0, 0, 1, 1]


@given(st.integers(0, 2**64), st.integers(1, 9), st.integers(1, 99), st.integers(1, 3), st.integers(0, 4))
def test_a_seed_says_it_all(seed, ranks, actions, starts, each):
    planned = draw_faults(seed, ranks, actions, starts=starts, per_start=each)
    assert planned == draw_faults(seed, ranks, actions, starts=starts, per_start=each)
    assert parse_faults(", ".join(map(str, planned))) == planned
    assert len(planned) == starts * each
    assert all(0 <= b.rank < ranks and 1 <= b.action <= actions and b.start < starts for b in planned)


@pytest.mark.parametrize("text", ["kill 1", "burn 1@2", "delay x@2"])
def test_text_that_is_no_fault(text):
    with pytest.raises(ConfigError, match=f"'{text}' is no fault: use 'kill RANK@ACTION'"):
        parse_faults(text)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ({(0, 0): [0, 1], (1, 0): [3, 4, 5]}, "start 1 begins at step 3, but only 2 were made before"),
        ({(0, 0): [0, 1, 1, 2]}, "start 0, rank 0: steps [0, 1, 1, 2]"),
        ({(0, 0): [0, 1], (0, 1): [1, 2]}, "start 0: ranks continued from steps [0, 1]"),
        ({(0, 0): [0, 1, 2]}, "3 of 6 steps were made"),
        ({(0, 0): [0, 1, 2, 3, 4, 5], (0, 1): [0, 1, 2]}, "ranks [1] did not make the last step"),
        ({(0, 0): [0, 1, 2, 3], (1, 0): [2, -3, 4, 5]}, "start 1, rank 0: step 3 gave "),
    ],
)  # fmt: skip
def test_a_history_that_is_wrong(tmp_path, lines, wrong):
    ledger = StepLog(tmp_path)
    for (start, rank), steps in lines.items():
        for step in steps:
            ledger.record_step(start, rank, abs(step), float(step))
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        ledger.check_and_get_last_start_of_each_step(6)


PROCESS = """
from pathlib import Path
from fsdpx.core.base import environment
from fsdpx.testing.chaos import StepLog, parse_faults, inject_faults
start, last = environment.read_environment().restart, Path("last")
ledger = StepLog(Path("ledger"))
if last.exists(): trainer.load(last)
comm.barrier().wait()
inject_faults(trainer, parse_faults(sys.argv[1]), start)
for step in range(trainer.global_step, 6):
    x, y = batches[step]
    ledger.record_step(start, comm.rank, step, trainer.step(x[mine], y[mine]))
    if trainer.global_step % 2 == 0: trainer.save(last)
print("fingerprint", trainer.inspect.compute_fingerprint(), flush=True)
"""


@pytest.mark.jobs
def test_processes_that_are_killed_and_stopped(tmp_path):
    """The bits are those of threads that nobody disturbs: the sum of two ranks has one order."""

    def calm(comm):
        names = {}
        exec(f"{TRAINER}for x, y in batches[:6]: trainer.step(x[mine], y[mine])", names)
        return names["trainer"].inspect.compute_fingerprint()

    (tmp_path / "tmp").mkdir()
    (tmp_path / "job.py").write_text(TRAINER + PROCESS)
    words = ["-m", "fsdpx", "run", "-n", "2", "--backoff", "0.1", "job.py", "kill 1@50 in 0, stop 0@20 in 1"]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(FSDPX_TIMEOUT="2", TMPDIR=str(tmp_path / "tmp")),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert none_left(tmp_path)
    assert done.stderr.count("restart") == 2
    assert set(re.findall(r"fingerprint (\w+)", done.stdout)) == set(spawn(calm, 2))
    history = StepLog(tmp_path / "ledger").check_and_get_last_start_of_each_step(6)
    assert history == sorted(history)
    assert history[-1] == 2
