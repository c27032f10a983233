"""The watchdog process that runs on each host while MPI is being initialized. If a rank does not arrive in time, the
watchdog prints which rank is missing (if it is known) and ends the job.

It is run as a script and imports only the standard library, so that it starts within milliseconds. The names of the
marker files that waiting ranks create contain all the information that the watchdog needs, so it opens no files. It
only lists a folder that belongs to its own user and that no other user can enter.
"""

from __future__ import annotations

import os
import platform
import re
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["MARK_PREFIX", "TIMED_OUT_MARK", "get_process_start_time", "parse_marker_name"]

MARK_PREFIX = "came-"
_MARK = re.compile(rf"{MARK_PREFIX}(\d{{1,9}})\.(\d{{1,9}}-\d{{0,20}})\.(\w{{0,9}})")
TIMED_OUT_MARK = "late"
"""Name of a folder that the watchdog creates when it ends the job. The folder tells `fsdpx run` that the ranks were
killed because a rank did not arrive in time."""
POLL_SECONDS = 0.5
SECONDS_TO_END = 2.0


def get_process_start_time(process: int) -> str:
    """Return the start time of a process on this host, in clock ticks of the kernel. Return "" if the process has
    ended, and "0" if the time cannot be read."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return "" if os.path.exists("/proc/self/stat") else "0"
    return "" if words[0] in "ZX" else words[19]


def parse_marker_name(name: str) -> tuple[int, str, str] | None:
    """Parse the name of a marker file. Return (rank, process ID with start time, local rank), or None if `name` is not
    the name of a marker file."""
    match = _MARK.fullmatch(name)
    return None if match is None else (int(match[1]), match[2], match[3])


def find_waiting_ranks(folder: str) -> dict[int, tuple[str, str]]:
    """Return the waiting ranks as {rank: (process ID with start time, local rank)}, or {} if the folder is not
    private."""
    arrivals = {}
    with suppress(FileNotFoundError):
        for rank, process, local in filter(None, map(parse_marker_name, _list_folder_if_private(folder))):
            if _is_process_alive(process):
                arrivals[rank] = process, local
    return arrivals


def _list_folder_if_private(folder: str) -> list[str]:
    if os.name != "posix":
        return os.listdir(folder)
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:  # the path is a symbolic link or a file
        return []
    try:
        its = os.fstat(inside)
        ours = its.st_uid == os.geteuid() and not its.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return os.listdir(inside) if ours else []
    finally:
        os.close(inside)


def _is_process_alive(owner: str) -> bool:
    """Return whether the process with the ID and start time in `owner` is alive. The process ID alone is not enough,
    because the system may have reused the ID for another process."""
    process, _, birth = owner.partition("-")
    return get_process_start_time(int(process)) == birth != ""


def describe_missing_ranks(
    waiting: dict[int, tuple[str, str]], seconds: float, size: int, local_size: int, known: bool
) -> str:
    """Return an error message that names the ranks that have not arrived, as far as this host can tell.

    `waiting` holds the ranks that have arrived on this host. `known` is True if all ranks of this host create their
    marker files in the same folder.
    """
    host = platform.node()
    local = {int(where) for _, where in waiting.values() if where.isdecimal()}
    missing = set(range(local_size)) - local
    if not known or not local_size or len(local) < len(waiting):
        who = "not all ranks have"
    elif not missing:
        who = f"all ranks of {host} but not those of other hosts have"
    elif size == local_size:
        missing = set(range(size)) - set(waiting)
        who = f"{_format_ranks(missing)} of {size} {'has' if len(missing) == 1 else 'have'} not"
    else:
        who = f"on {host} local {_format_ranks(missing)} of {local_size} {'has' if len(missing) == 1 else 'have'} not"
    come = f"{who} come to the start of MPI within {seconds:g} s after the first rank of {host}"
    return (
        f"fsdpx: {come}; {_format_ranks(waiting)} "
        "waited, and the job ends. A rank that is missing has not begun, has ended, or is busy: call fsdpx.init() "
        "before other long work, or set FSDPX_START_TIMEOUT to more seconds\n"
    )


def _format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as text, such as "rank 3" or "ranks 0, 2". This is a copy of a function in `base.messages`, which
    this script cannot import because fsdpx is not on its path."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def wait_and_list_unstarted_ranks(folder: str, seconds: float) -> dict[int, tuple[str, str]]:
    """Wait for `seconds` seconds, and return the ranks that are still waiting. Return {} early if MPI has been
    initialized or no rank is waiting any longer."""
    due, listens = time.monotonic() + seconds, [0]
    while True:
        ready, _, _ = select.select(listens, [], [], POLL_SECONDS)
        if ready:
            if os.read(0, 8):
                return {}  # the rank that started this watchdog has initialized MPI, so all ranks have arrived
            listens = []  # the rank that started this watchdog was killed, but other ranks may still be waiting
        arrivals = find_waiting_ranks(folder)
        if not arrivals or time.monotonic() >= due:
            return arrivals


def kill_waiting_ranks(waiting: dict[int, tuple[str, str]], launcher: str) -> None:
    """Kill the waiting ranks, so that the launcher ends the job. If the launcher does not exit, terminate it too."""
    for process, _ in waiting.values():
        _send_signal_if_alive(process, signal.SIGKILL)
    due = time.monotonic() + SECONDS_TO_END
    while "-" in launcher and _is_process_alive(launcher):
        if time.monotonic() > due:
            _send_signal_if_alive(launcher, signal.SIGTERM)
            return
        time.sleep(0.1)


def _send_signal_if_alive(owner: str, number: signal.Signals) -> None:
    """Send signal `number` to the process that `owner` identifies, if that process is still alive."""
    with suppress(OSError):
        if _is_process_alive(owner):
            os.kill(int(owner.partition("-")[0]), number)


def main(folder: str, seconds: str, launcher: str, size: str, local_size: str, keep: str) -> None:
    """Watch the initialization of MPI until it succeeds or times out. If `keep` is "keep", leave the marker files for
    `fsdpx run`, which reads and removes them."""
    missing = wait_and_list_unstarted_ranks(folder, float(seconds))
    if missing:
        sys.stderr.write(describe_missing_ranks(missing, float(seconds), int(size), int(local_size), launcher != "0"))
        sys.stderr.flush()
    if keep != "keep":
        shutil.rmtree(folder, ignore_errors=True)
    elif missing:
        with suppress(OSError):  # the marker already exists, or the folder of the launch was removed
            os.mkdir(os.path.join(folder, TIMED_OUT_MARK), 0o700)
    if missing:
        kill_waiting_ranks(missing, launcher)


if __name__ == "__main__":
    main(*sys.argv[1:])
