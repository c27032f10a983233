"""Two jobs that take turns of a few steps each: both are started, and one is stopped while the other one runs.

What a shared machine does in a minute meets both alike, so the ratio of a turn holds where rates do not.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import Job, command, environ, finish, start

__all__ = ["duel", "outcome"]

EDGE = 0.02  # seconds after a job goes on in which its ranks wake up


@dataclass
class Fighter:
    """A job with all its processes, and when it was allowed to run."""

    process: subprocess.Popen[str]
    folder: Path
    turns: list[tuple[float, float]] = field(default_factory=list)
    turn: float = 0.0

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def warm(self, patience: float) -> bool:
        """Wait until it has warmed up, and stop it; whether it came so far."""
        ready, until = self.folder / "ready", time.monotonic() + patience
        while not ready.exists():
            if self.over or time.monotonic() > until:
                return False
            time.sleep(0.02)
        self.turn = float(ready.read_text())
        self.signal(signal.SIGSTOP)
        return True

    def run(self) -> None:
        """One turn."""
        self.signal(signal.SIGCONT)
        begin = time.time()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.turn)
        self.turns.append((begin + EDGE, time.time()))
        self.signal(signal.SIGSTOP)

    def end(self, patience: float) -> dict[str, Any]:
        """Let it come to its end: what it printed, and its turns."""
        (self.folder / "stop").touch()
        self.signal(signal.SIGCONT)
        return finish(self.process, patience) | {"turns": self.turns}

    def signal(self, which: signal.Signals) -> None:
        for pid in [] if self.over else family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)


def family(pid: int) -> list[int]:
    """A process and all that descend from it, launchers first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def duel(jobs: Sequence[Job], model: str, turns: int, patience: float) -> list[dict[str, Any]]:
    """What each job printed, with its turns, or {"failed": reason}; a job whose rival failed did not run."""
    said: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        fighters: list[Fighter] = []
        for number, job in enumerate(jobs):
            place = Path(folder) / str(number)
            place.mkdir()
            process = start(command(job, model, "--turns", str(place)), environ(job.threads))
            if isinstance(process, OSError):
                said[number] = {"failed": str(process)}
                break
            fighters.append(Fighter(process, place))
            if not fighters[-1].warm(patience):
                break
        else:
            for _ in range(turns):
                for fighter in fighters:
                    fighter.run()
        said |= {number: fighter.end(patience) for number, fighter in enumerate(fighters)}
    return [said.get(number, {"failed": "its rival failed"}) for number in range(len(jobs))]


def outcome(said: dict[str, Any]) -> list[float | None]:
    """The median step of each turn, of the steps that began and ended in it."""
    steps = list(zip(said["begun"], said["seconds"], strict=True))
    within = [[s for at, s in steps if begin <= at and at + s <= end] for begin, end in said["turns"]]
    return [statistics.median(some) if some else None for some in within]
