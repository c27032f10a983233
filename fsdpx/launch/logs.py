"""The output of ranks, in a file each, and on the launcher's terminal with the rank before each line."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from fsdpx import files

__all__ = ["Follower", "ask", "asked", "redirect"]

_MARK = "logs"
"""A file in the folder of this start that names the folder for logs. A rank on a host that does not see it prints as
usual: the launcher could not follow a file there."""
_EVERY = 0.1


def ask(run: Path, folder: Path) -> None:
    files.write(run / _MARK, str(folder))


def asked(run: Path) -> Path | None:
    mark = files.believed(run / _MARK)
    return None if mark is None else Path(mark.decode())


def redirect(folder: Path, rank: int) -> None:
    """Append the output of this process and its libraries to the rank's file, line by line."""
    log = files.append(folder / f"rank-{rank:04}.log")
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class Follower:
    """A thread that prints the lines that come to the files of a folder, from now on until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = {path: path.lstat().st_size for path in _logs(folder)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsdpx run logs", daemon=True)
        self._thread.start()

    def close(self, ends: Mapping[int, str]) -> None:
        """Print what is left, lines without an end too, and write how ranks ended."""
        self._stop.set()
        self._thread.join()
        self._print(whole=False)
        for rank, text in ends.items():
            files.write(self.folder / f"rank-{rank:04}.json", text, files.READABLE)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            self._print()

    def _print(self, whole: bool = True) -> None:
        for path in _logs(self.folder):
            at = self._read.get(path, 0)
            try:
                with files.open_file(path) as file:
                    file.seek(at)
                    text = file.read()
            except files.Untrusted as error:
                files.passed_over(error)
                continue
            if whole:
                text = text[: text.rfind(b"\n") + 1]
            self._read[path] = at + len(text)
            rank = int(path.stem.partition("-")[2])
            for line in text.decode(errors="replace").splitlines():
                print(f"[{rank}] {line}", flush=True)


def _logs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank-*.log") if path.stem.partition("-")[2].isdecimal())
