"""Sums over the rows and over the columns of a matrix that is cut over ranks: the same bits however it is cut.

Rows are added one by one, columns along a fixed binary tree over the rows. A rank sends the sums of its whole rows, the
nodes of the tree that it has whole, and the elements of the rows at its ends of which others have the rest."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

__all__ = ["Portion", "matrix", "portion", "together"]

CHUNK = 1 << 16
"""Elements that are looked at together."""

Node = tuple[int, int]
"""(level, index): rows [index 2^level, (index + 1) 2^level), as far as there are so many."""


@dataclass(frozen=True)
class Portion:
    """What a rank knows. rows: the sums of its whole rows, from row `first` on. nodes: sums by column. loose: where its
    elements begin that are no whole row, and they themselves."""

    first: int
    rows: Any
    nodes: dict[Node, Any]
    loose: list[tuple[int, Any]]


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns: dim 0, and all others. A vector has one column."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def portion(xp: Any, values: Callable[[int, int], Any], offset: int, size: int, shape: tuple[int, int]) -> Portion:
    """Of elements [offset, offset + size) of a matrix. values: those from one to another of these, flat."""
    count, columns = shape
    end = offset + size
    first, last = -(-offset // columns), end // columns
    if first > last:
        first = last = end // columns
        ends = [(offset, end)]
    else:
        ends = [(offset, first * columns), (last * columns, end)]
    rows, nodes = [], {}
    for (level, index), (start, stop) in _nodes(first, last, count, max(CHUNK // columns, 1)):
        chunk = values(start * columns - offset, stop * columns - offset).reshape(-1, columns)
        rows.append(chunk.sum(axis=1))
        nodes[level, index] = _sum(xp, chunk)
    loose = [(start, values(start - offset, stop - offset)) for start, stop in ends if start < stop]
    return Portion(first, xp.concatenate(rows) if rows else None, _climb(nodes, count), loose)


def together(xp: Any, portions: Iterable[Portion], shape: tuple[int, int]) -> tuple[Any, Any]:
    """The sums of all rows (rows,) and of all columns (columns,), from the portions of all ranks."""
    count, columns = shape
    rows, nodes, torn = xp.empty(count), dict[Node, Any](), dict[int, Any]()
    for one in portions:
        nodes |= one.nodes
        if one.rows is not None:
            rows[one.first : one.first + one.rows.size] = one.rows
        for start, elements in one.loose:
            row, at = divmod(start, columns)
            torn.setdefault(row, xp.empty(columns))[at : at + elements.size] = elements
    for row, elements in torn.items():
        rows[row] = elements.reshape(1, -1).sum(axis=1)[0]
        nodes[0, row] = elements
    (root,) = _climb(nodes, count).values()
    return rows, root


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
