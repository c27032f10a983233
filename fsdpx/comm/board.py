"""The board of a group of ranks on one machine: where each rank writes how far it is, for the others to read.

Rank r writes only its own part, so no lock is needed: a collective with number n is *posted* by a rank when its data
may be read (with a few words that say where they lie), and *finished* when the rank has read what it needs. A fence
orders the words before the number."""

from __future__ import annotations

import numpy as np

from fsdpx.comm.calls import Array
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.host import HostWindow

__all__ = ["LETTER", "SLOTS", "Board"]

SLOTS = 64
"""Collectives in flight at one time; the next one takes the place of the oldest."""
HEAD = 8
"""64-bit words of a record before its payload: posted, finished, and words about the call. One cache line."""
LETTER = 128
"""Bytes that the payload of a record holds at least: what ranks tell each other about a step takes no more."""


class Board:
    """comm: the group; all of it on one machine. Collective to make."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._record = HEAD + -(-max(self.size, LETTER // 8) // HEAD) * HEAD  # a word for each rank, whole cache lines
        self._window = HostWindow(comm, SLOTS * self._record * 8)
        self._bytes = self._window.parts
        self.addresses = self._window.addresses
        self._fence = self._window.fence
        self._words = [memoryview(part.view(np.int64)) for part in self._bytes]
        self._mine = self._words[self.rank]

    def post(self, number: int, words: memoryview | None = None) -> int:
        """Say that this rank's data of a collective may be read, and where they lie (`Place.words`). Returns where the
        record is: bytes from each of `addresses`."""
        at = number % SLOTS * self._record
        mine = self._mine
        if words is not None:
            mine[at + 2 : at + 5] = words
        self._fence()
        mine[at] = number
        return 8 * at

    def posted(self, rank: int, number: int) -> bool:
        if self._words[rank][self._at(number)] < number:
            return False
        self._fence()
        return True

    def words(self, rank: int, number: int, count: int) -> list[int]:
        """The words that a rank gave to `post`."""
        at = self._at(number) + 2
        return self._words[rank][at : at + count].tolist()

    def payload(self, rank: int, number: int) -> Array:
        """The bytes of a record beside its head: written before `post`, or read after it."""
        at = 8 * (self._at(number) + HEAD)
        return self._bytes[rank][at : at + 8 * (self._record - HEAD)]

    def finish(self, number: int) -> None:
        """Say that this rank has read all it needs for a collective."""
        self._fence()
        self._mine[self._at(number) + 1] = number

    def finished(self, rank: int, number: int) -> bool:
        return self._words[rank][self._at(number) + 1] >= number

    def close(self) -> None:
        self._words, self._bytes = [], []
        del self._mine, self._fence
        self._window.free()

    def _at(self, number: int) -> int:
        return number % SLOTS * self._record
