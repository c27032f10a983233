"""How gradients add up: microbatch by microbatch and rank by rank, or along one fixed tree over chunks of the batch.

One value answers every question that depends on it: how a batch is cut, how many partial sums are alive, what reduces
need and move, whether sums may see how pages are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdpx.core.comm.calls import Transfer
from fsdpx.core.comm.communicator import DONE, split_evenly
from fsdpx.core.comm.mesh import Axes, Mesh
from fsdpx.core.compression import Moves, Route
from fsdpx.core.state.flat_parameters import ShardedPage
from fsdpx.core.state.gradients import (
    ChunkGradients,
    Gradient,
    Reduction,
    Subtrees,
    TreeNode,
    WholeGradient,
    chunks_of,
    depth,
    nodes_of,
    same_memory,
)
from fsdpx.errors import ConfigError, DataError

__all__ = ["Accumulation", "ByTree", "InOrder", "accumulation", "check_chunks", "microbatches_of"]


MOST_PIECES = 1 << 16
"""Of microbatches, or of chunks: the text of a step grows with their number."""


def check_chunks(chunks: int | None, microbatches: int | None) -> None:
    if chunks is None:
        return
    if not isinstance(chunks, int) or isinstance(chunks, bool) or not 1 <= chunks <= MOST_PIECES:
        most = f", {MOST_PIECES:,} at most" if isinstance(chunks, int) and chunks > MOST_PIECES else ""
        raise ConfigError(f"chunks={chunks!r}: a positive number of equal parts of the global batch{most}")
    if microbatches not in (None, 1):
        raise ConfigError(
            f"chunks={chunks} and microbatches={microbatches}: each chunk is a microbatch, give only one of them"
        )


class InOrder:
    """Microbatches add into one gradient in the order in which they run, and ranks as their collectives add."""

    bitwise = False
    """Whether results must not depend on how many ranks there are and how pages are cut."""
    times = 1
    """Partial gradients of a page that are alive at once."""

    def __init__(self, axes: Axes) -> None:
        self.axes, self.ranks = axes, axes.data.size

    def __repr__(self) -> str:
        return "in order"

    # -- batches -------------------------------------------------------------------------------------------------------

    def microbatches(self, wanted: int) -> int:
        """How many pieces each rank's part runs in."""
        return wanted

    def bounds(self, rows: Sequence[int], rank: int, microbatches: int) -> list[int]:
        """Where the pieces of a rank's samples begin and end. rows: of all data ranks."""
        return [rows[rank] * m // microbatches for m in range(microbatches + 1)]

    def largest(self, rows: Sequence[int], microbatches: int) -> int:
        """Samples of the largest piece on any rank."""
        return -(-max(rows) // microbatches)

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether a batch that is only looked at can be cut as those that are trained on."""
        return True

    def extrapolate(self, rows: int) -> tuple[int, ...]:
        """The samples of every data rank where each is given as many as this one."""
        return (rows,) * self.ranks

    def share(self, rows: int, rank: int) -> range:
        """The samples of a whole batch that come to a data rank."""
        return range(rows * rank // self.ranks, rows * (rank + 1) // self.ranks)

    def demand_pieces(self, what: str, why: str) -> None:
        """ConfigError where a part of a global batch alone cannot be trained on."""

    # -- gradients -----------------------------------------------------------------------------------------------------

    def gradient(self, buffer: Any, cut: Callable[[Any], list[Any]], at_home: bool) -> Gradient:
        """A blank gradient in `buffer`."""
        return WholeGradient(buffer, at_home)

    def settle(self, total: Any, part: Any) -> Any:
        """Add a reduced sum to the part that is kept, unless it is there already."""
        if not same_memory(total, part):
            part += total
        return part

    @property
    def joins(self) -> bool:
        """Whether parts are not yet the whole gradient when the last of them is settled."""
        return self.axes.replica.size > 1

    def join(self, part: Any, reduction: Reduction) -> Transfer:
        """Start to sum a part over the replica axis, in place."""
        handle = reduction.carrier.reduce_all(part)
        if reduction.carrier.scratch.size:
            handle.wait()  # its memory is lent for this action only
        return Transfer(handle, lambda: part)

    def scratch_nbytes(self, kind: str, route: Route, page: ShardedPage, itemsize: int) -> int:
        """Short-lived memory of a reduce ("carry", "trade") or a join of a page."""
        if kind == "trade":
            return 0
        shard, replica = self.axes.shard.size, self.axes.replica.size
        if kind == "join":
            return route.replica.scratch(page.mine.size, replica) if replica > 1 else 0
        return route.shard.scratch(page.size, shard) if shard > 1 else 0

    def moves(self, route: Route, page: ShardedPage, own: int, itemsize: int) -> tuple[Moves, Moves]:
        """The collectives of a reduce and of a join of a page, and the bytes that this rank sends in each. own: the
        elements of this rank's shard that it would own in an all-reduce over replicas."""
        shard, replica = self.axes.shard, self.axes.replica
        return (
            route.shard.moves(page.counts, shard.rank, itemsize),
            route.replica.moves_all(page.mine.size, replica.size, replica.rank, itemsize),
        )


class ByTree:
    """The global batch is cut into equal chunks, whose gradients are added along one binary tree over chunk numbers:
    the same bits at any number of ranks. Partial sums cost less whole than cut, so reduces wait for all of them."""

    bitwise = True

    def __init__(self, chunks: int, axes: Axes) -> None:
        self.total, self.ranks = chunks, axes.data.size
        self.shard, self.replica = (axes.shard.rank, axes.shard.size), (axes.replica.rank, axes.replica.size)
        self.mine = chunks_of(chunks, axes.data.rank, axes.data.size)
        self.times = depth(chunks, self.mine)

    def __repr__(self) -> str:
        return f"in {self.total} chunks"

    # -- batches -------------------------------------------------------------------------------------------------------

    def microbatches(self, wanted: int) -> int:
        return max(len(chunks_of(self.total, r, self.ranks)) for r in range(self.ranks))

    def bounds(self, rows: Sequence[int], rank: int, microbatches: int) -> list[int]:
        total = sum(rows)
        if total % self.total or total == 0:
            raise DataError(f"a global batch of {total} samples cannot be cut into chunks={self.total} equal parts")
        wanted = self._dealt(total)
        if list(rows) != wanted:
            raise DataError(
                f"chunks={self.total} wants {wanted} samples on ranks 0 to {self.ranks - 1}, they have {list(rows)}"
                f": DataLoader(..., chunks={self.total}) cuts batches so"
            )
        each = total // self.total
        return [i * each for i in range(len(self.mine) + 1)]

    def largest(self, rows: Sequence[int], microbatches: int) -> int:
        return -(-sum(rows) // self.total)

    def fits(self, rows: Sequence[int]) -> bool:
        total = sum(rows)
        return bool(total and total % self.total == 0) and list(rows) == self._dealt(total)

    def extrapolate(self, rows: int) -> tuple[int, ...]:
        return tuple(self._dealt(rows // len(self.mine) * self.total)) if self.mine else (rows,) * self.ranks

    def share(self, rows: int, rank: int) -> range:
        if rows % self.total:
            return range(rows * rank // self.ranks, rows * (rank + 1) // self.ranks)
        chunks, each = chunks_of(self.total, rank, self.ranks), rows // self.total
        return range(chunks.start * each, chunks.stop * each)

    def demand_pieces(self, what: str, why: str) -> None:
        raise ConfigError(f"{what}: with chunks {why}")

    def _dealt(self, total: int) -> list[int]:
        return [total // self.total * len(chunks_of(self.total, r, self.ranks)) for r in range(self.ranks)]

    # -- gradients -----------------------------------------------------------------------------------------------------

    def gradient(self, buffer: Any, cut: Callable[[Any], list[Any]], at_home: bool) -> Gradient:
        return ChunkGradients(cut(buffer), self.mine, self.total, self._held)

    def settle(self, total: Any, part: Any) -> Any:
        """Partial sums stay apart until all of them are there."""
        return total

    def join(self, part: Subtrees, reduction: Reduction) -> Transfer:
        carrier = reduction.carrier
        total = part.join(carrier.comm, self._groups, reduction.part, carrier.what)
        return Transfer(DONE, lambda: total)

    def scratch_nbytes(self, kind: str, route: Route, page: ShardedPage, itemsize: int) -> int:
        """Partial sums that arrive; those of the shard axis stay until the replicas have traded as well."""
        if kind != "trade":
            return 0
        own = page.mine.size
        elements = own * sum(map(len, self._held)) if self.shard[1] > 1 else 0
        if self.replica[1] > 1:
            elements += split_evenly(own, self.replica[1])[self.replica[0]] * sum(map(len, self._groups))
        return elements * itemsize

    def moves(self, route: Route, page: ShardedPage, own: int, itemsize: int) -> tuple[Moves, Moves]:
        """One exchange for each partial sum of the rank that holds most of them; each rank sends its own sums."""
        foreign, rest = (page.size - page.mine.size) * itemsize, (page.mine.size - own) * itemsize
        trades = _trades(self._groups, self.replica[0], rest)
        return _trades(self._held, self.shard[0], foreign), (*trades, ("all_gather", rest))

    @property
    def joins(self) -> bool:
        """Whether something is left to add, on this rank or on others."""
        return True

    @property
    def _held(self) -> list[tuple[TreeNode, ...]]:
        """What the chunks of each rank of this shard axis add up to."""
        base = self.replica[0] * self.shard[1]
        return [self._nodes(range(base + s, base + s + 1)) for s in range(self.shard[1])]

    @property
    def _groups(self) -> list[tuple[TreeNode, ...]]:
        """What the chunks of all ranks of each replica add up to."""
        width = self.shard[1]
        return [self._nodes(range(r * width, (r + 1) * width)) for r in range(self.replica[1])]

    def _nodes(self, ranks: range) -> tuple[TreeNode, ...]:
        first, last = (chunks_of(self.total, r, self.ranks) for r in (ranks[0], ranks[-1]))
        return nodes_of(self.total, range(first.start, last.stop))


Accumulation = InOrder | ByTree


def accumulation(chunks: int | None, axes: Axes) -> Accumulation:
    return InOrder(axes) if chunks is None else ByTree(chunks, axes)


def microbatches_of(wanted: int | None, chunks: int | None, mesh: Mesh) -> int:
    """The number asked for, else 1, or 4 for each rank of a pipe."""
    if wanted is not None:
        return wanted
    return 1 if mesh.width("pipe") == 1 or chunks is not None else 4 * mesh.width("pipe")


def _trades(held: Sequence[Sequence[TreeNode]], rank: int, nbytes: int) -> Moves:
    return tuple(("all_to_all", nbytes * (i < len(held[rank]))) for i in range(max(map(len, held))))
