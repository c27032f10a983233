"""Work in a process of its own, for what it would leave in this one.

PyTorch's exporter imports some 1,200 modules, its compiler and a computer algebra system among them: about 100 MiB that
every rank would keep and never need again. A child process that has this one's memory does it, and gives back a
description of a few KiB."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from fsdpx.interop.described import ModuleLayout, dumped, loaded

__all__ = ["PATIENCE", "apart"]

PATIENCE = 600.0
"""Seconds for the child; after that this process does its work."""
QUIET = {"fsdpx watchdog", "fsdpx progress"}
"""Threads of this process that hold no lock which PyTorch asks for."""
GIVEN = b"."  # the last byte of a whole result


def apart(work: Callable[[], ModuleLayout]) -> ModuleLayout:
    """work(), done by a child process where that is safe, and here if the child gave no result for whatever reason:
    what went wrong is then raised by the same work in this process."""
    return _by_child(work) or work()


def _by_child(work: Callable[[], ModuleLayout]) -> ModuleLayout | None:
    others = {thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}
    if not hasattr(os, "fork") or others - QUIET or torch.cuda.is_initialized():
        return None  # another thread may hold a lock that the child would wait for, and CUDA's state is not inherited
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python's, of threads that are not its own: those of libraries compute, and the child does not ask them to.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _give(writer, work)
    os.close(writer)
    text = _read(reader, time.monotonic() + PATIENCE)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):  # a program that ignores SIGCHLD has no children to wait for
        os.waitpid(child, 0)
    return loaded(text[:-1]) if text[-1:] == GIVEN else None


def _give(writer: int, work: Callable[[], ModuleLayout]) -> Any:
    """The child's life: it ends here, without what Python and libraries do at the end of a process."""
    status = 1
    try:
        torch.set_num_threads(1)  # the parent's threads are not here, and waiting for them never ends
        with os.fdopen(writer, "wb") as out:
            out.write(dumped(work()) + GIVEN)
        status = 0
    finally:
        os._exit(status)


def _read(reader: int, until: float) -> bytes:
    parts = list[bytes]()
    with os.fdopen(reader, "rb", buffering=0) as given:
        while (left := until - time.monotonic()) > 0:
            if select.select([given], [], [], left)[0]:
                parts.append(given.read(1 << 20) or b"")
                if not parts[-1]:
                    break
    return b"".join(parts)
