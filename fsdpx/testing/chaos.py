"""Fault injection: kill, stop or delay ranks at chosen actions of their programs. The faults can be drawn from a seed,
and are then reproducible. A step log then shows whether a restarted job is correct: no step may be skipped, and a
repeated step must give a bit-identical loss."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsdpx.core.comm.local import RankDied
from fsdpx.errors import ConfigError

__all__ = ["Fault", "InjectedFault", "StepLog", "draw_faults", "inject_faults", "parse_faults", "run_until_survived"]

FAULT_KINDS = ("kill", "stop", "delay")
_TEXT = re.compile(r"(kill|stop|delay) (\d+)@(\d+)(?: for ([\d.]+))?(?: in (\d+))?")
T = TypeVar("T")


class InjectedFault(RankDied):
    """Error raised in a rank that runs as a thread, to simulate killing or stopping the rank."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject on a rank. `str` returns a text such as "delay 1@30 for 0.5 in 0", which `parse_faults`
    accepts.

    Attributes
    ----------
    kind : "kill", "stop" or "delay"
    rank : the rank where the fault occurs
    action : the fault occurs when the rank has run this number of actions since it was last started
    seconds : duration of a delay
    start : number of restarts of the job before the fault occurs: 0 if it occurs in the first run
    """

    kind: str
    rank: int
    action: int
    seconds: float = 0.0
    start: int = 0

    def __str__(self) -> str:
        seconds = f" for {self.seconds:g}" if self.kind == "delay" else ""
        return f"{self.kind} {self.rank}@{self.action}{seconds} in {self.start}"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse a comma-separated list of faults. Raise ConfigError for an invalid fault."""
    return tuple(_parse_fault(part.strip()) for part in text.split(",") if part.strip())


def _parse_fault(part: str) -> Fault:
    match = _TEXT.fullmatch(part)
    if match is None:
        raise ConfigError(
            f"{part!r} is no fault: use 'kill RANK@ACTION', 'stop ...', 'delay ... for SECONDS' [in START]"
        )
    kind, rank, action, seconds, start = match.groups()
    return Fault(kind, int(rank), int(action), float(seconds or 0), int(start or 0))


def draw_faults(
    seed: int, ranks: int, actions: int, *, starts: int = 1, per_start: int = 1, kinds: Sequence[str] = FAULT_KINDS
) -> tuple[Fault, ...]:
    """Draw `per_start` random faults for each of the first `starts` starts of a job, for ranks 0 to `ranks` - 1 and
    actions 1 to `actions`. The result depends only on the arguments. Delays last 1 to 5 ms."""
    draw = random.Random(seed)
    made = []
    for start in range(starts):
        for _ in range(per_start):
            kind, seconds = draw.choice(list(kinds)), draw.randint(1, 5) / 1000
            rank, action = draw.randrange(ranks), draw.randint(1, actions)
            made.append(Fault(kind, rank, action, seconds if kind == "delay" else 0.0, start))
    return tuple(made)


def inject_faults(trainer: Any, faults: Iterable[Fault], start: int = 0, *, threads: bool = False) -> None:
    """Inject the faults that are meant for this rank and for start number `start` of the job (0 is the first start,
    before any restart).

    To kill or stop a rank that is a process, SIGKILL or SIGSTOP is sent to it. If ranks are threads (`threads`),
    `InjectedFault` is raised in the thread instead. Raises ConfigError for a fault of an unknown kind."""
    mine: dict[int, list[Fault]] = {}
    for fault in faults:
        if fault.kind not in FAULT_KINDS:
            raise ConfigError(f"chaos: {fault.kind!r} is none of {', '.join(FAULT_KINDS)}")
        if (fault.rank, fault.start) == (trainer.call_runner.rank, start):
            mine.setdefault(fault.action, []).append(fault)
    done = 0

    def observe(action: object) -> None:
        nonlocal done
        done += 1
        for fault in mine.get(done, ()):
            _inject_fault(fault, action, threads)

    trainer.inspect.engine.add_observer(observe)


def _inject_fault(fault: Fault, action: object, threads: bool) -> None:
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    elif threads:
        raise InjectedFault(f"{fault}, after {action}")
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def run_until_survived(run: Callable[[int], T], max_starts: int = 20) -> tuple[T, int]:
    """Call `run(0)`, `run(1)`, ... until one of the calls returns without raising `InjectedFault`. Return the result
    and the argument of the call that returned.

    Raise AssertionError if `max_starts` calls have failed."""
    for start in range(max_starts):
        try:
            return run(start), start
        except InjectedFault:
            continue
    raise AssertionError(f"a fault ended each of {max_starts} starts")


class StepLog:
    """A log of the steps of all ranks, for checking a job that was restarted after faults. There is one file for each
    rank and each start of the job. A file has one line per step, which the rank writes during the step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def record_step(self, start: int, rank: int, step: int, loss: float) -> None:
        """Append a step (counted from 0) and its loss to the file for this start and rank."""
        with (self.folder / f"{start:03}-{rank:05}").open("a") as file:
            file.write(f"{step} {loss.hex()}\n")

    def read_starts(self) -> dict[int, dict[int, list[tuple[int, str]]]]:
        """Read the log, and return it as a nested dict: `log[start][rank]` is a list of (step, loss as hexadecimal
        text). The last line of a file is skipped if it is incomplete because the rank was killed."""
        found: dict[int, dict[int, list[tuple[int, str]]]] = {}
        for path in sorted(self.folder.iterdir()):
            start, rank = map(int, path.name.split("-"))
            lines = path.read_text().split("\n")[:-1]
            found.setdefault(start, {})[rank] = [(int(n), loss) for n, loss in (line.split() for line in lines)]
        return found

    def check_and_get_last_start_of_each_step(self, steps: int) -> list[int]:
        """Check the log, and return a list that gives, for each of `steps` steps, the number of the job's last start
        that performed this step. Raise AssertionError if the log is wrong.

        Each start must continue from a checkpoint of an earlier start, without skipping a step. The losses of a step
        must be bit-identical on all ranks and in all starts that performed the step. The last start must have reached
        the last step on all ranks."""
        made: list[int] = []  # made[step] is the number of the last start of the job that performed this step
        losses: dict[int, str] = {}
        for start, ranks in self.read_starts().items():
            firsts = {entries[0][0] for entries in ranks.values() if entries}
            assert len(firsts) <= 1, f"start {start}: ranks continued from steps {sorted(firsts)}"
            for rank, entries in ranks.items():
                numbers = [n for n, _ in entries]
                assert numbers == list(range(*_get_bounds(numbers))), f"start {start}, rank {rank}: steps {numbers}"
                for n, loss in entries:
                    first = losses.setdefault(n, loss)
                    assert loss == first, f"start {start}, rank {rank}: step {n} gave {loss}, before {first}"
            if not firsts:
                continue
            begin, end = min(firsts), max(n for entries in ranks.values() for n, _ in entries) + 1
            assert begin <= len(made), f"start {start} begins at step {begin}, but only {len(made)} were made before"
            made[begin:] = [start] * (end - begin)
        assert len(made) == steps, f"{len(made)} of {steps} steps were made"
        last = list(self.read_starts().values())[-1] if made else {}
        late = [rank for rank, entries in last.items() if not entries or entries[-1][0] != steps - 1]
        assert not late, f"ranks {late} did not make the last step"
        return made


def _get_bounds(numbers: list[int]) -> tuple[int, int]:
    return (numbers[0], numbers[0] + len(numbers)) if numbers else (0, 0)
