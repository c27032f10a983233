"""The fixed binary tree along which the chunks of a global batch are summed.

Node (level, index) is the sum of chunks [index * 2**level, (index + 1) * 2**level), clipped to the number of chunks. As
all sums follow this tree, their bits do not depend on which rank computes which chunks, and when."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Stack", "TreeNode", "chunks_of", "depth", "nodes_of", "root"]

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
