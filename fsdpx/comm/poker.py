"""A thread that advances transfers while the rank computes: for machines with a core to spare, and slow networks.

MPI moves most transfers only while it is called, and the engine calls it between actions. The thread calls it
during them. The rank's own thread never calls MPI at the same time, so the library need not allow more than one
caller at once (MPI_THREAD_SERIALIZED)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["EVERY", "Poker"]

EVERY = 200e-6
"""Seconds between pokes."""


class Poker:
    """One per trainer; its thread begins with the first use, sleeps between uses and ends with the process. prepare:
    called in the thread first, to take the GPU of the rank."""

    def __init__(self, prepare: Callable[[], object] = lambda: None) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._poke: Callable[[], object] | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def during(self, poke: Callable[[], object]) -> Iterator[None]:
        """Inside the block the thread calls `poke` repeatedly; an error it meets is raised at the end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fsdpx progress", daemon=True)
            self._thread.start()
        self._poke = poke
        self._wake.set()
        try:
            yield
        finally:
            self._wake.clear()
            with self._lock:  # a poke that has begun ends first
                self._poke = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        self._prepare()
        while True:
            self._wake.wait()
            with self._lock:
                try:
                    if self._poke is not None:
                        self._poke()
                except BaseException as error:
                    self._error, self._poke = error, None
            time.sleep(EVERY)
