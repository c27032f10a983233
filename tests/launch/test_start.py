"""The start of MPI with a rank that does not come: real jobs, which would wait for ever."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from amount import pairs
from trials import Done, alive_in, environment, job, none_left

from fsdpx.core.comm.mpi.mpi_init_watchdog import describe_missing_ranks
from fsdpx.launch.exit_status import Evidence, JobEnding
from fsdpx.launch.rank_status import RankStatus

FIRST = """
import os, sys, time
rank, after, what, size = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]), *sys.argv[1:]
def meet(word, number):
    open(f"{word}-{rank}", "w").close()
    while len([n for n in os.listdir() if n.startswith(word)]) < number: time.sleep(0.01)
if rank == 1:
    meet("began", int(size))
    time.sleep(float(after)); exec(what)
else:
    open(f"began-{rank}", "w").close()
    if int(size) > 2:
        import fsdpx.core.trainer.array_collectives  # the others come together, however busy the machine is
        meet("ready", int(size) - 1)
"""
INIT = "import fsdpx\ncomm = fsdpx.init()\nif comm.rank == 0: print('through', comm.size, flush=True)\n"
IMPORT = "from mpi4py import MPI\n"
COME = "come to the start of MPI within {} s after the first rank of "


def test_who_is_missing_is_said_as_far_as_it_is_known() -> None:
    said = partial(describe_missing_ranks, {0: (11, "0"), 3: (12, "1")}, 3)
    come = COME.format(3)
    assert "fsdpx: ranks 1, 2, 4 of 5 have not " + come in said(5, 5, known=True)
    assert "; ranks 0, 3 waited, and the job ends. A rank that is missing" in said(5, 5, known=True)
    assert " local rank 2 of 3 has not " + come in said(6, 3, known=True)
    assert " but not those of other hosts have " + come in said(4, 2, known=True)
    for size, local, known in ((5, 5, False), (5, 0, True)):  # the launcher's process, or its variables, are not seen
        assert "fsdpx: not all ranks have " + come in said(size, local, known)
    assert "call fsdpx.init() before other long work, or set FSDPX_START_TIMEOUT" in said(5, 5, True)


def before_the_start(notes: dict[int, RankStatus], ended: list[int], waited: set[int], **more: object) -> JobEnding:
    return Evidence(1, notes, order=ended, waited=waited, **more).decide_ending()


def test_who_ended_before_the_start_gives_message_and_status() -> None:
    notes = {0: RankStatus(0, 1, "n1"), 1: RankStatus(1, 2, "n1", 3)}
    text = "rank 1 on n1 ended with exit status 3 before all ranks had started"
    assert before_the_start(notes, [1], {0}) == JobEnding("error", 3, (1, "n1"), None, text)
    notes[1] = RankStatus(1, 2, "n1", 0)
    assert before_the_start(notes, [1], {0}).status == 1  # a job that did not run is not done
    died = before_the_start({1: RankStatus(1, 2, "n1")}, [1], {0})
    assert died.text == "rank 1 on n1 died before all ranks had started"
    notes[1] = RankStatus(1, 2, "n1")  # the clock ends those who wait, and the launcher then the one who did not come
    for ended in ([0, 2, 1], [1, 0, 2]):  # in whatever order their ends are seen
        late = before_the_start({**notes, 2: RankStatus(2, 3, "n1")}, ended, {0, 2}, late=True)
        assert (late.kind, late.text) == ("hung", "rank 1 did not come to MPI's start, where ranks 0, 2 waited")
    late = before_the_start(notes, [0, 2], {0, 2})
    assert (late.kind, late.text) == ("hung", "ranks 0, 2 waited in MPI's start for others that did not come")
    inside = before_the_start(notes, [1, 0], {0, 1}, ranks=2)  # as MPI ends those of a host with too long a name
    said = "all ranks had come to MPI's start, where rank 1 ended: what MPI says of it, if anything, is above"
    assert (inside.kind, inside.text) == ("died", said)
    assert before_the_start(notes, [1, 0], {0, 1}, ranks=3).kind == "hung"


def started(folder: Path, what: str, after: float = 0.0, rest: str = INIT, **variables: str) -> Done:
    done = job(folder, FIRST + rest, ranks=2, args=(str(after), what, "2"), **variables)
    assert none_left(folder)
    assert list((folder / "tmp").glob("fsdpx-*")) == []
    return done


@pytest.mark.jobs
@pytest.mark.parametrize("what", ["time.sleep(1000)", "os._exit(0)"])
def test_a_rank_that_does_not_come_ends_the_job_and_is_named(tmp_path: Path, what: str) -> None:
    done = started(tmp_path, what, FSDPX_START_TIMEOUT="1")
    assert done.status != 0
    assert done.seconds < 30
    assert "fsdpx: rank 1 of 2 has not " + COME.format(1) in done.err or "prterun" in done.err  # which may be faster
    assert "through" not in done.out


@pytest.mark.jobs
def test_a_rank_that_comes_late_is_waited_for_and_the_job_ends_well(tmp_path: Path) -> None:
    ends = "assert fsdpx.all_reduce(1) == 2; assert fsdpx.local_rank() == comm.rank; fsdpx.finalize()\n"
    done = started(tmp_path, "pass", after=1.0, rest=INIT + ends)
    assert (done.status, done.err) == (0, "")
    assert "through 2" in done.out


@pytest.mark.jobs
def test_a_rank_that_ends_after_the_start_of_mpi_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    ends = "\nif MPI.COMM_WORLD.rank == 1: time.sleep(1000)\n"
    done = started(tmp_path, "pass", rest=IMPORT + ends + INIT, FSDPX_TIMEOUT="2")
    assert done.status != 0
    assert done.seconds < 30
    assert "not all ranks have arrived within 2 s. All of them call fsdpx.init() or distribute()" in done.err


def begin_run(folder, what, *options, ranks=2, rest=INIT, **variables):
    (folder / "tmp").mkdir()
    (folder / "job.py").write_text(FIRST + rest)
    return subprocess.Popen(
        [sys.executable, "-m", "fsdpx", "run", "-n", str(ranks), *options, "job.py", "0", what, str(ranks)],
        cwd=folder, stderr=subprocess.PIPE, text=True, env=environment(TMPDIR=str(folder / "tmp"), **variables),
    )  # fmt: skip


def run(folder: Path, what: str, **options: object) -> tuple[int, str]:
    """Status and errors of a job under `fsdpx run`, in less than half of the 60 s that ranks would wait."""
    with begin_run(folder, what, "--max-restarts", "0", **options) as job:
        _, err = job.communicate(timeout=30)
    assert none_left(folder)
    return job.returncode, err


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("ending", "rest"),
    pairs(
        [
            ("import nothing", "ended with ModuleNotFoundError", 1),
            ("sys.exit(0)", "ended with exit status 0", 1),
            ("os._exit(7)", "ended with exit status 7", 7),
        ],
        [INIT, IMPORT + INIT],
    ),
)
def test_run_ends_with_who_ended_before_the_start(tmp_path: Path, ending: tuple[str, str, int], rest: str) -> None:
    what, said, status = ending
    found, err = run(tmp_path, what, rest=rest)
    assert f" {said}" in err.partition("fsdpx run: rank 1 on ")[2], err
    assert ("No module named 'nothing'" in err) == ("import" in what)
    assert found == status


@pytest.mark.jobs
def test_run_says_who_did_not_come_and_takes_nobody_for_dead(tmp_path: Path) -> None:
    status, err = run(tmp_path, "time.sleep(1000)", ranks=3, FSDPX_START_TIMEOUT="2")
    assert status != 0
    last = err.partition("fsdpx run: ")[2]
    assert last.startswith("rank 1 did not come to MPI's start, where ranks 0, 2 waited"), err


@pytest.mark.jobs
def test_run_that_is_killed_leaves_nobody_behind(tmp_path: Path) -> None:
    with begin_run(tmp_path, "time.sleep(1000)") as job:
        while not list(tmp_path.glob("tmp/fsdpx-run-*/start-0/start-*/came-*")):  # rank 0 waits for the other one
            time.sleep(0.02)
        job.kill()
    assert none_left(tmp_path, 20), alive_in(tmp_path)
