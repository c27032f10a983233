"""One rank fails, all end: an uncaught exception in any thread is printed once, then MPI aborts."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Protocol

from fsdpx.errors import CommError, DesyncError, FsdpxError, OutOfMemory

__all__ = ["end_all_on_errors"]

_SECONDS_TO_DELIVER = 0.1
_SECONDS_FOR_RANK_0 = 3.0


class Abortable(Protocol):
    """An object that can end all ranks, as communicators can."""

    @property
    def rank(self) -> int: ...

    def abort(self, code: int = 1) -> None: ...


def end_all_on_errors(comm: Abortable) -> None:
    """From now on an uncaught exception in any thread of this process, the first one, ends all ranks, with status 1.

    Without it the other ranks wait for ever: Python ends, and MPI_Finalize of the failed rank waits for them. An error
    that all ranks raise together is printed once: the others leave it to rank 0, which ends them. Installing again,
    with any communicator, only replaces the one that aborts. A child that was
    forked is no rank: there exceptions are Python's."""
    begun, process = threading.Lock(), os.getpid()

    def end(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, thread: str = ""
    ) -> None:
        if os.getpid() != process:
            sys.__excepthook__(kind, error, trace)  # type: ignore[arg-type]
            sys.stderr.flush()
            os._exit(1)  # Python's own way out would finalize MPI, and wait there
        elif begun.acquire(blocking=False):
            sys.stdout.flush()
            if comm.rank > 0 and _alike(error):
                time.sleep(_SECONDS_FOR_RANK_0)
            sys.stderr.write(report(comm.rank, kind, error, trace, thread))
            sys.stderr.flush()
            time.sleep(_SECONDS_TO_DELIVER)  # the launcher forwards output in a process that abort will kill
            comm.abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != process:
            threading.__excepthook__(args)
        elif not issubclass(args.exc_type, SystemExit):  # which ends a thread quietly, as in Python itself
            name = args.thread.name if args.thread is not None else "unknown"
            end(args.exc_type, args.exc_value, args.exc_traceback, name)

    sys.excepthook, threading.excepthook = end, in_thread


def _alike(error: BaseException | None) -> bool:
    """Whether other ranks are likely to raise the same: what is wrong with choices, batches and calls is checked or
    agreed on by all of them."""
    return isinstance(error, DesyncError) or (
        isinstance(error, FsdpxError) and not isinstance(error, CommError | OutOfMemory)
    )


def report(
    rank: int, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, thread: str = ""
) -> str:
    """The traceback, every line in its place, under a head that names rank and host."""
    head = f"[rank {rank}/{platform.node()}]" + (f" in thread {thread}" if thread else "")
    return f"{head} {''.join(traceback.format_exception(kind, error, trace))}"
