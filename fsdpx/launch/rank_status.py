"""Files through which the ranks of a job report to the launcher: status files, logs, and named pipes that close when a
rank dies."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdpx.core.base import safe_files

__all__ = [
    "LogFollower",
    "RankStatus",
    "open_and_unlink_lifeline_pipe",
    "open_pipe_that_reveals_rank_death",
    "read_log_folder",
    "read_rank_statuses",
    "redirect_output_to_log",
    "write_log_folder_request",
]

_LOG_FOLDER_FILE = "logs"
"""Name of the file that contains the path of the log folder. It is in the folder that belongs to one attempt to run the
job. A rank whose host does not see the file prints as usual, because the launcher could not follow the rank's log
file."""
_POLL_SECONDS = 0.1


def write_log_folder_request(run: Path, folder: Path) -> None:
    """Ask the ranks to write their output to log files in `folder`. The request is a file in `run`, the folder of this
    attempt to run the job."""
    safe_files.write_file(run / _LOG_FOLDER_FILE, str(folder))


def read_log_folder(run: Path) -> Path | None:
    """Return the log folder named in a file that the launcher wrote to `run`, the folder of this attempt to run the
    job. Return None if there is no such file."""
    mark = safe_files.read_if_trusted(run / _LOG_FOLDER_FILE)
    return None if mark is None else Path(mark.decode())


def redirect_output_to_log(folder: Path, rank: int) -> None:
    """Redirect the stdout and stderr of this process, including the output of C libraries, to the end of the rank's log
    file. Output is written line by line."""
    log = safe_files.open_for_append(folder / f"rank-{rank:04}.log")
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class LogFollower:
    """Background thread that prints new lines of all ranks' log files, like `tail -f`, until
    `stop_and_write_rank_statuses` is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = {path: path.lstat().st_size for path in _list_log_files(folder)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow_logs, name="fsdpx run logs", daemon=True)
        self._thread.start()

    def stop_and_write_rank_statuses(self, ends: Mapping[int, str]) -> None:
        """Stop the thread, print all remaining output, and write a file for each rank that tells how the rank ended.
        `ends` maps ranks to the JSON texts of these files."""
        self._stop.set()
        self._thread.join()
        self._print_new_lines(complete_only=False)
        for rank, text in ends.items():
            safe_files.write_file(self.folder / f"rank-{rank:04}.json", text, safe_files.READABLE)

    def _follow_logs(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._print_new_lines()

    def _print_new_lines(self, complete_only: bool = True) -> None:
        """Print the new lines of all log files, each preceded by its rank. With `complete_only`, the last line of a
        file is left for later if it is incomplete."""
        for path in _list_log_files(self.folder):
            at = self._read.get(path, 0)
            try:
                with safe_files.open_file(path) as file:
                    file.seek(at)
                    text = file.read()
            except safe_files.Untrusted as error:
                safe_files.warn_file_ignored(error)
                continue
            if complete_only:
                text = text[: text.rfind(b"\n") + 1]
            self._read[path] = at + len(text)
            rank = int(path.stem.partition("-")[2])
            for line in text.decode(errors="replace").splitlines():
                print(f"[{rank}] {line}", flush=True)


def _list_log_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank-*.log") if path.stem.partition("-")[2].isdecimal())


_MAX_DESCRIPTOR = 4095


@dataclass(frozen=True)
class RankStatus:
    """The content of a rank's status file.

    Attributes
    ----------
    rank, process, host : rank, process id and host name
    status : exit status; None while the rank is running, or if it was killed
    error : type name of the exception that ended the rank, or ""
    listens : whether the script saves a checkpoint when it gets SIGUSR1, as it does inside `Preemption`
    """

    rank: int
    process: int
    host: str
    status: int | None = None
    error: str = ""
    listens: bool = False

    def to_json(self) -> str:
        """Return the status as JSON text."""
        return json.dumps(asdict(self))

    def write_to_folder(self, folder: Path) -> None:
        """Write the status file of this rank to `folder`, the folder of this attempt to run the job."""
        safe_files.make_folder(folder)  # hosts other than the launcher's may lack the folder
        safe_files.write_file(folder / f"rank-{self.rank:05}.json", self.to_json())


def read_rank_statuses(folder: Path) -> dict[int, RankStatus]:
    """Return the status of each rank that has started, as a dict keyed by rank. Invalid files are skipped, with a
    single warning."""
    notes = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            if (data := safe_files.read_if_trusted(path)) is not None:
                note = RankStatus(**safe_files.require_json_fields(safe_files.parse_json(data), _FIELD_TYPES))
                notes[note.rank] = note
        except ValueError as error:
            safe_files.warn_file_ignored(error, path)
    return notes


_FIELD_TYPES = {"rank": int, "process": int, "host": str, "status": (int, type(None)), "error": str, "listens": bool}


def open_pipe_that_reveals_rank_death(folder: Path, rank: int) -> None:
    """Create and open a named pipe that is never written to, so that the launcher notices the death of this process
    before any other process does.

    When a process dies, the kernel closes its files, starting with the highest descriptors, and then reports that the
    process has ended. The pipe has a high descriptor, so it closes before the socket to the MPI launcher, which kills
    the other ranks when that socket closes."""
    if not hasattr(os, "mkfifo"):
        return
    with suppress(OSError):  # the folder may be missing on this host, or its file system may not support named pipes
        path = _get_lifeline_path(folder, rank)
        os.mkfifo(path)
        # The pipe is also opened for reading, so that `open` does not wait for a reader.
        low = os.open(path, os.O_RDWR)
        # The copy is inheritable, so that a program that replaces the script (exec) keeps the pipe open. Forked
        # children close it.
        high = os.dup2(low, min(os.sysconf("SC_OPEN_MAX") - 1, _MAX_DESCRIPTOR))
        os.close(low)
        os.register_at_fork(after_in_child=lambda: _close_descriptor(high))


def open_and_unlink_lifeline_pipe(folder: Path, rank: int) -> int | None:
    """Open and unlink the named pipe of a rank, and return a descriptor that becomes readable when the rank dies.
    Return None if there is no pipe."""
    path = _get_lifeline_path(folder, rank)
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        path.unlink()
        return descriptor
    return None


def _get_lifeline_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.lifeline"


def _close_descriptor(descriptor: int) -> None:
    with suppress(OSError):  # the script may have closed all descriptors, including this one
        os.close(descriptor)
