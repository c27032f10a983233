"""Resharding: plan which elements of which tensors each rank sends and receives when the ranks change, and transfer
them."""

from __future__ import annotations

import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.namespace import from_host, namespace_of, parse_dtype, to_host
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.checkpoint.local_shards import BLOCK_BYTES, LocalShard, iterate_codec_memory, iterate_local_state_shards
from fsdpx.core.comm.communicator import Communicator, Handle, SurvivorCommunicator, drain_transfers
from fsdpx.core.state.ledger import LedgerKey
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import RankLost
from fsdpx.nn.layer import ParameterSpec
from fsdpx.nn.shard_specs import ShardSpec

__all__ = [
    "MAX_MESSAGES_IN_FLIGHT", "ElementMove", "ElementRows", "ElementRuns", "Gaps", "ReshardMessage", "ReshardPlan",
    "ShardDescriptor", "ShardSupply", "choose_sources_of_shard", "describe_missing_elements", "describe_shard",
    "drain_transfers_for_limited_time", "find_element_runs_of_shard", "find_uncovered_ranges_of_tensor",
    "has_uncovered_elements", "iterate_state_changed_before_agreement", "iterate_up_to_date_shards", "reshard_arrays",
]  # fmt: skip

Gaps = tuple[np.ndarray, np.ndarray]
"""The ranges of a tensor that no rank holds, in order, as (array of starts, array of stops)."""
MAX_REPORTED_GAPS = 4
"""Maximum number of gaps of one tensor that a message lists; the others are only counted."""


class ShardDescriptor(NamedTuple):
    """Metadata of a `LocalShard`, without its array: which elements of a tensor a rank holds.

    The shard consists of `size` elements of a flat array, starting at index `start`. If `cut` is None, this array is
    the full tensor `name`, of shape `shape`. Otherwise, the array is the part of the tensor that `cut` assigns to rank
    `rank` of a tensor axis of `width` ranks."""

    name: str
    start: int
    size: int
    rank: int
    width: int
    shape: tuple[int, ...]
    cut: ShardSpec | None
    dtype: str

    @property
    def flat_array_key(self) -> tuple[int, int, ShardSpec | None]:
        """Key that identifies the flat array into which `start` is an index. Two shards of a tensor can be compared by
        `start` and `stop` only if their keys are equal."""
        return self.rank, self.width, self.cut

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def span(self) -> tuple[int, int]:
        """A range [start, stop) of the full tensor, in C order, that contains all elements of this shard."""
        return (self.start, self.stop) if self.cut is None else (0, math.prod(self.shape))


class ElementRuns(NamedTuple):
    """The elements of a shard as contiguous runs: elements [start[i], stop[i]) of the full tensor are stored in order
    from offset at[i] of the local flat array."""

    start: np.ndarray
    stop: np.ndarray
    at: np.ndarray


def describe_shard(part: LocalShard) -> ShardDescriptor:
    spec, dtype = part.spec, sys.intern(part.array.dtype.name)
    is_cut = spec.cut is not None and part.width > 1
    rank, width, cut = (part.rank, part.width, spec.cut) if is_cut else (0, 1, None)
    return ShardDescriptor(part.name, part.start, int(part.array.size), rank, width, spec.shape, cut, dtype)


def find_element_runs_of_shard(part: ShardDescriptor) -> ElementRuns:
    """Return the contiguous runs of the full tensor that make up a shard.

    They cover the same elements as `ShardSpec.iterate_intervals`, but are computed with array operations, because there
    can be many runs: a shard along dim 1 has one run per row."""
    first, last, cut = part.start, part.stop, part.cut
    if cut is None:
        found = np.array([[first], [last], [0]], np.int64)
        return ElementRuns(*(found if part.size else found[:, :0]))
    inner = math.prod(part.shape[cut.dim + 1 :])
    blocks = np.array(cut.ranges_of_rank_along_dim(part.shape, part.rank, part.width), np.int64) * inner
    lengths = blocks[:, 1] - blocks[:, 0]
    row = max(int(lengths.sum()), 1)
    rows = np.arange(first // row, -(-last // row), dtype=np.int64)[:, None]
    local = rows * row + (np.cumsum(lengths) - lengths)
    begin, end = np.maximum(local, first), np.minimum(local + lengths, last)
    start = rows * (part.shape[cut.dim] * inner) + blocks[:, 0] + begin - local
    there = begin < end
    return ElementRuns(start[there], (start + end - begin)[there], begin[there] - first)


def iterate_up_to_date_shards(state: TrainState, before: Mapping[LedgerKey, Any] | None = None) -> Iterator[LocalShard]:
    """Yield the local shards of the train state that are up to date on this rank.

    Each running statistic is up to date on only one pipeline rank, which `placement.pipe_rank_by_statistic` specifies.
    `before` contains arrays to use instead of those that an unfinished step has changed (see
    `iterate_state_changed_before_agreement`)."""
    home, here = state.placement.pipe_rank_by_statistic, state.placement.axes.coordinates.pipe
    for part in iterate_local_state_shards(state):
        if part.name not in home:
            yield part
        elif home[part.name] == here:
            array = (before or {}).get(LedgerKey("statistic", None, part.name), part.array)
            yield replace(part, array=array.reshape(-1))
    yield from iterate_codec_memory(state, before)


def iterate_state_changed_before_agreement(state: TrainState) -> Iterator[tuple[LedgerKey, Any]]:
    """Yield (key, array) for the state that a step changes before all ranks agree on it: running statistics, which
    change in the forward pass, and error-feedback memory of codecs, which changes in gradient reductions."""
    return (
        (row.key, array) for row, array in state.ledger.iterate_saved_rows() if row.key.kind in ("statistic", "memory")
    )


def describe_missing_elements(
    have: Iterable[Iterable[ShardDescriptor]], want: Mapping[str, ParameterSpec]
) -> list[str]:
    """Return a line of text for each tensor of `want` that the ranks do not hold completely, such as "0.weight:
    elements 12..24 of 48".

    `have` lists the shards of each rank. Does not communicate: equal arguments give equal results on all ranks."""
    parts, texts = _group_by_name(part for some in have for part in some), []
    for name, spec in want.items():
        start, stop = find_uncovered_ranges_of_tensor(parts[name], spec.size)
        if start.size:
            gaps = [
                f"{a}..{b}"
                for a, b in zip(start[:MAX_REPORTED_GAPS].tolist(), stop[:MAX_REPORTED_GAPS].tolist(), strict=True)
            ]
            more = f" and {start.size - MAX_REPORTED_GAPS} more runs" if start.size > MAX_REPORTED_GAPS else ""
            texts.append(f"{name}: elements {', '.join(gaps)}{more} of {spec.size}")
    return texts


def find_uncovered_ranges_of_tensor(parts: Sequence[ShardDescriptor], size: int) -> Gaps:
    """Return the ranges of a tensor of `size` elements that none of `parts` covers, as an array of starts and an array
    of stops."""
    found = [find_element_runs_of_shard(part) for part in parts]
    start = np.concatenate([*(r.start for r in found), [size]]).astype(np.int64)
    stop = np.concatenate([*(r.stop for r in found), [size]]).astype(np.int64)
    order = np.argsort(start, kind="stable")
    reach = np.concatenate([[0], np.maximum.accumulate(stop[order])[:-1]])
    gap = start[order] > reach
    return reach[gap], start[order][gap]


def has_uncovered_elements(gaps: Gaps, part: ShardDescriptor) -> bool:
    """Return whether any element of the shard `part` lies in one of the gaps."""
    start, stop = gaps
    some = find_element_runs_of_shard(part)
    # for each run of elements, the first gap that ends after the run's start
    after = np.searchsorted(stop, some.start, "right")
    there = after < start.size
    return bool(np.any(start[after[there]] < some.stop[there]))


def _group_by_name(parts: Iterable[ShardDescriptor]) -> defaultdict[str, list[ShardDescriptor]]:
    found: defaultdict[str, list[ShardDescriptor]] = defaultdict(list)
    for part in parts:
        found[part.name].append(part)
    return found


class ElementRows(NamedTuple):
    """A set of elements from one of this rank's shards, described as contiguous runs. `part` is the index of the shard.
    Run i has size[i] elements, starting at offset at[i]."""

    part: int
    at: np.ndarray
    size: np.ndarray

    def take_from_flat_array(self, array: Any) -> Any:
        """Return these elements of the flat `array`, as a view if they form a single run, and otherwise as a copy."""
        if self.at.size == 1:
            return array[int(self.at[0]) : int(self.at[0] + self.size[0])]
        return (
            array[self._make_index(array)]
            if self._is_index_copy_faster(array)
            else np.concatenate(list(self._iterate_views(array)))
        )

    def copy_values_into_elements_of(self, array: Any, values: Any) -> None:
        """Copy `values` into these elements of the flat `array`."""
        if self._is_index_copy_faster(array):
            array[self._make_index(array)] = _move_to_device_of(array, values)
            return
        at = 0
        for view in self._iterate_views(array):
            _copy_into(view, values[at : at + view.size])
            at += view.size

    def _iterate_views(self, array: Any) -> Iterator[Any]:
        return (array[at : at + size] for at, size in zip(self.at.tolist(), self.size.tolist(), strict=True))

    def _is_index_copy_faster(self, array: Any) -> bool:
        """Return whether to copy all runs at once with an index array, rather than one by one.

        A single copy is faster if runs are short, or on a GPU, where each copy has a fixed cost."""
        return self.at.size > 1 and (
            not isinstance(array, np.ndarray) or self.size.sum() < SHORT_RUN_ELEMENTS * self.size.size
        )

    def _make_index(self, array: Any) -> Any:
        ends = np.cumsum(self.size)
        return _move_to_device_of(array, np.repeat(self.at - (ends - self.size), self.size) + np.arange(ends[-1]))


SHORT_RUN_ELEMENTS = 32
"""If runs of consecutive elements are shorter than this on average, all runs are copied at once with an index array."""


class ElementMove(NamedTuple):
    """Elements to transfer from rank `source` to the receiver, which may be the same rank. The elements are read from
    the source's shard with index `have`, and written to the receiver's shard with index `want`.

    Run i has size[i] elements, which are read from offset at[i] and written to offset to[i]."""

    source: int
    have: int
    want: int
    at: np.ndarray
    to: np.ndarray
    size: np.ndarray
    dtype: str


class ShardSupply(NamedTuple):
    """A shard that can be sent, identified by its index `number` among the shards of rank `rank`."""

    rank: int
    number: int
    part: ShardDescriptor


class ReshardMessage(NamedTuple):
    """A message of a reshard, from the point of view of its sender or its receiver.

    Attributes
    ----------
    number : sort key of the message, the same on sender and receiver: the tuple (round, i, sender). The message is the
        i-th message (from 0) that its sender sends in this round. In round k, rank r sends to rank r + k
    sends : whether this rank sends the message
    peer : the other rank
    rows : elements in the message, as positions in the shards that this rank holds (if it sends the message) or wants
        (if it receives the message)
    """

    number: tuple[int, int, int]
    sends: bool
    peer: int
    rows: list[ElementRows]


@dataclass(frozen=True)
class ReshardPlan:
    """What `rank` sends, receives and copies in a reshard. If all ranks pass the same lists, the sends in their plans
    match the receives.

    `have` and `want` list the shards of every rank before and after the reshard. `block` is the maximum number of bytes
    of one message. The plan's memory is proportional to the number of contiguous runs of elements."""

    rank: int
    have: Sequence[Sequence[ShardDescriptor]]
    want: Sequence[Sequence[ShardDescriptor]]
    block: int = BLOCK_BYTES

    def require_all_elements_held(self) -> None:
        """Assert that every wanted element is held by some rank, in the wanted dtype. Either all ranks pass, or all
        raise AssertionError."""
        supplies = {
            name: [o.part for some in ranks.values() for o in some]
            for name, ranks in self._held_shards_by_name_and_rank.items()
        }
        gaps: dict[str, Gaps] = {}
        formats: dict[str, set[str]] = {}
        for part in (part for some in self.want for part in some if part.size):
            known = supplies.get(part.name, [])
            if part.name not in gaps:
                gaps[part.name] = find_uncovered_ranges_of_tensor(known, math.prod(part.shape))
                formats[part.name] = {supply.dtype for supply in known}
            every = sorted(formats[part.name] | {part.dtype})
            assert len(every) == 1, f"reshard: {part.name} is {' and '.join(every)}"
            assert not has_uncovered_elements(gaps[part.name], part), f"reshard: no rank holds elements of {part}"

    @cached_property
    def local_moves(self) -> list[tuple[ElementRows, ElementRows]]:
        """Elements that this rank both holds and wants, as (source, target) pairs of rows to copy."""
        mine = [move for move in self._incoming_moves if move.source == self.rank]
        sides = zip(
            self._split_moves_into_block_messages(mine, True),
            self._split_moves_into_block_messages(mine, False),
            strict=True,
        )
        return [pair for rows in sides for pair in zip(*rows, strict=True)]

    @cached_property
    def messages_in_ring_order(self) -> list[ReshardMessage]:
        """The messages of this rank, in an order that is the same on all ranks: in round k, each rank sends to rank +
        k and receives from rank - k."""
        sent, size = defaultdict[int, list[ElementMove]](list), len(self.have)
        for dest, move in self._outgoing_moves:
            sent[dest].append(move)
        found = [*self.incoming_messages]
        for dest, moves in sent.items():
            number = (dest - self.rank) % size
            found += [
                ReshardMessage((number, i, self.rank), True, dest, r)
                for i, r in enumerate(self._split_moves_into_block_messages(moves, True))
            ]
        return sorted(found, key=lambda message: message.number)

    @property
    def incoming_messages(self) -> Iterator[ReshardMessage]:
        """Messages that this rank receives."""
        received, size = defaultdict[int, list[ElementMove]](list), len(self.have)
        for move in self._incoming_moves:
            received[move.source].append(move)
        for source, moves in received.items():
            for i, rows in enumerate(
                self._split_moves_into_block_messages(moves, False) if source != self.rank else ()
            ):
                yield ReshardMessage(((self.rank - source) % size, i, source), False, source, rows)

    @cached_property
    def _held_shards_by_name_and_rank(self) -> dict[str, dict[int, list[ShardSupply]]]:
        """The shards that can be sent, as a nested dict: tensor name -> rank -> list of shards."""
        found: dict[str, dict[int, list[ShardSupply]]] = {}
        for rank, parts in enumerate(self.have):
            for index, part in enumerate(parts):
                if part.size:
                    found.setdefault(part.name, {}).setdefault(rank, []).append(ShardSupply(rank, index, part))
        return found

    @cached_property
    def _holder_offset_by_name(self) -> dict[str, int]:
        """For each tensor name, an offset that determines which rank sends first, among the ranks that hold the tensor.
        To spread the load, each tensor has a different offset."""
        return {name: holder_offset for holder_offset, name in enumerate(sorted(self._held_shards_by_name_and_rank))}

    @cached_property
    def _incoming_moves(self) -> list[ElementMove]:
        return [move for i in range(len(self.want[self.rank])) for move in self._find_moves_into_shard(self.rank, i)]

    @property
    def _outgoing_moves(self) -> Iterator[tuple[int, ElementMove]]:
        mine = {name for name, ranks in self._held_shards_by_name_and_rank.items() if self.rank in ranks}
        for dest, wanted in enumerate(self.want):
            if dest != self.rank:
                for i, part in enumerate(wanted):
                    if part.name in mine:
                        yield from (
                            (dest, move) for move in self._find_moves_into_shard(dest, i) if move.source == self.rank
                        )

    def _find_moves_into_shard(self, dest: int, index: int) -> list[ElementMove]:
        """Return the moves that fill the shard at index `index` in the list of shards that rank `dest` wants."""
        part = self.want[dest][index]
        if part.size == 0:
            return []
        ranks, (first, last) = self._held_shards_by_name_and_rank[part.name], part.span
        for supply in ranks.get(dest, ()):
            if (
                supply.part.flat_array_key == part.flat_array_key
                and supply.part.start <= part.start
                and part.stop <= supply.part.stop
            ):
                at, to, size = np.array([[part.start - supply.part.start], [0], [part.size]])
                return [ElementMove(dest, supply.number, index, at, to, size, part.dtype)]
        supplies = [
            supply
            for rank in sorted(ranks)
            for supply in ranks[rank]
            if supply.part.span[0] < last and first < supply.part.span[1]
        ]
        chunk = max(self.block // parse_dtype(part.dtype).itemsize, 1)
        return choose_sources_of_shard(part, index, dest, supplies, self._holder_offset_by_name[part.name], chunk)

    def _split_moves_into_block_messages(self, moves: Iterable[ElementMove], sends: bool) -> list[list[ElementRows]]:
        """Divide moves into messages of `block` bytes, and return a list of `ElementRows` for each message.

        All elements are laid out in sequence, with each move aligned to ALIGN_BYTES, and the sequence is divided every
        `block` bytes. Sender and receiver therefore divide the sequence at the same positions, and a message from the
        middle of a long run contains only elements of this run."""
        found = defaultdict[int, list[ElementRows]](list)
        filled, block = 0, max(self.block // ALIGN_BYTES, 1) * ALIGN_BYTES
        for move in moves:
            itemsize = parse_dtype(move.dtype).itemsize
            first, each = -(-filled // ALIGN_BYTES) * ALIGN_BYTES // itemsize, block // itemsize
            stop = first + np.cumsum(move.size)
            start = stop - move.size
            cuts = np.union1d(start, np.arange(-(-first // each) * each, stop[-1], each))
            run = np.searchsorted(start, cuts, "right") - 1
            part, at = (move.have, move.at) if sends else (move.want, move.to)
            edges = np.flatnonzero(np.diff(cuts // each)) + 1
            places, sizes = at[run] + cuts - start[run], np.diff(cuts, append=stop[-1])
            for number, *rows in zip(
                (cuts // each)[[0, *edges]].tolist(), np.split(places, edges), np.split(sizes, edges), strict=True
            ):
                found[number].append(ElementRows(part, *rows))
            filled = int(stop[-1]) * itemsize
        return [found[number] for number in sorted(found)]


ALIGN_BYTES = 8
"""Moves are aligned to this many bytes, the size of the largest element."""


def choose_sources_of_shard(
    want: ShardDescriptor, index: int, receiver: int, supplies: Sequence[ShardSupply], holder_offset: int, chunk: int
) -> list[ElementMove]:
    """Choose the rank that supplies each element of the shard `want`. Return one move for each source shard; the runs
    of a move are in the order of `want`.

    `want` has the index `index` among the shards that `receiver` wants. The receiver copies elements that it holds
    itself. For all other elements, the ranks that hold them take turns every `chunk` elements; `holder_offset` and the
    receiver's rank determine which rank comes first, to spread the load."""
    wanted, held = find_element_runs_of_shard(want), [find_element_runs_of_shard(supply.part) for supply in supplies]
    edges = _find_split_positions(wanted, held, chunk)
    to = _find_local_positions(wanted, edges[:-1])
    inside = to >= 0
    start, size, to = edges[:-1][inside], np.diff(edges)[inside], to[inside]
    places = [_find_local_positions(some, start) for some in held]
    others = [(i, place) for i, (o, place) in enumerate(zip(supplies, places, strict=True)) if o.rank != receiver]
    chosen, at = np.full(start.size, -1), np.zeros(start.size, np.int64)

    def take_masked(i: int, mask: np.ndarray) -> None:
        mask = mask & (chosen < 0)
        chosen[mask], at[mask] = i, places[i][mask]

    for i, supply in enumerate(supplies):
        if supply.rank == receiver:
            take_masked(i, places[i] >= 0)
    count = sum(((place >= 0).astype(np.int64) for _, place in others), np.zeros(start.size, np.int64))
    number, seen = (start // chunk + holder_offset + receiver) % np.maximum(count, 1), np.zeros(start.size, np.int64)
    for i, place in others:
        take_masked(i, (place >= 0) & (seen == number))
        seen += place >= 0
    # moves are in the order of the receiver's array, so adjacent moves can be merged
    follows = (chosen[1:] == chosen[:-1]) & (at[1:] == (at + size)[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    chosen, at, to, size = chosen[first], at[first], to[first], np.add.reduceat(size, first)
    found = []
    for i, supply in enumerate(supplies):
        own = chosen == i
        if own.any():
            found.append(ElementMove(supply.rank, supply.number, index, at[own], to[own], size[own], want.dtype))
    return found


def _find_split_positions(wanted: ElementRuns, held: Sequence[ElementRuns], chunk: int) -> np.ndarray:
    """Return positions that divide the wanted elements into intervals. The positions are chosen so that each rank holds
    either all elements of an interval or none of them. A single rank can then send a whole interval."""
    first, last = int(wanted.start[0]), int(wanted.stop[-1])
    lines = np.arange(-(-first // chunk) * chunk, last, chunk, dtype=np.int64)
    edges = np.concatenate([*wanted[:2], *(edge for some in held for edge in some[:2]), lines])
    return np.unique(edges[(first <= edges) & (edges <= last)])


def _find_local_positions(some: ElementRuns, elements: np.ndarray) -> np.ndarray:
    """For each of `elements` (indices in the full tensor), return its offset in the local array, or -1 if the local
    array does not contain it. `some` lists the runs of consecutive elements that make up the local array."""
    i = np.searchsorted(some.start, elements, "right") - 1
    inside = (i >= 0) & (elements < some.stop[i])
    return np.where(inside, some.at[i] + elements - some.start[i], -1)


MAX_MESSAGES_IN_FLIGHT = 8
"""Maximum number of messages that a rank sends or receives at the same time."""
_undrained_transfers: list[Handle] = []
"""Broken transfers that did not end in time. These transfers may still write to their buffers, so the buffers are never
freed."""


def reshard_arrays(
    comm: Communicator, have: Sequence[LocalShard], want: Sequence[LocalShard], block: int = BLOCK_BYTES
) -> None:
    """Fill the arrays of `want` on every rank with the elements that ranks hold in `have`, bit for bit. Collective.

    Every rank may hold and want any elements, or none. If several ranks hold an element, its bits must be the same on
    all of them. A rank copies the elements that it holds itself; the ranks that hold the other elements take turns
    sending them. Arrays of `want` may share memory with arrays of `have` only where both contain the same elements of a
    tensor. Before the call, check with `describe_missing_elements` that each wanted element is held by at least one
    rank. Raises RankLost if a rank dies; `comm` is then revoked, and some arrays of `want` may already be filled.

    A rank receives the bytes that it wants and does not hold, in messages of at most `block` bytes. The rank needs
    additional memory only for elements that are not contiguous, up to MAX_MESSAGES_IN_FLIGHT x block."""
    mine = ([describe_shard(part) for part in have], [describe_shard(part) for part in want])
    everyone = comm.all_gather_value(mine)
    plan = ReshardPlan(comm.rank, [one[0] for one in everyone], [one[1] for one in everyone], block)
    plan.require_all_elements_held()
    given, taken = [_view_as_unsigned(part.array) for part in have], [_view_as_unsigned(part.array) for part in want]
    _exchange_messages(comm, plan, given, taken, [part.name for part in have], [part.name for part in want])


def drain_transfers_for_limited_time(handles: Iterable[Handle]) -> bool:
    """Wait a limited time for broken transfers to end, because MPI may write to their buffers until they do.

    References to transfers that do not end are kept, so that their buffers are not freed. Returns whether all have
    ended."""
    left = drain_transfers(handles)
    _undrained_transfers.extend(left)
    return not left


@dataclass(frozen=True)
class ReshardTransfer:
    """A message of a reshard while it is in transit. `on_complete` is called when the message has been transferred."""

    handle: Handle
    on_complete: Callable[[], None]


def _exchange_messages(
    comm: Communicator, plan: ReshardPlan, have: list[Any], want: list[Any], have_names: list[str],
    want_names: list[str],
) -> None:  # fmt: skip
    """Send and receive all messages of a plan, several at a time.

    Waiting for the oldest message cannot deadlock, even if a send waits for its receive. Each rank posts its messages
    in the order of their numbers. Consider the unfinished message with the lowest number: all earlier messages of its
    two ranks are complete, so both ranks have posted it."""
    transfers: deque[ReshardTransfer] = deque()
    spare: list[np.ndarray] = []

    def wait_for_oldest() -> None:
        transfers[0].handle.wait()
        transfers.popleft().on_complete()

    try:
        for message in plan.messages_in_ring_order:
            if len(transfers) == MAX_MESSAGES_IN_FLIGHT:
                wait_for_oldest()
            arrays, names = (have, have_names) if message.sends else (want, want_names)
            transfers.append(_start_message(comm, message, arrays, names, spare, plan.block))
        for had, wanted in plan.local_moves:
            wanted.copy_values_into_elements_of(want[wanted.part], had.take_from_flat_array(have[had.part]))
        while transfers:
            wait_for_oldest()
    except RankLost:
        if isinstance(comm, SurvivorCommunicator):
            comm.revoke()
        drain_transfers_for_limited_time(one.handle for one in transfers)
        raise


def _start_message(
    comm: Communicator, message: ReshardMessage, arrays: list[Any], names: list[str], spare: list[np.ndarray],
    block: int,
) -> ReshardTransfer:  # fmt: skip
    """Start to send or receive a message. If it is contiguous in host memory, transfer it in place; otherwise, use a
    buffer."""
    first, *others = message.rows
    what, call = f"{names[first.part]}, re-cut", comm.send if message.sends else comm.recv
    if not others and first.at.size == 1 and isinstance(arrays[first.part], np.ndarray):
        return ReshardTransfer(
            call(first.take_from_flat_array(arrays[first.part]).view(np.uint8), message.peer, what=what), lambda: None
        )
    block_memory, filled = spare.pop() if spare else np.empty(block, np.uint8), 0
    packed: list[tuple[ElementRows, Any, np.ndarray]] = []
    for rows in message.rows:
        array = arrays[rows.part]
        end = filled + int(rows.size.sum()) * array.itemsize
        packed.append((rows, array, block_memory[filled:end].view(array.dtype)))
        filled = end
        if message.sends:
            _copy_into(packed[-1][2], rows.take_from_flat_array(array))

    def write_received() -> None:
        for rows, array, part in () if message.sends else packed:
            rows.copy_values_into_elements_of(array, part)
        spare.append(block_memory)

    return ReshardTransfer(call(block_memory[:filled], message.peer, what=what), write_received)


def _view_as_unsigned(array: Any) -> Any:
    """Return a view of the array as unsigned integers of the same width, so that no library interprets the bits as
    floats."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _move_to_device_of(array: Any, values: Any) -> Any:
    """Return `values` on the device of `array`, which is the host or a GPU."""
    if isinstance(array, np.ndarray):
        return to_host(values)
    return from_host(namespace_of(array), values) if isinstance(values, np.ndarray) else values


def _copy_into(target: Any, source: Any) -> None:
    target[...] = _move_to_device_of(target, source)
