"""`pack_graphs` joins several graphs into one, so that a batch of different graphs can be passed as a single sample."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpx.errors import DataError

__all__ = ["PackedGraphs", "pack_graphs"]


class PackedGraphs(NamedTuple):
    """Several graphs joined into one, without edges between them: the nodes of the first graph come first, then the
    nodes of the second, and so on.

    Attributes
    ----------
    edges : indices of the sending and the receiving node of each edge, (2, edges)
    offsets : index of the first node of each graph, followed by the total number of nodes
    """

    edges: np.ndarray
    offsets: np.ndarray

    @property
    def total_nodes(self) -> int:
        """Total number of nodes of all graphs together."""
        return int(self.offsets[-1])

    @property
    def graph_numbers(self) -> np.ndarray:
        """For each node, the index of its graph, from 0. `fsdpx.MeshLevel` takes this array to link the nodes to a
        coarser mesh that has one node per graph."""
        return np.repeat(np.arange(self.offsets.size - 1), np.diff(self.offsets))

    def assign_parts(self, ranks: int) -> np.ndarray:
        """Assign each graph to one rank, and return the rank of each node, for the argument `parts` of
        `Partition.from_replicated_graph`.

        To give the ranks similar numbers of nodes, graphs are assigned from the largest to the smallest, each to the
        rank that has the fewest nodes so far (Graham 1969).

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
        """Concatenate the node values of all graphs.

        Parameters
        ----------
        arrays : one array per graph, (nodes, features) or (samples, nodes, features)

        Returns
        -------
        numpy.ndarray
            the values of all nodes, in the same layout

        Raises
        ------
        DataError : if an array and its graph have different numbers of nodes, or if arrays have different numbers of
            samples or features
        """
        found, sizes = [np.asarray(array) for array in arrays], np.diff(self.offsets).tolist()
        shapes = [array.shape for array in found]
        if [shape[-2:-1] for shape in shapes] != [(n,) for n in sizes]:
            raise DataError(f"PackedGraphs.pack: arrays of shapes {shapes} for graphs of {sizes} nodes")
        if len({(*shape[:-2], shape[-1]) for shape in shapes}) > 1:
            raise DataError(f"PackedGraphs.pack: arrays of shapes {shapes} differ in more than their nodes")
        return np.concatenate(found, axis=-2)

    def unpack(self, array: Any) -> list[np.ndarray]:
        """Split an array into views, one per graph. This is the inverse of `pack`.

        Parameters
        ----------
        array : values of all nodes, (nodes, features) or (samples, nodes, features)

        Returns
        -------
        list of numpy.ndarray
        """
        return np.split(np.asarray(array), self.offsets[1:-1], axis=-2)


def pack_graphs(edges: Sequence[Any], nodes: Sequence[int]) -> PackedGraphs:
    """Join several graphs into one. The node indices of each graph are increased by the number of nodes in all earlier
    graphs.

    Parameters
    ----------
    edges : for each graph, an integer array (2, edges) with the indices of the sending and the receiving node of each
        edge
    nodes : number of nodes of each graph

    Returns
    -------
    PackedGraphs

    Raises
    ------
    DataError : if an edge refers to a node that its graph does not have
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
