"""`fsdpx run --join FOLDER -n K`: add ranks to a running job.

The requesting process writes a file into the folder of the job, and the job's launcher answers with another file. MPI
libraries cannot add processes to a running job that tolerates the death of ranks. Therefore the running ranks save a
checkpoint, and the job is restarted with more ranks."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsdpx.core.base import safe_files
from fsdpx.errors import LaunchError
from fsdpx.launch.rank_status import read_rank_statuses

__all__ = ["JoinRequests", "request_more_ranks"]

_REQUEST_PREFIX, _ANSWER_PREFIX, _REFUSAL_PREFIX = "joins-", "answer-", "no: "
_POLL_SECONDS = 0.5


def request_more_ranks(folder: Path, ranks: int, seconds: float) -> str:
    """Ask the launcher of a running job for `ranks` more ranks, and return its answer. Raise LaunchError if the
    launcher refuses or does not answer.

    `folder` is the --folder of the job. `seconds` is how long to wait for the answer; the launcher answers only once a
    rank of the job is ready to save a checkpoint."""
    if ranks < 1:
        raise LaunchError(f"--join -n {ranks}: one or more is needed")
    if not folder.is_dir():
        raise LaunchError(f"--join {folder}: there is no such folder; it is what --folder was when the job was started")
    name = f"{platform.node()}-{os.getpid()}"
    asks, answer = folder / f"{_REQUEST_PREFIX}{name}", folder / f"{_ANSWER_PREFIX}{name}"
    end = time.monotonic() + seconds
    try:
        safe_files.write_file(asks, str(ranks))
        while (reply := safe_files.read_if_trusted(answer)) is None:
            if time.monotonic() > end:
                raise LaunchError(
                    f"--join {folder}: no answer for {seconds:g} s: no fsdpx run --folder {folder} runs there, or none "
                    "of its ranks on the launcher's host saves when it is asked to stop (fit(..., checkpoints=...))"
                )
            time.sleep(0.1)
    finally:
        for file in (asks, answer):
            with suppress(OSError):  # the file may be gone already, or belong to another user
                file.unlink()
    text = reply.decode(errors="replace")
    if text.startswith(_REFUSAL_PREFIX):
        raise LaunchError(f"--join {folder}: {text.removeprefix(_REFUSAL_PREFIX)}")
    return text


class JoinRequests:
    """Handles requests to add ranks to a job. It runs in the job's launcher. The attribute `accepted_ranks` is the
    number of ranks that will join at the next restart."""

    def __init__(self, folder: Path, fits: Callable[[int], object]) -> None:
        """Discard old requests in `folder`, the job's --folder. `fits` is a function that raises LaunchError if the
        launcher has no slots for the given number of additional ranks."""
        self.accepted_ranks = 0
        self._folder, self._fits, self._due = folder, fits, 0.0
        for left in folder.glob(f"{_REQUEST_PREFIX}*"):
            with suppress(OSError):  # the file may be gone already, or belong to another user
                left.unlink()

    def answer_and_request_save(self, notes: Path) -> None:
        """If no rank of the job handles the signal to save a checkpoint, leave new requests for a later call. Otherwise
        answer the requests and, if any were accepted, send the signal to the rank that handles it. This method is cheap
        enough to be called often.

        `notes` is the folder with the status files of the ranks."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _POLL_SECONDS
        asking = list(self._folder.glob(f"{_REQUEST_PREFIX}*"))
        listener = _find_process_handling_save_signal(notes) if asking else None
        if listener is None:
            return
        for asks in asking:
            self._answer_request(asks)
        if self.accepted_ranks:
            with suppress(ProcessLookupError):
                os.kill(listener, signal.SIGUSR1)

    def pop_accepted_rank_count(self) -> int:
        """Return the number of ranks that were accepted since the previous call, and reset the count to 0."""
        came, self.accepted_ranks = self.accepted_ranks, 0
        return came

    def refuse_open_requests(self) -> None:
        """Refuse all unanswered requests, because the job has ended."""
        for asks in self._folder.glob(f"{_REQUEST_PREFIX}*"):
            if safe_files.read_if_trusted(asks) is not None:
                self._replace_request_by_answer(asks, f"{_REFUSAL_PREFIX}the job has ended")

    def _answer_request(self, asks: Path) -> None:
        """Accept or refuse the request in the file `asks`. A request from another user is ignored, with a single
        warning."""
        text = safe_files.read_if_trusted(asks)
        if text is None:  # the requesting process has given up, or belongs to another user
            return
        more = int(text) if len(text) < 10 and text.isdigit() else 0
        if not more:
            self._replace_request_by_answer(asks, f"{_REFUSAL_PREFIX}{text[:80]!r} is no number of ranks")
            return
        try:
            self._fits(self.accepted_ranks + more)
        except LaunchError as error:
            self._replace_request_by_answer(asks, f"{_REFUSAL_PREFIX}{error}")
        else:
            self.accepted_ranks += more
            self._replace_request_by_answer(asks, f"the job saves and goes on with {more} more")

    def _replace_request_by_answer(self, asks: Path, text: str) -> None:
        """Delete the request file `asks`, and write the answer `text` to the corresponding answer file."""
        with suppress(OSError):  # the requesting process may have removed the file
            asks.unlink()
            safe_files.write_file(asks.with_name(asks.name.replace(_REQUEST_PREFIX, _ANSWER_PREFIX, 1)), text)


def _find_process_handling_save_signal(notes: Path) -> int | None:
    """Return the process id of a rank on this host that saves a checkpoint when it gets SIGUSR1, as a script does
    inside a `Preemption` block. Return None if there is none.

    Ranks that do not handle the signal would be killed by it. A single rank that handles the signal is enough, because
    this rank makes all ranks save."""
    here = (n for n in read_rank_statuses(notes).values() if n.host == platform.node())
    return next((note.process for note in here if note.listens and note.status is None), None)
