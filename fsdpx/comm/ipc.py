"""Messages of arrays of GPUs between processes of one host, from GPU to GPU: in chunks, through memory that the sender
has exported (CUDA IPC).

The hosts keep the order. Once the event after the copy has come, the rank that copied a chunk into a slot sends the
other a note; the rank that copied it out reports in the same way that the slot is free. So no stream of one process
waits for one of another, and the carrier moves notes of a few bytes only."""

from __future__ import annotations

import os
import platform
from collections import deque
from itertools import combinations
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from fsdpx import environment
from fsdpx.comm.calls import Array, Call, Handle
from fsdpx.comm.carrying import Carrying, inside
from fsdpx.comm.communicator import Communicator
from fsdpx.cuda import ipc
from fsdpx.cuda.devices import on
from fsdpx.cuda.streams import Side
from fsdpx.errors import ConfigError

__all__ = ["CHUNK", "SLOTS", "Desk", "PeerExchange", "Reach", "reach", "settle"]

CHUNK, SLOTS = 4 << 20, 4
"""Bytes of a slot, and slots of an array that is sent."""
FULL, FREE = 1, 2
NOTE = np.dtype([("kind", "u1"), ("slot", "u1"), ("number", "u8"), ("handle", "u1", ipc.HANDLE_BYTES)])
PROBED = 4096  # bytes

_slabs: dict[int, deque[ipc.Slab]] = {}
"""By GPU, those that no message uses. They are kept: others may have them open."""


class Desk:
    """Takes the notes that one rank sends under one tag, and gives them to the messages that they are about. Messages
    are counted on both sides: those of one tag come in order. expected: notes that have still to come for those that
    this rank has begun; others come early and are kept."""

    def __init__(self) -> None:
        self.sending, self.receiving = dict[int | None, PeerExchange](), dict[int | None, PeerExchange]()
        self.sent = self.received = self.expected = 0
        self._early: dict[int, list[tuple[int, bytes]]] = {}
        self._heard: tuple[Handle, np.ndarray] | None = None

    def send(self, message: PeerExchange, chunks: int) -> int:
        """Expect a note for each chunk; the number of the message."""
        number, self.sent = self.sent, self.sent + 1
        self.sending[number] = message
        self.expected += chunks
        return number

    def receive(self, message: PeerExchange, chunks: int) -> int:
        """Expect the chunks that have not come early."""
        number, self.received = self.received, self.received + 1
        self.receiving[number] = message
        early = self._early.pop(number, [])
        self.expected += chunks - len(early)
        for slot, handle in early:
            message.fetch(slot, handle)
        return number

    def listen(self, notes: Carrying, call: Call, rank: int) -> None:
        while self.expected:
            if self._heard is None:
                note = np.zeros(1, NOTE)
                self._heard = notes.exchange(call, [], [(rank, note.view(np.uint8))]), note
            if not self._heard[0].test():
                return
            (kind, slot, number, handle), self._heard = self._heard[1][0].tolist(), None
            if kind == FULL and number not in self.receiving:
                self._early.setdefault(number, []).append((slot, bytes(handle)))
                continue
            self.expected -= 1
            if kind == FREE:
                self.sending[number].free.append(slot)
            else:
                self.receiving[number].fetch(slot, bytes(handle))


_desks: WeakKeyDictionary[Any, dict[tuple[int, int], Desk]] = WeakKeyDictionary()
"""By communicator of notes, then by rank and tag."""


class PeerExchange:
    """The message to a rank, and the one from it, of one call; `outgoing` or `incoming` may be None. Every chunk is one
    note from the sender and one back. free: slots. A handle."""

    def __init__(
        self, notes: Carrying, call: Call, rank: int, side: Side, outgoing: Array | None, incoming: Array | None
    ) -> None:
        self._notes, self._call, self._rank, self._side = notes, call, rank, side
        self._chunks, self._awaited = _cut(outgoing), _cut(incoming)
        self._leaving, self._landing = deque[tuple[Handle, int]](), deque[tuple[Handle, int]]()
        self._notes_sent: list[Handle] = []
        self.free = list(range(SLOTS))
        self._slab = _taken(outgoing) if self._chunks else None
        self._desk = _desks.setdefault(notes, {}).setdefault((rank, call.tag), Desk())
        self._out = self._desk.send(self, len(self._chunks)) if self._chunks else None
        self._in = self._desk.receive(self, len(self._awaited)) if self._awaited else None

    def test(self) -> bool:
        """Take all steps that can be taken; True when both messages are there and all slots are free again."""
        self._desk.listen(self._notes, self._call, self._rank)
        while self._chunks and self.free:
            slot, chunk = self.free.pop(), self._chunks.popleft()
            self._leaving.append((self._copy(self._own.address, slot, chunk, inward=False), slot))
        while self._leaving and self._leaving[0][0].test():
            self._tell(FULL, self._leaving.popleft()[1], self._out, self._own.handle)
        while self._landing and self._landing[0][0].test():
            self._tell(FREE, self._landing.popleft()[1], self._in, bytes(ipc.HANDLE_BYTES))
        self._notes_sent = [handle for handle in self._notes_sent if not handle.test()]
        under_way = self._chunks or self._awaited or self._leaving or self._landing or self._notes_sent
        if under_way or (self._slab is not None and len(self.free) < SLOTS):
            return False
        self._end()
        return True

    def fetch(self, slot: int, handle: bytes) -> None:
        """The next chunk is in this slot of the other rank's."""
        self._landing.append((self._copy(ipc.opened(handle), slot, self._awaited.popleft(), inward=True), slot))

    @property
    def _own(self) -> ipc.Slab:
        assert self._slab is not None
        return self._slab

    def _copy(self, address: int, slot: int, chunk: Array, inward: bool) -> Handle:
        with on(chunk):
            return self._side.across(address + slot * CHUNK, chunk, inward)

    def _tell(self, kind: int, slot: int, number: int | None, handle: bytes) -> None:
        note = np.array([(kind, slot, number, np.frombuffer(handle, np.uint8))], NOTE)
        self._notes_sent.append(self._notes.exchange(self._call, [(self._rank, note.view(np.uint8))], []))

    def _end(self) -> None:
        """Give back what others may use."""
        if self._slab is not None:
            _slabs.setdefault(self._slab.gpu, deque()).append(self._slab)
            self._slab = None
        self._desk.sending.pop(self._out, None)
        self._desk.receiving.pop(self._in, None)


def _cut(array: Array | None) -> deque[Array]:
    if array is None:
        return deque()
    data = array.view("uint8")
    return deque(data[start : start + CHUNK] for start in range(0, data.size, CHUNK))


def _taken(array: Array) -> ipc.Slab:
    """Slots that no other message uses: a message that waited for another one's could wait for ever."""
    kept = _slabs.get(array.device.id)
    if kept:
        return kept.pop()
    with on(array):
        return ipc.export(SLOTS * CHUNK)


# -- who reaches whom --------------------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """ranks: by rank, those whose memory it reads right, and which read its. evidence: as text, of all pairs."""

    ranks: tuple[frozenset[int], ...]
    evidence: tuple[str, ...]


def settle(world: Communicator) -> None:
    """With FSDPX_CUDA_IPC=1 large arrays go this way between processes of a host: those of the communicator inside
    `world`, and of its later groups. Collective; ConfigError on all ranks if two of them cannot."""
    carrier: Any = inside(world, "reached")
    if carrier is None or not environment.cuda_ipc():
        return
    found = reach(world)
    hosts = world.all_gather_plain(_place())
    for one, other in combinations(range(world.size), 2):
        together = hosts[one][0] == hosts[other][0] and hosts[one] != hosts[other]
        if together and other not in found.ranks[one]:
            raise ConfigError(
                f"FSDPX_CUDA_IPC=1, but ranks {one} and {other} of {hosts[one][0]} do not share memory of their GPUs "
                f"({'; '.join(found.evidence)}): leave it out, then arrays go through the host"
            )
    carrier.reached, carrier.notes = found.ranks[world.rank], carrier.split(0, carrier.rank)


def reach(world: Communicator) -> Reach:
    """Try it: each process of a host reads what the others have written on their GPUs, twice, with different bytes each
    time. Collective; every rank has taken its GPU."""
    slab, why = None, ""
    try:
        slab = ipc.export(PROBED)
    except RuntimeError as error:  # of CUDA
        why = " ".join(str(error).split())
    facts = world.all_gather_plain((_place(), slab and slab.handle, why))
    own = facts[world.rank][0]
    near = [r for r, (place, _, _) in enumerate(facts) if place[0] == own[0] and place != own]
    failed = {rank: f"rank {rank} exports nothing: {facts[rank][2]}" for rank in near if facts[rank][1] is None}
    for turn in range(2):
        if slab is not None:
            ipc.write(slab.address, _pattern(world.rank, turn))
        world.barrier().wait()
        for rank in near:
            if rank not in failed and (text := _misread(facts[rank][1], rank, turn)):
                failed[rank] = f"rank {world.rank} cannot read rank {rank}'s: {text}"
        world.barrier().wait()
    everyone = world.all_gather_plain((near, failed))
    good = [{rank for rank in near if rank not in failed} for near, failed in everyone]
    both = tuple(frozenset(r for r in mine if rank in good[r]) for rank, mine in enumerate(good))
    texts = dict.fromkeys(text for _, failed in everyone for text in failed.values())
    if any(both):
        pairs = sum(map(len, both)) // 2
        texts = {f"{pairs} {'pair' if pairs == 1 else 'pairs'} of ranks read what the other wrote": None, **texts}
    return Reach(both, tuple(texts) or ("no host has several processes with a GPU",))


def _misread(handle: bytes, rank: int, turn: int) -> str:
    """Why this rank cannot read what that one has written; nothing if it can."""
    found = np.empty(PROBED, np.uint8)
    try:
        ipc.read(ipc.opened(handle), found)
    except RuntimeError as error:
        return " ".join(str(error).split())
    return "" if (found == _pattern(rank, turn)).all() else "other bytes than were written"


def _pattern(rank: int, turn: int) -> np.ndarray:
    return np.random.default_rng([rank, turn]).integers(0, 256, PROBED, np.uint8)


def _place() -> tuple[str, int]:
    """The host and the process: threads of one process need none of this."""
    return platform.node(), os.getpid()
