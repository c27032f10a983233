"""`MeshLevel` links a mesh to a coarser one."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpx.core.comm.default_communicator import all_gather_plain_value
from fsdpx.errors import ConfigError
from fsdpx.ext.meshes.arguments import as_integer_array, parse_or_raise_on_all_ranks
from fsdpx.ext.meshes.graph_building import GraphArguments, build_local_graph, exchange_arrays, find_rows
from fsdpx.ext.meshes.levels import LevelLink
from fsdpx.ext.meshes.local_graph import LocalGraph, MeshPartition, PartSizes
from fsdpx.ext.meshes.partition import Partition
from fsdpx.nn.shard_specs import Kind

__all__ = ["MeshLevel"]

MAX_DRY_LINKS = 8
"""Maximum number of maps that a `MeshLevel` caches for dry runs. A map links the fine nodes to the coarse nodes."""


class MeshLevel:
    """Links a mesh to a coarser one: each node of the finer mesh belongs to one node of the coarser mesh. Collective.

    `nn.Restrict` and `nn.Prolong` move values between the two meshes; layers between them work on the coarse mesh. A
    node and the coarse node that it belongs to may be on different ranks.

    Parameters
    ----------
    fine : the finer mesh, which is the trainer's `domain` or the coarse mesh of another level
    coarse : the coarser mesh, on the same ranks; its nodes have their own global numbers
    numbers : for each node of `fine` that this rank owns, the global number of the node of `coarse` that it belongs to

    Raises
    ------
    ConfigError : on all ranks, if the meshes are on different ranks, or if any of `numbers` is not the number of a node
        of `coarse`
    """

    def __init__(self, fine: Partition, coarse: Partition, numbers: Any) -> None:
        comm, size = fine.comm, fine.dims[0]
        rank, other = fine.rank, coarse.rank

        def parse() -> np.ndarray:
            if (coarse.dims[0], other) != (size, rank):
                raise ConfigError(f"{coarse} and {fine} must have the same ranks in the same order")
            found = as_integer_array("numbers", numbers, 1)
            if found.size != fine.graph.nodes or found.max(initial=-1) >= coarse.total_nodes:
                raise ConfigError(
                    f"numbers: give {fine.graph.nodes} numbers of nodes below {coarse.total_nodes}, got {found.size}, "
                    f"of which the largest is {found.max(initial=-1)}"
                )
            return found

        given = parse_or_raise_on_all_ranks(comm, parse)
        self.fine, self.coarse = fine, coarse
        link = _build_link(comm, rank, size, coarse, fine, given)
        self.shares = 1.0 / np.maximum(_exchange_fine_node_counts_per_coarse(comm, size, link), 1)
        self._sizes = [PartSizes(*sizes) for sizes in all_gather_plain_value(comm, tuple(link.sizes))]
        self._links = [LevelLink(link, fine.partition, coarse.partition)]

    def __repr__(self) -> str:
        return f"MeshLevel({self.fine}, {self.coarse})"

    def find_node_map(self, kind: Kind) -> LevelLink:
        """Return the map between the two meshes. Does not communicate.

        Parameters
        ----------
        kind : how node values of one of the meshes are distributed. In a dry run, it may describe the part of another
            rank

        Returns
        -------
        LevelLink
            the map for this rank, also if `kind` belongs to neither mesh. If `kind` describes the part of another rank,
            the map for that rank, with sizes but no data
        """
        known = next((link for link in self._links if kind in (link.fine, link.coarse)), None)
        if known is not None or not isinstance(kind, MeshPartition) or kind.graph.numbers.size:
            return known or self._links[0]
        if kind.shape != (self.fine.total_nodes,) or kind.kind != "nodes":
            return self._links[0]
        if kind.is_on_one_rank:
            # Later calls find the new link by the graph of its fine or coarse partition. Each copy of the fine mesh has
            # its own graph, so each copy also needs its own copy of the coarse mesh.
            (coarse,) = self.coarse.as_rank(0).joined_partition
            sizes = PartSizes(self.coarse.total_nodes, 0, kind.shape[0])
        else:
            ranks = range(len(self._sizes))
            rank = next((r for r in ranks if self._sizes[r].edges == kind.graph.nodes), 0)
            coarse, sizes = self.coarse.as_rank(rank).partition, self._sizes[rank]
        made = LevelLink(LocalGraph.from_part_sizes_without_data(sizes, 0), kind, coarse)
        self._links = [self._links[0], *self._links[1:][1 - MAX_DRY_LINKS :], made]
        return made


def _build_link(comm: Any, rank: int, size: int, coarse: Partition, fine: Partition, numbers: np.ndarray) -> LocalGraph:
    """Return a graph whose nodes are the coarse nodes, with one edge per fine node of this rank, as in
    `LevelLink.graph`. Collective.

    The function first builds a graph of both coarse and fine nodes, in which the coarse nodes have the lower numbers
    and all edges lead from coarse to fine nodes. It then removes the fine nodes, because no edge starts at them."""
    above = coarse.total_nodes
    away = np.setdiff1d(numbers, coarse.numbers)
    rows = np.concatenate([coarse.numbers, above + fine.numbers, away])
    own, many = coarse.graph.nodes, fine.graph.nodes
    ends = np.stack([find_rows(rows, numbers), own + np.arange(many)])
    given = GraphArguments(rows, np.arange(rows.size) < own + many, ends, undirected=False)
    graph = build_local_graph(comm, rank, size, given).graph
    senders = np.where(graph.senders < own, graph.senders, graph.senders - many)
    offsets, none = np.concatenate([graph.sender_offsets[:own], graph.sender_offsets[own + many :]]), ends[0, :0]
    kept = np.concatenate([graph.numbers[:own], graph.numbers[own + many :]])
    return LocalGraph(
        own, graph.ghosts, many, kept, senders, none, none, graph.sender_order, offsets, none, np.zeros((many, 0)),
        graph.sends, graph.receives,
    )  # fmt: skip


def _exchange_fine_node_counts_per_coarse(comm: Any, size: int, link: LocalGraph) -> np.ndarray:
    """Return the number of fine nodes that belong to each coarse node of this rank, as an array (nodes,).
    Collective."""
    here = np.diff(link.sender_offsets)
    pieces = [here[:0, None]] * size
    for rank, first, stop in link.receives:
        pieces[rank] = here[link.nodes + first : link.nodes + stop, None]
    found, counts = exchange_arrays(comm, pieces), here[: link.nodes].copy()
    for rank, rows in link.sends:
        counts[rows] += found[rank][:, 0]
    return counts
