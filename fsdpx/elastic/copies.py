"""Snapshots of this rank's state in the memory of other ranks, sent while training goes on."""

from __future__ import annotations

import math
import platform
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from fsdpx.array.arena import ALIGN
from fsdpx.array.namespace import dtype, to_host
from fsdpx.checkpoint.pieces import Held
from fsdpx.checkpoint.state import State
from fsdpx.comm.communicator import Communicator, Handle
from fsdpx.comm.steps import progress_of, spin
from fsdpx.elastic.buddies import buddies
from fsdpx.elastic.descriptors import Descriptor, describe, live
from fsdpx.elastic.recut import let_go
from fsdpx.engine.engine import Engine
from fsdpx.errors import CommTimeout, RankLost
from fsdpx.nn.layer import Spec

__all__ = ["MESSAGE", "Copies", "Generation"]

MESSAGE = 64 << 20
"""Bytes of one message, at most."""


@dataclass(frozen=True)
class Generation:
    """The state after step number `step`, as far as it is in the memory of this rank: its own and that of those whose
    buddy it is. parts: views that are good until the `take` after the next."""

    step: int
    state: State
    parts: list[Held]


class Buffers:
    """Room for one generation. own: this rank's snapshot. kept: rank -> copy of its snapshot."""

    def __init__(self, own: Sequence[Descriptor], kept: dict[int, list[Descriptor]]) -> None:
        self.own = _aligned(_nbytes(own))
        self.kept = {rank: _aligned(_nbytes(parts)) for rank, parts in kept.items()}
        self.mine = _parts(self.own, own)
        self.parts = [*self.mine, *(part for rank, parts in kept.items() for part in _parts(self.kept[rank], parts))]

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + sum(buffer.nbytes for buffer in self.kept.values())


class Copies:
    """Two generations of snapshots. All ranks of `comm` make the same calls in the same order.

    A generation under way is `take`n, arrives, and is the newest complete one when it is `promote`d, which is done
    when all ranks have agreed that theirs has `arrived`. Until then the one before it is complete and untouched, so
    that a death at any time leaves one that all ranks have. Nothing is kept where replicas are copies enough. Idle
    ranks have no state of their own, but keep copies of others'.

    Sends copies x own bytes for every generation; a rank without buddies on other hosts has its copies on its own.
    """

    def __init__(self, comm: Communicator, engine: Engine, copies: int, trains: bool = True) -> None:
        """comm: of its own. engine: of an idle rank, any. copies: of each rank's state. Collective."""
        self._comm, self._engine, self._trains = comm, engine, trains
        self.needed = comm.size > 1 and engine.axes.replica.size <= copies
        """False: every element is on as many other ranks anyway, or there is no other."""
        self.copying = 0.0
        """Seconds that the last `take` took: copying here."""
        self.travelling = 0.0
        """Seconds from the last `take` to the arrival of all it sent and received."""
        self._complete: list[tuple[Buffers, int, State]] = []  # newest first
        self._spare: list[Buffers] = []
        self._under_way: tuple[Buffers, int, State] | None = None
        self._flying: deque[Handle] = deque()
        self._lost: RankLost | None = None  # met when transfers were begun
        weakref.finalize(self, let_go, self._flying)  # MPI may still write what was under way
        self._begun = 0.0
        self._own: list[Descriptor] = []
        self._kept: dict[int, list[Descriptor]] = {}
        self._buddies: tuple[int, ...] = ()
        if self.needed:
            self._own = [describe(part) for part in self._live()]
            everyone = comm.all_gather_object((platform.node(), self._own))
            placed = buddies([host for host, _ in everyone], copies)
            self._buddies = placed[comm.rank]
            self._kept = {rank: everyone[rank][1] for rank in range(comm.size) if comm.rank in placed[rank]}

    @property
    def nbytes(self) -> int:
        """Bytes beside the state, from the second `take` on: 2 x (own + kept), each part on its own cache lines."""
        return 2 * (_nbytes(self._own) + sum(_nbytes(parts) for parts in self._kept.values()))

    @property
    def allocated(self) -> int:
        """Bytes of all buffers that there are now."""
        known = [*self._complete, *([self._under_way] if self._under_way else [])]
        return sum(buffers.nbytes for buffers in [*self._spare, *(buffers for buffers, _, _ in known)])

    def take(self, state: State, step: int | None = None) -> None:
        """Copy this rank's state as it is now, and begin to send it. step: its number, by default that of `state`.

        Returns when the copy is made; the transfers go on in `arrived`, which also tells of ranks that were lost now.
        """
        assert self._under_way is None, "the copies of the last take have not been promoted or abandoned"
        if not self.needed:
            return
        self._begun = perf_counter()
        buffers = self._room()
        for target, source in zip(buffers.mine, self._live(), strict=True):
            assert describe(source) == describe(target)
            target.array[...] = to_host(source.array)
        self._under_way = buffers, state.steps if step is None else step, state
        self.copying = perf_counter() - self._begun
        try:
            for rank, buffer in buffers.kept.items():
                for part in _messages(buffer):
                    self._flying.append(self._comm.recv(part, rank, what=f"the state of rank {rank}"))
            for rank in self._buddies:
                for part in _messages(buffers.own):
                    self._flying.append(self._comm.send(part, rank, what="a copy of the state"))
        except RankLost as error:
            self._lost = error

    def arrived(self) -> bool:
        """Whether all that this rank sends and receives of the generation under way is there; True if none is under
        way. Moves it on, does not wait. RankLost if a rank has died that it needs."""
        if self._lost is not None:
            raise self._lost
        if not self._flying:
            return True
        while self._flying and self._flying[0].test():
            self._flying.popleft()
        if not self._flying:
            self.travelling = perf_counter() - self._begun
        return not self._flying

    def wait(self) -> None:
        """Return when the generation under way has arrived. A wait as others are, which a watchdog sees."""
        timeout = getattr(self._comm, "timeout", math.inf)
        if not spin(self.arrived, progress_of(self._comm), timeout):
            raise CommTimeout(f"the copies of the state have not arrived after {timeout:g} s")

    def promote(self) -> None:
        """The generation under way is complete: all ranks have agreed that theirs has arrived."""
        if not self.needed:
            return
        assert self._under_way is not None, "promote without take"
        assert not self._flying, "promote before all has arrived"
        self._complete.insert(0, self._under_way)
        self._under_way = None

    def generations(self) -> list[Generation]:
        """The complete ones, newest first."""
        return [Generation(step, state, list(buffers.parts)) for buffers, step, state in self._complete]

    def abandon(self) -> None:
        """Forget the generation under way, after a failure and `revoke`. Complete ones stay."""
        over = let_go(self._flying)
        self._flying.clear()
        self._lost = None
        if self._under_way is not None and over:
            self._spare.append(self._under_way[0])
        self._under_way = None

    def trim(self) -> None:
        """Let go of all but the newest complete generation. Others are on the same ranks: whoever dies, none of them is
        whole if that one is not."""
        del self._complete[1:]
        self._spare.clear()

    def close(self) -> None:
        """Nothing is under way any more. Collective."""
        self.abandon()
        self._comm.close()

    def _live(self) -> Iterable[Held]:
        return live(self._engine) if self._trains else ()

    def _room(self) -> Buffers:
        """The oldest of two complete generations gives way."""
        if len(self._complete) == 2:
            return self._complete.pop()[0]
        return self._spare.pop() if self._spare else Buffers(self._own, self._kept)


def _messages(buffer: np.ndarray) -> Iterator[np.ndarray]:
    return (buffer[at : at + MESSAGE] for at in range(0, buffer.size, MESSAGE))


def _size(part: Descriptor) -> int:
    """Bytes of whole cache lines."""
    return -(-part.size * dtype(part.dtype).itemsize // ALIGN) * ALIGN


def _nbytes(parts: Sequence[Descriptor]) -> int:
    return sum(_size(part) for part in parts)


def _aligned(nbytes: int) -> np.ndarray:
    room = np.empty(nbytes + ALIGN, np.uint8)
    first = -room.ctypes.data % ALIGN
    return room[first : first + nbytes]


def _parts(buffer: np.ndarray, parts: Sequence[Descriptor]) -> list[Held]:
    """The parts one after the other, as views of `buffer`."""
    found, at = [], 0
    for part in parts:
        kind = dtype(part.dtype)
        array = buffer[at : at + part.size * kind.itemsize].view(kind)
        found.append(Held(part.name, array, part.start, Spec(part.shape, cut=part.cut), part.rank, part.width))
        at += _size(part)
    return found
