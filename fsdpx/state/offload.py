"""The part of a rank's state on disk between uses: records, each the rows that a slot of programs sees."""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.array.arena import address
from fsdpx.comm.communicator import DONE, Communicator, Handle
from fsdpx.config import Offload
from fsdpx.errors import ConfigError, OffloadError
from fsdpx.program import Slot
from fsdpx.shapes.array import Root
from fsdpx.state.disk import ALIGN, DiskTransfer, File, Rates, Spilled, rates_of, taken
from fsdpx.state.ledger import KINDS, Key, LedgerRow
from fsdpx.state.placement import Placement

__all__ = ["Disk", "open_disk"]


class Disk:
    """Where the rows of that level lie. A record's rows lie behind each other, so one read brings them all.

    file: None in a dry run, which moves nothing."""

    def __init__(self, rows: Sequence[LedgerRow], xp: Any, offload: Offload) -> None:
        self.xp, self.offload = xp, offload
        self.file: File | None = None
        self._unlock: Callable[[], object] | None = None
        self._records: dict[Slot, list[LedgerRow]] = {}
        for row in rows:
            if row.level == "disk":
                self._records.setdefault(Slot(KINDS[row.key.kind].slot, row.key.page), []).append(row)
        self._places: dict[Key, int] = {}
        self.spilled: dict[Slot, int] = {}  # bytes of the activations of the last run
        self._parts: dict[tuple[Slot, int], tuple[int, int]] = {}  # where each part of them lies, and its room
        self._there: dict[Slot, Any] = {}  # the bytes in memory of the records that were fetched
        self.nbytes = 0
        mapped = [row for row in rows if row.level == "map" and row.inside is None]
        for row in (*(row for record in self._records.values() for row in record), *mapped):
            self._places[row.key] = self.nbytes
            self.nbytes += _whole(row.nbytes)

    def open(self, owner: str) -> None:
        """Take the folder and as much of the disk as is needed; OffloadError if that cannot be."""
        folder = Path(self.offload.folder)
        self._unlock = unlock = weakref.finalize(self, os.close, taken(folder, owner))
        unlock.atexit = False
        self.file = File(folder, self.nbytes, self.offload.direct)

    # -- time ----------------------------------------------------------------------------------------------------------

    @cached_property
    def rates(self) -> Rates | None:
        """How fast this disk is, if that can be known; measured when first asked for."""
        return rates_of(Path(self.offload.folder), self.offload.direct)

    @property
    def seconds(self) -> float:
        """For which reads or writes were under way, since the last `reset`."""
        return 0.0 if self.file is None else self.file.watch.seconds

    def reset(self) -> None:
        if self.file is not None:
            self.file.watch.seconds = 0.0

    # -- records -------------------------------------------------------------------------------------------------------

    def size(self, record: Slot) -> int:
        """Bytes of a record on disk."""
        return sum(_whole(row.nbytes) for row in self._records.get(record, ()))

    def buffer_nbytes(self, record: Slot) -> int:
        """Bytes of memory that a record needs while it is there, so that it can begin at a multiple of ALIGN."""
        size = self.size(record)
        return size + ALIGN if size else 0

    def fetch(self, record: Slot, buffer: Any) -> tuple[Handle, Any]:
        """Begin to read a record into `buffer` of `buffer_nbytes`; and its value: the array, or arrays by name."""
        rows, at, arrays = self._records[record], 0, {}
        data = self._there[record] = _aligned(buffer, self.size(record))
        for row in rows:
            arrays[row.key.name] = data[at : at + row.nbytes].view(row.dtype)
            at += _whole(row.nbytes)
        handle = DONE if self.file is None else self.file.read(self._places[rows[0].key], data)
        return handle, arrays.get("", arrays)

    def store(self, record: Slot) -> Handle:
        """Begin to write a record from where it was fetched to."""
        at, data = self._places[self._records[record][0].key], self._there[record]
        return DONE if self.file is None else self.file.write(at, data)

    # -- activations, whose sizes are those of the batch ---------------------------------------------------------------

    def spill(self, slot: Slot, spilled: Spilled) -> Handle:
        """Begin to write the memory of an activation, which is then no more a part of `spilled`."""
        roots, spilled.roots = spilled.roots, []
        places = [self._place(slot, i, nbytes) for i, nbytes in enumerate(spilled.sizes)]
        self.spilled[slot] = sum(spilled.sizes)
        if self.file is None:
            return DONE
        bytes_of = [root.reshape(-1, order="A").view("uint8") for root in roots]
        return _together(self.file.write(at, data) for at, data in zip(places, bytes_of, strict=True))

    def bring(self, slot: Slot, spilled: Spilled) -> tuple[Handle, list[Any]]:
        """Begin to read it into new memory."""
        if self.file is None:
            return DONE, [Root(nbytes) for nbytes in spilled.sizes]
        whole = [_aligned(np.empty(_whole(nbytes) + ALIGN, np.uint8), _whole(nbytes)) for nbytes in spilled.sizes]
        places = [self._place(slot, i, nbytes) for i, nbytes in enumerate(spilled.sizes)]
        return _together(self.file.read(at, data) for at, data in zip(places, whole, strict=True)), whole

    def _place(self, slot: Slot, index: int, nbytes: int) -> int:
        """Where a part of an activation lies: the same place in each step, unless it has grown."""
        at, reserved = self._parts.get((slot, index), (0, 0))
        if nbytes > reserved:
            at = self.nbytes if self.file is None else self.file.extend(_whole(nbytes))
            self.nbytes = at + _whole(nbytes)
            self._parts[slot, index] = at, _whole(nbytes)
        return at

    def mapped(self, row: LedgerRow) -> Any:
        """The array of a row, on disk: see `File.mapped`."""
        if self.file is None:
            return self.xp.empty((row.elements,), dtype=row.dtype)
        return self.file.mapped(self._places[row.key], row.elements, row.dtype)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self._unlock is not None:
            self._unlock()
        self.file = None


def open_disk(placement: Placement, rows: Sequence[LedgerRow], offload: Offload) -> Disk:
    """The disk of `Offload`. Collective: OffloadError on all ranks if one of them cannot have it."""
    disk = Disk(rows, placement.xp, offload)
    if not placement.imaginary:
        _open(disk, offload, placement.axes.world)
    return disk


def _open(disk: Disk, offload: Offload, world: Communicator) -> None:
    if not hasattr(os, "posix_fallocate"):
        raise ConfigError(f"offload={offload!r}: this system cannot set a part of a disk aside; Linux can")
    owner = f"process {os.getpid()} on {platform.node()}, {time.time_ns()}"
    problem, cause = None, None
    try:
        disk.open(world.all_gather_plain(owner)[0])
    except OffloadError as error:
        problem, cause = str(error), error
    for rank, text in enumerate(world.all_gather_plain(problem)):
        if text is not None:
            disk.close()
            who = f"rank {rank}: " if world.size > 1 else ""
            raise OffloadError(f"offload: {who}{text}") from cause


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _aligned(buffer: Any, nbytes: int) -> Any:
    first = -address(buffer) % ALIGN
    return buffer[first : first + nbytes]


def _together(transfers: Iterable[DiskTransfer]) -> DiskTransfer:
    return DiskTransfer([piece for one in transfers for piece in one.left])
