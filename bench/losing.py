"""One elastic training, timed: a job of `elastic.py`, for Open MPI and `mpiexec --with-ft ulfm`.

    mpiexec --with-ft ulfm -n 2 python bench/losing.py cost [--model small] [--rounds 4]
    mpiexec --with-ft ulfm -n 3 python bench/losing.py recovery [--mib 16]

The lowest rank prints one line of JSON. `cost`: seconds of steps that are elastic and of such that are not, in turns,
between the same ranks, which speak by messages. `recovery`: the last rank kills itself in the middle of a step; seconds
until the others hear of it, and what they do until they go on.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from workloads import MODELS, batch, in_fsdpx

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.comm.init import open_fault_tolerant_communicator

__all__ = ["chain", "cost", "recovery"]

BEFORE, AFTER = 5, 2  # steps
WINDOW = 6  # steps of a round
PHASES = {
    "the others are found": "shrink", "all ranks have said what they hold": "ask", "the new trainer is there": "build",
    "state has moved": "move", "there are copies again": "copy", "the end": "agree",
}  # fmt: skip
"""What is announced at the end of each phase of a recovery, and its name in the table."""


def cost(comm: Any, name: str, rounds: int) -> dict[str, Any]:
    """Seconds of each step, by round: `elastic`, one copy in each round, and `plain`; of its parts, on this rank:
    `commit` of each step, with waiting for the other ranks, `take` of each copy; `every`: the steps that the trainer
    chose to have between two copies."""
    layers, loss = in_fsdpx(MODELS[name])
    options = {"loss": loss, "optimizer": optim.AdamW(lr=3e-4), "strategy": "fsdp"}
    plain = layers.as_distributed(comm=open_fault_tolerant_communicator(comm), **options)
    elastic = layers.as_distributed(comm=comm, elastic=True, **options)
    parts, whole = batch(MODELS[name], comm.rank, comm.size), batch(MODELS[name])
    ranks, clock = elastic.call_runner._coordinator, elastic.inspect.engine.clock
    taken, pace = watched(ranks.assembly.copies), ranks._copy_interval
    for _ in range(2):
        plain.step(*parts)
    found: dict[str, Any] = {"elastic": [], "plain": [], "commit": [], "take": taken, "every": pace.every}
    pace.every = 1

    def elastically() -> None:
        before = clock.rows["COMMIT"][0]
        elastic.step(*whole)
        found["commit"].append(clock.rows["COMMIT"][0] - before)

    copies = ranks.assembly.copies
    while ranks.last_step - ranks.newest_copied_step > 1 or len(copies.list_complete_snapshots()) < 2:
        elastic.step(*whole)
    pace.every = WINDOW
    taken.clear()
    kinds = {"elastic": elastically, "plain": lambda: plain.step(*parts)}
    for turn in range(rounds):
        for kind in sorted(kinds, reverse=turn % 2 == 1):
            comm.barrier().wait()
            found[kind].append([clocked(kinds[kind]) for _ in range(WINDOW)])
    elastic.close()
    plain.close()
    return found


def watched(copies: Any) -> list[float]:
    """Seconds of each `take` from now on."""
    taken: list[float] = []
    take = copies.start_copying_to_buddies

    def timed(*arguments: Any) -> None:
        taken.append(clocked(lambda: take(*arguments)))

    copies.start_copying_to_buddies = timed
    return taken


def clocked(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def chain(mib: float) -> tuple[nn.Sequential, int]:
    """Linear layers whose weights and moments of AdamW are about as many MiB, and their width."""
    width = 32
    while width < 2048 and 12 * 16 * width * width <= mib * 2**20:
        width *= 2
    layers = max(round(mib * 2**20 / (12 * width * (width + 1))), 1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), width


def recovery(comm: Any, mib: float, folder: Path) -> dict[str, Any]:
    """Seconds of every phase on the rank that took longest, the phases in order."""
    model, width = chain(mib)
    trainer = model.as_distributed(
        loss=nn.MSELoss(),
        optimizer=optim.AdamW(lr=1e-3),
        strategy="fsdp",
        comm=comm,
        elastic=fsdpx.ElasticConfig(every=1),
    )
    said: list[tuple[str, float]] = []
    dies, norms = comm.rank == comm.size - 1, 0

    def observe(action: Any) -> None:
        nonlocal norms
        if isinstance(action, str):
            said.append((action.removeprefix("recovery: "), time.time()))
        elif action.op == "SCALE":
            norms += 1
            if dies and norms == BEFORE:
                (folder / "unseen").write_text(str(time.time()))
                (folder / "unseen").rename(folder / "died")
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.inspect.engine.add_observer(observe)
    x = np.ones((2 * comm.size, width), np.float32)
    for _ in range(BEFORE + AFTER):
        trainer.step(x, x)
    (happened,) = trainer.call_runner.recoveries
    died = float((folder / "died").read_text())
    said.append(("the end", said[0][1] + happened.seconds))
    steps = {PHASES.get(b, b): end - begin for (_, begin), (b, end) in pairwise(said)}
    everyone = trainer.call_runner.world.all_gather_object((said[0][1] - died, happened.seconds, steps))
    slowest = max(everyone, key=lambda one: one[1])
    sizes = [array.nbytes for _, array in trainer.inspect.engine.state.ledger.iterate_saved_rows()]
    return {
        "heard": min(heard for heard, _, _ in everyone), "seconds": slowest[1], "phases": slowest[2],
        "bytes": sum(trainer.call_runner.world.all_gather_object(sum(sizes))), "replayed": happened.replayed,
    }  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("what", choices=("cost", "recovery"))
    p.add_argument("--model", choices=MODELS, default="small")
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("--mib", type=float, default=16)
    p.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = p.parse_args()
    comm = fsdpx.init()
    first = comm.rank == 0
    if args.what == "cost":
        found = cost(comm, args.model, args.rounds)
    else:
        found = recovery(comm, args.mib, args.folder)
    if first:
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
