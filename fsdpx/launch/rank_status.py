"""What ranks of a job leave for the launcher: notes and logs."""

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
    "get_log_folder",
    "hold_lifeline",
    "open_lifeline",
    "read_statuses",
    "redirect_output",
    "request_logs",
]

_MARK = "logs"
"""A file in the folder of this start that names the folder for logs. A rank on a host that does not see it prints as
usual: the launcher could not follow a file there."""
_POLL_SECONDS = 0.1


def request_logs(run: Path, folder: Path) -> None:
    safe_files.write_file(run / _MARK, str(folder))


def get_log_folder(run: Path) -> Path | None:
    mark = safe_files.read_if_trusted(run / _MARK)
    return None if mark is None else Path(mark.decode())


def redirect_output(folder: Path, rank: int) -> None:
    """Append the output of this process and its libraries to the rank's file, line by line."""
    log = safe_files.open_for_append(folder / f"rank-{rank:04}.log")
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class LogFollower:
    """A thread that prints the lines that come to the files of a folder, from now on until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = {path: path.lstat().st_size for path in _list_logs(folder)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow_logs, name="fsdpx run logs", daemon=True)
        self._thread.start()

    def close(self, ends: Mapping[int, str]) -> None:
        """Print what is left, lines without an end too, and write how ranks ended."""
        self._stop.set()
        self._thread.join()
        self._print_new_lines(whole=False)
        for rank, text in ends.items():
            safe_files.write_file(self.folder / f"rank-{rank:04}.json", text, safe_files.READABLE)

    def _follow_logs(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._print_new_lines()

    def _print_new_lines(self, whole: bool = True) -> None:
        for path in _list_logs(self.folder):
            at = self._read.get(path, 0)
            try:
                with safe_files.open_file(path) as file:
                    file.seek(at)
                    text = file.read()
            except safe_files.Untrusted as error:
                safe_files.warn_ignored(error)
                continue
            if whole:
                text = text[: text.rfind(b"\n") + 1]
            self._read[path] = at + len(text)
            rank = int(path.stem.partition("-")[2])
            for line in text.decode(errors="replace").splitlines():
                print(f"[{rank}] {line}", flush=True)


def _list_logs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank-*.log") if path.stem.partition("-")[2].isdecimal())


_HIGHEST = 4095


@dataclass(frozen=True)
class RankStatus:
    """status: the exit status, None while the rank runs or if it was killed. error: the type of its exception. listens:
    whether the script reacts to USR1, as it does within `Preemption`."""

    rank: int
    process: int
    host: str
    status: int | None = None
    error: str = ""
    listens: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def write_to(self, folder: Path) -> None:
        safe_files.make_folder(folder)  # on other hosts it may not exist
        safe_files.write_file(folder / f"rank-{self.rank:05}.json", self.to_json())


def read_statuses(folder: Path) -> dict[int, RankStatus]:
    """The notes of all ranks that have begun. What is no note is passed over with one warning."""
    notes = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            data = safe_files.read_if_trusted(path)
            note = None if data is None else RankStatus(**safe_files.check_fields(safe_files.parse_json(data), _KINDS))
        except ValueError as error:
            safe_files.warn_ignored(error, path)
            continue
        if note is not None:
            notes[note.rank] = note
    return notes


_KINDS = {"rank": int, "process": int, "host": str, "status": (int, type(None)), "error": str, "listens": bool}


def hold_lifeline(folder: Path, rank: int) -> None:
    """Open a named pipe that is never written to: it closes when this process dies, before any other process can know.

    A dying process closes its files, those with the highest descriptors first; then the kernel reports its end. A
    launcher that sees the process's socket close, and kills the others, comes after this pipe for sure."""
    if not hasattr(os, "mkfifo"):
        return
    with suppress(OSError):  # the folder of another host, or a file system without pipes
        path = _get_lifeline_path(folder, rank)
        os.mkfifo(path)
        low = os.open(path, os.O_RDWR)  # it does not wait for a reader
        # Another program that the script becomes (exec) is the same rank, children (fork) are not.
        high = os.dup2(low, min(os.sysconf("SC_OPEN_MAX") - 1, _HIGHEST))
        os.close(low)
        os.register_at_fork(after_in_child=lambda: _close_descriptor(high))


def open_lifeline(folder: Path, rank: int) -> int | None:
    """A descriptor that has an event when the rank's pipe closes; None if there is no pipe. Its name goes."""
    path = _get_lifeline_path(folder, rank)
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        path.unlink()
        return descriptor
    return None


def _get_lifeline_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.lifeline"


def _close_descriptor(descriptor: int) -> None:
    with suppress(OSError):  # the script has closed it
        os.close(descriptor)
