"""Jobs of several ranks killed while they save: the old or the new checkpoint loads. `python kills_ranks.py 100`.

Three ranks under mpiexec save without end. A random one is killed at a random moment, and the launcher ends the job.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kills import PATIENCE, Kill, fill, in_words, run, save_without_end, small, wait_for_saves

from fsdpx import Trainer, init

sys.path.insert(0, str(Path(__file__).parents[2]))
from trials import MPIEXEC, environment, none_left

RANKS = 3
READY = "ready.json"


def save(folder: Path, first: int) -> None:
    """What each rank does. The first save is timed; then rank 0 says who they are and how long one takes."""
    comm = init()
    trainer = small(comm)
    fill(trainer, first - 1)
    begin = time.perf_counter()
    trainer.save(folder / "clock")
    facts = {"pids": comm.all_gather_object(os.getpid()), "seconds": time.perf_counter() - begin}
    if comm.rank == 0:
        Path("unseen").write_text(json.dumps(facts))
        Path("unseen").rename(READY)
    save_without_end(trainer, folder, first)


def by_rank(folder: Path, jobs: Path) -> Kill:
    """jobs: working directory of the jobs, by which what is left of them is found."""

    def kill(trainer: Trainer, first: int, chance: random.Random) -> None:
        (jobs / READY).unlink(missing_ok=True)
        command = [str(MPIEXEC), "-n", str(RANKS), sys.executable, __file__, "save", str(folder), str(first)]
        with subprocess.Popen(
            command, cwd=jobs, env=environment(TMPDIR=str(jobs)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        ) as job:  # fmt: skip
            facts = _ready(job, jobs / READY)
            wait_for_saves(folder, first, chance, facts["seconds"])
            segments = _segments(facts["pids"])
            os.kill(chance.choice(facts["pids"]), signal.SIGKILL)
            output, _ = job.communicate(timeout=PATIENCE)
            assert job.returncode, f"the job ended well, with a rank killed\n{output}"
            assert "Traceback" not in output, output
        assert none_left(jobs)
        for path in segments:
            path.unlink(missing_ok=True)

    return kill


def _ready(job: subprocess.Popen[str], place: Path) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE
    while not place.exists():
        if job.poll() is not None or time.monotonic() > end:
            job.kill()
            raise AssertionError(f"status {job.wait()} before the first save\n{job.communicate()[0]}")
        time.sleep(0.002)
    return json.loads(place.read_text())


def _segments(pids: list[int]) -> set[Path]:
    """Shared memory in which these processes speak: an MPI whose ranks are killed leaves it behind."""
    maps = [Path(f"/proc/{pid}/maps") for pid in pids]
    lines = [line for file in maps if file.exists() for line in file.read_text().splitlines()]
    return {Path(line.split()[5]) for line in lines if "/dev/shm/" in line}


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]), int(sys.argv[3]))
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as jobs:
        print(in_words(run(Path(place), int(sys.argv[1]), by_rank(Path(place), Path(jobs)))))
