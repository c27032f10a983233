"""Ranks at their own speed as real processes, one of which is killed: the others train on, to the end."""

import pytest
from jobs_ulfm import job

pytestmark = pytest.mark.jobs


PROGRAM = """
import os, signal, sys
from contextlib import contextmanager
import numpy as np
import fsdpx
from fsdpx import nn, optim

STEPS, DEADLY, VICTIM = 40, 12, 1

def deadly(window, steps):
    '''From now on this rank dies in the middle of what it changes, with the lock of a part.'''
    opened = window.open_locked_part

    @contextmanager
    def open_locked_part(rank, start, stop, write=True):
        with opened(rank, start, stop, write) as block:
            if write and steps():
                os.kill(os.getpid(), signal.SIGKILL)
            yield block

    window.open_locked_part = open_locked_part

comm = fsdpx.init()
rng = np.random.default_rng(7)
x = rng.standard_normal((30, 8)).astype(np.float32)
y = np.tanh(x[:, :3])
own = slice(comm.rank, None, comm.size)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3))
with model.as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(lr=1e-2), strategy=eval(sys.argv[1])) as trainer:
    if comm.rank == VICTIM:
        deadly(trainer.inspect.placement.sync_policy.window, lambda: trainer.global_step == DEADLY)
    losses = [trainer.step(x[own], y[own]) for _ in range(STEPS)]
    trainer.call_runner.wait_for_last_step()
    bits = trainer.inspect.compute_fingerprint()
    print("ended", comm.rank, trainer.global_step, losses[0], losses[-1], bits, flush=True)
fsdpx.finalize()
"""


@pytest.mark.parametrize("strategy", ["fsdpx.AsyncSGD(staleness=3)", "'gossip'"])
def test_a_rank_killed_with_a_lock_costs_the_others_nothing(tmp_path, strategy):
    """They make all of their steps, the loss falls, they have one model in the end, and the job ends well."""
    done = job(tmp_path, PROGRAM, 3, strategy)
    assert done.status == 0, done.err
    assert "Traceback" not in done.err, done.err
    ended = [line.split() for line in sorted(done.lines("ended"))]
    assert [(rank, steps) for rank, steps, *_ in ended] == [("0", "40"), ("2", "40")], done.err
    for _, _, first, last, _ in ended:
        assert float(last) < 0.5 * float(first)
    assert len({fingerprint for *_, fingerprint in ended}) == 1
