"""Gradients of pages: whole, and of chunks; and the fixed binary tree along which chunks are summed.

Node (level, index) of the tree is the sum of chunks [index * 2**level, (index + 1) * 2**level), clipped to their
number. As all sums follow this tree, their bits do not depend on which rank computes which chunks, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from fsdpx.core.comm.calls import Transfer
from fsdpx.core.comm.communicator import DONE, Communicator, Handle, split_evenly
from fsdpx.core.compression import BoundCodec
from fsdpx.core.state.flat_parameters import ShardedPage

__all__ = [
    "ChunkGradients", "Gradient", "Reduction", "Stack", "Subtrees", "TreeNode", "WholeGradient", "chunks_of", "depth",
    "nodes_of", "root", "rows_of", "same_memory",
]  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class TreeNode:
    level: int
    index: int

    @property
    def start(self) -> int:
        return self.index << self.level


def chunks_of(chunks: int, rank: int, ranks: int) -> range:
    """The chunks that data-rank `rank` of `ranks` computes: floor(S r / n) up to floor(S (r + 1) / n)."""
    return range(chunks * rank // ranks, chunks * (rank + 1) // ranks)


def rows_of(samples: int, rank: int, ranks: int, chunks: int | None) -> int:
    """How many samples of a global batch data-rank `rank` of `ranks` has, as `DataLoader` deals them."""
    if chunks is not None:
        return samples // chunks * len(chunks_of(chunks, rank, ranks))
    return samples * (rank + 1) // ranks - samples * rank // ranks


def root(chunks: int) -> TreeNode:
    return TreeNode((chunks - 1).bit_length(), 0)


class Stack(Generic[T]):
    """Partial sums of adjacent nodes; two siblings are added as soon as both are there (a binary counter).

    add: (left, right) -> sum, may work in place on `left`. Memory: at most log2(chunks) + 1 partial sums."""

    def __init__(self, chunks: int, add: Callable[[T, T], T]) -> None:
        self.chunks, self.add = chunks, add
        self.entries: list[tuple[TreeNode, T]] = []

    def push(self, node: TreeNode, value: T) -> None:
        """Add a node; nodes come from left to right without gaps."""
        self.entries.append((self._raised(node), value))
        while len(self.entries) > 1 and self._siblings():
            (left, a), (_, b) = self.entries[-2:]
            del self.entries[-2:]
            self.entries.append((self._raised(TreeNode(left.level + 1, left.index // 2)), self.add(a, b)))

    def _siblings(self) -> bool:
        left, right = self.entries[-2][0], self.entries[-1][0]
        return left.level == right.level and left.index % 2 == 0 and right.index == left.index + 1

    def _raised(self, node: TreeNode) -> TreeNode:
        """A left child whose right sibling lies beyond the last chunk is its parent."""
        top = root(self.chunks).level
        while node.level < top and node.index % 2 == 0 and (node.index + 1) << node.level >= self.chunks:
            node = TreeNode(node.level + 1, node.index // 2)
        return node


def nodes_of(chunks: int, run: range) -> tuple[TreeNode, ...]:
    """The fewest nodes that cover a run of chunks: what a `Stack` holds after pushing them one by one."""
    stack: Stack[None] = Stack(chunks, lambda a, b: None)
    for c in run:
        stack.push(TreeNode(0, c), None)
    return tuple(node for node, _ in stack.entries)


def depth(chunks: int, run: range) -> int:
    """Partial sums alive at once while a run of chunks is pushed one by one, at least 1."""
    stack: Stack[None] = Stack(chunks, lambda a, b: None)
    most = 1
    for c in run:
        most = max(most, len(stack.entries) + 1)
        stack.push(TreeNode(0, c), None)
    return most


class Reduction(NamedTuple):
    """What summing the gradient of one page over one mesh axis needs. part: where this rank's sum is kept; first: there
    is nothing in it yet. scratch: short-lived memory of a tree."""

    carrier: BoundCodec
    page: ShardedPage
    part: Any
    first: bool
    scratch: Any


class WholeGradient:
    """One full gradient; microbatches add into it in the order in which they run.

    blank: nothing has been written yet; the first action that works on it leaves no element unwritten."""

    def __init__(self, buffer: Any, at_home: bool) -> None:
        """at_home: a reduced part lies at its own place, as others may read the rest; else in front."""
        self.buffer, self.at_home = buffer, at_home
        self.blank = True

    def at(self, microbatch: int) -> Any:
        return self.buffer

    def without_samples(self) -> None:
        """A microbatch without samples gives zeros, if none before gave more."""
        if self.blank:
            self.buffer[...] = 0
            self.blank = False

    def reduce(self, reduction: Reduction) -> Transfer:
        """Start to sum over the shard axis; the result is this rank's part.

        The first sum goes straight to where the part is kept, others into the gradient's own memory."""
        full, r = self.buffer, reduction
        if r.carrier.comm.size == 1:
            r.carrier.keep(full)
            if r.first and not same_memory(full, r.part):
                r.part[...] = full
            return Transfer(DONE, lambda: r.part if r.first else full)
        mine = r.page.mine
        spare = full[mine.start : mine.stop] if self.at_home else full[: mine.size]
        out = r.part if r.first else spare
        return Transfer(r.carrier.reduce(full, out, r.page.counts), lambda: out)


class ChunkGradients:
    """Gradients of chunks, added along the canonical tree. leaves: buffers for all partial sums alive at once.

    blank: nothing has been written into the current leaf, as in `WholeGradient`."""

    blank = False

    def __init__(self, leaves: list[Any], chunks: range, total: int, held: Sequence[Sequence[TreeNode]]) -> None:
        """chunks: of this rank. total: of the global batch. held: what each rank of the shard axis has in the end."""
        self.free = leaves[::-1]
        self.chunks, self.held = chunks, held
        self.stack: Stack[Any] = Stack(total, self._add)
        self.current: tuple[int, Any] | None = None

    def at(self, microbatch: int) -> Any:
        """The leaf of the chunk that runs as `microbatch`; the one before is complete then."""
        if self.current is None or self.current[0] != microbatch:
            self._close()
            self.current = (microbatch, self.free.pop())
            self.blank = True
        return self.current[1]

    def without_samples(self) -> None:
        """A chunk that is not there adds nothing."""

    def reduce(self, reduction: Reduction) -> Transfer:
        """Along the tree: partial sums go to the owners of their elements, which add them in tree order.

        Bytes per rank: nodes x (n - n/N), where nodes is how many subtrees the rank's chunks make up: one when the
        number of ranks is a power of two that divides the number of chunks."""
        self._close()
        r, (_, comm, *_, what) = reduction, reduction.carrier
        trade = Trade(comm, self.stack.entries, self.held, r.page.counts, self.stack.chunks, r.scratch, what)
        return Transfer(trade, lambda: Subtrees(trade.finish(), r.scratch[trade.used :], self.stack.chunks))

    def _close(self) -> None:
        if self.current is not None:
            microbatch, leaf = self.current
            self.current = None
            self.stack.push(TreeNode(0, self.chunks[microbatch]), leaf)

    def _add(self, left: Any, right: Any) -> Any:
        left += right
        self.free.append(right)
        return left


Gradient = WholeGradient | ChunkGradients


@dataclass(frozen=True)
class Subtrees:
    """This rank's elements of partial sums that are not one sum yet, the scratch that is left, and all chunks."""

    entries: list[tuple[TreeNode, Any]]
    scratch: Any
    total: int

    def join(self, replica: Communicator, groups: Sequence[Sequence[TreeNode]], out: Any, what: str) -> Any:
        """The sum over the replica axis, in `out`. groups: what each replica's ranks hold. Blocking: the memory of the
        entries is lent until this action."""
        if replica.size == 1:
            out[...] = self.entries[0][1]
            return out
        counts = split_evenly(out.size, replica.size)
        own = Trade(replica, self.entries, groups, counts, self.total, self.scratch, what).finish()[0][1]
        replica.all_gather(own, out, counts, what=what).wait()
        return out


class Trade:
    """One exchange of partial sums: each rank ends with its elements of every node of the group, added as far up as the
    tree allows. `held[r]` are the nodes of rank r; scratch takes what arrives, an array of the gradients' dtype."""

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
            own, none = counts[comm.rank], [0] * comm.size
            for i in range(max(map(len, held))):
                sources = [r for r in range(comm.size) if i < len(held[r])]
                received = scratch[self.used : self.used + own * len(sources)]
                self.used += received.size
                outgoing = (entries[i][1], counts) if i < len(entries) else (scratch[:0], none)
                incoming = [own if r in sources else 0 for r in range(comm.size)]
                self.handles.append(comm.all_to_all(outgoing[0], received, outgoing[1], incoming, what=what))
                self.arrived += [(held[r][i], received[k * own : (k + 1) * own]) for k, r in enumerate(sources)]

    def test(self) -> bool:
        done = [handle.test() for handle in self.handles]  # poke them all
        return all(done)

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()

    def finish(self) -> list[tuple[TreeNode, Any]]:
        self.wait()
        stack: Stack[Any] = Stack(self.total, _add)
        for node, values in sorted(self.arrived, key=lambda entry: entry[0].start):
            stack.push(node, values)
        return stack.entries


def _add(left: Any, right: Any) -> Any:
    left += right
    return left


def same_memory(a: Any, b: Any) -> bool:
    """Whether two flat views start at the same byte."""
    return a is b or (
        hasattr(a, "__array_interface__") and a.__array_interface__["data"] == b.__array_interface__["data"]
    )
