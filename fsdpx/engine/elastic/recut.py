"""State on its way from the ranks that have it to the ranks that want it: only elements that change hands travel."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fsdpx.array.namespace import dtype, from_host, namespace_of, to_host
from fsdpx.comm.communicator import Communicator, Handle
from fsdpx.comm.survivors import Survivor, settle
from fsdpx.engine.checkpoint.pieces import BLOCK, Held
from fsdpx.engine.elastic.descriptors import Descriptor, Runs, describe, missing, runs, uncovered, whole
from fsdpx.errors import RankLost

__all__ = ["FLIGHT", "Descriptor", "describe", "let_go", "missing", "recut", "whole"]

FLIGHT = 8
"""Messages of a rank under way at once. Beside the arrays, up to FLIGHT x BLOCK bytes are needed."""
ALONE = BLOCK // 8
"""Bytes from which on a run travels by itself, from where it lies to where it belongs; shorter ones are packed."""


def recut(comm: Communicator, have: Sequence[Held], want: Sequence[Held]) -> None:
    """Fill the arrays of `want` on every rank from the arrays of `have` on any rank, bit by bit. Collective.

    Every rank has and wants what it likes, also nothing; several may have the same elements, then with equal bits.
    What a rank has itself it copies; the rest comes from those that have it, in turns. Arrays of `want` are the same
    memory as those of `have` only where they are the same elements. All that is wanted must be there: ask `missing`
    before. RankLost if a rank dies; `comm` is revoked then, and some of `want` may be filled.

    A rank receives the bytes that it wants and has not; messages hold at most BLOCK of them.
    """
    told = ([describe(part) for part in have], [describe(part) for part in want])
    everyone = comm.all_gather_object(told)
    plan = Plan(comm.rank, [one[0] for one in everyone], [one[1] for one in everyone])
    plan.demand_possible()
    _travel(comm, plan, have, want)


Gaps = tuple[np.ndarray, np.ndarray]
"""First elements of runs, and one past their last ones."""
_stranded: list[Handle] = []
"""Broken transfers that did not end in time: what they may yet write to must stay as long as the process."""


class Offer(NamedTuple):
    """Part number `index` of what a rank has."""

    rank: int
    index: int
    part: Descriptor


class Move(NamedTuple):
    """`size` elements from `at` on of part `have` of rank `source` become those from `to` on of part `want` of the rank
    that wants them."""

    source: int
    have: int
    at: int
    want: int
    to: int
    size: int


class Message(NamedTuple):
    """Its number in the order that all ranks keep: round, place among those of two ranks, sender."""

    number: tuple[int, int, int]
    peer: int
    moves: list[Move]


@dataclass(frozen=True)
class Plan:
    """What `rank` sends, receives and copies. Ranks that know the same lists derive plans that fit together.

    have, want: of every rank.
    """

    rank: int
    have: Sequence[Sequence[Descriptor]]
    want: Sequence[Sequence[Descriptor]]

    def demand_possible(self) -> None:
        """Alike on all ranks: somebody has every element that is wanted, in the format in which it is wanted."""
        gaps: dict[str, Gaps] = {}
        for part in (part for some in self.want for part in some if part.size):
            offers = [offer.part for some in self._offers[part.name].values() for offer in some]
            if part.name not in gaps:
                gaps[part.name] = uncovered(offers, math.prod(part.shape))
            assert not _meet(gaps[part.name], part), f"recut: elements of {part} are in nobody's hands"
            formats = {offer.dtype for offer in offers} | {part.dtype}
            assert len(formats) == 1, f"recut: {part.name} is {' and '.join(sorted(formats))}"

    @cached_property
    def own(self) -> list[Move]:
        """What is here already."""
        return [move for move in self._incoming if move.source == self.rank]

    @cached_property
    def messages(self) -> list[tuple[bool, Message]]:
        """(whether this rank is the sender, message), in the order of their numbers."""
        size, sends, recvs = len(self.have), defaultdict(list), defaultdict(list)
        for dest, move in self._outgoing:
            sends[dest].append(move)
        for move in self._incoming:
            if move.source != self.rank:
                recvs[move.source].append(move)
        found = []
        for number in range(1, size):
            dest, source = (self.rank + number) % size, (self.rank - number) % size
            for k, moves in enumerate(self._packed(sends[dest], lambda m: self.have[m.source][m.have])):
                found.append((True, Message((number, k, self.rank), dest, moves)))
            for k, moves in enumerate(self._packed(recvs[source], lambda m: self.want[self.rank][m.want])):
                found.append((False, Message((number, k, source), source, moves)))
        return sorted(found, key=lambda one: one[1].number)

    @cached_property
    def _offers(self) -> defaultdict[str, dict[int, list[Offer]]]:
        """Name -> rank -> what it has of it."""
        found: defaultdict[str, dict[int, list[Offer]]] = defaultdict(dict)
        for rank, parts in enumerate(self.have):
            for index, part in enumerate(parts):
                if part.size:
                    found[part.name].setdefault(rank, []).append(Offer(rank, index, part))
        return found

    @cached_property
    def _turns(self) -> dict[str, int]:
        """Where the turns of those that have a tensor begin."""
        return {name: turn for turn, name in enumerate(sorted(self._offers))}

    @cached_property
    def _incoming(self) -> list[Move]:
        return [move for i in range(len(self.want[self.rank])) for move in self._moves(self.rank, i)]

    @property
    def _outgoing(self) -> Iterator[tuple[int, Move]]:
        mine = {name for name, ranks in self._offers.items() if self.rank in ranks}
        for dest, wanted in enumerate(self.want):
            if dest != self.rank:
                for i, part in enumerate(wanted):
                    if part.name in mine:
                        yield from ((dest, move) for move in self._moves(dest, i) if move.source == self.rank)

    def _moves(self, dest: int, index: int) -> list[Move]:
        """How part number `index` of what `dest` wants is put together."""
        part = self.want[dest][index]
        ranks = self._offers[part.name]
        for offer in ranks.get(dest, ()):
            other = offer.part
            if other.frame == part.frame and other.start <= part.start and part.stop <= other.stop:
                return [Move(dest, offer.index, part.start - other.start, index, 0, part.size)] if part.size else []
        first, last = part.span
        offers = [
            offer
            for rank in sorted(ranks)
            for offer in ranks[rank]
            if offer.part.span[0] < last and first < offer.part.span[1]
        ]
        return assign(part, index, dest, offers, self._turns.get(part.name, 0))

    def _packed(self, moves: list[Move], part: Callable[[Move], Descriptor]) -> Iterator[list[Move]]:
        """The moves of each message: long ones alone, short ones together."""
        group: list[Move] = []
        filled = 0
        for move in moves:
            itemsize = dtype(part(move).dtype).itemsize
            for piece in _shortened(move, BLOCK // itemsize):
                nbytes = piece.size * itemsize
                if group and (nbytes >= ALONE or filled + nbytes > BLOCK):
                    yield group
                    group, filled = [], 0
                group.append(piece)
                filled += nbytes
                if nbytes >= ALONE:
                    yield group
                    group, filled = [], 0
        if group:
            yield group


def assign(want: Descriptor, index: int, receiver: int, offers: Sequence[Offer], turn: int) -> list[Move]:
    """Who sends which elements of `want`, number `index` of what `receiver` wants, in its order.

    An element comes from the receiver itself if it has it, else from one of those that have it: they take turns by
    BLOCK, beginning with another one for every tensor (`turn`) and receiver.
    """
    wanted, lying = runs(want), [runs(offer.part) for offer in offers]
    if wanted.start.size == 0 or not offers:
        return []
    grid = BLOCK // dtype(want.dtype).itemsize
    edges = _edges(wanted, lying, grid)
    to = _places(wanted, edges[:-1])
    inside = to >= 0
    start, size, to = edges[:-1][inside], np.diff(edges)[inside], to[inside]
    places = [_places(some, start) for some in lying]
    others = [(i, place) for i, (o, place) in enumerate(zip(offers, places, strict=True)) if o.rank != receiver]
    chosen, at = np.full(start.size, -1), np.zeros(start.size, np.int64)

    def take(i: int, mask: np.ndarray) -> None:
        mask = mask & (chosen < 0)
        chosen[mask], at[mask] = i, places[i][mask]

    for i, offer in enumerate(offers):
        if offer.rank == receiver:
            take(i, places[i] >= 0)
    count = sum(((place >= 0).astype(np.int64) for _, place in others), np.zeros(start.size, np.int64))
    number, seen = (start // grid + turn + receiver) % np.maximum(count, 1), np.zeros(start.size, np.int64)
    for i, place in others:
        take(i, (place >= 0) & (seen == number))
        seen += place >= 0
    there = chosen >= 0
    joined = _joined(chosen[there], at[there], to[there], size[there])
    return [Move(offers[i].rank, offers[i].index, a, index, t, n) for i, a, t, n in joined]


def _edges(wanted: Runs, lying: Sequence[Runs], grid: int) -> np.ndarray:
    """Between two of these, whoever has one element has all, and whose turn it is does not change."""
    first, last = int(wanted.start[0]), int(wanted.stop[-1])
    lines = np.arange(-(-first // grid) * grid, last, grid, dtype=np.int64)
    edges = np.concatenate([*wanted[:2], *(edge for some in lying for edge in some[:2]), lines])
    return np.unique(edges[(first <= edges) & (edges <= last)])


def _places(some: Runs, elements: np.ndarray) -> np.ndarray:
    """Where each of `elements` of the whole tensor lies in the local array; -1 if it does not."""
    i = np.searchsorted(some.start, elements, "right") - 1
    inside = (i >= 0) & (elements < some.stop[i])
    return np.where(inside, some.at[i] + elements - some.start[i], -1)


def _joined(
    chosen: np.ndarray, at: np.ndarray, to: np.ndarray, size: np.ndarray
) -> Iterator[tuple[int, int, int, int]]:
    """Pieces that follow each other on both sides are one; in the receiver's array all do."""
    if size.size == 0:
        return iter(())
    follows = (chosen[1:] == chosen[:-1]) & (at[1:] == (at + size)[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    columns = chosen[first], at[first], to[first], np.add.reduceat(size, first)
    return zip(*(column.tolist() for column in columns), strict=True)


def _shortened(move: Move, most: int) -> Iterator[Move]:
    if move.size <= most:
        yield move
        return
    for done in range(0, move.size, most):
        yield move._replace(at=move.at + done, to=move.to + done, size=min(most, move.size - done))


def _meet(gaps: Gaps, part: Descriptor) -> bool:
    """Whether an element of `part` is in one of the gaps."""
    start, stop = gaps
    if start.size == 0:
        return False
    some = runs(part)
    after = np.searchsorted(stop, some.start, "right")  # the first gap that ends behind the begin of each run
    there = after < start.size
    return bool(np.any(start[after[there]] < some.stop[there]))


# -- on the way -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flight:
    """A message under way. land: what is done when it has come."""

    handle: Handle
    land: Callable[[], None]


def _travel(comm: Communicator, plan: Plan, have: Sequence[Held], want: Sequence[Held]) -> None:
    """At any time the unfinished message with the least number is under way on both sides: all that either posted
    before it are done. So waiting for the oldest never ends in a circle, also where a send waits for its receive."""
    flying: deque[Flight] = deque()
    scratch: list[np.ndarray] = []

    def land() -> None:
        flying[0].handle.wait()
        flying.popleft().land()

    try:
        for sends, message in plan.messages:
            if len(flying) == FLIGHT:
                land()
            flying.append(_posted(comm, sends, message, have if sends else want, scratch))
        for move in plan.own:
            _copy(want[move.want].array[move.to :][: move.size], have[move.have].array[move.at :][: move.size])
        while flying:
            land()
    except RankLost:
        if isinstance(comm, Survivor):
            comm.revoke()
        let_go(one.handle for one in flying)
        raise


def let_go(handles: Iterable[Handle]) -> bool:
    """Wait a while for broken transfers to end, since until then their buffers are theirs; whether all have."""
    left = settle(handles)
    _stranded.extend(left)
    return not left


def _posted(
    comm: Communicator, sends: bool, message: Message, parts: Sequence[Held], scratch: list[np.ndarray]
) -> Flight:
    places = (
        [(m.have, m.at, m.size) for m in message.moves] if sends else [(m.want, m.to, m.size) for m in message.moves]
    )
    views = [_bytes(parts[i].array[at : at + size]) for i, at, size in _followed(places)]
    name = f"{parts[places[0][0]].name} in new hands"
    if len(views) == 1 and isinstance(views[0], np.ndarray):
        call = comm.send if sends else comm.recv
        return Flight(call(views[0], message.peer, what=name), _nothing)
    room = scratch.pop() if scratch else np.empty(BLOCK, np.uint8)
    ends = np.cumsum([0, *(view.size for view in views)]).tolist()
    packed = [room[a:b] for a, b in zip(ends, ends[1:], strict=False)]

    def unpack() -> None:
        for view, part in zip(views, packed, strict=True):
            _copy(view, part)
        scratch.append(room)

    if not sends:
        return Flight(comm.recv(room[: ends[-1]], message.peer, what=name), unpack)
    for view, part in zip(views, packed, strict=True):
        _copy(part, view)
    return Flight(comm.send(room[: ends[-1]], message.peer, what=name), lambda: scratch.append(room))


def _followed(places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(part, first element, elements), joined where they follow each other."""
    found = [places[0]]
    for i, at, size in places[1:]:
        last, first, count = found[-1]
        if (last, first + count) == (i, at):
            found[-1] = (last, first, count + size)
        else:
            found.append((i, at, size))
    return found


def _bytes(array: Any) -> Any:
    return array.view(np.uint8)


def _copy(target: Any, source: Any) -> None:
    """Between arrays of the host and of a GPU."""
    if isinstance(target, np.ndarray):
        target[...] = to_host(source)
    elif isinstance(source, np.ndarray):
        target[...] = from_host(namespace_of(target), source)
    else:
        target[...] = source


def _nothing() -> None:
    pass
