"""Gradient accumulation over microbatches and ranks, either in the order in which gradients arrive, or along a fixed
binary tree over chunks of the batch. The tree gives bitwise identical results on any number of ranks.

The `Accumulation` of a placement decides everything that depends on this choice: how a batch is split, how many
partial sums are kept at the same time, which buffers and transfers a gradient reduction needs, and whether sums may
depend on how parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.comm.communicator import COMPLETED, split_evenly
from fsdpx.core.comm.mesh import Mesh, MeshAxes
from fsdpx.core.compression import CodecRoute, Transfers
from fsdpx.core.state.flat_parameters import ShardedPage
from fsdpx.core.state.gradients import (
    ChunkGradients,
    FullGradient,
    Gradient,
    PartialSums,
    Reduction,
    TreeNode,
    count_max_live_partial_sums,
    cover_chunks_with_tree_nodes,
    get_chunks_of_rank,
    has_same_address,
)
from fsdpx.errors import ConfigError, DataError

__all__ = [
    "Accumulation",
    "SequentialAccumulation",
    "TreeAccumulation",
    "get_microbatch_count_or_default",
    "make_accumulation",
    "require_valid_chunks",
]


MAX_MICROBATCHES = 1 << 16
"""Maximum number of microbatches or chunks. The length of programs grows with this number."""


def require_valid_chunks(chunks: int | None, microbatches: int | None) -> None:
    if chunks is None:
        return
    if not isinstance(chunks, int) or isinstance(chunks, bool) or not 1 <= chunks <= MAX_MICROBATCHES:
        most = f", {MAX_MICROBATCHES:,} at most" if isinstance(chunks, int) and chunks > MAX_MICROBATCHES else ""
        raise ConfigError(f"reproducible_chunks={chunks!r}: a positive number of equal parts of the global batch{most}")
    if microbatches not in (None, 1):
        raise ConfigError(
            f"reproducible_chunks={chunks} and microbatches={microbatches}: each chunk is a microbatch, give only one "
            "of them"
        )


class SequentialAccumulation:
    """Adds gradients in the order in which they arrive: microbatches in execution order, and ranks in whatever order
    the collective uses."""

    bitwise = False
    """True if results must not depend on the number of ranks or on how pages (flat parameter buffers) are sharded."""
    times = 1
    """Maximum number of partial gradients of a page (flat parameter buffer) that are kept at the same time."""

    def __init__(self, axes: MeshAxes) -> None:
        self.axes, self.ranks = axes, axes.data.size

    def __repr__(self) -> str:
        return "in order"

    def count_microbatches(self, wanted: int) -> int:
        """Return the number of microbatches that each rank runs per step. `wanted` is the number requested in the
        options."""
        return wanted

    def find_microbatch_bounds(self, rows: Sequence[int], rank: int, microbatches: int) -> list[int]:
        """Return the index of the first sample in each microbatch of a rank, followed by the rank's total number of
        samples. `rows` holds the number of samples of each data rank."""
        return [rows[rank] * m // microbatches for m in range(microbatches + 1)]

    def count_samples_of_largest_microbatch(self, rows: Sequence[int], microbatches: int) -> int:
        """Return the number of samples in the largest microbatch of any rank. `rows` holds the number of samples of
        each data rank."""
        return -(-max(rows) // microbatches)

    def can_split_batch(self, rows: Sequence[int]) -> bool:
        """Return whether a batch for evaluation or prediction can be split into microbatches in the same way as a
        training batch. `rows` holds the number of samples of each data rank."""
        return True

    def estimate_samples_per_rank(self, rows: int) -> tuple[int, ...]:
        """Estimate the number of samples of each data rank. `rows` is the number of samples of this rank."""
        return (rows,) * self.ranks

    def get_sample_indices_of_rank(self, rows: int, rank: int) -> range:
        """Return the indices of the samples that data rank `rank` gets from a global batch of `rows` samples."""
        return range(rows * rank // self.ranks, rows * (rank + 1) // self.ranks)

    def require_partial_batch_support(self, what: str, why: str) -> None:
        """Raise ConfigError if ranks cannot train on part of a global batch. The error message begins with `what`, the
        name of the call, and gives `why` as the reason."""

    def create_gradient(self, buffer: Any, split: Callable[[Any], list[Any]], keep_offset: bool) -> Gradient:
        """Return an empty gradient accumulator that stores its values in `buffer`. `split` is a function that divides
        the buffer into one block for each partial sum. See `FullGradient` for `keep_offset`."""
        return FullGradient(buffer, keep_offset)

    def add_reduced_sum(self, total: Any, part: Any) -> Any:
        """Add `total` (the result of a reduce-scatter) to `part` (this rank's shard of the accumulated gradient), and
        return `part`. If both arrays share the same memory, add nothing, because the collective has already added its
        result."""
        if not has_same_address(total, part):
            part += total
        return part

    @property
    def needs_join(self) -> bool:
        """True if gradient shards must also be summed over replicas after all the reduce-scatters of a step."""
        return self.axes.replica.size > 1

    def start_all_reduce_over_replicas(self, part: Any, reduction: Reduction) -> TimedTransfer:
        """Start an in-place all-reduce of a gradient shard over the replica axis."""
        handle = reduction.carrier.start_all_reduce(part)
        if reduction.carrier.scratch.size:
            handle.wait()  # wait now, because the scratch memory is reused as soon as this function returns
        return TimedTransfer(handle, lambda: part)

    def count_scratch_bytes(self, kind: str, route: CodecRoute, page: ShardedPage, itemsize: int) -> int:
        """Return the number of bytes of temporary memory needed to reduce the gradient of a page (flat parameter
        buffer). `kind` is the purpose of the memory: "carry" for the codec of a reduce-scatter, "trade" for partial
        sums in a reduce-scatter, and "join" for an all-reduce over replicas."""
        if kind == "trade":
            return 0
        shard, replica = self.axes.shard.size, self.axes.replica.size
        if kind == "join":
            return route.replica.scratch_bytes(page.own_range.size, replica) if replica > 1 else 0
        return route.shard.scratch_bytes(page.size, shard) if shard > 1 else 0

    def predict_transfers(
        self, route: CodecRoute, page: ShardedPage, own: int, itemsize: int
    ) -> tuple[Transfers, Transfers]:
        """Return two lists of pairs (collective, number of bytes that this rank sends): one for the reduce-scatter of
        the gradient of a page (flat parameter buffer), and one for its all-reduce over replicas. `own` is the number of
        elements that this rank sums in the all-reduce."""
        shard, replica = self.axes.shard, self.axes.replica
        return (
            route.shard.predict_transfers(page.counts, shard.rank, itemsize),
            route.replica.predict_all_reduce_transfers(page.own_range.size, replica.size, replica.rank, itemsize),
        )


class TreeAccumulation:
    """Adds the gradients of equal chunks of the global batch along one binary tree over chunk numbers, so that results
    are bitwise identical on any number of ranks. Each rank first adds the gradients of its own chunks, as far as the
    tree allows. A single reduction then combines all remaining partial sums. This sends fewer bytes than one reduction
    per chunk would."""

    bitwise = True

    def __init__(self, chunks: int, axes: MeshAxes) -> None:
        self.total, self.ranks = chunks, axes.data.size
        self.shard, self.replica = (axes.shard.rank, axes.shard.size), (axes.replica.rank, axes.replica.size)
        self.mine = get_chunks_of_rank(chunks, axes.data.rank, axes.data.size)
        self.times = count_max_live_partial_sums(chunks, self.mine)

    def __repr__(self) -> str:
        return f"in {self.total} chunks"

    def count_microbatches(self, wanted: int) -> int:
        return max(len(get_chunks_of_rank(self.total, r, self.ranks)) for r in range(self.ranks))

    def find_microbatch_bounds(self, rows: Sequence[int], rank: int, microbatches: int) -> list[int]:
        total = sum(rows)
        if total % self.total or total == 0:
            raise DataError(
                f"a global batch of {total} samples cannot be split into reproducible_chunks={self.total} equal parts"
            )
        wanted = self._count_samples_by_rank(total)
        if list(rows) != wanted:
            raise DataError(
                f"reproducible_chunks={self.total} needs {wanted} samples on ranks 0 to {self.ranks - 1}, not "
                f"{list(rows)}"
                f": DataLoader(..., reproducible_chunks={self.total}) splits batches this way"
            )
        each = total // self.total
        return [i * each for i in range(len(self.mine) + 1)]

    def count_samples_of_largest_microbatch(self, rows: Sequence[int], microbatches: int) -> int:
        return -(-sum(rows) // self.total)

    def can_split_batch(self, rows: Sequence[int]) -> bool:
        total = sum(rows)
        return bool(total and total % self.total == 0) and list(rows) == self._count_samples_by_rank(total)

    def estimate_samples_per_rank(self, rows: int) -> tuple[int, ...]:
        return (
            tuple(self._count_samples_by_rank(rows // len(self.mine) * self.total))
            if self.mine
            else (rows,) * self.ranks
        )

    def get_sample_indices_of_rank(self, rows: int, rank: int) -> range:
        if rows % self.total:
            return range(rows * rank // self.ranks, rows * (rank + 1) // self.ranks)
        chunks, each = get_chunks_of_rank(self.total, rank, self.ranks), rows // self.total
        return range(chunks.start * each, chunks.stop * each)

    def require_partial_batch_support(self, what: str, why: str) -> None:
        raise ConfigError(f"{what}: with chunks {why}")

    def _count_samples_by_rank(self, total: int) -> list[int]:
        return [total // self.total * len(get_chunks_of_rank(self.total, r, self.ranks)) for r in range(self.ranks)]

    def create_gradient(self, buffer: Any, split: Callable[[Any], list[Any]], keep_offset: bool) -> Gradient:
        return ChunkGradients(split(buffer), self.mine, self.total, self._nodes_of_shard_ranks)

    def add_reduced_sum(self, total: Any, part: Any) -> Any:
        """Return `total` unchanged. The partial sums are added later, once all of them have arrived."""
        return total

    def start_all_reduce_over_replicas(self, part: PartialSums, reduction: Reduction) -> TimedTransfer:
        carrier = reduction.carrier
        total = part.all_reduce_over_replicas(carrier.comm, self._nodes_of_replicas, reduction.part, carrier.what)
        return TimedTransfer(COMPLETED, lambda: total)

    def count_scratch_bytes(self, kind: str, route: CodecRoute, page: ShardedPage, itemsize: int) -> int:
        """Return the number of bytes of memory needed for the partial sums that this rank receives. Partial sums
        received over the shard axis are kept until the exchange between replicas is complete."""
        if kind != "trade":
            return 0
        own_elements = page.own_range.size
        elements = own_elements * sum(map(len, self._nodes_of_shard_ranks)) if self.shard[1] > 1 else 0
        if self.replica[1] > 1:
            elements += split_evenly(own_elements, self.replica[1])[self.replica[0]] * sum(
                map(len, self._nodes_of_replicas)
            )
        return elements * itemsize

    def predict_transfers(
        self, route: CodecRoute, page: ShardedPage, own: int, itemsize: int
    ) -> tuple[Transfers, Transfers]:
        """Return two lists of pairs (collective, number of bytes that this rank sends): one for the exchanges of
        partial sums over the shard axis, and one for the exchanges over replicas. The rank with the most partial sums
        determines the number of exchanges. Ranks with fewer partial sums send nothing in the last exchanges."""
        foreign, rest = (page.size - page.own_range.size) * itemsize, (page.own_range.size - own) * itemsize
        trades = _predict_exchanges(self._nodes_of_replicas, self.replica[0], rest)
        return _predict_exchanges(self._nodes_of_shard_ranks, self.shard[0], foreign), (*trades, ("all_gather", rest))

    @property
    def needs_join(self) -> bool:
        """Always True, because partial sums must still be added after a reduce-scatter."""
        return True

    @property
    def _nodes_of_shard_ranks(self) -> list[tuple[TreeNode, ...]]:
        """For each rank along this rank's shard axis, a tuple of nodes of the binary tree. The values of these nodes
        add up to the sum over the chunks (parts of the batch) that the rank computes."""
        base = self.replica[0] * self.shard[1]
        return [self._cover_chunks_of_ranks(range(base + s, base + s + 1)) for s in range(self.shard[1])]

    @property
    def _nodes_of_replicas(self) -> list[tuple[TreeNode, ...]]:
        """For each replica, a tuple of nodes of the binary tree. The values of these nodes add up to the sum over the
        chunks (parts of the batch) that the replica computes."""
        width = self.shard[1]
        return [self._cover_chunks_of_ranks(range(r * width, (r + 1) * width)) for r in range(self.replica[1])]

    def _cover_chunks_of_ranks(self, ranks: range) -> tuple[TreeNode, ...]:
        first, last = (get_chunks_of_rank(self.total, r, self.ranks) for r in (ranks[0], ranks[-1]))
        return cover_chunks_with_tree_nodes(self.total, range(first.start, last.stop))


Accumulation = SequentialAccumulation | TreeAccumulation


def make_accumulation(chunks: int | None, axes: MeshAxes) -> Accumulation:
    return SequentialAccumulation(axes) if chunks is None else TreeAccumulation(chunks, axes)


def get_microbatch_count_or_default(wanted: int | None, chunks: int | None, mesh: Mesh) -> int:
    """Return the number of microbatches per step: `wanted` if it is not None, and otherwise a default. The default is 4
    per pipeline rank in a pipeline without `reproducible_chunks`, and 1 in all other cases."""
    if wanted is not None:
        return wanted
    return 1 if mesh.width_of("pipe") == 1 or chunks is not None else 4 * mesh.width_of("pipe")


def _predict_exchanges(held: Sequence[Sequence[TreeNode]], rank: int, nbytes: int) -> Transfers:
    return tuple(("all_to_all", nbytes * (i < len(held[rank]))) for i in range(max(map(len, held))))
