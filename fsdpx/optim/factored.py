"""Sums over the rows and over the columns of a matrix that is cut over ranks: the same bits however it is cut.

Rows are added one by one, columns along a fixed binary tree over the rows: once as they are, and once with each row
divided by something that follows from its mean. A rank sends the sums of its whole rows, the nodes of the tree that it
has whole, and the elements of the rows at its ends of which others have the rest."""

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

__all__ = ["Divisors", "MatrixPiece", "elements", "matrix", "portion", "together"]

CHUNK = 1 << 16
"""Elements that are looked at together."""

Node = tuple[int, int]
"""(level, index): rows [index 2^level, (index + 1) 2^level) of the matrix, those that exist."""
Divisors = Callable[[int, Any], Any]
"""From the means of rows, the first of which has a number, to what each of these rows is divided by."""


class MatrixPiece(NamedTuple):
    """Elements [offset, offset + size) of a matrix of `shape`: the part of one rank."""

    offset: int
    size: int
    shape: tuple[int, int]

    @property
    def rows(self) -> tuple[int, int]:
        """Its whole rows: the first, and one past the last."""
        columns = self.shape[1]
        first, last = -(-self.offset // columns), (self.offset + self.size) // columns
        return (last, last) if first > last else (first, last)

    @property
    def loose(self) -> list[tuple[int, int]]:
        """Where elements lie that belong to no whole row."""
        (first, last), columns = self.rows, self.shape[1]
        end, inside = self.offset + self.size, first * columns < self.offset  # a part of one row
        ends = [(self.offset, end)] if inside else [(self.offset, first * columns), (last * columns, end)]
        return [(start, stop) for start, stop in ends if start < stop]

    @property
    def nodes(self) -> list[Node]:
        """Of the tree, those that it has whole."""
        leaves = {node: 0 for node, _ in _nodes(*self.rows, self.shape[0], max(CHUNK // self.shape[1], 1))}
        return sorted(_climb(leaves, self.shape[0]))


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns: dim 0, and all others. A vector has one column."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def elements(piece: MatrixPiece) -> int:
    """Of what `portion` gives."""
    first, last = piece.rows
    return last - first + 2 * len(piece.nodes) * piece.shape[1] + sum(stop - start for start, stop in piece.loose)


def portion(xp: Any, values: Callable[[int, int], Any], divisors: Divisors, piece: MatrixPiece) -> Any:
    """The flat array that the piece's rank sends. values: elements from one to another of the piece, flat."""
    (first, last), (count, columns), offset = piece.rows, piece.shape, piece.offset
    rows, nodes = [], {}
    for node, (start, stop) in _nodes(first, last, count, max(CHUNK // columns, 1)):
        chunk = values(start * columns - offset, stop * columns - offset).reshape(-1, columns)
        rows.append(chunk.sum(axis=1))
        nodes[node] = xp.stack([_sum(xp, chunk), _sum(xp, chunk / divisors(start, rows[-1] / columns)[:, None])])
    sums = [found.reshape(-1) for _, found in sorted(_climb(nodes, count).items(), key=lambda item: item[0])]
    return xp.concatenate([*rows, *sums, *(values(start - offset, stop - offset) for start, stop in piece.loose)])


def together(
    xp: Any, statistics: Iterable[tuple[MatrixPiece, Any]], divisors: Divisors, shape: tuple[int, int]
) -> tuple[Any, Any, Any]:
    """From what all ranks tell: the sums of all rows (rows,), and those of all columns (columns,), as they are and with
    each row divided."""
    count, columns = shape
    rows, nodes, torn = xp.empty(count), dict[Node, Any](), dict[int, Any]()
    for piece, flat in statistics:
        (first, last), at = piece.rows, piece.rows[1] - piece.rows[0]
        rows[first:last] = flat[:at]
        for node in piece.nodes:
            nodes[node] = flat[at : at + 2 * columns].reshape(2, columns)
            at += 2 * columns
        for start, stop in piece.loose:
            row, begin = divmod(start, columns)
            torn.setdefault(row, xp.empty(columns))[begin : begin + stop - start] = flat[at : at + stop - start]
            at += stop - start
    for row, values in torn.items():
        rows[row] = values.reshape(1, -1).sum(axis=1)[0]
        nodes[0, row] = xp.stack([values, values / divisors(row, rows[row : row + 1] / columns)])
    (root,) = _climb(nodes, count).values()
    return rows, root[0], root[1]


def _nodes(first: int, last: int, count: int, most: int) -> Iterator[tuple[Node, tuple[int, int]]]:
    """Rows [first, last) of `count` as nodes of at most `most` rows, with the rows of each."""
    while first < last:
        level = 0
        while first % (2 << level) == 0 and 2 << level <= most and min(first + (2 << level), count) <= last:
            level += 1
        stop = min(first + (1 << level), count)
        yield (level, first >> level), (first, stop)
        first = stop


def _sum(xp: Any, rows: Any) -> Any:
    """The rows of one node, in pairs."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        pairs = rows[0:even:2] + rows[1:even:2]
        rows = pairs if even == len(rows) else xp.concatenate([pairs, rows[even:]])
    return rows[0]


def _climb(nodes: dict[Node, Any], count: int) -> dict[Node, Any]:
    """The same with pairs added wherever both are there; a last node without a partner stands for the pair."""
    found, level = dict(nodes), 0
    while count > 1 << level:
        for of, index in sorted(node for node in found if node[0] == level):
            if index % 2:
                continue
            alone = (index + 1) << level >= count
            if alone or (of, index + 1) in found:
                left = found.pop((of, index))
                found[level + 1, index // 2] = left if alone else left + found.pop((of, index + 1))
        level += 1
    return found
