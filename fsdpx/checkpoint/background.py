"""A save that goes on in a thread of each rank while training does: no thread talks to another rank but by files."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.array.namespace import to_host
from fsdpx.checkpoint.commit import alone, in_words, together
from fsdpx.checkpoint.disk import opened, write_at
from fsdpx.checkpoint.save import Prepared
from fsdpx.checkpoint.write import SUMS, write
from fsdpx.errors import CheckpointError
from fsdpx.files import read_json
from fsdpx.state.state import TrainState

__all__ = ["Background"]

POLL = 0.01  # seconds between rank 0's looks at what the others have done
GRACE = 10.0  # seconds that the others have when the main program has ended


class Background:
    """A save under way. What this rank writes is copied at once; the rest is the thread's. Rank 0's commits when all
    ranks have left their sums in the folder, so that the checkpoint is whole without another call to the trainer."""

    def __init__(self, state: TrainState, prepared: Prepared) -> None:
        self.world, self.prepared = state.placement.axes.world, prepared
        self._copies = [replace(piece, array=np.array(to_host(piece.array))) for piece in prepared.pieces(state)]
        self._problem: str | None = None
        self._ended: str | None = None  # why the commit failed
        self._wrote, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fsdpx save (rank {self.world.rank})")
        self._thread.start()

    def wait(self) -> None:
        """Return when the checkpoint is whole; CheckpointError, the same on all ranks, if it cannot be. Collective."""
        where = self.prepared.where
        try:
            together(self.world, where, self._demand_written)
            alone(self.world, where, self._demand_committed)
        except BaseException:
            self._stopped.set()
            self._thread.join()
            self.prepared.abandon()
            raise

    def abandon(self) -> None:
        """Another rank has died: no rank will find it whole. What was there before stays."""
        self._stopped.set()
        self._thread.join()
        self.prepared.abandon()

    def _demand_written(self) -> None:
        self._wrote.wait()
        if self._problem is not None:
            raise CheckpointError(self._problem)

    def _demand_committed(self) -> None:
        self._thread.join()
        if self._ended is not None:
            raise CheckpointError(self._ended)

    def _run(self) -> None:
        prepared, rank = self.prepared, self.world.rank
        try:
            sums = write(prepared.folder, prepared.plan, self._copies)
            self._copies = []
            if rank > 0:
                _leave(prepared.folder, rank, sums)
        except BaseException as error:
            self._problem = in_words(error)
        self._wrote.set()
        if rank > 0 or self._problem is not None:
            return
        try:
            total = self._everyone(sums)
            if total is not None:
                prepared.finish(total)
        except BaseException as error:
            self._ended = in_words(error)

    def _everyone(self, sums: np.ndarray) -> np.ndarray | None:
        """All ranks' sums together; None if one of them says that it cannot write."""
        end = math.inf
        for rank in range(1, self.world.size):
            path = _place(self.prepared.folder, rank)
            while not path.exists():
                if end == math.inf and not threading.main_thread().is_alive():
                    end = time.monotonic() + GRACE
                if self._stopped.is_set() or time.monotonic() > end:
                    return None
                time.sleep(POLL)
            sums = sums ^ np.array(read_json(path, ours=False), np.uint64)
            path.unlink()
        return sums


def _leave(folder: Path, rank: int, sums: np.ndarray) -> None:
    """Seen by rank 0 when it is whole."""
    place = _place(folder, rank)
    unseen: Any = place.with_name(place.name + "-unseen")
    unseen.touch()
    with opened(unseen, writing=True) as fd:
        write_at(fd, json.dumps(sums.tolist()).encode(), 0)
    unseen.rename(place)


def _place(folder: Path, rank: int) -> Path:
    return folder / f"{SUMS}{rank}"
