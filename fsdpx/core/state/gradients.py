"""Accumulated gradients of pages (flat parameter buffers), either as one sum or per chunk of the batch, and the fixed
binary tree that determines the order in which chunk gradients are added.

Node (level, index) of the tree is the sum over chunks [index * 2**level, (index + 1) * 2**level), clipped to the number
of chunks. All sums follow this tree, so they are bitwise identical no matter which rank computes a chunk, or when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from fsdpx.core.array.arena import get_data_pointer
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.core.comm.communicator import COMPLETED, Communicator, Handle, split_evenly
from fsdpx.core.compression import BoundCodec
from fsdpx.core.state.flat_parameters import ShardedPage

__all__ = [
    "ChunkGradients",
    "FullGradient",
    "Gradient",
    "PairwiseSumStack",
    "PartialSums",
    "Reduction",
    "TreeNode",
    "count_max_live_partial_sums",
    "count_samples_of_rank",
    "cover_chunks_with_tree_nodes",
    "get_chunks_of_rank",
    "get_root_node",
    "has_same_address",
]  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class TreeNode:
    level: int
    index: int

    @property
    def start(self) -> int:
        return self.index << self.level


def get_chunks_of_rank(chunks: int, rank: int, ranks: int) -> range:
    """Return the range of chunks (equal parts of the global batch) that data rank `rank` of `ranks` computes:
    [floor(chunks * rank / ranks), floor(chunks * (rank + 1) / ranks))."""
    return range(chunks * rank // ranks, chunks * (rank + 1) // ranks)


def count_samples_of_rank(samples: int, rank: int, ranks: int, chunks: int | None) -> int:
    """Return the number of samples that `DataLoader` gives to data rank `rank` for a global batch of `samples`
    samples."""
    if chunks is not None:
        return samples // chunks * len(get_chunks_of_rank(chunks, rank, ranks))
    return samples * (rank + 1) // ranks - samples * rank // ranks


def get_root_node(chunks: int) -> TreeNode:
    return TreeNode((chunks - 1).bit_length(), 0)


class PairwiseSumStack(Generic[T]):
    """A stack that sums the values of chunks (parts of the batch) pairwise, along the binary tree described in the
    module docstring. Two sibling nodes are added as soon as both are on the stack, like a carry in a binary counter, so
    the stack holds at most log2(chunks) + 1 partial sums.

    `add` is a function (left, right) -> sum that may modify `left`."""

    def __init__(self, chunks: int, add: Callable[[T, T], T]) -> None:
        self.chunks, self.add = chunks, add
        self.entries: list[tuple[TreeNode, T]] = []

    def push_node(self, node: TreeNode, value: T) -> None:
        """Push the value of a node of the binary tree. Nodes must be pushed in the order of their chunks (parts of the
        batch), without gaps."""
        self.entries.append((self._find_highest_node_of_same_chunks(node), value))
        while len(self.entries) > 1 and self._has_siblings_on_top():
            (left, a), (_, b) = self.entries[-2:]
            del self.entries[-2:]
            parent = TreeNode(left.level + 1, left.index // 2)
            self.entries.append((self._find_highest_node_of_same_chunks(parent), self.add(a, b)))

    def _has_siblings_on_top(self) -> bool:
        left, right = self.entries[-2][0], self.entries[-1][0]
        return left.level == right.level and left.index % 2 == 0 and right.index == left.index + 1

    def _find_highest_node_of_same_chunks(self, node: TreeNode) -> TreeNode:
        """Return the highest node of the binary tree that is a sum over the same chunks (parts of the batch) as `node`.
        A left child has the same chunks as its parent if its right sibling would begin after the last chunk."""
        top = get_root_node(self.chunks).level
        while node.level < top and node.index % 2 == 0 and (node.index + 1) << node.level >= self.chunks:
            node = TreeNode(node.level + 1, node.index // 2)
        return node


def cover_chunks_with_tree_nodes(chunks: int, run: range) -> tuple[TreeNode, ...]:
    """Return the smallest set of tree nodes that together cover exactly the chunks (parts of the batch) in `run`. These
    nodes remain on a `PairwiseSumStack` after all these chunks have been pushed."""
    stack: PairwiseSumStack[None] = PairwiseSumStack(chunks, lambda a, b: None)
    for c in run:
        stack.push_node(TreeNode(0, c), None)
    return tuple(node for node, _ in stack.entries)


def count_max_live_partial_sums(chunks: int, run: range) -> int:
    """Return the maximum number of partial sums (at least 1) that a rank holds at the same time while it adds the
    gradients of the chunks (parts of the batch) in `run`."""
    stack: PairwiseSumStack[None] = PairwiseSumStack(chunks, lambda a, b: None)
    most = 1
    for c in run:
        most = max(most, len(stack.entries) + 1)
        stack.push_node(TreeNode(0, c), None)
    return most


class Reduction(NamedTuple):
    """The arguments for reducing the gradient of a page (flat parameter buffer) over one mesh axis.

    Attributes
    ----------
    carrier : the codec and the communicator with which the gradient is sent
    page : the page and its shards
    part : array for this rank's shard of the sum
    first : True if nothing has been written to `part` in this step
    scratch : temporary memory for a tree reduction
    """

    carrier: BoundCodec
    page: ShardedPage
    part: Any
    first: bool
    scratch: Any


class FullGradient:
    """An unsharded gradient on this rank. The gradients of microbatches are added in execution order.

    Attributes
    ----------
    is_blank : True if nothing has been written yet, so that the next write must set every element instead of adding
    """

    def __init__(self, buffer: Any, keep_offset: bool) -> None:
        """Accumulate in `buffer`; its initial values may be undefined. If `keep_offset` is False, this rank's shard of
        the sum is stored at the front of the buffer. If `keep_offset` is True, the shard is stored at its own offset in
        the buffer, because other ranks may be reading the other shards."""
        self.buffer, self.keep_offset = buffer, keep_offset
        self.is_blank = True

    def get_microbatch_buffer(self, microbatch: int) -> Any:
        return self.buffer

    def add_empty_microbatch(self) -> None:
        """Handle a microbatch without samples: set the gradient to zero if nothing has been written yet."""
        if self.is_blank:
            self.buffer[...] = 0
            self.is_blank = False

    def start_reduce_scatter(self, reduction: Reduction) -> TimedTransfer:
        """Start the reduce-scatter over the shard axis. Waiting for the transfer returns this rank's shard of the sum.
        Collective.

        The first sum of a step is written directly to the accumulated gradient shard. Later sums are written to this
        gradient's buffer, and the caller must then add them to the shard."""
        full, r = self.buffer, reduction
        if r.carrier.comm.size == 1:
            r.carrier.add_and_clear_kept_error(full)
            total = self.use_as_only_shard(r.part, r.first)
            return TimedTransfer(COMPLETED, lambda: total)
        own_range = r.page.own_range
        spare = full[own_range.start : own_range.stop] if self.keep_offset else full[: own_range.size]
        out = r.part if r.first else spare
        return TimedTransfer(r.carrier.start_reduce_scatter(full, out, r.page.counts), lambda: out)

    def use_as_only_shard(self, part: Any, first: bool) -> Any:
        """Return this rank's shard of the sum over a shard axis with a single rank. This shard is the full gradient. If
        `first` is True, copy the gradient to `part` and return `part`. Otherwise, return the buffer that holds the
        gradient. The arguments are described in `Reduction`."""
        if first and not has_same_address(self.buffer, part):
            part[...] = self.buffer
        return part if first else self.buffer


class ChunkGradients:
    """The gradients of chunks of the batch. They are added along a binary tree: two siblings are added as soon as both
    are complete. `leaves` holds the buffers, as many as the maximum number of partial sums that this rank keeps at the
    same time.

    Attributes
    ----------
    is_blank : True if nothing has been written for the current chunk yet, as in `FullGradient`
    """

    is_blank = False

    def __init__(self, leaves: list[Any], chunks: range, total: int, held: Sequence[Sequence[TreeNode]]) -> None:
        """Start without gradients. `chunks` is the range of chunks (parts of the batch) that this rank computes, and
        `total` is the number of chunks in the global batch. For each rank along the shard axis, `held` lists the tree
        nodes whose sums the rank has after the backward pass."""
        self.free = leaves[::-1]
        self.chunks, self.held = chunks, held
        self.stack: PairwiseSumStack[Any] = PairwiseSumStack(total, self._add_partial_sums)
        self.current: tuple[int, Any] | None = None

    def get_microbatch_buffer(self, microbatch: int) -> Any:
        """Return the gradient buffer for this rank's microbatch number `microbatch`. Each microbatch is one chunk (part
        of the batch). When a new chunk begins, first add the gradient of the previous chunk to the tree."""
        if self.current is None or self.current[0] != microbatch:
            self._push_current_chunk()
            self.current = (microbatch, self.free.pop())
            self.is_blank = True
        return self.current[1]

    def add_empty_microbatch(self) -> None:
        """Do nothing, because a microbatch without samples is not a chunk."""

    def start_reduce_scatter(self, reduction: Reduction) -> TimedTransfer:
        """Start an exchange in which each rank receives its shard of all ranks' partial sums. Waiting for the transfer
        also adds the received shards, in the order given by the tree of partial sums. Collective.

        With N ranks and a gradient of n elements, a rank sends n - n/N elements for each of its partial sums. It has
        only one partial sum if the number of chunks per rank is a power of two."""
        self._push_current_chunk()
        r, (_, comm, *_, what) = reduction, reduction.carrier
        trade = PartialSumExchange(
            comm, self.stack.entries, self.held, r.page.counts, self.stack.chunks, r.scratch, what
        )
        return TimedTransfer(
            trade, lambda: PartialSums(trade.wait_and_get_tree_sums(), r.scratch[trade.used :], self.stack.chunks)
        )

    def _push_current_chunk(self) -> None:
        if self.current is not None:
            microbatch, leaf = self.current
            self.current = None
            self.stack.push_node(TreeNode(0, self.chunks[microbatch]), leaf)

    def _add_partial_sums(self, left: Any, right: Any) -> Any:
        left += right
        self.free.append(right)
        return left


Gradient = FullGradient | ChunkGradients


@dataclass(frozen=True)
class PartialSums:
    """This rank's shard of partial sums that must still be added across replicas.

    Attributes
    ----------
    entries : pairs (tree node, values)
    scratch : temporary memory that is still unused
    total : number of chunks (parts) of the global batch
    """

    entries: list[tuple[TreeNode, Any]]
    scratch: Any
    total: int

    def all_reduce_over_replicas(
        self, replica: Communicator, groups: Sequence[Sequence[TreeNode]], out: Any, what: str
    ) -> Any:
        """Write the sum over the replica axis to `out`, and return `out`. For each replica, `groups` lists the nodes of
        the binary tree for which that replica holds partial sums. `what` names the transfers in error messages. Return
        only when the transfers are complete, because the memory of the partial sums is reused afterwards.
        Collective."""
        if replica.size == 1:
            out[...] = self.entries[0][1]
            return out
        counts = split_evenly(out.size, replica.size)
        own_sum = PartialSumExchange(
            replica, self.entries, groups, counts, self.total, self.scratch, what
        ).wait_and_get_tree_sums()[0][1]
        replica.all_gather(own_sum, out, counts, what=what).wait()
        return out


class PartialSumExchange:
    """An all-to-all exchange of partial sums. Each rank receives its own shard of every rank's partial sums, and adds
    them along the tree. For each rank, `held` lists the tree nodes whose sums the rank has. `scratch` is memory for the
    received elements."""

    def __init__(
        self,
        comm: Communicator,
        entries: list[tuple[TreeNode, Any]],
        held: Sequence[Sequence[TreeNode]],
        counts: Sequence[int],
        total: int,
        scratch: Any,
        what: str,
    ) -> None:
        self.total, self.used = total, 0
        self.handles: list[Handle] = []
        self.arrived: list[tuple[TreeNode, Any]] = list(entries)
        if comm.size > 1:
            self.arrived = []
            own_count, none = counts[comm.rank], [0] * comm.size
            for i in range(max(map(len, held))):
                sources = [r for r in range(comm.size) if i < len(held[r])]
                received = scratch[self.used : self.used + own_count * len(sources)]
                self.used += received.size
                outgoing = (entries[i][1], counts) if i < len(entries) else (scratch[:0], none)
                incoming = [own_count if r in sources else 0 for r in range(comm.size)]
                self.handles.append(comm.all_to_all(outgoing[0], received, outgoing[1], incoming, what=what))
                self.arrived += [
                    (held[r][i], received[k * own_count : (k + 1) * own_count]) for k, r in enumerate(sources)
                ]

    def test(self) -> bool:
        # call test() on every handle (no short circuit), because some MPI libraries advance transfers only then
        done = [handle.test() for handle in self.handles]
        return all(done)

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()

    def wait_and_get_tree_sums(self) -> list[tuple[TreeNode, Any]]:
        self.wait()
        stack: PairwiseSumStack[Any] = PairwiseSumStack(self.total, _add_in_place)
        for node, values in sorted(self.arrived, key=lambda entry: entry[0].start):
            stack.push_node(node, values)
        return stack.entries


def _add_in_place(left: Any, right: Any) -> Any:
    left += right
    return left


def has_same_address(a: Any, b: Any) -> bool:
    """Return whether two arrays start at the same memory address."""
    return a is b or (isinstance(a, np.ndarray) and get_data_pointer(a) == get_data_pointer(b))
