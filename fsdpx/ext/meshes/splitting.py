"""Divides a whole graph into parts, either by coordinates or with METIS."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.ext.meshes.local_graph import PartSizes

__all__ = ["METHODS", "assign_parts", "count_nodes_and_edges_per_part"]

METHODS = ("coordinates", "metis")


def assign_parts(method: str, parts: int, nodes: int, edges: np.ndarray, positions: np.ndarray | None) -> np.ndarray:
    """Assign each node to a part, and return the part numbers, from 0 to parts - 1.

    `edges` is (2, edges). `positions`, (nodes, dims), is required by the method "coordinates"."""
    if method not in METHODS:
        raise ConfigError(f"method={method!r}: choose one of {', '.join(map(repr, METHODS))}")
    if method == "metis":
        return _split_with_metis(parts, nodes, edges)
    if positions is None:
        raise ConfigError('method="coordinates" needs positions=, or choose method="metis"')
    found = np.zeros(nodes, np.int64)
    _bisect_nodes(found, np.arange(nodes), positions, 0, parts)
    return found


def count_nodes_and_edges_per_part(
    ranks: int, parts: np.ndarray, edges: np.ndarray, undirected: bool
) -> tuple[PartSizes, ...]:
    """Return the sizes of each rank's part. `parts` contains the rank of each node, and `edges`, (2, edges), the node
    numbers of each edge."""
    nodes = parts.size
    if undirected:
        numbers = np.unique(np.concatenate([edges[0] * nodes + edges[1], edges[1] * nodes + edges[0]]))
        edges = np.stack(np.divmod(numbers, nodes)) if nodes else edges
    senders, home = edges[0], parts[edges[1]]
    away = parts[senders] != home
    ghosts = np.unique(home[away] * nodes + senders[away])  # one number for each (rank, ghost of that rank) pair
    readers, owners = ghosts // nodes if nodes else ghosts, parts[ghosts % nodes] if nodes else ghosts
    messages, rows = np.unique(readers * ranks + owners, return_counts=True)
    sends: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    receives: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for message, count in zip(messages.tolist(), rows.tolist(), strict=True):
        reader, owner = divmod(message, ranks)
        receives[reader].append((owner, count))
        sends[owner].append((reader, count))
    counts = (np.bincount(one, minlength=ranks).tolist() for one in (parts, readers, home))
    return tuple(PartSizes(*part) for part in zip(*counts, sends, receives, strict=True))


def _bisect_nodes(found: np.ndarray, nodes: np.ndarray, positions: np.ndarray, first: int, parts: int) -> None:
    """Assign `nodes` to the parts from `first` to first + parts - 1, and write the results to found[nodes]. Uses
    recursive coordinate bisection (Berger and Bokhari 1987): nodes are divided along the dim with the largest extent,
    and then each half is divided in the same way."""
    if parts == 1 or nodes.size == 0:
        found[nodes] = first
        return
    here = positions[nodes]
    dim = int(np.argmax(here.max(axis=0) - here.min(axis=0)))
    sorted_nodes = nodes[np.lexsort((nodes, here[:, dim]))]
    low = parts // 2
    half = nodes.size * low // parts
    _bisect_nodes(found, sorted_nodes[:half], positions, first, low)
    _bisect_nodes(found, sorted_nodes[half:], positions, first + low, parts - low)


def _split_with_metis(parts: int, nodes: int, edges: np.ndarray) -> np.ndarray:
    """Assign each node to a part with METIS, which cuts few edges (Karypis and Kumar 1998)."""
    try:
        metis: Any = import_module("pymetis")
    except ImportError as error:
        raise ConfigError(
            'method="metis" needs pymetis: pip install pymetis, or choose method="coordinates"'
        ) from error
    both = np.unique(np.concatenate([edges, edges[::-1]], axis=1), axis=1)
    both = both[:, both[0] != both[1]]
    starts: Any = np.searchsorted(both[0], np.arange(nodes + 1))
    return np.asarray(metis.part_graph(parts, xadj=starts.tolist(), adjncy=both[1].tolist())[1], np.int64)
