"""Chaos: ranks that are killed, stopped or delayed at chosen actions, the same ones for the same seed, and what must
hold afterwards: the bits of an undisturbed run, and a history in which each step counts once."""

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
    """A thread rank was killed or stopped on purpose."""


@dataclass(frozen=True)
class Fault:
    """What happens to `rank` after its action number `action`, counted from 1 in each start of the job. start: in which
    one. seconds: of a delay. Prints as "delay 1@30 for 0.5 in 0", parses back."""

    kind: str
    rank: int
    action: int
    seconds: float = 0.0
    start: int = 0

    def __str__(self) -> str:
        seconds = f" for {self.seconds:g}" if self.kind == "delay" else ""
        return f"{self.kind} {self.rank}@{self.action}{seconds} in {self.start}"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Blows from text, separated by commas; ConfigError for what is none."""
    return tuple(_parse_fault(part.strip()) for part in text.split(",") if part.strip())


def _parse_fault(part: str) -> Fault:
    match = _TEXT.fullmatch(part)
    if match is None:
        raise ConfigError(
            f"{part!r} is no blow: use 'kill RANK@ACTION', 'stop ...', 'delay ... for SECONDS' [in START]"
        )
    kind, rank, action, seconds, start = match.groups()
    return Fault(kind, int(rank), int(action), float(seconds or 0), int(start or 0))


def draw_faults(
    seed: int, ranks: int, actions: int, *, starts: int = 1, each: int = 1, kinds: Sequence[str] = FAULT_KINDS
) -> tuple[Fault, ...]:
    """`each` blows in each of the first `starts` starts, at random ranks and actions (1 to `actions`): a function of
    the arguments alone. Delays last up to 5 ms."""
    draw = random.Random(seed)
    made = []
    for start in range(starts):
        for _ in range(each):
            kind, seconds = draw.choice(list(kinds)), draw.randint(1, 5) / 1000
            rank, action = draw.randrange(ranks), draw.randint(1, actions)
            made.append(Fault(kind, rank, action, seconds if kind == "delay" else 0.0, start))
    return tuple(made)


def inject_faults(trainer: Any, planned: Iterable[Fault], start: int = 0, *, threads: bool = False) -> None:
    """From now on, do to this rank what is planned for it in this start of the job.

    A process gets SIGKILL or SIGSTOP. threads: ranks are threads, and both are a `InjectedFault` raised in that
    rank."""
    mine: dict[int, list[Fault]] = {}
    for blow in planned:
        if blow.kind not in FAULT_KINDS:
            raise ConfigError(f"chaos: {blow.kind!r} is none of {', '.join(FAULT_KINDS)}")
        if (blow.rank, blow.start) == (trainer.call_runner.rank, start):
            mine.setdefault(blow.action, []).append(blow)
    done = 0

    def observe(action: object) -> None:
        nonlocal done
        done += 1
        for blow in mine.get(done, ()):
            _inject(blow, action, threads)

    trainer.inspect.engine.add_observer(observe)


def _inject(blow: Fault, action: object, threads: bool) -> None:
    if blow.kind == "delay":
        time.sleep(blow.seconds)
    elif threads:
        raise InjectedFault(f"{blow}, after {action}")
    else:
        os.kill(os.getpid(), signal.SIGKILL if blow.kind == "kill" else signal.SIGSTOP)


def run_until_survived(run: Callable[[int], T], most: int = 20) -> tuple[T, int]:
    """Call run(0), run(1), ... until one is not struck: what it returns, and its number."""
    for start in range(most):
        try:
            return run(start), start
        except InjectedFault:
            continue
    raise AssertionError(f"struck in each of {most} starts")


class StepLog:
    """What each rank reports to have done: one file per start and rank, a line per step, written at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def record_step(self, start: int, rank: int, step: int, loss: float) -> None:
        """Rank `rank` has made step number `step` (from 0) with this loss."""
        with (self.folder / f"{start:03}-{rank:05}").open("a") as file:
            file.write(f"{step} {loss.hex()}\n")

    def read_starts(self) -> dict[int, dict[int, list[tuple[int, str]]]]:
        """start -> rank -> (step, loss) in order. A last line that a kill cut off is left out."""
        found: dict[int, dict[int, list[tuple[int, str]]]] = {}
        for path in sorted(self.folder.iterdir()):
            start, rank = map(int, path.name.split("-"))
            lines = path.read_text().split("\n")[:-1]
            found.setdefault(start, {})[rank] = [(int(n), loss) for n, loss in (line.split() for line in lines)]
        return found

    def check(self, steps: int) -> list[int]:
        """In which start each of `steps` steps was made for good; AssertionError says what is wrong.

        A start goes on where a checkpoint of an earlier one ended: no step is left out, what is done again gives the
        same loss to the last bit, ranks agree, and each step counts exactly once."""
        made: list[int] = []  # start in which each step was made for good, so far
        losses: dict[int, str] = {}
        for start, ranks in self.read_starts().items():
            firsts = {entries[0][0] for entries in ranks.values() if entries}
            assert len(firsts) <= 1, f"start {start}: ranks went on from steps {sorted(firsts)}"
            for rank, entries in ranks.items():
                numbers = [n for n, _ in entries]
                assert numbers == list(range(*_get_range(numbers))), f"start {start}, rank {rank}: steps {numbers}"
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


def _get_range(numbers: list[int]) -> tuple[int, int]:
    return (numbers[0], numbers[0] + len(numbers)) if numbers else (0, 0)
