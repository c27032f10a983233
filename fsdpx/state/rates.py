"""How fast a disk reads and writes what lies in one piece: measured once for each, then known."""

from __future__ import annotations

import math
import platform
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fsdpx import environment
from fsdpx.array.arena import address
from fsdpx.errors import OffloadError
from fsdpx.files import typed
from fsdpx.state import records
from fsdpx.state.disk import ALIGN, File

__all__ = ["Rates", "rates_of"]

BYTES = 64 << 20
"""As many are written and read."""


class Rates(NamedTuple):
    """Bytes per second."""

    read: float
    written: float

    def seconds(self, read: int, written: int) -> float:
        """The time to read `read` bytes and then write `written`."""
        return read / self.read + written / self.written


def rates_of(folder: Path, direct: bool | None) -> Rates | None:
    """Of the disk of a folder, in the pieces in which rows are moved; None where that cannot be known: the folder is
    missing or full, or nothing is to be measured (FSDPX_TUNE=0)."""
    if not folder.is_dir():
        return None
    settings = environment.read()
    key = {"machine": platform.node(), "device": folder.stat().st_dev, "direct": direct is not False}
    known = records.read("disk", key, _of_record, times=settings.tune)
    if known is not None and not settings.retune:
        return known
    if not settings.tune:
        return None
    busy = records.load()
    try:
        found = _measured(folder, direct)
    except OffloadError:
        return None
    records.write("disk", key, found._asdict(), busy)
    return found


def _of_record(value: dict[str, Any]) -> Rates:
    found = Rates(**typed(value, {"read": float, "written": float}))
    if not all(0 < rate < math.inf for rate in found):
        raise ValueError("a rate is no number of bytes per second")
    return found


def _measured(folder: Path, direct: bool | None) -> Rates:
    memory = np.zeros(BYTES + ALIGN, np.uint8)
    start = -address(memory) % ALIGN
    data, file = memory[start : start + BYTES], File(folder, BYTES, direct)
    try:
        file.write(0, data).wait()  # the first time a disk sets blocks aside
        seconds = []
        for move in (file.read, file.write):
            begin = perf_counter()
            move(0, data).wait()
            seconds.append(perf_counter() - begin)
        return Rates(*(BYTES / one for one in seconds))
    finally:
        file.close()
