"""Arguments that a `Partition` accepts, completes or rejects."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from mesh_graphs import WAYS, Graph, make_partition, make_trainer
from models import alike
from threads import on_ranks

import fsdpx
from fsdpx import data, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError, DataError


def list_edges(partition: fsdpx.Partition) -> list[tuple[int, ...]]:
    """Return the global numbers of the sender and receiver of each edge, with its features, in the rank's order."""
    graph = partition.graph
    ends = zip(graph.numbers[graph.senders], graph.numbers[graph.receivers], graph.edge_features, strict=True)
    return [(int(s), int(r), *np.round(f, 9).tolist()) for s, r, f in ends]


@pytest.mark.parametrize("way", WAYS)
def test_each_receiver_has_all_of_its_edges_however_they_are_passed(way):
    graph, _ = Graph.random(2, 4).in_rank_order()
    apart = graph.positions[graph.edges[0]] - graph.positions[graph.edges[1]]
    features = np.concatenate([apart, np.linalg.norm(apart, axis=1, keepdims=True)], axis=1)
    wanted = [(*map(int, e), *np.round(f, 9).tolist()) for e, f in zip(graph.edges.T, features, strict=True)]

    def one(comm):
        made = make_partition(comm, graph, way)
        assert (made.total_nodes, made.total_edges, made.dims) == (graph.nodes, graph.edges.shape[1], (4,))
        assert set(made.graph.receivers) <= set(range(made.local_shape[0]))
        return list_edges(made), made.numbers.tolist(), made.graph.ghosts, repr(made)

    found = spawn(one, 4)
    assert sorted(edge for edges, *_ in found for edge in edges) == sorted(wanted)
    for rank, (edges, numbers, ghosts, text) in enumerate(found):
        assert sorted(numbers) == np.flatnonzero(graph.parts == rank).tolist()
        assert {edge[1] for edge in edges} <= set(numbers)
        assert ghosts == len({edge[0] for edge in edges} - set(numbers))  # without a ghost that no edge reads
        rows = {number: row for row, number in enumerate(numbers)}
        assert [(rows[r], s) for s, r, *_ in edges] == sorted((rows[r], s) for s, r, *_ in edges)
        assert text == found[0][3]


def triangles(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes and triangles of n x n squares."""
    at = np.arange((n + 1) ** 2).reshape(n + 1, n + 1)
    a, b, c, d = (x.reshape(-1) for x in (at[:-1, :-1], at[:-1, 1:], at[1:, :-1], at[1:, 1:]))
    points = np.stack(np.meshgrid(*[np.linspace(0, 1, n + 1)] * 2), axis=-1).reshape(-1, 2)
    return points, np.concatenate([np.stack([a, b, d], axis=1), np.stack([a, d, c], axis=1)])


@pytest.mark.parametrize("ranks", [1, 3])
def test_cells_of_ranks_that_share_nodes_make_each_edge_once(ranks):
    points, cells = triangles(5)
    pairs = {tuple(pair) for cell in cells.tolist() for i in cell for j in cell if i != j for pair in [(i, j)]}

    def one(comm):
        mine = cells[comm.rank :: comm.size]
        rows = np.unique(mine)
        made = fsdpx.Partition.from_cells(comm, mine, positions=points[rows])
        local = fsdpx.Partition.from_cells(comm, np.searchsorted(rows, mine), rows, positions=points[rows])
        assert list_edges(local) == list_edges(made)
        loops = fsdpx.Partition.from_cells(comm, mine, pairs=[(0, 1)])
        assert loops.total_edges < made.total_edges
        whole = np.arange(made.total_nodes * 2.0).reshape(-1, 2)
        np.testing.assert_array_equal(made.all_gather(whole[rows]), whole)  # including rows of other ranks' nodes
        np.testing.assert_array_equal(made.all_gather(made.take_local(whole[None])), whole[None])
        wide = np.full((rows.size, 2, 1), np.nan)
        wide[made.owned_rows, :, 0] = made.take_local(whole)
        np.testing.assert_array_equal(made.update_ghosts(wide)[..., 0], whole[rows])
        with pytest.raises(DataError, match=r"update_ghosts: rank 0: .* the rank has \d+ rows with ghosts"):
            made.update_ghosts(np.zeros((3, 2)))
        return list_edges(made)

    edges = [edge[:2] for found in spawn(one, ranks) for edge in found]
    assert len(edges) == len(pairs)
    assert set(edges) == pairs


def test_parts_by_coordinates_are_even_and_edges_between_them_few():
    points, cells = triangles(12)
    edges = np.concatenate([cells[:, [0, 1]], cells[:, [1, 2]], cells[:, [0, 2]]]).T

    def one(comm, method):
        made = fsdpx.Partition.from_replicated_graph(
            comm, edges, len(points), positions=points, method=method, undirected=True
        )
        return made.local_shape[0], made.graph.ghosts, made.total_edges

    found = spawn(one, 5, "coordinates")
    assert sum(n for n, *_ in found) == len(points)
    assert max(n for n, *_ in found) - min(n for n, *_ in found) <= 1
    assert max(ghosts for _, ghosts, _ in found) < 30
    assert {e for *_, e in found} == {len({tuple(e) for e in np.concatenate([edges, edges[::-1]], axis=1).T.tolist()})}
    if find_spec("pymetis"):
        assert sum(n for n, *_ in spawn(one, 3, "metis")) == len(points)
    else:
        with pytest.raises(ConfigError, match="needs pymetis: pip install pymetis"):
            spawn(one, 2, "metis")


def test_edges_lost_at_the_borders_of_parts_are_an_error_or_put_right():
    """Each rank has the cells of its nodes, but passes only edges that its own nodes receive from its own cells."""
    points, cells = triangles(9)
    parts = (points[:, 0] > 0.5).astype(int)
    home = parts[cells].min(axis=1)

    def one(comm, undirected):
        mine = cells[home == comm.rank]
        rows = np.unique(np.concatenate([mine.reshape(-1), np.flatnonzero(parts == comm.rank)]))
        ends = np.concatenate([mine[:, p] for p in ([0, 1], [1, 0], [1, 2], [2, 1], [0, 2], [2, 0])])
        ends = np.unique(ends, axis=0)
        ends = ends[parts[ends[:, 1]] == comm.rank]
        made = fsdpx.Partition.from_numbers(
            comm, rows, parts[rows] == comm.rank, edges=np.searchsorted(rows, ends.T), undirected=undirected
        )
        return made.total_edges

    with pytest.raises(ConfigError, match=r"no rank passes the edge from node \d+ to node \d+\. .*undirected=True"):
        spawn(one, 2, None)
    complete = spawn(lambda comm: fsdpx.Partition.from_cells(comm, cells).total_edges, 1)[0]
    assert spawn(one, 2, True) == [complete] * 2
    assert spawn(one, 2, False)[0] < complete


EDGES = np.array([[0, 1], [1, 0]])


def change_on_rank_1(make: Callable[..., Any], **usual: Any) -> Callable[..., Callable[[Communicator], Any]]:
    """Return a function of the arguments that rank 1 changes. It returns a function of the communicator, which makes a
    partition with the `usual` arguments."""
    return lambda **change: lambda comm: make(comm, **{**usual, **(change if comm.rank == 1 else {})})


def make_two_nodes_per_rank(comm: Communicator, **options: Any) -> Any:
    return fsdpx.Partition(comm, **{"ghosts": [(2 * comm.rank + 2) % 6], **options})


owned = change_on_rank_1(make_two_nodes_per_rank, owned=2, edges=np.array([[0, 2], [1, 1]]))
split = change_on_rank_1(fsdpx.Partition.from_replicated_graph, edges=EDGES, nodes=4, parts=[0, 1, 1, 2])
cells = change_on_rank_1(fsdpx.Partition.from_cells, cells=[[0, 1, 2]])


def numbered(rank1: Any, mask: list[bool] | None = None) -> Callable[[Communicator], Any]:
    def one(comm):
        rows = [[0, 1], rank1, [4, 5]][comm.rank]
        own = [True] * len(rows) if comm.rank != 1 or mask is None else mask
        return fsdpx.Partition.from_numbers(comm, rows, np.array(own), edges=EDGES)

    return one


def placed(comm: Communicator) -> Any:
    first = 2.0 * comm.rank
    points = [[first, 1.0], [first + 1, 1.0], [(first + 2) % 6, 1.0 if comm.rank else 7.0]]
    return make_two_nodes_per_rank(comm, owned=2, edges=EDGES, positions=points)


def far(comm: Communicator) -> Any:
    """A node whose coordinates are 0 up to rounding on its owner, in a mesh that extends to 1000."""
    points = [[[np.cos(np.pi / 2), 0.0]], [[1000.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]][comm.rank]
    ghosts = [0] if comm.rank else []
    return fsdpx.Partition(comm, owned=1, ghosts=ghosts, edges=[ghosts, ghosts], positions=points)


def featured(ends: list[list[int]], features: list[list[float]]) -> Callable[[Communicator], Any]:
    """All ranks pass an edge from node 0 to node 1, for which rank 1 passes other values."""

    def one(comm):
        edges, values = (ends, features) if comm.rank == 1 else ([[0], [1]], [[2.0]])
        return fsdpx.Partition.from_numbers(comm, [0, 1], edges=edges, edge_features=values)

    return one


def without_rows(comm: Communicator) -> Any:
    """Rank 1 has no nodes and no edges, and passes [] for everything."""
    rows = [[0, 1], [], [2, 3]][comm.rank]
    edges, features = ([[0], [1]], [[1.0, 2.0]]) if rows else ([], [])
    points = [[float(row)] * 3 for row in rows]
    options = {"edges": edges, "edge_features": features, "positions": points}
    made = fsdpx.Partition.from_numbers(comm, rows, [True] * len(rows), **options)
    assert (made.edge_feature_count, made.local_shape) == (6, (len(rows),))


WRONG: list[tuple[Callable[[Communicator], Any], str]] = [
    (owned(owned=-1), "rank 1: owned=-1: give the number of owned nodes"),
    (owned(ghosts=[7]), "node 7 is a ghost on rank 1, and no rank owns it"),
    (owned(ghosts=[2]), "rank 1: node 2 has two rows: give each node once"),
    (owned(ghosts=[0.5]), "rank 1: ghosts must be whole numbers with 1 dims, got float64"),
    (owned(ghosts=[-3]), "rank 1: ghosts has -3, and must be at least 0"),
    (owned(owners=[2]), None),  # right: node 4 is on rank 2
    (owned(owners=[0]), "rank 1: owners= says that rank 0 owns node 4, but rank 2 does"),
    (owned(owners=[0, 2]), "rank 1: owners has 2 ranks for 1 ghosts"),
    (owned(edges=np.zeros((3, 2), int)), r"rank 1: edges must be \(2, edges\).* got \(3, 2\): transpose it"),
    (owned(edges=np.array([[0], [3]])), "rank 1: edges has row 3, but there are 3 rows of nodes"),
    (owned(edge_features=np.ones((3, 1))), r"rank 1: edge_features must be \(2, n\) numbers"),
    (owned(edge_features=np.ones((2, 1))), "edge_features: rank 0 has None, and rank 1 1"),
    (owned(positions=np.ones((5, 2))), r"rank 1: positions must be \(2 or 3, n\) numbers"),
    (owned(undirected="yes"), "rank 1: undirected='yes': True, False or None"),
    (owned(undirected=np.array([True, False])), "rank 1: undirected=array"),
    (owned(owned=np.array([1, 2])), "rank 1: owned=array.*: give the number of owned nodes"),
    (owned(ghosts=[[1], [2, 3]]), "rank 1: ghosts must be an array: "),
    (owned(edges=[[0, 1], [1]]), "rank 1: edges must be an array: "),
    (owned(edges=None), "rank 1: edges must be whole numbers with 2 dims, got object"),
    (owned(edges=[]), None),
    (owned(positions=[[0, 1], [1]]), "rank 1: positions must be an array: "),
    (owned(undirected=True), "undirected: rank 0 has None, and rank 1 True"),
    (numbered([2, 5]), "node 5 is owned by ranks 1, 2: each node has one owner"),
    (numbered([2, 7]), "there are 6 nodes, and the largest global number is 7: number them from 0 without gaps"),
    (numbered(np.array([2, 2**63 + 5], np.uint64)), "rank 1: numbers has 9223372036854775813, and must be .* below 2"),
    (numbered([2, 3], [True]), "rank 1: owned_mask must be 2 bools"),
    (numbered([2, 3], [True, False]), "node 3 is a ghost on rank 1, and no rank owns it"),
    (placed, r"node 2 is at \[2\.0, 1\.0\] on rank 1, which owns it, and at \[2\.0, 7\.0\] on rank 0"),
    (without_rows, None),
    (far, None),
    (owned(positions=np.full((3, 2), np.nan)), "rank 1: positions has nan in row 0: give finite numbers"),
    (featured([[0], [1]], [[2.0 + 1e-12]]), None),
    (
        featured([[0], [1]], [[1.0]]),
        r"the edge from node 0 to node 1 has the features \[2\.0\] on rank 0, and \[1\.0\] on rank 1",
    ),
    (featured([[0, 0], [1, 1]], [[1.0], [2.0]]), "all edges between two nodes in the same order"),
    (featured([[0], [1]], [[np.inf]]), "rank 1: edge_features has inf in row 0: give finite numbers"),
    (split(parts=[0, 1, 1, 3]), r"rank 1: parts must be 4 numbers of ranks, from 0 to 2"),
    (split(parts=[0, 1, 0, 2]), "rank 1 passes other parts than rank 0: pass the same graph"),
    (split(edges=EDGES[:, :1]), "rank 1 passes other edges than rank 0"),
    (split(parts=None, method="coordinates"), "rank 1: method=.* needs positions=, or choose method"),
    (split(parts=None, method="best"), "rank 1: method='best': choose one of"),
    (split(nodes=2.5), "rank 1: nodes=2.5: give the number of nodes of the whole graph"),
    (lambda comm: fsdpx.Partition.from_replicated_graph(comm, EDGES, 4), "needs positions=, or choose method"),
    (
        lambda comm: fsdpx.Partition.from_replicated_graph(comm, EDGES, 4, method="best"),
        "choose one of 'coordinates', 'metis'",
    ),
    (lambda comm: fsdpx.Partition.from_cells(comm, [[0, 1, 2]], pairs=[(0, 3)]), "numbers from 0 to 2"),
    (cells(pairs=[0, 1]), "rank 1: pairs must be whole numbers with 2 dims"),
    (cells(pairs=5), "rank 1: pairs must be whole numbers with 2 dims"),
    (cells(pairs=[(0, "a")]), "rank 1: pairs must be whole numbers with 2 dims"),
    (cells(pairs=[(0.0, 1.0)]), "rank 1: pairs must be whole numbers with 2 dims, got float64"),
    (cells(cells=[[0, 1, 2], [1, 2]]), "rank 1: cells must be an array: "),
    (cells(numbers=[0, 1]), "rank 1: edges has row 2, but there are 2 rows of nodes"),
    (cells(cells=[]), None),
    (lambda comm: fsdpx.Partition.from_cells(comm, [0, 1]), "cells must be whole numbers with 2 dims"),
    (lambda comm: fsdpx.Partition("comm", owned=1, edges=EDGES), "is not a communicator"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(number):
    make, text = WRONG[number]

    assert re.search(f"^ConfigError: (?s:.*){text}" if text else "^no error$", alike(3, make))


def test_arrays_have_the_rows_of_owned_nodes_or_of_all_nodes_of_a_rank():
    graph, _ = Graph.random(1, 3).in_rank_order()
    values = np.random.default_rng(0).standard_normal((graph.nodes, 3))

    def one(comm):
        made = make_partition(comm, graph, "owned")
        rows = np.concatenate([made.numbers, np.full(made.row_counts[1] - made.row_counts[0], -1)])
        wide = np.where(rows[:, None] < 0, np.nan, values[rows])  # values of ghosts are not read
        trainer = make_trainer(nn.GraphConv(3, 2), comm, made, loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1))
        labels = made.numbers % 2
        losses = [
            trainer.step(wide, labels), trainer.step(wide[None], labels[None]),
            trainer.step(made.take_local(values), np.concatenate([labels, np.zeros(rows.size - labels.size, int)])),
        ]  # fmt: skip
        y = trainer.predict(wide)
        assert y.shape == (made.local_shape[0], 2)
        assert trainer.predict(wide[None]).shape == (1, *y.shape)
        with pytest.raises(DataError, match=r"has shape \(2, 3\), but this rank has \d+ nodes"):
            trainer.predict(np.zeros((2, 3)))
        if comm.size > 1:
            with pytest.raises(DataError, match=r"these are all 23 nodes of the mesh, .*: give its part, Pa"):
                trainer.predict(values)
        with pytest.raises(DataError, match=r"of 3 values for each node in turn, as array\.reshape\(-1, 3\)"):
            trainer.predict(wide.reshape(-1))
        with pytest.raises(DataError, match="does not have 23 nodes"):
            made.take_local(values[:5])
        with pytest.raises(DataError, match=r"rank 0: an array of shape \(3,\) does not have the"):
            made.all_gather(np.zeros(3))
        made.close()
        return losses, trainer.output_grid is made

    (wanted, same), *others = spawn(one, 3)
    assert same
    for losses, _ in others:
        assert losses == wanted
    assert wanted[2] < wanted[1] < wanted[0]


def read_only(rows: int) -> np.ndarray:
    array = np.zeros((rows, 2))
    array.setflags(write=False)
    return array


@pytest.mark.parametrize("method", ["all_gather", "update_ghosts", "exchange_edges"])
def test_arrays_of_other_kinds_on_one_rank_are_an_error_on_all(method):
    makes = {
        "width": (lambda rows: np.zeros((rows, 3)), r"rank 0 has float64 of shape \(rows, 2\), and rank 1 .*rows, 3"),
        "dtype": (lambda rows: np.zeros((rows, 2), int), "rank 0 has float64 of .*, and rank 1 int64 of shape"),
        "samples": (lambda rows: np.zeros((1, rows, 2)), ".*rank 1"),
        "rows": (lambda rows: np.zeros((rows + 9, 2)), r"rank 1: an array of shape \(\d+, 2\)"),
        "list": (lambda rows: [[0.0, 0.0]] * rows, "rank 1: list that cannot be changed in place"),
        "read": (read_only, "rank 1: ndarray that cannot be changed in place: give a writable numpy array"),
    }

    def one(comm):
        first = 2 * comm.rank
        made = fsdpx.Partition(comm, owned=2, ghosts=[(first + 2) % 4], edges=[[2, 0, 1], [0, 1, 1]])
        found = []
        for name, (make, text) in makes.items():
            if method != "update_ghosts" and name in ("list", "read"):
                continue
            with pytest.raises(DataError, match=f"Partition.{method}: {text}") as raised:
                getattr(made, method)(make(3) if comm.rank else np.zeros((3, 2)))
            found.append(str(raised.value))
        return found

    a, b = spawn(one, 2)
    assert a == b


def test_labels_of_any_number_of_samples_are_labels():
    """Also of as many samples as a rank has nodes, or nodes and ghosts."""

    def one(comm):
        parts = np.array([0, 1, 1]) % comm.size
        made = fsdpx.Partition.from_replicated_graph(comm, [[0, 1, 2], [1, 2, 0]], 3, parts=parts)
        trainer = make_trainer(nn.GraphConv(2, 2), comm, made, loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1))
        x, labels = np.ones((3, 3, 2)) * np.arange(3)[:, None], np.arange(9).reshape(3, 3) % 2
        return [trainer.step(made.take_local(x[:n]), labels[:n, made.numbers]) for n in (1, 2, 3)]

    np.testing.assert_allclose(spawn(one, 2)[0], spawn(one, 1)[0], rtol=1e-12)


def test_rows_of_ghosts_may_be_anywhere():
    rows = [[4, 0, 1, 2], [1, 3, 2, 4]]
    mask = [[False, True, False, True], [True, True, False, True]]
    whole = np.arange(10.0).reshape(5, 2)

    def one(comm):
        own = np.array(mask[comm.rank])
        made = fsdpx.Partition.from_numbers(comm, rows[comm.rank], own, edges=[[0, 1, 2], [1, 2, 3]])
        assert made.owned_rows.tolist() == np.flatnonzero(own).tolist()
        wide = np.where(own[:, None], whole[rows[comm.rank]], np.nan)
        np.testing.assert_array_equal(made.all_gather(wide), whole)
        np.testing.assert_array_equal(made.all_gather(made.take_owned_rows(wide[None])), whole[None])
        return made.update_ghosts(wide)

    for found, numbers in zip(spawn(one, 2), rows, strict=True):
        np.testing.assert_array_equal(found, whole[numbers])


def test_a_training_goes_on_with_another_partition_of_the_mesh(tmp_path):
    graph = Graph.random(4, 3)
    x, t = np.random.default_rng(3).standard_normal((2, 4, graph.nodes, 3))

    def one(comm, steps, saves):
        made = make_partition(comm, graph.assign(graph.parts % comm.size), "anywhere")
        trainer = make_trainer(nn.GATConv(3, 3), comm, made, optimizer=optim.AdamW(lr=0.1))
        if steps.start:
            trainer.load(tmp_path / "state")
        losses = [trainer.step(made.take_local(a), made.take_local(b)) for a, b in zip(x[steps], t[steps], strict=True)]
        if saves:
            trainer.save(tmp_path / "state")
        return losses

    wanted = spawn(one, 1, slice(0, 4), False)[0]
    found = spawn(one, 3, slice(0, 2), True)[0] + spawn(one, 2, slice(2, 4), False)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_members_of_an_ensemble_have_a_partition_each():
    graph = Graph.random(4, 2)
    x, t = np.random.default_rng(3).standard_normal((2, 3, 2, graph.nodes, 3))

    def one(comm, members):
        member = comm.rank // (comm.size // members)
        own = comm.subgroup([comm.size // members * member + r for r in range(comm.size // members)])
        made = make_partition(own, graph, "split")
        mesh = fsdpx.Mesh(replica=members, shard=None) if members > 1 else None
        trainer = make_trainer(nn.GraphConv(3, 3), comm, made, optimizer=optim.AdamW(lr=0.1), mesh=mesh)
        some = slice(member, None, members)
        return [trainer.step(made.take_local(a[some]), made.take_local(b[some])) for a, b in zip(x, t, strict=True)]

    wanted = spawn(one, 2, 1)[0]
    for losses in spawn(one, 4, 2):
        np.testing.assert_allclose(losses, wanted, rtol=1e-12)


@on_ranks(2)
def test_loaders_that_give_the_ranks_of_a_mesh_different_samples_are_refused(comm):
    mesh = make_partition(comm, Graph.random(1, comm.size), "anywhere")
    trainer = nn.GraphConv(3, 2).as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), comm=comm, domain=mesh)
    fields = np.zeros((8, mesh.local_shape[0], 5), np.float32)
    samples = data.ArrayDataset(fields[..., :3], fields[..., 3:])
    for x, y in data.DataLoader(samples, 4, comm=comm):
        with pytest.raises(DataError, match="the DataLoader of rank 1 gives other samples than that of rank 0"):
            trainer.step(x, y)
    for x, y in data.DataLoader(samples, 4, comm=trainer.data_group):
        trainer.step(x, y)
