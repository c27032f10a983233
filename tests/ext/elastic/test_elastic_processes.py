"""Elastic training with real ranks that are killed or stopped: the others end with the bits of an undisturbed run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import edges
import pytest
from jobs_ulfm import job, unable
from trials_elastic import POINTS, SAVING, Death, Plan, demand, run

pytestmark = pytest.mark.jobs

TIMEOUT = 10.0
"""Seconds after which a rank that does nothing counts as dead: on a busy machine one waits for a core for some."""
PATIENCE = 60.0
"""Seconds by which a busy machine may be late. A rank that nobody misses is waited for 30 times as long."""
DEATH_BEFORE_DISTRIBUTE = """
import os, signal
import fsdpx
from fsdpx import nn, optim

if fsdpx.init().rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
fsdpx.distribute(nn.Sequential(nn.Linear(6, 3)), loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), elastic=True)
print("went on", flush=True)
"""


@pytest.fixture(autouse=True)
def _ranks_survive_each_other():
    if reason := unable():
        pytest.skip(reason)


def trial(folder, plan, **variables):
    found = run(plan, folder, **variables)
    demand(found)
    return found


def test_one_rank_after_the_other_rank_0_first(tmp_path):
    found = trial(tmp_path, Plan(3, "fsdp", every=2, background=True, deaths=(Death(0, 100), Death(2, 500))))
    assert found.results[0]["lost"] == [[0], [2]]
    assert len(found.detections) == 2
    assert max(found.detections) < PATIENCE


def test_ranks_are_lost_while_all_save_and_while_others_come_together(tmp_path):
    deaths = (Death(1, SAVING, 0.002), Death(3, "recovery: the new trainer is there"))
    found = trial(tmp_path, Plan(4, "hybrid", every=3, deaths=deaths))
    assert sorted(rank for lost in found.results[0]["lost"] for rank in lost) == [1, 3]


def test_a_save_in_the_background_is_given_up(tmp_path):
    trial(tmp_path, Plan(2, "zero1", every=1, background=True, deaths=(Death(1, SAVING, 0.002),)))


def test_stopped_ranks_count_as_dead(tmp_path):
    """In a step, while the others come together for that one, and again in a step."""
    deaths = Death(0, 300, kind="stop"), Death(2, POINTS[4], kind="stop"), Death(3, 500, kind="stop")
    found = trial(tmp_path, Plan(4, "fsdp", deaths=deaths), FSDPX_TIMEOUT=str(TIMEOUT))
    said = [line for line in found.done.err.splitlines() if line.startswith("fsdpx watchdog:")]
    assert len(said) == 3
    for line in said:
        assert re.match(r"fsdpx watchdog: rank \d is stopped \(process \d+ got SIGSTOP\) and all wait for it", line)
        assert f" since {TIMEOUT:.0f} s: it counts as dead. It was " in line
    assert found.results[0]["lost"] == [[0, 2], [3]]
    assert len(found.detections) == 2
    assert all(TIMEOUT < waited < TIMEOUT + PATIENCE for waited in found.detections)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("leave", r"rank 1 has come to the end of its script, after its call \d+, step, and rank [02] waits for it"),
        ("loop", f"rank 1 does something else and all wait for it since {TIMEOUT:.0f} s: it counts as dead. It was "),
        ("end", ""),
    ],
)
def test_a_rank_that_does_not_come_counts_as_dead(tmp_path, kind, said):
    found = trial(tmp_path, Plan(3, "fsdp", deaths=(Death(1, 300, kind=kind),)), FSDPX_TIMEOUT=str(TIMEOUT))
    assert re.search(said, found.done.err), found.done.err
    assert found.results[0]["lost"] == [[1]]
    assert max(found.detections) < TIMEOUT + PATIENCE


def test_one_is_killed_and_another_stopped_at_once(tmp_path):
    deaths = Death(3, 300), Death(0, 300, kind="stop")
    found = trial(tmp_path, Plan(4, "fsdp", deaths=deaths), FSDPX_TIMEOUT=str(TIMEOUT))
    assert sorted(rank for lost in found.results[0]["lost"] for rank in lost) == [0, 3]


@pytest.mark.parametrize("stage", edges.STAGES)
@pytest.mark.parametrize("seed", range(4))
def test_deaths_at_the_edges_of_a_job(tmp_path, stage, seed):
    edges.demand(seed, stage, tmp_path / "job")


def test_a_death_before_distribute_is_told_with_its_rank(tmp_path):
    done = job(tmp_path, DEATH_BEFORE_DISTRIBUTE, 3)
    assert re.search(r"RankLost: opening a communicator on rank [02] of 3: rank 1 has died\n", done.err), done.err
    assert not done.out


def test_the_script_for_many_kills_compares_with_what_jobs_compute():
    """Started by hand, it chooses no other BLAS library for the undisturbed run than its jobs have."""
    script = Path(__file__).parent / "chaos_elastic.py"
    kept = {name: value for name, value in os.environ.items() if name != "FSDPX_TUNE"}
    done = subprocess.run([sys.executable, script, "1"], env=kept, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "0 of 1 seeds failed" in done.stdout) == (0, True), done.stdout + done.stderr
