"""What ranks move to go on without some of them, by the code of elastic training, on shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpx.array.namespace import dtype
from fsdpx.checkpoint.pieces import held
from fsdpx.comm.mesh import Mesh
from fsdpx.elastic.assembly import seated
from fsdpx.elastic.copies import buddies, needed, snapshot_bytes
from fsdpx.elastic.recut import Descriptor, RecutPlan, describe, live, missing
from fsdpx.errors import StateLost
from fsdpx.plan.storage import Accesses
from fsdpx.state.ledger import saved_tensors
from fsdpx.state.state import TrainState

__all__ = ["Recut", "recut"]


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
