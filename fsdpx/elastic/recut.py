"""What moves when ranks change: the parts that each rank sends and receives, and the messages that bring them."""

from __future__ import annotations

import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from fsdpx.array.namespace import dtype, from_host, namespace_of, to_host
from fsdpx.checkpoint.pieces import BLOCK, Held, held, kept
from fsdpx.comm.communicator import Communicator, Handle, Survivor, settle
from fsdpx.errors import RankLost
from fsdpx.nn.cut import Cut
from fsdpx.nn.layer import Spec
from fsdpx.state.ledger import Key
from fsdpx.state.state import TrainState

__all__ = [
    "FLIGHT", "Descriptor", "ElementMove", "Gaps", "Message", "RecutPlan", "Runs", "StridedRuns", "Supply", "assign",
    "describe", "let_go", "live", "meet", "missing", "moving", "recut", "runs", "uncovered",
]  # fmt: skip

Gaps = tuple[np.ndarray, np.ndarray]
"""Runs [start, stop) of a tensor that no rank has, in order."""
GAPS = 4
"""Gaps of one tensor that are listed; the rest are counted."""


class Descriptor(NamedTuple):
    """A `Held` without its array, of the tensor `name` of `shape`: `size` elements from `start` on of what line `rank`
    of `width` of the tensor axis has by `cut`. cut: None where that is the whole tensor."""

    name: str
    start: int
    size: int
    rank: int
    width: int
    shape: tuple[int, ...]
    cut: Cut | None
    dtype: str

    @property
    def frame(self) -> tuple[int, int, Cut | None]:
        """Parts of one tensor with the same frame lie in the same flat array."""
        return self.rank, self.width, self.cut

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def span(self) -> tuple[int, int]:
        """The range of the whole tensor in which all elements of this piece lie."""
        return (self.start, self.stop) if self.cut is None else (0, math.prod(self.shape))


class Runs(NamedTuple):
    """Elements [start[i], stop[i]) of a whole tensor, in order, are those from at[i] on of a local flat array."""

    start: np.ndarray
    stop: np.ndarray
    at: np.ndarray


def describe(part: Held) -> Descriptor:
    spec, dtype = part.spec, sys.intern(part.array.dtype.name)
    is_cut = spec.cut is not None and part.width > 1
    rank, width, cut = (part.rank, part.width, spec.cut) if is_cut else (0, 1, None)
    return Descriptor(part.name, part.start, int(part.array.size), rank, width, spec.shape, cut, dtype)


def runs(part: Descriptor) -> Runs:
    """The same elements as `Cut.runs`, all at once: a cut of dim 1 has one run per row."""
    first, last, cut = part.start, part.stop, part.cut
    if cut is None:
        found = np.array([[first], [last], [0]], np.int64)
        return Runs(*(found if part.size else found[:, :0]))
    inner = math.prod(part.shape[cut.dim + 1 :])
    blocks = np.array(cut.ranges(part.shape, part.rank, part.width), np.int64) * inner
    lengths = blocks[:, 1] - blocks[:, 0]
    row = max(int(lengths.sum()), 1)
    rows = np.arange(first // row, -(-last // row), dtype=np.int64)[:, None]
    local = rows * row + (np.cumsum(lengths) - lengths)
    begin, end = np.maximum(local, first), np.minimum(local + lengths, last)
    start = rows * (part.shape[cut.dim] * inner) + blocks[:, 0] + begin - local
    there = begin < end
    return Runs(start[there], (start + end - begin)[there], begin[there] - first)


def live(state: TrainState, before: Mapping[Key, Any] | None = None) -> Iterator[Held]:
    """The parts of the train state that are up to date here: running statistics only where the pipe moves them.

    before: arrays in place of some rows as they are, see `moving`: those of a step that did not come to its end are
    spoilt."""
    home, here = state.placement.statistics_home, state.placement.axes.coordinates.pipe
    for part in held(state):
        if part.name not in home:
            yield part
        elif home[part.name] == here:
            array = (before or {}).get(Key("statistic", None, part.name), part.array)
            yield replace(part, array=array.reshape(-1))
    yield from kept(state, before)


def moving(state: TrainState) -> Iterator[tuple[Key, Any]]:
    """Rows that change before all ranks agree on a step: running statistics in forward, what codecs keep in reduces."""
    return ((row.key, array) for row, array in state.ledger.saved() if row.key.kind in ("statistic", "memory"))


def missing(have: Iterable[Iterable[Descriptor]], want: Mapping[str, Spec]) -> list[str]:
    """The tensors of `want` of which no rank holds some element, as text: "0.weight: elements 12..24 of 48".

    have: of each rank. Pure: ranks that know the same say the same."""
    parts, texts = _by_name(part for some in have for part in some), []
    for name, spec in want.items():
        start, stop = uncovered(parts[name], spec.size)
        if start.size:
            gaps = [f"{a}..{b}" for a, b in zip(start[:GAPS].tolist(), stop[:GAPS].tolist(), strict=True)]
            more = f" and {start.size - GAPS} more runs" if start.size > GAPS else ""
            texts.append(f"{name}: elements {', '.join(gaps)}{more} of {spec.size}")
    return texts


def uncovered(parts: Sequence[Descriptor], size: int) -> Gaps:
    """The elements of a tensor of `size` elements that are in none of `parts`."""
    found = [runs(part) for part in parts]
    start = np.concatenate([*(r.start for r in found), [size]]).astype(np.int64)
    stop = np.concatenate([*(r.stop for r in found), [size]]).astype(np.int64)
    order = np.argsort(start, kind="stable")
    reach = np.concatenate([[0], np.maximum.accumulate(stop[order])[:-1]])
    gap = start[order] > reach
    return reach[gap], start[order][gap]


def meet(gaps: Gaps, part: Descriptor) -> bool:
    """Whether an element of `part` is in one of the gaps."""
    start, stop = gaps
    some = runs(part)
    after = np.searchsorted(stop, some.start, "right")  # the first gap that ends after the start of each run
    there = after < start.size
    return bool(np.any(start[after[there]] < some.stop[there]))


def _by_name(parts: Iterable[Descriptor]) -> defaultdict[str, list[Descriptor]]:
    found: defaultdict[str, list[Descriptor]] = defaultdict(list)
    for part in parts:
        found[part.name].append(part)
    return found


SHARE = 8
"""A move that fills this part of a message travels alone, from where it lies to where it belongs; shorter ones are
packed with their neighbours."""


class StridedRuns(NamedTuple):
    """Of part number `part`: `lines` runs of `size` elements, the first from `at` on, each `step` after the last."""

    part: int
    at: int
    step: int
    size: int
    lines: int

    @property
    def elements(self) -> int:
        return self.size * self.lines

    @property
    def solid(self) -> bool:
        """The pieces follow each other without gaps."""
        return self.lines == 1 or self.step == self.size

    def some(self, first: int, lines: int) -> StridedRuns:
        return self._replace(at=self.at + first * self.step, lines=lines)

    def within(self, line: int, first: int, size: int) -> StridedRuns:
        """Some elements of one of the runs."""
        return StridedRuns(self.part, self.at + line * self.step + first, size, size, 1)

    def view(self, array: Any) -> Any:
        """The elements in the flat `array` of the part, of shape (lines, size)."""
        if self.solid:
            return array[self.at : self.at + self.elements].reshape(self.lines, self.size)
        strides = (self.step * array.itemsize, array.itemsize)
        tricks = namespace_of(array).lib.stride_tricks
        return tricks.as_strided(array[self.at :], (self.lines, self.size), strides)


class ElementMove(NamedTuple):
    """Elements of what rank `source` has become elements of what another one, or itself, wants."""

    source: int
    have: StridedRuns
    want: StridedRuns


class Supply(NamedTuple):
    """Part number `index` of what a rank has."""

    rank: int
    number: int
    part: Descriptor


class Message(NamedTuple):
    """number: its place in the order of all messages, which is the same on all ranks (round, place among those of two
    ranks, sender). rows: of what this rank has if it sends, else of what it wants."""

    number: tuple[int, int, int]
    sends: bool
    peer: int
    rows: list[StridedRuns]


@dataclass(frozen=True)
class RecutPlan:
    """All that `rank` sends, receives and copies. Ranks that know the same lists derive plans that fit together.

    have, want: of every rank. block: bytes of one message, at most. It needs memory in proportion to the number of
    runs that do not lie at regular distances; rows of a cut tensor do."""

    rank: int
    have: Sequence[Sequence[Descriptor]]
    want: Sequence[Sequence[Descriptor]]
    block: int = BLOCK

    def demand_possible(self) -> None:
        """Alike on all ranks: some rank has every element that is wanted, in the format in which it is wanted."""
        supplies = {name: [o.part for some in ranks.values() for o in some] for name, ranks in self._supplies.items()}
        gaps: dict[str, Gaps] = {}
        formats: dict[str, set[str]] = {}
        for part in (part for some in self.want for part in some if part.size):
            known = supplies.get(part.name, [])
            if part.name not in gaps:
                gaps[part.name] = uncovered(known, math.prod(part.shape))
                formats[part.name] = {supply.dtype for supply in known}
            every = sorted(formats[part.name] | {part.dtype})
            assert len(every) == 1, f"recut: {part.name} is {' and '.join(every)}"
            assert not meet(gaps[part.name], part), f"recut: elements of {part} are held by no rank"

    @cached_property
    def own(self) -> list[ElementMove]:
        """The elements that are here already."""
        return [move for move in self._incoming if move.source == self.rank]

    @cached_property
    def messages(self) -> list[Message]:
        """The messages of this rank, in an order in which all ranks meet: in round k it sends to rank + k and receives
        from rank - k."""
        size, sent, received = (
            len(self.have),
            defaultdict[int, list[ElementMove]](list),
            defaultdict[int, list[ElementMove]](list),
        )
        for dest, move in self._outgoing:
            sent[dest].append(move)
        for move in self._incoming:
            received[move.source].append(move)
        mine, wanted = self.have[self.rank], self.want[self.rank]
        found = []
        for k in range(1, size):
            dest, source = (self.rank + k) % size, (self.rank - k) % size
            for i, moves in enumerate(self._packed(sent[dest], lambda move: mine[move.have.part])):
                found.append(Message((k, i, self.rank), True, dest, [move.have for move in moves]))
            for i, moves in enumerate(self._packed(received[source], lambda move: wanted[move.want.part])):
                found.append(Message((k, i, source), False, source, [move.want for move in moves]))
        return sorted(found)

    @cached_property
    def _supplies(self) -> dict[str, dict[int, list[Supply]]]:
        """Name -> rank -> what it has of it."""
        found: dict[str, dict[int, list[Supply]]] = {}
        for rank, parts in enumerate(self.have):
            for index, part in enumerate(parts):
                if part.size:
                    found.setdefault(part.name, {}).setdefault(rank, []).append(Supply(rank, index, part))
        return found

    @cached_property
    def _turns(self) -> dict[str, int]:
        """Where the turns of those that have a tensor begin."""
        return {name: turn for turn, name in enumerate(sorted(self._supplies))}

    @cached_property
    def _incoming(self) -> list[ElementMove]:
        return [move for i in range(len(self.want[self.rank])) for move in self._moves(self.rank, i)]

    @property
    def _outgoing(self) -> Iterator[tuple[int, ElementMove]]:
        mine = {name for name, ranks in self._supplies.items() if self.rank in ranks}
        for dest, wanted in enumerate(self.want):
            if dest != self.rank:
                for i, part in enumerate(wanted):
                    if part.name in mine:
                        yield from ((dest, move) for move in self._moves(dest, i) if move.source == self.rank)

    def _moves(self, dest: int, index: int) -> list[ElementMove]:
        """How part number `index` of what `dest` wants is put together."""
        part = self.want[dest][index]
        if part.size == 0:
            return []
        ranks = self._supplies[part.name]
        for supply in ranks.get(dest, ()):
            if supply.part.frame == part.frame and supply.part.start <= part.start and part.stop <= supply.part.stop:
                there = StridedRuns(supply.number, part.start - supply.part.start, part.size, part.size, 1)
                return [ElementMove(dest, there, StridedRuns(index, 0, part.size, part.size, 1))]
        first, last = part.span
        supplies = [
            supply
            for rank in sorted(ranks)
            for supply in ranks[rank]
            if supply.part.span[0] < last and first < supply.part.span[1]
        ]
        grid = max(self.block // dtype(part.dtype).itemsize, 1)
        return assign(part, index, dest, supplies, self._turns[part.name], grid)

    def _packed(
        self, moves: Iterable[ElementMove], part: Callable[[ElementMove], Descriptor]
    ) -> Iterator[list[ElementMove]]:
        """The moves of each message."""
        group: list[ElementMove] = []
        filled = 0
        for move in moves:
            itemsize = dtype(part(move).dtype).itemsize
            for piece in _shortened(move, self.block // itemsize):
                nbytes = piece.have.elements * itemsize
                alone = nbytes * SHARE >= self.block
                if group and (alone or filled + nbytes > self.block):
                    yield group
                    group, filled = [], 0
                group.append(piece)
                filled += nbytes
                if alone:
                    yield group
                    group, filled = [], 0
        if group:
            yield group


def assign(
    want: Descriptor, index: int, receiver: int, supplies: Sequence[Supply], turn: int, grid: int
) -> list[ElementMove]:
    """How `want`, number `index` of what `receiver` wants, is put together from `supplies`, in order for each source.

    An element comes from the receiver itself if it has it, else from one of those that have it: they take turns by
    `grid` elements, beginning with another one for every tensor (`turn`) and receiver."""
    wanted, lying = runs(want), [runs(supply.part) for supply in supplies]
    edges = _edges(wanted, lying, grid)
    to = _places(wanted, edges[:-1])
    inside = to >= 0
    start, size, to = edges[:-1][inside], np.diff(edges)[inside], to[inside]
    places = [_places(some, start) for some in lying]
    others = [(i, place) for i, (o, place) in enumerate(zip(supplies, places, strict=True)) if o.rank != receiver]
    chosen, at = np.full(start.size, -1), np.zeros(start.size, np.int64)

    def take(i: int, mask: np.ndarray) -> None:
        mask = mask & (chosen < 0)
        chosen[mask], at[mask] = i, places[i][mask]

    for i, supply in enumerate(supplies):
        if supply.rank == receiver:
            take(i, places[i] >= 0)
    count = sum(((place >= 0).astype(np.int64) for _, place in others), np.zeros(start.size, np.int64))
    number, seen = (start // grid + turn + receiver) % np.maximum(count, 1), np.zeros(start.size, np.int64)
    for i, place in others:
        take(i, (place >= 0) & (seen == number))
        seen += place >= 0
    pieces = _regular(_joined(chosen, at, to, size))
    return [
        ElementMove(
            supplies[i].rank,
            StridedRuns(supplies[i].number, a, a_step, n, lines),
            StridedRuns(index, t, t_step, n, lines),
        )
        for i, a, a_step, t, t_step, n, lines in pieces
    ]


def _edges(wanted: Runs, lying: Sequence[Runs], grid: int) -> np.ndarray:
    """Between two of these, a rank that has one element has all, and the rank whose turn it is does not change."""
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
    """Pieces that follow each other at the source are one; in the receiver's array they follow each other anyway."""
    follows = (chosen[1:] == chosen[:-1]) & (at[1:] == (at + size)[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    columns = chosen[first], at[first], to[first], np.add.reduceat(size, first)
    return zip(*(column.tolist() for column in columns), strict=True)


def _regular(pieces: Iterable[tuple[int, int, int, int]]) -> Iterator[list[int]]:
    """(source, at, its step, to, its step, size, lines): pieces of one source and size at equal distances are one."""
    open_ones: dict[int, list[int]] = {}
    for source, at, to, size in pieces:
        last = open_ones.get(source)
        if last is not None:
            _, at0, at_step, to0, to_step, length, lines = last
            if size == length and lines == 1 and at > at0:
                last[2], last[4], last[6] = at - at0, to - to0, 2
                continue
            if size == length and (at, to) == (at0 + lines * at_step, to0 + lines * to_step):
                last[6] += 1
                continue
            yield last
        open_ones[source] = [source, at, size, to, size, size, 1]
    yield from open_ones.values()


def _shortened(move: ElementMove, most: int) -> Iterator[ElementMove]:
    """The same in pieces of at most that many elements."""
    source, have, want = move
    if have.elements <= most:
        yield move
    elif have.size <= most:
        together = most // have.size
        for first in range(0, have.lines, together):
            lines = min(together, have.lines - first)
            yield ElementMove(source, have.some(first, lines), want.some(first, lines))
    else:
        for line in range(have.lines):
            for first in range(0, have.size, most):
                size = min(most, have.size - first)
                yield ElementMove(source, have.within(line, first, size), want.within(line, first, size))


FLIGHT = 8
"""Messages of a rank under way at once."""
_stranded: list[Handle] = []
"""Broken transfers that did not end in time: the memory they may still write to must last as long as the process."""


def recut(comm: Communicator, have: Sequence[Held], want: Sequence[Held], block: int = BLOCK) -> None:
    """Fill the arrays of `want` on every rank from the arrays of `have` on any rank, bit by bit. Collective.

    Every rank may have and want any elements, or none; several may have the same elements, then with equal bits. A rank
    copies the elements it has itself; the rest comes from those that have it, in turns. Arrays of `want` are the same
    memory as those of `have` only where they are the same elements. All that is wanted must be there: ask `missing`
    before. RankLost if a rank dies; `comm` is revoked then, and some of `want` may be filled.

    A rank receives the bytes that it wants and has not, in messages of at most `block` bytes. Beside the arrays it
    needs up to FLIGHT x block, and that only where elements do not follow each other."""
    mine = ([describe(part) for part in have], [describe(part) for part in want])
    everyone = comm.all_gather_plain(mine)
    plan = RecutPlan(comm.rank, [one[0] for one in everyone], [one[1] for one in everyone], block)
    plan.demand_possible()
    given, taken = [_raw(part.array) for part in have], [_raw(part.array) for part in want]
    _travel(comm, plan, given, taken, [part.name for part in have], [part.name for part in want])


def let_go(handles: Iterable[Handle]) -> bool:
    """Wait a while for broken transfers to end, as they may write to their buffers until then; whether all have."""
    left = settle(handles)
    _stranded.extend(left)
    return not left


@dataclass(frozen=True)
class PendingMessage:
    """A message under way. land: what is done when it has come."""

    handle: Handle
    land: Callable[[], None]


def _travel(
    comm: Communicator, plan: RecutPlan, have: list[Any], want: list[Any], have_names: list[str], want_names: list[str]
) -> None:
    """At any time the unfinished message with the least number is under way on both sides: all that either posted
    before it are done. So waiting for the oldest never ends in a circle, also where a send waits for its receive."""
    flying: deque[PendingMessage] = deque()
    spare: list[np.ndarray] = []

    def land() -> None:
        flying[0].handle.wait()
        flying.popleft().land()

    try:
        for message in plan.messages:
            if len(flying) == FLIGHT:
                land()
            arrays, names = (have, have_names) if message.sends else (want, want_names)
            flying.append(_posted(comm, message, arrays, names, spare, plan.block))
        for move in plan.own:
            _copy(move.want.view(want[move.want.part]), move.have.view(have[move.have.part]))
        while flying:
            land()
    except RankLost:
        if isinstance(comm, Survivor):
            comm.revoke()
        let_go(one.handle for one in flying)
        raise


def _posted(
    comm: Communicator, message: Message, arrays: list[Any], names: list[str], spare: list[np.ndarray], block: int
) -> PendingMessage:
    """From or to the array itself where it is one run of host memory, else through a room of its own."""
    what = f"{names[message.rows[0].part]}, re-cut"
    call = comm.send if message.sends else comm.recv
    run = _run(message.rows, arrays)
    if run is not None:
        return PendingMessage(call(run, message.peer, what=what), lambda: None)
    block_memory = spare.pop() if spare else np.empty(block, np.uint8)
    views = [rows.view(arrays[rows.part]) for rows in message.rows]
    ends = [0, *accumulate(view.nbytes for view in views)]
    packed = [
        block_memory[a:b].view(view.dtype).reshape(view.shape)
        for (a, b), view in zip(pairwise(ends), views, strict=True)
    ]

    def unpack() -> None:
        for view, part in zip(views, packed, strict=True):
            _copy(view, part)
        spare.append(block_memory)

    if message.sends:
        for view, part in zip(views, packed, strict=True):
            _copy(part, view)
    handle = call(block_memory[: ends[-1]], message.peer, what=what)
    return PendingMessage(handle, (lambda: spare.append(block_memory)) if message.sends else unpack)


def _run(rows: list[StridedRuns], arrays: list[Any]) -> np.ndarray | None:
    """The bytes of `rows`, if they follow each other in one array on the host."""
    first, stop, array = rows[0], rows[0].at, arrays[rows[0].part]
    if not isinstance(array, np.ndarray):
        return None
    for one in rows:
        if one.part != first.part or not one.solid or one.at != stop:
            return None
        stop += one.elements
    return array[first.at : stop].view(np.uint8)


def _raw(array: Any) -> Any:
    """As integers of the same width: bits that no library takes for numbers."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _copy(target: Any, source: Any) -> None:
    """Between arrays of the host and of a GPU."""
    if isinstance(target, np.ndarray):
        target[...] = to_host(source)
    elif isinstance(source, np.ndarray):
        target[...] = from_host(namespace_of(target), source)
    else:
        target[...] = source
