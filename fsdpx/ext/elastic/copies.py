"""In-memory checkpoints: copies of each rank's state in the memory of other ranks (its buddies)."""

from __future__ import annotations

import math
import platform
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from fsdpx.core.array.arena import ALIGN
from fsdpx.core.array.namespace import parse_dtype, to_host
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.checkpoint.local_shards import LocalShard
from fsdpx.core.checkpoint.scalars import CheckpointScalars
from fsdpx.core.comm.calls import get_progress, spin_until
from fsdpx.core.comm.communicator import Communicator, Handle
from fsdpx.core.comm.windows import allocate_aligned
from fsdpx.core.state.flat_parameters import ElementRange
from fsdpx.core.state.ledger import LEDGER_KINDS, Ledger, LedgerKey, LedgerKind, LedgerRow
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import CommTimeout, RankLost
from fsdpx.ext.elastic.reshard import (
    ShardDescriptor,
    describe_shard,
    drain_transfers_for_limited_time,
    iterate_up_to_date_shards,
)  # fmt: skip
from fsdpx.nn.layer import ParameterSpec

__all__ = [
    "MESSAGE_BYTES", "StateCopies", "StateGeneration", "are_copies_needed", "assign_copy_holders_to_each_rank",
    "count_snapshot_bytes", "form_state_backup_groups",
]  # fmt: skip


def assign_copy_holders_to_each_rank(hosts: Sequence[str], copies: int) -> list[tuple[int, ...]]:
    """Return the buddies of each rank: the `copies` ranks (or all other ranks, if there are fewer) that keep a copy of
    its state.

    `hosts` gives the host of each rank. Ranks form groups of copies + 1 ranks, in which each rank keeps the state of
    all others. The remaining ranks join the last group. This group is a ring, in which each rank keeps the state of the
    `copies` ranks before it. Every rank thus keeps as many copies as it has buddies.

    Groups need the same memory as a single ring of all ranks, but lose state less often. State is lost only if a rank
    and all its buddies die at once. A ring of N ranks contains N sets of ranks whose simultaneous death loses state.
    Groups contain only N / (copies + 1) such sets. If N ranks form pairs, the job survives k random simultaneous losses
    unless two of the lost ranks form a pair. The probability of survival is `C(N/2, k) * 2**k / C(N, k)`, where C is
    the binomial coefficient. For N = 16 and k = 3, this is 0.80; for a ring, it is 0.63."""
    found: list[tuple[int, ...]] = [()] * len(hosts)
    for group in form_state_backup_groups(hosts, copies):
        n = len(group)
        for i, rank in enumerate(group):
            found[rank] = tuple(group[(i + k) % n] for k in range(1, min(copies, n - 1) + 1))
    return found


def form_state_backup_groups(hosts: Sequence[str], copies: int) -> list[list[int]]:
    """Return groups of ranks that keep each other's state, spread over hosts.

    Ranks are sorted by host, and assigned to groups round-robin. Two ranks of the same host are therefore in the same
    group only if the host has more ranks than there are groups."""
    ranks = _group_ranks_by_host(hosts)
    count = max(len(ranks) // (copies + 1), 1)
    dealt = len(ranks) if count == 1 else count * (copies + 1)
    found = [ranks[g:dealt:count] for g in range(count)]
    found[-1] = _order_ranks_across_hosts(found[-1] + ranks[dealt:], hosts)
    return found


def _group_ranks_by_host(hosts: Sequence[str]) -> list[int]:
    """Return the ranks grouped by host. Hosts with the most ranks come first, so that the ranks at the end of the list,
    which are added to the last group, come from many hosts."""
    size, first = Counter(hosts), {host: hosts.index(host) for host in set(hosts)}
    return sorted(range(len(hosts)), key=lambda rank: (-size[hosts[rank]], first[hosts[rank]], rank))


def _order_ranks_across_hosts(ranks: list[int], hosts: Sequence[str]) -> list[int]:
    """Return the ranks in an order that puts neighbors on different hosts where possible.

    The ranks are sorted by host, and then the two halves of that list are interleaved."""
    place = {rank: i for i, rank in enumerate(_group_ranks_by_host(hosts))}
    ordered = sorted(ranks, key=lambda rank: place[rank])
    half = -(-len(ordered) // 2)
    found = [0] * len(ordered)
    found[0::2], found[1::2] = ordered[:half], ordered[half:]
    return found


def are_copies_needed(ranks: int, replicas: int, copies: int) -> bool:
    """Return whether ranks must keep copies of state. No copies are needed if every element is on more than `copies`
    ranks anyway, as in data parallelism, or if there is only one rank."""
    return ranks > 1 and replicas <= copies


MESSAGE_BYTES = 64 << 20
"""Maximum size of a message, in bytes."""


@dataclass(frozen=True)
class StateGeneration:
    """The part of the training state that this rank holds in memory, as it was after step `step`.

    `parts` are this rank's own state and the copies that it keeps for other ranks. They are views that stay valid
    until `StateCopies.start_copying_to_buddies` has been called twice."""

    step: int
    scalars: CheckpointScalars
    parts: Sequence[LocalShard]


class CopyPartners(NamedTuple):
    """The ranks that this rank exchanges copies of state with.

    Attributes
    ----------
    buddies : ranks that keep a copy of this rank's state
    own : the parts of tensors that make up this rank's state
    kept : maps each rank whose state this rank keeps to the parts of that state
    """

    buddies: tuple[int, ...]
    own: list[ShardDescriptor]
    kept: dict[int, list[ShardDescriptor]]


LEDGER_KINDS["copy"] = LedgerKind("copies for recovery")  # other ranks' state, and this rank's earlier state


class SnapshotBuffers:
    """Host memory for one snapshot, registered in the ledger (the table of a rank's arrays).

    Attributes
    ----------
    own : this rank's snapshot, as an array of bytes
    kept : maps each rank to that rank's snapshot, as an array of bytes
    """

    def __init__(self, ledger: Ledger, number: int, partners: CopyPartners) -> None:
        own, kept = partners.own, partners.kept
        self._ledger, self._number, self._keys = ledger, number, list[LedgerKey]()
        self.own = self._add_ledger_row("own", own)
        self.kept = {rank: self._add_ledger_row(f"of rank {rank}", parts) for rank, parts in kept.items()}
        self.mine = _view_parts(self.own, own)
        self.parts = [
            *self.mine,
            *(part for rank, parts in kept.items() for part in _view_parts(self.kept[rank], parts)),
        ]

    def _add_ledger_row(self, name: str, parts: Sequence[ShardDescriptor]) -> np.ndarray:
        buffer, key = allocate_aligned(count_snapshot_bytes(parts)), LedgerKey("copy", None, f"{name}, {self._number}")
        self._ledger.add_row(
            LedgerRow(key, buffer.dtype, ElementRange(0, buffer.size), "private", level="host"), buffer
        )
        self._keys.append(key)
        return buffer

    def free_ledger_rows(self) -> None:
        for key in self._keys:
            self._ledger.drop_row(key)


class StateCopies:
    """The last two generations of in-memory checkpoints. All ranks of `comm` must make the same calls in the same
    order.

    A generation consists of the snapshots of all ranks after one step. `start_copying_to_buddies` begins a generation.
    Once all ranks have agreed that all of its copies have arrived (`progress_and_test_transfers`), `promote_generation`
    makes it the newest complete generation. Until then, the previous generation remains complete and unchanged.
    Therefore, the surviving ranks always have a complete generation in common, no matter when a rank dies. No copies
    are kept if there are enough replicas. Idle ranks have no state of their own, but keep copies for other ranks.

    A rank sends `copies` times the bytes of its state for each generation. If a rank has no buddies on other hosts, its
    copies are on its own host."""

    def __init__(self, comm: Communicator, state: TrainState, copies: int, trains: bool = True) -> None:
        """Agree on which ranks keep copies of which state. Collective.

        `comm` is used only for copies. `state` is this rank's state; an idle rank (`trains` is False) may pass any
        state. `copies` is the number of copies of each rank's state."""
        self._comm, self._state, self._trains = comm, state, trains
        self.needed = are_copies_needed(comm.size, state.placement.axes.replica.size, copies)
        self.copy_seconds = 0.0
        """Time in seconds that the last `start_copying_to_buddies` took to copy the state on this rank."""
        self.transfer_seconds = 0.0
        """Time in seconds from the last `start_copying_to_buddies` to the arrival of all its messages."""
        self._complete: list[tuple[SnapshotBuffers, int, CheckpointScalars]] = []  # newest first
        self._spare: list[SnapshotBuffers] = []
        self._under_way: tuple[SnapshotBuffers, int, CheckpointScalars] | None = None
        self._transfers: deque[Handle] = deque()
        # error caught while starting transfers; `progress_and_test_transfers` raises it
        self._lost: RankLost | None = None
        weakref.finalize(
            self, drain_transfers_for_limited_time, self._transfers
        )  # the buffers must not be freed while MPI may still write to them
        self._begun = 0.0
        self._buffer_count = 0
        self._partners = CopyPartners((), [], {})
        if self.needed:
            own = [describe_shard(part) for part in self._iterate_up_to_date_shards()]
            everyone = comm.all_gather_value((platform.node(), own))
            placed = assign_copy_holders_to_each_rank([host for host, _ in everyone], copies)
            kept = {rank: everyone[rank][1] for rank in range(comm.size) if comm.rank in placed[rank]}
            self._partners = CopyPartners(placed[comm.rank], own, kept)

    @property
    def nbytes(self) -> int:
        """Number of bytes that copies take on this rank once two generations exist. In each generation, this rank
        stores a snapshot of its own state and a snapshot for each rank whose copy it keeps. Each part of a snapshot is
        rounded up to cache lines."""
        own, kept = self._partners.own, self._partners.kept
        return 2 * (count_snapshot_bytes(own) + sum(map(count_snapshot_bytes, kept.values())))

    def start_copying_to_buddies(self, scalars: CheckpointScalars, step: int | None = None) -> None:
        """Take a snapshot of this rank's state, and start sending it to the buddies.

        Returns as soon as the snapshot is taken. `progress_and_test_transfers` advances the transfers, and also raises
        the error if a rank was lost during this call. `step` is the step number of the snapshot; if None, it is taken
        from `scalars`."""
        assert self._under_way is None, "the copies of the last take have not been promoted or abandoned"
        if not self.needed:
            return
        self._begun = perf_counter()
        buffers = self._reuse_or_allocate_buffers()
        for target, source in zip(buffers.mine, self._iterate_up_to_date_shards(), strict=True):
            assert describe_shard(source) == describe_shard(target)
            target.array[...] = to_host(source.array)
        self._under_way = buffers, scalars.steps if step is None else step, scalars
        self.copy_seconds = perf_counter() - self._begun
        try:
            for rank, buffer in buffers.kept.items():
                for part in _split_into_messages(buffer):
                    self._transfers.append(self._comm.recv(part, rank, what=f"the state of rank {rank}"))
            for rank in self._partners.buddies:
                for part in _split_into_messages(buffers.own):
                    self._transfers.append(self._comm.send(part, rank, what="a copy of the state"))
        except RankLost as error:
            self._lost = error

    def progress_and_test_transfers(self) -> bool:
        """Advance pending transfers without waiting, and return whether all copies that this rank sends and receives
        have arrived.

        Returns True if no transfers are pending. Raises RankLost if a rank that takes part in the transfers has
        died."""
        if self._lost is not None:
            raise self._lost
        if not self._transfers:
            return True
        while self._transfers and self._transfers[0].test():
            self._transfers.popleft()
        if not self._transfers:
            self.transfer_seconds = perf_counter() - self._begun
        return not self._transfers

    def wait_for_copies(self) -> None:
        """Wait until all copies that this rank sends and receives have arrived. The watchdog monitors this wait like
        any other wait."""
        timeout = getattr(self._comm, "timeout", math.inf)
        if not spin_until(self.progress_and_test_transfers, get_progress(self._comm), timeout):
            raise CommTimeout(f"the copies of the state have not arrived after {timeout:g} s")

    def promote_generation(self) -> None:
        """Make the generation that was being copied the newest complete generation.

        Call this only after all ranks have agreed that their copies have arrived."""
        if not self.needed:
            return
        assert self._under_way is not None, "promote without take"
        assert not self._transfers, "promote before all has arrived"
        self._complete.insert(0, self._under_way)
        self._under_way = None

    def list_complete_snapshots(self) -> list[StateGeneration]:
        """Return the complete snapshots in this rank's memory, newest first."""
        return [StateGeneration(step, scalars, list(buffers.parts)) for buffers, step, scalars in self._complete]

    def abandon_generation(self) -> None:
        """Drop the generation that is being copied; complete generations are kept. Call this after a failure, once
        `revoke` has been called."""
        over = drain_transfers_for_limited_time(self._transfers)
        self._transfers.clear()
        self._lost = None
        if self._under_way is not None and over:
            self._spare.append(self._under_way[0])
        self._under_way = None

    def drop_old_generations(self) -> None:
        """Free all generations except the newest complete one.

        Older generations are useless, because all generations are stored on the same ranks: if the death of a rank
        makes the newest generation incomplete, the older ones are incomplete as well."""
        for buffers in (*(buffers for buffers, _, _ in self._complete[1:]), *self._spare):
            buffers.free_ledger_rows()
        del self._complete[1:]
        self._spare.clear()

    def close(self) -> None:
        """Drop the generation that is being copied, and close the communicator. Collective."""
        self.abandon_generation()
        self._comm.close()

    def _iterate_up_to_date_shards(self) -> Iterable[LocalShard]:
        return iterate_up_to_date_shards(self._state) if self._trains else ()

    def _reuse_or_allocate_buffers(self) -> SnapshotBuffers:
        """Return buffers for the next snapshot. If there are two complete snapshots, reuse the buffers of the older
        one; otherwise, use spare buffers or allocate new ones."""
        if len(self._complete) == 2:
            return self._complete.pop()[0]
        if self._spare:
            return self._spare.pop()
        self._buffer_count += 1
        return SnapshotBuffers(self._state.ledger, self._buffer_count, self._partners)


def _split_into_messages(buffer: np.ndarray) -> Iterator[np.ndarray]:
    return (buffer[at : at + MESSAGE_BYTES] for at in range(0, buffer.size, MESSAGE_BYTES))


def _count_aligned_bytes(part: ShardDescriptor) -> int:
    """Return the size in bytes of a part of a tensor, rounded up to cache lines."""
    return -(-part.size * parse_dtype(part.dtype).itemsize // ALIGN) * ALIGN


def count_snapshot_bytes(parts: Sequence[ShardDescriptor]) -> int:
    """Return the size in bytes of a snapshot that consists of `parts`."""
    return sum(_count_aligned_bytes(part) for part in parts)


def _view_parts(buffer: np.ndarray, parts: Sequence[ShardDescriptor]) -> list[LocalShard]:
    """Return the parts of a snapshot as views of `buffer`, which holds them one after another."""
    found, at = [], 0
    for part in parts:
        kind = parse_dtype(part.dtype)
        array = buffer[at : at + part.size * kind.itemsize].view(kind)
        found.append(
            LocalShard(part.name, array, part.start, ParameterSpec(part.shape, cut=part.cut), part.rank, part.width)
        )
        at += _count_aligned_bytes(part)
    return found
