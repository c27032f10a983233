"""Builds each rank's part of a graph from the arguments of all ranks, by finding which rank owns each node and which
rank gets each edge. Functions with the parameter `comm` are collective.

Ranks find each other through a distributed directory: the entry for a node is held by the rank whose number is the
node's global number modulo the number of ranks. So no rank needs memory for the whole graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.comm.default_communicator import all_gather_plain_value
from fsdpx.errors import ConfigError
from fsdpx.ext.meshes.local_graph import LocalGraph, PartSizes

__all__ = [
    "BuiltGraph", "GraphArguments", "build_local_graph", "exchange_arrays", "exchange_wanted_rows", "find_rows",
    "raise_first_error",
]  # fmt: skip

NEARLY_ALL = 0.1
"""If less than this fraction of the edges lacks a reverse edge, the graph is assumed to be undirected."""
TOLERANCE = 1e-6
"""Maximum allowed difference between the values that two ranks pass for the same node or edge. For coordinates, it is
relative to the largest coordinate of all nodes; for an edge feature, to the largest value of this feature."""

Table = np.ndarray


class GraphArguments(NamedTuple):
    """The part of a graph that one rank passes to `Partition`. Rows are the nodes of this part, in the rank's own
    order.

    Attributes
    ----------
    numbers : global number of each row
    owned : whether the rank owns the node in each row; if None, the lowest rank that has a node owns it
    edges : rows of senders and receivers, (2, edges)
    positions : coordinates of all rows, (rows, dims), or of the owned rows only; None if not given
    edge_features : features of each edge, (edges, features); None if not given
    undirected : whether each edge stands for both directions; if None, edges are directed, but an error is raised if
        reverse edges seem to be missing
    owners : the expected owner (rank) of each row; an error is raised if a row has another owner. None if not given
    """

    numbers: Table
    owned: Table | None
    edges: Table
    positions: Table | None = None
    edge_features: Table | None = None
    undirected: bool | None = None
    owners: Table | None = None


class BuiltGraph(NamedTuple):
    """The result of `build_local_graph`: this rank's part of the graph, the rank that owns each of the caller's rows,
    the sizes of all ranks' parts, and the routes along which edge values are sent."""

    graph: LocalGraph
    owners: Table
    parts: tuple[PartSizes, ...]
    routes: EdgeRoutes


class EdgeRoutes(NamedTuple):
    """Routes for edge values. The values of an edge are sent from the rank that passed the edge to the rank that owns
    the edge's receiver node.

    Attributes
    ----------
    sent : for each destination rank, the indices of the edges that this rank passed and sends there
    taken : for each edge of this rank's graph, its index in the list of all edges that this rank received; the list is
        sorted by sending rank
    """

    sent: list[Table]
    taken: Table


class _Edges(NamedTuple):
    """For each edge, the global numbers of its sender and receiver, its features, the rank that owns the sender, and
    how many earlier edges have the same sender and receiver."""

    senders: Table
    receivers: Table
    owners: Table
    repeats: Table
    features: Table

    def take(self, index: Any) -> _Edges:
        return _Edges(*(column[index] for column in self))


def build_local_graph(comm: Any, rank: int, size: int, given: GraphArguments) -> BuiltGraph:
    """Build the part of the graph that this rank computes on: its owned nodes, all incoming edges of these nodes, and
    the ghosts that these edges read.

    Raises ConfigError on all ranks if the arguments of some ranks contradict each other."""
    owners = _find_owners(comm, rank, size, given)
    rows = np.flatnonzero(owners == rank)
    numbers = given.numbers[rows]
    total = sum(all_gather_plain_value(comm, int(rows.size)))
    edges, routes = _send_edges_to_receivers(comm, size, given, owners)
    if given.undirected is None:
        _require_no_lost_reverse_edges(comm, size, edges, total)
    receivers = find_rows(numbers, edges.receivers)
    sorting = np.lexsort((edges.repeats, edges.senders, receivers))
    edges, receivers = edges.take(sorting), receivers[sorting]
    routes = routes._replace(taken=routes.taken[sorting])
    away = edges.owners != rank
    ghosts = np.unique(np.stack([edges.owners[away], edges.senders[away]]), axis=1)
    senders = np.empty(receivers.size, np.int64)
    senders[~away] = find_rows(numbers, edges.senders[~away])
    senders[away] = rows.size + find_rows(ghosts[1], edges.senders[away])
    ends = np.searchsorted(ghosts[0], np.arange(size + 1))
    receives = tuple((r, int(ends[r]), int(ends[r + 1])) for r in range(size) if ends[r + 1] > ends[r])
    lent = exchange_wanted_rows(comm, numbers, np.split(ghosts[1], ends[1:-1]))
    sends = tuple((r, wanted) for r, wanted in enumerate(lent) if wanted.size)
    features = edges.features
    if given.positions is not None:
        positions = given.positions if len(given.positions) == rows.size else given.positions[rows]
        everyone = np.concatenate([positions, *exchange_arrays(comm, [positions[wanted] for wanted in lent])])
        apart = everyone[senders] - everyone[receivers]
        features = np.concatenate([features, apart, np.linalg.norm(apart, axis=1, keepdims=True)], axis=1)
    by_sender = np.argsort(senders, kind="stable")
    local = rows.size + ghosts.shape[1]
    offsets = _find_offsets(receivers, rows.size)
    graph = LocalGraph(
        rows.size, ghosts.shape[1], receivers.size, np.concatenate([numbers, ghosts[1]]), senders, receivers, offsets,
        by_sender, _find_offsets(senders[by_sender], local), receivers[by_sender], np.ascontiguousarray(features),
        sends, receives, max(all_gather_plain_value(comm, int(np.diff(offsets).max(initial=0)))),
    )  # fmt: skip
    parts = tuple(PartSizes(*part) for part in all_gather_plain_value(comm, tuple(graph.sizes)))
    return BuiltGraph(graph, owners, parts, routes)


def raise_first_error(comm: Any, text: str, names_rank: bool = True) -> None:
    """Raise ConfigError on all ranks if any rank passes a nonempty `text`. The message is the text from the first such
    rank, preceded by that rank's number if `names_rank` is True."""
    for rank, found in enumerate(all_gather_plain_value(comm, text)):
        if found:
            raise ConfigError(f"Partition: rank {rank}: {found}" if names_rank else f"Partition: {found}")


def exchange_arrays(comm: Any, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Send pieces[r] to each rank r, and return the pieces that this rank received, in rank order. All pieces on all
    ranks must be matrices of the same dtype and with the same number of columns."""
    if not hasattr(comm, "all_to_all"):
        return list(comm.alltoall(list(pieces)))
    counts = all_gather_plain_value(comm, [len(piece) for piece in pieces])
    width, rows = pieces[0].shape[1], [each[comm.rank] for each in counts]
    flat = np.empty(sum(rows) * width, pieces[0].dtype)
    sent = np.ascontiguousarray(np.concatenate(pieces)).reshape(-1)
    sizes = [len(piece) * width for piece in pieces], [n * width for n in rows]
    comm.all_to_all(sent, flat, *sizes, what="a partition of a mesh").wait()
    return np.split(flat.reshape(sum(rows), width), np.cumsum(rows)[:-1])


def find_rows(numbers: Table, wanted: Table) -> Table:
    """For each number in `wanted`, return its index in `numbers`. Every number in `wanted` must occur exactly once in
    `numbers`."""
    order = np.argsort(numbers, kind="stable")
    return order[np.searchsorted(numbers, wanted, sorter=order)]


def exchange_wanted_rows(comm: Any, numbers: Table, wanted: Sequence[Table]) -> list[Table]:
    """Exchange requests for node values between all ranks. This rank tells each owner which nodes it wants. Return one
    array per rank r, with the row indices of this rank's nodes whose values rank r wants.

    wanted[r] holds the global numbers of the nodes that this rank wants from rank r, their owner. `numbers` are the
    global numbers of this rank's own nodes."""
    asked = exchange_arrays(comm, [one[:, None] for one in wanted])
    return np.split(find_rows(numbers, np.concatenate(asked)[:, 0]), np.cumsum([len(one) for one in asked])[:-1])


def _find_owners(comm: Any, rank: int, size: int, given: GraphArguments) -> Table:
    """Return the rank that owns each row. The ranks look up owners in a distributed directory."""
    numbers = given.numbers
    claims = np.zeros(numbers.size, np.int64) if given.owned is None else given.owned.astype(np.int64)
    home = numbers % size
    places = [np.flatnonzero(home == r) for r in range(size)]
    table = np.stack([numbers, claims], axis=1)
    found = exchange_arrays(comm, [table[rows] for rows in places])
    answers, error = _look_up_node_owners_for_ranks(found, given.owned is None)
    seen = np.unique(np.concatenate(found)[:, 0])
    totals = all_gather_plain_value(comm, (int(seen.size), int(seen.max(initial=-1)), error))
    if not any(text for *_, text in totals) and sum(n for n, *_ in totals) != max(m for _, m, _ in totals) + 1:
        error = (
            f"there are {sum(n for n, *_ in totals)} nodes, and the largest global number is "
            f"{max(m for _, m, _ in totals)}: number them from 0 without gaps"
        )
    raise_first_error(comm, error, names_rank=False)
    owners = np.empty(numbers.size, np.int64)
    for rows, answer in zip(places, exchange_arrays(comm, answers), strict=True):
        owners[rows] = answer[:, 0]
    raise_first_error(comm, _explain_wrong_owner_of_node(given, owners))
    if given.positions is not None:
        _require_equal_positions(comm, rank, size, given, owners)
    return owners


def _look_up_node_owners_for_ranks(found: Sequence[Table], shared: bool) -> tuple[list[Table], str]:
    """Return the owners of the nodes that each rank asked about, as one array per rank, and an error message. The
    message is "" if every node has exactly one owner.

    Each row of found[r] holds a node number and whether rank r owns the node. If `shared` is True, the lowest rank that
    has a node owns it."""
    everyone = np.concatenate(found)
    source = np.repeat(np.arange(len(found)), [len(table) for table in found])
    claimed = np.ones(len(everyone), bool) if shared else everyone[:, 1] > 0
    # for each node, `first` contains its row from the lowest rank that has the node
    known, first = np.unique(everyone[claimed, 0], return_index=True)
    owners = source[claimed][first]
    error = ""
    if not shared and known.size < claimed.sum():
        twice = np.flatnonzero(np.diff(np.sort(everyone[claimed, 0])) == 0)
        number = np.sort(everyone[claimed, 0])[twice[0]]
        ranks = np.unique(source[claimed][everyone[claimed, 0] == number]).tolist()
        error = f"node {number} is owned by ranks {', '.join(map(str, ranks))}: each node has one owner"
    place = np.minimum(np.searchsorted(known, everyone[:, 0]), max(known.size - 1, 0))
    lost = np.flatnonzero(known[place] != everyone[:, 0]) if known.size else np.arange(len(everyone))
    if lost.size:
        number, rank = everyone[lost[0], 0], source[lost[0]]
        error = f"node {number} is a ghost on rank {rank}, and no rank owns it"
        return [np.zeros((len(table), 1), np.int64) for table in found], error
    answers = owners[place][:, None] if len(everyone) else np.zeros((0, 1), np.int64)
    return np.split(answers, np.cumsum([len(table) for table in found])[:-1]), error


def _explain_wrong_owner_of_node(given: GraphArguments, owners: Table) -> str:
    """Return an error message about the first row whose owner differs from the owner that the caller expects. Return ""
    if all owners match."""
    if given.owners is None:
        return ""
    wrong = np.flatnonzero(owners != given.owners)
    if not wrong.size:
        return ""
    number = given.numbers[wrong[0]]
    return f"owners= says that rank {given.owners[wrong[0]]} owns node {number}, but rank {owners[wrong[0]]} does"


def _require_equal_positions(comm: Any, rank: int, size: int, given: GraphArguments, owners: Table) -> None:
    """Raise ConfigError if any rank passes coordinates for a node that differ from those passed by the node's owner."""
    positions, numbers, mine, text = given.positions, given.numbers, np.flatnonzero(owners == rank), ""
    assert positions is not None
    has_ghosts = len(positions) == numbers.size
    shown = [np.flatnonzero(owners == r) if has_ghosts and r != rank else mine[:0] for r in range(size)]
    wanted = exchange_wanted_rows(comm, numbers[mine], [numbers[rows] for rows in shown])
    theirs = np.concatenate(exchange_arrays(comm, [positions[rows] for rows in shown]))
    here = (positions[mine] if has_ghosts else positions)[np.concatenate(wanted)]
    span = max(all_gather_plain_value(comm, float(np.abs(positions).max(initial=0.0)))) or 1.0
    wrong = np.flatnonzero(np.abs(here - theirs).max(axis=1, initial=0.0) > TOLERANCE * span)
    if wrong.size:
        at, source = wrong[0], np.repeat(np.arange(size), [rows.size for rows in wanted])
        text = (
            f"node {numbers[mine][np.concatenate(wanted)[at]]} is at {here[at].tolist()} on rank {rank}, which owns "
            f"it, and at {theirs[at].tolist()} on rank {source[at]}: give positions in the order of the numbers"
        )
    raise_first_error(comm, text, names_rank=False)


def _send_edges_to_receivers(comm: Any, size: int, given: GraphArguments, owners: Table) -> tuple[_Edges, EdgeRoutes]:
    """Send each edge to the rank that owns its receiver. Return the edges that this rank receives, and the routes along
    which their values are sent.

    An edge that several ranks pass counts once, and must have the same features on all of them. An edge that one rank
    passes several times counts several times, unless the graph is undirected."""
    senders, receivers = given.edges
    features = np.zeros((senders.size, 0)) if given.edge_features is None else given.edge_features
    if given.undirected:
        senders, receivers = np.concatenate([senders, receivers]), np.concatenate([receivers, senders])
        features = np.concatenate([features, features])
    numbers = given.numbers
    ends = numbers[senders], numbers[receivers]
    repeats = np.zeros(senders.size, np.int64) if given.undirected else _count_earlier_duplicate_edges(*ends)
    edges = _Edges(*ends, owners[senders], repeats, features)
    home = owners[receivers]
    places = [np.flatnonzero(home == r) for r in range(size)]
    table = np.stack(edges[:4], axis=1)
    tables = exchange_arrays(comm, [table[rows] for rows in places])
    found, source = np.concatenate(tables), np.repeat(np.arange(size), [len(one) for one in tables])
    values = np.concatenate(exchange_arrays(comm, [edges.features[rows] for rows in places]))
    everyone = _Edges(found[:, 0], found[:, 1], found[:, 2], found[:, 3], values)
    order = np.lexsort((everyone.repeats, everyone.senders, everyone.receivers))
    keys = found[order][:, [0, 1, 3]]
    is_first = np.ones(len(keys), bool)
    is_first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    _require_equal_edge_features(comm, everyone, order, order[is_first][np.cumsum(is_first) - 1], source)
    return everyone.take(order[is_first]), EdgeRoutes(places, order[is_first])


def _require_equal_edge_features(comm: Any, edges: _Edges, rows: Table, first: Table, source: Table) -> None:
    """Raise ConfigError on all ranks if ranks pass different features for the same edge. The features are compared with
    the features from the lowest rank that passes the edge.

    If several ranks pass an edge, `edges` has one entry for each of these ranks. `source` contains the rank of each
    entry. For each i, the entries rows[i] and first[i] describe the same edge, and first[i] is the entry from the
    lowest rank."""
    values, text = edges.features, ""
    spans = np.max(all_gather_plain_value(comm, np.abs(values).max(axis=0, initial=0.0)), axis=0)
    wrong = np.flatnonzero((np.abs(values[rows] - values[first]) > TOLERANCE * spans).any(axis=1))
    if wrong.size:
        at, other = first[wrong[0]], rows[wrong[0]]
        repeat = f" (number {edges.repeats[at]} of those between them)" if edges.repeats[at] else ""
        text = (
            f"the edge from node {edges.senders[at]} to node {edges.receivers[at]}{repeat} has the features "
            f"{values[at].tolist()} on rank {source[at]}, and {values[other].tolist()} on rank {source[other]}: pass "
            "the same on all ranks that pass an edge, and all edges between two nodes in the same order"
        )
    raise_first_error(comm, text, names_rank=False)


def _count_earlier_duplicate_edges(senders: Table, receivers: Table) -> Table:
    """Count, for each edge, the earlier edges with the same sender and the same receiver."""
    order = np.lexsort((senders, receivers))
    a, b = senders[order], receivers[order]
    is_first = np.ones(a.size, bool)
    is_first[1:] = (a[1:] != a[:-1]) | (b[1:] != b[:-1])
    starts = np.flatnonzero(is_first)
    repeats = np.empty(a.size, np.int64)
    repeats[order] = np.arange(a.size) - np.repeat(starts, np.diff([*starts, a.size]))
    return repeats


def _require_no_lost_reverse_edges(comm: Any, size: int, edges: _Edges, total: int) -> None:
    """Raise ConfigError if nearly all edges, but not all, have a reverse edge.

    For example, reverse edges are missing at the boundary between two ranks if each rank derived its edges only from
    the mesh cells that it holds.

    `total` is the number of nodes of the whole graph."""
    pairs = np.stack([edges.senders, edges.receivers], axis=1)
    asked = np.concatenate(exchange_arrays(comm, [pairs[edges.owners == r] for r in range(size)]))
    # `asked` holds the edges whose senders this rank owns. Their reverse edges lead to nodes of this rank. This rank
    # has all edges that lead to its nodes, so a reverse edge that it lacks was not passed by any rank.
    wanted = np.unique(asked[:, 1] * total + asked[:, 0])
    missing = np.setdiff1d(wanted, pairs[:, 0] * total + pairs[:, 1], assume_unique=False)
    example = divmod(int(missing[0]), total) if missing.size else None
    facts = all_gather_plain_value(comm, (int(wanted.size), int(missing.size), example))
    count, lost = sum(n for n, *_ in facts), sum(n for _, n, _ in facts)
    if 0 < lost < NEARLY_ALL * count:
        sender, receiver = next(pair for *_, pair in facts if pair)
        raise ConfigError(
            f"Partition: {lost} of {count} edges have no reverse edge: no rank passes the edge from node {sender} to "
            f"node {receiver}. If edges have no direction, pass undirected=True, which makes both directions of each; "
            "if they do, pass undirected=False"
        )


def _find_offsets(sorted_rows: Table, count: int) -> Table:
    """For each row number r from 0 to count - 1, return the index at which the entries equal to r begin in the sorted
    array `sorted_rows`. The last element of the result is the length of that array."""
    return np.searchsorted(sorted_rows, np.arange(count + 1)).astype(np.int64)
