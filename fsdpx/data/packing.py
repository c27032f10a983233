"""`pack_graphs`: several graphs as one, so that a batch of different graphs is one sample."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpx.errors import DataError

__all__ = ["PackedGraphs", "pack_graphs"]


class PackedGraphs(NamedTuple):
    """Several graphs without edges between them, as one graph: the nodes of the first, then those of the second, and
    so on.

    Attributes
    ----------
    edges : numbers of sender and receiver of each edge, (2, edges)
    offsets : number of the first node of each graph, and at the end the number of all nodes
    """

    edges: np.ndarray
    offsets: np.ndarray

    @property
    def total_nodes(self) -> int:
        """Number of nodes of all graphs."""
        return int(self.offsets[-1])

    def assign_parts(self, ranks: int) -> np.ndarray:
        """Return the rank of each node, for `Partition.split(parts=)`, so that each graph is on one rank and ranks have
        about as many nodes: the largest graph goes to the rank with the fewest, then the next (Graham 1969).

        Parameters
        ----------
        ranks : number of ranks

        Returns
        -------
        numpy.ndarray
            (nodes,)
        """
        sizes = np.diff(self.offsets)
        loads, chosen = [(0, rank) for rank in range(ranks)], np.zeros(sizes.size, np.int64)
        for graph in np.argsort(-sizes, kind="stable"):
            load, rank = heapq.heappop(loads)
            chosen[graph] = rank
            heapq.heappush(loads, (load + int(sizes[graph]), rank))
        return np.repeat(chosen, sizes)

    def pack(self, arrays: Sequence[Any]) -> np.ndarray:
        """Concatenate values of the nodes of each graph.

        Parameters
        ----------
        arrays : (nodes, features) or (samples, nodes, features) of each graph

        Returns
        -------
        numpy.ndarray
            the same for all nodes

        Raises
        ------
        DataError : if an array does not have the nodes of its graph, or their numbers of samples or features differ
        """
        found, sizes = [np.asarray(array) for array in arrays], np.diff(self.offsets).tolist()
        shapes = [array.shape for array in found]
        if [shape[-2:-1] for shape in shapes] != [(n,) for n in sizes]:
            raise DataError(f"PackedGraphs.pack: arrays of shapes {shapes} for graphs of {sizes} nodes")
        if len({(*shape[:-2], shape[-1]) for shape in shapes}) > 1:
            raise DataError(f"PackedGraphs.pack: arrays of shapes {shapes} differ in more than their nodes")
        return np.concatenate(found, axis=-2)

    def unpack(self, array: Any) -> list[np.ndarray]:
        """Return the values of each graph, as views: the inverse of `pack`.

        Parameters
        ----------
        array : (nodes, features) or (samples, nodes, features) of all nodes

        Returns
        -------
        list of numpy.ndarray
        """
        return np.split(np.asarray(array), self.offsets[1:-1], axis=-2)


def pack_graphs(edges: Sequence[Any], nodes: Sequence[int]) -> PackedGraphs:
    """Return several graphs as one, in which the nodes of each graph are renumbered by an offset.

    Parameters
    ----------
    edges : integers (2, edges) for each graph: numbers of sender and receiver of each edge
    nodes : number of nodes of each graph

    Returns
    -------
    PackedGraphs

    Raises
    ------
    DataError : if an edge has a node that its graph does not have
    """
    tables = [np.asarray(table) for table in edges]
    if len(tables) != len(nodes):
        raise DataError(f"pack_graphs: edges of {len(tables)} graphs, and numbers of nodes of {len(nodes)}")
    for i, (table, count) in enumerate(zip(tables, nodes, strict=True)):
        if table.dtype.kind not in "iu" or table.ndim != 2 or table.shape[0] != 2:
            raise DataError(f"pack_graphs: edges of graph {i} must be integers (2, edges), got {table.shape}")
        if (wrong := table[(table < 0) | (table >= count)]).size:
            raise DataError(f"pack_graphs: edges of graph {i} have node {wrong[0]}, and the graph {count} nodes")
    offsets = np.cumsum([0, *nodes]).astype(np.int64)
    moved = [table.astype(np.int64) + start for table, start in zip(tables, offsets[:-1], strict=True)]
    return PackedGraphs(np.concatenate([np.zeros((2, 0), np.int64), *moved], axis=1), offsets)
