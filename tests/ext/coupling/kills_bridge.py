"""Kill solver ranks or training ranks while they exchange fields, and check that no job hangs.

A solver rank and two training ranks under mpiexec send and receive without end. A random one is killed at a random
moment, and the launcher ends the job.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import fsdpx

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
from coupled import make_side, send_step  # noqa: E402
from trials import MPIEXEC, environment, none_left  # noqa: E402

RANKS, PATIENCE_SECONDS = 3, 60.0


def exchange(mode, ending):
    """Exchange fields on this rank: until it is "killed" or, on the solver, end "unclosed", without closing the bridge.
    Rank 0 prints the process IDs when all ranks have started."""
    comm = fsdpx.init()
    trains = comm.rank >= comm.size // 2
    bridge, grid, _ = make_side(comm, comm.size // 2, mode=mode)
    pids, wait, step = comm.all_gather_object(os.getpid()), mode != "latest", 0
    while not trains and step != 40 * (ending == "unclosed") - 1:
        send_step(bridge, grid, step)
        bridge.receive(wait)
        bridge.receive_weights(wait)
        step += 1
        if step == 3 and comm.rank == 0 and ending == "killed":
            print(json.dumps(pids), flush=True)
    if not trains:
        return
    for snapshot in bridge:
        bridge.send(snapshot.fields[0])
        bridge.send_weights({"w": np.ones(50_000)})
    bridge.close()
    if comm.rank == comm.size - 1:
        print("the trainer has ended", flush=True)


def start(jobs, mode, ending, ranks):
    """Start a job; jobs: its working directory, by which what is left of it is found."""
    return subprocess.Popen(
        [str(MPIEXEC), "-n", str(ranks), sys.executable, __file__, mode, ending], cwd=jobs, text=True,
        env=environment(TMPDIR=str(jobs), OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def kill_one(jobs, mode, chance):
    """Start a job and kill one of its ranks, after which the job ends."""
    with start(jobs, mode, "killed", RANKS) as job:
        line = next((line for line in job.stdout if line.startswith("[")), "")
        assert line, f"status {job.wait()} before the first exchange"
        time.sleep(chance.random() * 0.2)
        rank = chance.randrange(RANKS)
        os.kill(json.loads(line)[rank], signal.SIGKILL)
        output, _ = job.communicate(timeout=PATIENCE_SECONDS)
        assert job.returncode, f"the job ended well, with rank {rank} killed\n{output}"
    assert none_left(jobs)


def end_unclosed(jobs, mode):
    """The solver's script ends without closing the bridge, and the trainer ends as well."""
    with start(jobs, mode, "unclosed", 2) as job:
        output, _ = job.communicate(timeout=PATIENCE_SECONDS)
    assert (job.returncode, "the trainer has ended" in output) == (0, True), output
    assert none_left(jobs)


if __name__ == "__main__":
    exchange(*sys.argv[1:])
