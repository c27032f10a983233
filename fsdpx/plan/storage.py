"""What checkpoints move to and from the disk, and ranks to each other where some are lost, by the code that saves,
loads and recovers, on shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdpx.array.namespace import dtype
from fsdpx.checkpoint.pieces import held, in_blocks, owned
from fsdpx.checkpoint.read import parts, spans
from fsdpx.checkpoint.save import Choices, plan_of
from fsdpx.checkpoint.state import scalars_of
from fsdpx.comm.mesh import Mesh
from fsdpx.elastic.assembly import seated
from fsdpx.elastic.copies import buddies, needed, snapshot_bytes
from fsdpx.elastic.recut import Descriptor, RecutPlan, describe, live, missing
from fsdpx.errors import StateLost
from fsdpx.plan.machine import Storage
from fsdpx.state.ledger import saved_tensors
from fsdpx.state.state import TrainState
from fsdpx.state.tuning import bytes_text

__all__ = ["Accesses", "Checkpoint", "RankStorage", "Recut", "rank_storage", "recut"]


class Accesses(NamedTuple):
    """Reads or writes of a file: how many, and their bytes."""

    calls: int
    nbytes: int

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Accesses:
        """Accesses of these numbers of bytes."""
        known = [*sizes]
        return cls(len(known), sum(known))


@dataclass(frozen=True)
class RankStorage:
    """What one rank does with the tensors of a checkpoint. Beside it the first rank writes and reads headers and texts,
    some KB; what codecs keep is not counted.

    Parameters
    ----------
    rank : of the world
    written : when it saves its part
    verified : when it looks at the digests of its even part of all bytes, before it loads
    loaded : when it loads what it holds, with what lies between
    """

    rank: int
    written: Accesses
    verified: Accesses
    loaded: Accesses

    @property
    def read(self) -> int:
        """Bytes that it reads in a load with digests."""
        return self.verified.nbytes + self.loaded.nbytes


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of ranks that save, and that load what any number of ranks has saved.

    Parameters
    ----------
    nbytes : of all tensors
    ranks : of the world
    each : one rank of each class
    """

    nbytes: int
    ranks: int
    each: tuple[RankStorage, ...]

    @property
    def read(self) -> int:
        """Bytes that all ranks read together."""
        return sum(one.read for one in self.each) * self.ranks // len(self.each)

    def seconds(self, disk: Storage) -> tuple[float, float]:
        """How long saving takes, and loading."""
        save = disk.seconds(max(one.written.nbytes for one in self.each), self.nbytes, disk.write)
        return save, disk.seconds(max(one.read for one in self.each), self.read, disk.read)

    def __str__(self) -> str:
        written, read = max(one.written.nbytes for one in self.each), max(one.read for one in self.each)
        return (
            f"a checkpoint has {bytes_text(self.nbytes)}: a rank writes up to {bytes_text(written)}, and reads up to "
            f"{bytes_text(read)} to load one ({bytes_text(self.read)} on all ranks)"
        )


def rank_storage(state: TrainState) -> tuple[RankStorage, int]:
    """What a rank does with a checkpoint of its own world, and the bytes of all tensors."""
    layout = plan_of(state.placement, Choices(), scalars_of(state, None, None), {})
    entries, world = {name: entry for _, name, entry in layout.tensors()}, state.placement.axes.world
    sizes = [entry.nbytes for entry in entries.values()]
    written = (
        (stop - start) * entries[piece.name].itemsize
        for piece in owned(state)
        for block in in_blocks(piece, entries[piece.name].itemsize)
        for start, stop in block.runs
    )
    loaded = (
        (runs[-1][1] - runs[0][0]) * entries[piece.name].itemsize
        for piece in held(state)
        for _, together in spans(piece, entries[piece.name])
        for runs in together
    )
    verified = (count for _, _, count in parts(sizes, world.rank, world.size))
    return RankStorage(world.rank, *map(Accesses.of, (written, verified, loaded))), sum(sizes)


# -- going on without some ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recut:
    """Recovery from the memory of the ranks that are left.

    Parameters
    ----------
    mesh : of those that train from then on
    received : what each rank that is left gets of the others, in their order; the rest it has
    copied : bytes that each of them then sends, so that there are copies again
    """

    mesh: Mesh
    received: tuple[Accesses, ...]
    copied: tuple[int, ...]


def recut(
    before: Sequence[TrainState], after: Sequence[TrainState], lost: Sequence[int], copies: int, hosts: Sequence[str]
) -> Recut:
    """A recovery of all ranks that there were as those that train then. hosts: of the former. copies: see `Elastic`.

    Copies are used only where ranks that are left do not have all: what these have is newer.

    Raises
    ------
    StateLost : some elements were in the memory of lost ranks alone
    """
    left = [rank for rank in range(len(before)) if rank not in lost]
    own = [[describe(part) for part in live(state)] for state in before]
    have, wanted = [own[rank] for rank in left], saved_tensors(after[0].placement)
    if missing(have, wanted):  # then those of an older step count
        placed = _placed(before[0], hosts, copies)
        have = [own[r] + [part for q, some in enumerate(placed) if r in some for part in own[q]] for r in left]
    if gone := missing(have, wanted):
        ranks, words = ", ".join(map(str, lost)), ", ".join(gone[:3]) + (" ..." if len(gone) > 3 else "")
        raise StateLost(f"without ranks {ranks} parts of the state are gone ({words}): keep more copies")
    training = seated(left, len(after))
    want: list[list[Descriptor]] = [[] for _ in left]
    for rank, state in zip(training, after, strict=True):
        want[rank] = [describe(part) for part in held(state)]
    sent, placed = [0] * len(left), _placed(after[0], [hosts[rank] for rank in left], copies)
    for rank, state in zip(training, after, strict=True):
        sent[rank] = len(placed[rank]) * snapshot_bytes([describe(part) for part in live(state)])
    received = tuple(_received(rank, have, want) for rank in range(len(left)))
    return Recut(after[0].placement.axes.mesh, received, tuple(sent))


def _placed(state: TrainState, hosts: Sequence[str], copies: int) -> list[tuple[int, ...]]:
    """The ranks that keep a copy of the state of each."""
    kept = needed(len(hosts), state.placement.axes.replica.size, copies)
    return buddies(hosts, copies) if kept else [()] * len(hosts)


def _received(rank: int, have: Sequence[Sequence[Descriptor]], want: Sequence[Sequence[Descriptor]]) -> Accesses:
    size = [dtype(part.dtype).itemsize for part in want[rank]]
    arriving = RecutPlan(rank, have, want).arriving
    return Accesses.of(sum(int(rows.size.sum()) * size[rows.part] for rows in message.rows) for message in arriving)
