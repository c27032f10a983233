"""What checkpoints move to and from the disk, by the code that saves and loads, on shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fsdpx.checkpoint.pieces import held, in_blocks, owned
from fsdpx.checkpoint.read import parts, spans
from fsdpx.checkpoint.save import Choices, plan_of
from fsdpx.checkpoint.state import scalars_of
from fsdpx.plan.machine import Storage
from fsdpx.state.state import TrainState
from fsdpx.state.tuning import bytes_text

__all__ = ["Accesses", "Checkpoint", "RankStorage", "rank_storage"]


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

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


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
