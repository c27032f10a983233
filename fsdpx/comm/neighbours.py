"""The ranks of a group on one machine, and where they meet: numbered calls on a board, arrays in windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fsdpx.comm.board import SLOTS, Board
from fsdpx.comm.calls import Array, Call, Handle
from fsdpx.comm.carrier import Carrier
from fsdpx.comm.host import Host, WindowAddress
from fsdpx.comm.meeting import Meeting
from fsdpx.comm.steps import spin
from fsdpx.errors import CommTimeout

__all__ = ["Neighbours"]


class Neighbours:
    """ranks: those of `comm` on this machine, this rank being number `lane` of them. latest: for each place on the
    board, the call that has it. Collective over `comm`: `number` tells the machines apart."""

    def __init__(self, comm: Carrier, host: Host, ranks: list[int], number: int) -> None:
        self.rank, self.size, self.timeout, self.progress = comm.rank, comm.size, comm.timeout, comm.progress
        self.host = host
        self.ranks = ranks
        self.lane = ranks.index(comm.rank)
        self.others = [index for index in range(len(ranks)) if index != self.lane]
        local = comm if len(ranks) == comm.size else comm.split(number, comm.rank)
        assert local is not None
        self.board = Board(local)
        if local is not comm:
            local.close()
        self.latest: list[Any] = [None] * SLOTS
        self._number = 0

    def reserve(self, call: object = "a call") -> int:
        """The number of a meeting: taken when a call is issued, in one order on all ranks, however late it meets."""
        self._number = number = self._number + 1
        slot, latest = number % SLOTS, self.latest
        if latest[slot] is not None:
            self._wait_for_place(slot)
        latest[slot] = call
        return number

    def _wait_for_place(self, slot: int) -> None:
        free = partial(self._free, slot)
        if not free() and not spin(free, self.progress, self.timeout):
            raise CommTimeout(f"{self.latest[slot]}: {SLOTS} meetings later, not all ranks have taken part")

    def _free(self, slot: int) -> bool:
        """Whether the place on the board can be used again: all have read what was there."""
        latest = self.latest[slot]
        return latest is None or (not isinstance(latest, str) and latest.free())

    def sync(self, number: int, call: Call) -> Handle:
        """A meeting without work: complete when all have come."""
        self.board.post(number)
        return self._meet(number, call, held=False)

    def meet(
        self, number: int, place: WindowAddress | None, call: Call, work: Callable[[], None], **terms: Any
    ) -> Handle:
        """Post where an array lies, None if the payload says all; `work` when all have done so, complete when all have
        finished theirs."""
        self.board.post(number, None if place is None else place.words)
        return self._meet(number, call, work, **terms)

    def _meet(self, number: int, call: Call, work: Callable[[], None] | None = None, **terms: Any) -> Meeting:
        meeting = Meeting(self, number, call, work, **terms)
        self.latest[number % SLOTS] = meeting
        return meeting

    def peer(self, index: int, number: int, start: int, size: int, dtype: np.dtype) -> Array:
        """A slice of the array that rank `index` of the machine posted."""
        return self.host.view(self.board.words(index, number, 3), start, size, dtype)

    def sources(self, number: int, own: Array, start: int) -> list[Array]:
        """The slice of every rank that begins at `start` and is as long as `own`, in rank order."""
        count = range(len(self.ranks))
        return [own if i == self.lane else self.peer(i, number, start, own.size, own.dtype) for i in count]

    def payload(self, index: int, number: int) -> Array:
        """Words that rank `index` of the machine gives with its post: one for each rank, or the bytes of a letter."""
        return self.board.payload(index, number).view(np.int64)

    def copy_pieces(self, number: int, pieces: Sequence[tuple[int, Array, int]]) -> None:
        """Read each array of (index, array, start) from where rank `index` has posted."""
        for index, array, start in pieces:
            array[...] = self.peer(index, number, start, array.size, array.dtype)
