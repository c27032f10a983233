"""The clock of MPI's start, one process on each host: ends a job whose last rank does not come, and names that rank.

It is run as a file, to be there within milliseconds, so it needs the standard library only."""

import os
import platform
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["CAME", "LATE", "began", "ranks_text"]

CAME = "came-"
LATE = "late"
"""Marks a start that was ended here, whatever order the ranks' deaths are then seen in."""
EVERY = 0.5
SECONDS_TO_END = 2.0


def began(process: int) -> str:
    """When a process of this host began, as its kernel counts; "" if it has ended, "0" where that cannot be seen."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return "" if os.path.exists("/proc/self/stat") else "0"
    return "" if words[0] in "ZX" else words[19]


def come(folder: str) -> dict[int, tuple[int, str]]:
    """Rank -> process and local rank, of those that wait."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name.startswith(CAME):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    process, _, local = file.read().partition(" ")
                if process and began(int(process)):
                    found[int(name.removeprefix(CAME))] = int(process), local
    return found


def report(found: dict[int, tuple[int, str]], seconds: float, size: int, local_size: int, known: bool) -> str:
    """The ranks that have not come, as far as this host can tell. known: whether all marks of its ranks are in one
    place."""
    host = platform.node()
    local = {int(where) for _, where in found.values() if where.isdecimal()}
    missing = set(range(local_size)) - local
    if not known or not local_size or len(local) < len(found):
        who = "not all ranks have"
    elif not missing:
        who = f"all ranks of {host} but not those of other hosts have"
    elif size == local_size:
        missing = set(range(size)) - set(found)
        who = f"{ranks_text(missing)} of {size} {'has' if len(missing) == 1 else 'have'} not"
    else:
        who = f"on {host} local {ranks_text(missing)} of {local_size} {'has' if len(missing) == 1 else 'have'} not"
    come = f"{who} come to the start of MPI within {seconds:g} s after the first rank of {host}"
    return (
        f"fsdpx: {come}; {ranks_text(found)} "
        "waited, and the job ends. A rank that is missing has not begun, has ended, or is busy: call fsdpx.init() "
        "before other long work, or set FSDPX_START_TIMEOUT to more seconds\n"
    )


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3" or "ranks 0, 2"."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def watch(folder: str, seconds: float) -> dict[int, tuple[int, str]]:
    """The ranks that still wait when time is up; none if all is well, or no waiting rank is left."""
    due, listens = time.monotonic() + seconds, [0]
    while True:
        ready, _, _ = select.select(listens, [], [], EVERY)
        if ready:
            if os.read(0, 8):
                return {}  # the rank that started this clock got through, so all have come
            listens = []  # it was killed, but others may wait
        found = come(folder)
        if not found or time.monotonic() >= due:
            return found


def end(found: dict[int, tuple[int, str]], launcher: str) -> None:
    """Kill the ranks that wait. The launcher then ends the others; it is told to if it lets jobs outlive ranks."""
    for process, _ in found.values():
        _signal(process, signal.SIGKILL)
    due = time.monotonic() + SECONDS_TO_END
    number, _, birth = launcher.partition("-")
    while birth and began(int(number)) == birth:
        if time.monotonic() > due:
            _signal(int(number), signal.SIGTERM)
            return
        time.sleep(0.1)


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(OSError):
        os.kill(process, number)


def main(folder: str, seconds: str, launcher: str, size: str, local_size: str, keep: str) -> None:
    """keep: `fsdpx run` reads the marks, and removes them itself."""
    found = watch(folder, float(seconds))
    if found:
        sys.stderr.write(report(found, float(seconds), int(size), int(local_size), launcher != "0"))
        sys.stderr.flush()
    if keep != "keep":
        shutil.rmtree(folder, ignore_errors=True)
    elif found:
        with suppress(FileNotFoundError), open(os.path.join(folder, LATE), "w", encoding="utf-8"):
            pass
    if found:
        end(found, launcher)


if __name__ == "__main__":
    main(*sys.argv[1:])
