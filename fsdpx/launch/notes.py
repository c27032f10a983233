"""Notes about a rank in the folder of its start, for `fsdpx run`: that it has begun, how it ended, when it died."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdpx import files

__all__ = ["Note", "hold_lifeline", "open_lifeline", "read_notes"]

_HIGHEST = 4095


@dataclass(frozen=True)
class Note:
    """status: the exit status, None while the rank runs or if it was killed. error: the type of its exception. listens:
    whether the script reacts to USR1, as it does within `Preemption`."""

    rank: int
    process: int
    host: str
    status: int | None = None
    error: str = ""
    listens: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))

    def write(self, folder: Path) -> None:
        files.folder(folder)  # on other hosts it may not exist
        files.write(folder / f"rank-{self.rank:05}.json", self.text())


def read_notes(folder: Path) -> dict[int, Note]:
    """The notes of all ranks that have begun. What is no note is passed over with one warning."""
    notes = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            data = files.believed(path)
            note = None if data is None else Note(**files.typed(files.parse_json(data), _KINDS))
        except ValueError as error:
            files.passed_over(error, path)
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
        path = _lifeline(folder, rank)
        os.mkfifo(path)
        low = os.open(path, os.O_RDWR)  # it does not wait for a reader
        # Another program that the script becomes (exec) is the same rank, children (fork) are not.
        high = os.dup2(low, min(os.sysconf("SC_OPEN_MAX") - 1, _HIGHEST))
        os.close(low)
        os.register_at_fork(after_in_child=lambda: _close(high))


def open_lifeline(folder: Path, rank: int) -> int | None:
    """A descriptor that has an event when the rank's pipe closes; None if there is no pipe. Its name goes."""
    path = _lifeline(folder, rank)
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        path.unlink()
        return descriptor
    return None


def _lifeline(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.lifeline"


def _close(descriptor: int) -> None:
    with suppress(OSError):  # the script has closed it
        os.close(descriptor)
