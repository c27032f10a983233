"""What does a trace cost, and how well are the clocks of ranks known?

    mpiexec -n 2 python bench/tracing.py [--models small tiny] [--rounds 30] [--quick]

Every round is one step with the trace and one without it, in turns in the same processes. The ratio is that of the
medians; spread: the middle half of the rounds' own ratios."""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from records import arguments, lines, save
from workloads import MODELS, batch, in_fsdpx

import fsdpx
from fsdpx import optim
from fsdpx.comm import Communicator
from fsdpx.observe.chrome import merge

__all__ = ["tables"]


def traced(comm: Communicator, name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of a step with and without a trace, by round; what came of the trace."""
    model, loss = in_fsdpx(MODELS[name])
    mesh = fsdpx.Mesh(pipe=2) if comm.size > 1 and name != "mlp" else None
    trainer = model.as_distributed(
        loss=loss, optimizer=optim.AdamW(lr=1e-4), comm=comm, mesh=mesh, trace=fsdpx.Trace(folder, steps=rounds)
    )
    x, y = batch(MODELS[name], trainer.data.rank, trainer.data.size)
    recording = trainer.engine.recording
    seconds: dict[bool, list[float]] = {True: [], False: []}
    trainer.step(x, y)
    for turn in range(rounds):
        for on in (True, False) if turn % 2 else (False, True):
            trainer.engine.recording = recording if on else None
            comm.barrier().wait()
            begin = time.perf_counter()
            trainer.step(x, y)
            seconds[on].append(max(comm.all_gather_object(time.perf_counter() - begin)))
    trainer.engine.recording = recording
    trainer.close()
    actions = len(recording.turns[-1].acted)
    found = {"model": name, "actions": actions, "on": seconds[True], "off": seconds[False]}
    if comm.rank == 0:
        path, error, messages = merge(folder)
        found |= {"error": error, "messages": messages, "bytes": os.path.getsize(path)}
    return found


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    head = ["model", "actions", "ms without", "ms with", "ratio", "spread", "clock error us", "messages", "bytes/step"]
    rows = []
    for row in found["rows"]:
        on, off = np.array(row["on"]), np.array(row["off"])
        low, high = np.quantile(on / off, [0.25, 0.75])
        medians = [float(np.median(one)) for one in (off, on)]
        rows.append(
            [
                row["model"], str(row["actions"]), *(f"{1e3 * one:.2f}" for one in medians),
                f"{medians[1] / medians[0]:.4f}", f"{low:.3f}-{high:.3f}", f"{1e6 * row['error']:.1f}",
                str(row["messages"]), f"{row['bytes'] / len(on):,.0f}",
            ]
        )  # fmt: skip
    return [("cost", lines(head, rows))]


def main() -> int:
    p = arguments(__doc__ or "", rounds=30)
    p.add_argument("--models", nargs="+", default=["small", "tiny"], choices=MODELS)
    options = p.parse_args()
    comm = fsdpx.init()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = comm.all_gather_object(folder)[0]
        for name in ["tiny"] if options.quick else options.models:
            rows.append(traced(comm, name, 3 if options.quick else options.rounds, Path(folder, name)))
            comm.barrier().wait()
    if comm.rank == 0:
        found = {"ranks": comm.size, "rows": rows}
        save("tracing", options, found)
        for _, text in tables(found):
            print(text, flush=True)
    fsdpx.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
