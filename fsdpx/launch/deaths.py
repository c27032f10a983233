"""In which order the ranks of this host end, as `fsdpx run` sees it from outside."""

from __future__ import annotations

import math
import os
import platform
import select
import threading
import time
from pathlib import Path

from fsdpx.comm.mpi.start import waiting
from fsdpx.launch.notes import open_lifeline, read_notes

__all__ = ["Deaths"]

_SECONDS_IN_VAIN = 2.0
"""Seconds that ranks may wait in MPI's start for one that has ended before the job is ended."""


class Deaths:
    """A thread that records in which order the ranks of this host end: the first one makes the others fail.

    It need not be quick: epoll returns descriptors in the order in which they became ready. A rank's lifeline is ready
    before a launcher can know of its death and kill the others. The process itself, which is ready only afterwards, is
    looked at too: where there are no named pipes, or a child of the rank has kept one open.

    Attributes
    ----------
    order: the ranks that have ended.
    missed: those that had ended before they were looked at.
    in_vain: set when others wait in MPI's start for one that has ended."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.order: list[int] = []
        self.missed: list[int] = []
        self.in_vain = threading.Event()
        self._folder, self._ranks, self._host = folder, ranks, platform.node()
        self._stop = threading.Event()
        self._living: dict[int, int] = {}  # descriptor of a process or of its lifeline -> rank
        self._thread = threading.Thread(target=self._run, name="fsdpx run", daemon=True)
        if hasattr(os, "pidfd_open") and hasattr(select, "epoll"):
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        known: set[int] = set()
        since = math.inf  # when a rank was first seen to wait in vain
        with select.epoll() as deaths:
            while not self._stop.is_set():
                notes = read_notes(self._folder) if len(known) < self._ranks and not self.order else {}
                for rank in notes.keys() - known:
                    known.add(rank)
                    if notes[rank].host == self._host:
                        self._look_at(rank, notes[rank].process, deaths)
                for descriptor, _ in deaths.poll(0.1):
                    deaths.unregister(descriptor)
                    rank = self._living.pop(descriptor)
                    os.close(descriptor)
                    if rank not in self.order:
                        self.order.append(rank)
                now = time.monotonic()
                since = min(since, now) if (self.order or self.missed) and waiting(self._folder) else math.inf
                if now - since >= _SECONDS_IN_VAIN:
                    self.in_vain.set()
        for descriptor in self._living:
            os.close(descriptor)

    def _look_at(self, rank: int, process: int, deaths: select.epoll) -> None:
        try:
            descriptor = os.pidfd_open(process)
        except OSError:
            self.missed.append(rank)
            return
        for ready in (descriptor, open_lifeline(self._folder, rank)):
            if ready is not None:
                self._living[ready] = rank
                deaths.register(ready, select.EPOLLIN)
