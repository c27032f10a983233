"""`Partition`: a mesh or graph that is partitioned over ranks. Each rank describes the part that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.default_communicator import (
    all_gather_plain_value,
    get_rank_and_size,
    require_valid_intracomm,
    to_mpi4py,
)
from fsdpx.core.comm.mesh import Mesh, MeshAxes, SampleGroups
from fsdpx.core.state.sample_layout import Domain
from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.fields.domain_communicator import duplicate_communicator_and_make_finalizer
from fsdpx.ext.fields.local_arrays import iterate_layers_including_rollout_nets, require_arrays_fit_local_part
from fsdpx.ext.fields.sample_groups import group_ranks_sharing_samples
from fsdpx.ext.meshes.arguments import (
    agree_on_optional_arguments,
    as_integer_array,
    parse_count,
    parse_graph,
    parse_or_raise_on_all_ranks,
    parse_owned_mask,
    parse_replicated_graph_arguments,
    require_same_graph_on_all_ranks,
    to_array,
)
from fsdpx.ext.meshes.graph_building import (
    BuiltGraph,
    GraphArguments,
    build_local_graph,
    exchange_arrays,
    exchange_wanted_rows,
    find_rows,
)
from fsdpx.ext.meshes.local_graph import LocalGraph, MeshPartition, PartSizes
from fsdpx.ext.meshes.node_samples import NodeSamples
from fsdpx.ext.meshes.solver_meshes import (
    SolverMesh,
    exchange_facets_and_list_cell_edges,
    get_meshio_points_and_edges,
    list_edges_of_cells,
    read_dmplex,
    read_graph_of_dolfinx_space,
)
from fsdpx.ext.meshes.splitting import count_nodes_and_edges_per_part
from fsdpx.nn.layer import Layer
from fsdpx.nn.shard_specs import FieldPartition, Kind

__all__ = ["Partition"]

WholeGraph = tuple[Any, ...]
"""Arguments for `parse_replicated_graph_arguments`, except the first one (the number of ranks)."""


class Partition(Domain):
    """A mesh or graph that is partitioned over ranks, as in finite-element and finite-volume codes. Collective.

    Each node has one owner. A rank passes the nodes that it owns, the global numbers of its ghosts (copies of nodes of
    other ranks), and its edges. The rank computes on all edges whose receivers it owns; edges that only other ranks
    passed are fetched once. Results do not depend on how the mesh is partitioned.

    The trainer's `step` and `predict` take arrays (nodes, features) or (samples, nodes, features), with a row for each
    owned node, or for each owned node and ghost, in the caller's order. Ghost rows may hold any values, because layers
    exchange ghosts. Results have a row for each owned node.

    Parameters
    ----------
    comm : communicator of the ranks that hold the mesh: an mpi4py communicator, which is duplicated, any object with a
        `tompi4py()` method, such as `PETSc.Comm`, or an fsdpx communicator
    owned : number of nodes that this rank owns. Nodes are numbered in rank order: the nodes of rank 0 are 0, 1, ...
    ghosts : global numbers of this rank's ghosts, in the order of their rows after the owned nodes; default: none
    owners : the expected owner of each ghost, to be checked; default: no check
    edges : integers (2, edges): the rows of each edge's sender and receiver, like `edge_index` in PyTorch Geometric.
        Any rank may pass any edge, and several ranks may pass the same edge
    positions : coordinates (rows, dims) of owned nodes and ghosts, or of owned nodes only. If given, the coordinates of
        each edge's sender relative to its receiver, and their norm, are appended to the features of the edge
    edge_features : features (edges, features) of the edges, the same for all samples; default: none
    undirected : if True, each edge counts in both directions; if False, edges are directed. By default, edges are
        directed, but an error is raised if nearly all edges, but not all, have a reverse edge, because the missing ones
        were probably lost

    Raises
    ------
    ConfigError : on all ranks, if arguments have wrong shapes, a node has several owners or none, the coordinates of a
        ghost differ from the owner's coordinates, or edges seem to be missing. The other constructors also raise this
        error
    """

    def __init__(
        self, comm: Any, *, owned: int, ghosts: Any = (), owners: Any = None, edges: Any, positions: Any = None,
        edge_features: Any = None, undirected: bool | None = None,
    ) -> None:  # fmt: skip
        comm = _as_communicator(comm)
        rank, _ = get_rank_and_size(comm)
        count = parse_or_raise_on_all_ranks(comm, lambda: parse_count("owned", owned, "owned nodes"))
        first = sum(all_gather_plain_value(comm, count)[:rank])

        def parse() -> GraphArguments:
            numbers = np.concatenate([np.arange(first, first + count), as_integer_array("ghosts", ghosts, 1)])
            mask = np.arange(numbers.size) < count
            given = parse_graph(numbers, mask, edges, positions, edge_features, undirected)
            if owners is None:
                return given
            of_ghosts = as_integer_array("owners", owners, 1)
            if count + of_ghosts.size != numbers.size:
                raise ConfigError(f"owners has {of_ghosts.size} ranks for {numbers.size - count} ghosts")
            return given._replace(owners=np.concatenate([np.full(count, rank), of_ghosts]))

        self._build_partition(comm, parse)

    @classmethod
    def from_numbers(
        cls, comm: Any, numbers: Any, owned_mask: Any = None, *, edges: Any, positions: Any = None,
        edge_features: Any = None, undirected: bool | None = None,
    ) -> Partition:  # fmt: skip
        """Return the partition of a mesh whose owned nodes and ghosts may be in any order on each rank. Collective.

        Parameters
        ----------
        comm, edges, positions, edge_features, undirected : as in `Partition`
        numbers : global number of the node in each row; the nodes of the mesh are numbered 0, 1, ... without gaps
        owned_mask : whether this rank owns the node of each row. Default: each node belongs to the lowest rank that has
            it, which suits codes whose ranks own elements and share nodes
        """

        def parse() -> GraphArguments:
            found = as_integer_array("numbers", numbers, 1)
            return parse_graph(
                found, parse_owned_mask(owned_mask, found.size), edges, positions, edge_features, undirected
            )

        return cls._make_partition(_as_communicator(comm), parse)

    @classmethod
    def from_cells(
        cls, comm: Any, cells: Any, numbers: Any = None, owned_mask: Any = None, *,
        pairs: Sequence[tuple[int, int]] | None = None, positions: Any = None,
    ) -> Partition:  # fmt: skip
        """Return the partition of a mesh, given the cells that each rank has. Edges in both directions join the nodes
        of a cell; an edge that several cells or ranks share counts once. Collective.

        Parameters
        ----------
        comm, positions : as in `Partition`
        cells : integers (cells, nodes per cell): the nodes of each of this rank's cells, as row indices or, without
            `numbers`, as global numbers. Without `numbers`, arrays have one row for each node of the rank's cells,
            sorted by global number
        numbers : global number of the node in each row; default: see `cells`
        owned_mask : as in `from_numbers`
        pairs : pairs of nodes of a cell that are joined, such as ((0, 1), (1, 2), (2, 3), (3, 0)) for quadrilaterals
            whose nodes are listed in order around the cell. Default: all pairs, as in triangles and tetrahedra
        """

        def parse() -> GraphArguments:
            rows = as_integer_array("cells", cells, 2)
            if numbers is None:
                found, inverse = np.unique(rows, return_inverse=True)
                rows = inverse.reshape(rows.shape)
            else:
                found = as_integer_array("numbers", numbers, 1)
            mask, edges = parse_owned_mask(owned_mask, found.size), list_edges_of_cells(rows, pairs)
            return parse_graph(found, mask, edges, positions, None, True)

        return cls._make_partition(_as_communicator(comm), parse)

    @classmethod
    def from_dolfinx(
        cls, V: Any, *, pairs: Sequence[tuple[int, int]] | None = None, positions: Any = None
    ) -> Partition:
        """Return the partition of the dofs of a dolfinx function space. Collective over the mesh's communicator.

        Edges in both directions join the dofs of each cell, as in an assembled matrix. In a space of degree 0, the
        nodes are the cells, and edges join cells that share a facet. The graph does not depend on the ghost mode.

        Arrays have the same rows as `Function.x.array.reshape(-1, V.dofmap.index_map_bs)`, including the ghosts of
        dolfinx.

        Parameters
        ----------
        V : a function space that is continuous or of degree 0. It may be scalar or blocked, such as ("Lagrange", 2,
            (3,)), but not a subspace
        pairs : pairs of dofs of a cell that are joined, as indices into a row of `V.dofmap.list`. Default: all pairs
        positions : as in `Partition`; for example, scaled coordinates. Default: the coordinates of the dofs

        Raises
        ------
        ConfigError : if no two cells of the space share a dof
        """
        return cls._from_solver(V.mesh.comm, lambda: read_graph_of_dolfinx_space(V, pairs, positions))

    @classmethod
    def from_dmplex(cls, dm: Any, *, nodes: str = "vertices", positions: Any = None) -> Partition:
        """Return the partition of the vertices or cells of a PETSc DMPlex. Collective over its communicator.

        Edges of the graph join vertices that share an edge of the mesh, or cells that share a facet, in both
        directions. The graph does not depend on the overlap of the DMPlex.

        Arrays have the same rows as `vector.array.reshape(-1, dofs)`, for a local or global vector with `dofs` dofs at
        each vertex or cell.

        Parameters
        ----------
        dm : the distributed mesh, with edges and facets (interpolated)
        nodes : what the nodes of the graph are: "vertices" (default) or "cells"
        positions : as in `Partition`; for example, scaled coordinates. Default: the coordinates of the vertices, or the
            centroids of the cells

        Raises
        ------
        ConfigError : if the mesh lacks edges and facets (is not interpolated)
        """
        return cls._from_solver(dm.comm, lambda: read_dmplex(dm, nodes, positions))

    @classmethod
    def _from_solver(cls, comm: Any, read: Callable[[], SolverMesh]) -> Partition:
        """Return the partition of a solver's mesh. Arrays have the same rows as in the solver, even if edges need more
        ghosts than the solver has."""
        comm = _as_communicator(comm)
        mesh = parse_or_raise_on_all_ranks(comm, read)
        edges, numbers, owned, rows = mesh.edges, mesh.numbers, mesh.owned, mesh.numbers.size
        positions = parse_or_raise_on_all_ranks(comm, lambda: to_array("positions", mesh.positions))
        if mesh.facets is not None:
            edges, numbers = exchange_facets_and_list_cell_edges(comm, get_rank_and_size(comm)[1], mesh)
            owned = np.concatenate([owned, np.zeros(numbers.size - rows, bool)])
            if positions.shape[:1] == (rows,):
                positions = positions[mesh.owned]
        return cls._make_partition(comm, lambda: parse_graph(numbers, owned, edges, positions, None, True), rows)

    @classmethod
    def from_replicated_graph(
        cls, comm: Any, edges: Any, nodes: int, *, parts: Any = None, method: str = "coordinates",
        positions: Any = None, edge_features: Any = None, undirected: bool | None = None,
    ) -> Partition:  # fmt: skip
        """Partition a graph that every rank has in full. Collective.

        Call `take_local` on the result to select the rows of this rank's nodes from an array for all nodes, in the
        order of their global numbers.

        Parameters
        ----------
        comm, undirected : as in `Partition`
        edges : integers (2, edges): node numbers of the sender and receiver of each edge, the same on all ranks
        nodes : number of nodes of the graph
        parts : the rank that owns each node, (nodes,); default: chosen by `method`
        method : "coordinates" (default), which bisects `positions` recursively, or "metis", which cuts few edges and
            requires pymetis
        positions : coordinates (nodes, dims) of all nodes, used as in `Partition`
        edge_features : features (edges, features) of all edges; default: none

        Raises
        ------
        ConfigError : if ranks pass different graphs
        """
        graph = nodes, edges, parts, method, positions, edge_features, undirected
        return cls._partition_replicated_graph(comm, lambda: graph)

    @classmethod
    def from_meshio(
        cls, comm: Any, mesh: Any, *, parts: Any = None, method: str = "coordinates", positions: Any = None
    ) -> Partition:
        """Partition a mesh that every rank has read with meshio. Collective.

        Edges in both directions join points that share an edge of a line, triangle, quad, polygon, tetra, pyramid,
        wedge or hexahedron, and all points of any other cell. `take_local(mesh.point_data[name])` returns the rows of
        this rank's points, in the order of the file.

        Parameters
        ----------
        comm, parts, method : as in `from_replicated_graph`
        mesh : result of `meshio.read`, the same on all ranks
        positions : as in `from_replicated_graph`; for example, scaled coordinates. Default: the coordinates of the
            points, without dims in which all points have the same coordinate

        Raises
        ------
        ConfigError : if ranks pass different meshes, or cells of one block differ in their numbers of points
        """

        def read() -> WholeGraph:
            places, edges = get_meshio_points_and_edges(mesh)
            return len(places), edges, parts, method, places if positions is None else positions, None, True

        return cls._partition_replicated_graph(comm, read)

    @classmethod
    def _partition_replicated_graph(cls, comm: Any, read: Callable[[], WholeGraph]) -> Partition:
        """Partition the graph that `read` returns in the form of arguments for `parse_replicated_graph_arguments`.
        Collective."""
        comm = _as_communicator(comm)
        rank, size = get_rank_and_size(comm)
        given, chosen = parse_or_raise_on_all_ranks(comm, lambda: parse_replicated_graph_arguments(size, *read()))
        require_same_graph_on_all_ranks(comm, given, chosen)
        senders, receivers = given.edges
        wanted = chosen[receivers] == rank
        if given.undirected:
            wanted |= chosen[senders] == rank
        rows = np.unique(np.concatenate([np.flatnonzero(chosen == rank), given.edges[:, wanted].reshape(-1)]))
        local = given._replace(
            numbers=rows,
            owned=chosen[rows] == rank,
            edges=np.searchsorted(rows, given.edges[:, wanted]),
            positions=None if given.positions is None else given.positions[rows],
            edge_features=None if given.edge_features is None else given.edge_features[wanted],
        )
        made = cls._make_partition(comm, lambda: local)
        if not given.undirected:
            taken, made._passed_edges = np.flatnonzero(wanted), given.edges.shape[1]
            made._routes = made._routes._replace(sent=[taken[rows] for rows in made._routes.sent])
        made._local_rows = made.local_shape[0]  # the caller's arrays have no rows for ghosts
        made._owned_rows, none = np.arange(made._local_rows), np.zeros(0, np.int64)
        made._ghost_rows = made._lent_rows = [none] * size
        return made

    @classmethod
    def from_graph(
        cls, edges: Any, nodes: int, ranks: int, rank: int = 0, *, parts: Any = None, method: str = "coordinates",
        positions: Any = None, edge_features: Any = None, undirected: bool | None = None,
    ) -> Partition:  # fmt: skip
        """Return the partition of a graph over hypothetical ranks, for `fsdpx.plan` and `fsdpx.dry_run(domain=)`. Does
        not communicate.

        Parameters
        ----------
        edges, nodes, parts, method, positions, edge_features, undirected : as in `from_replicated_graph`
        ranks : number of ranks
        rank : the rank whose part is described; default 0

        """
        count = parse_count("ranks", ranks, "ranks")
        if count < 1:
            raise ConfigError("Partition.from_graph: ranks=0: give the number of ranks")
        given, chosen = parse_replicated_graph_arguments(
            count, nodes, edges, parts, method, positions, edge_features, undirected
        )
        sizes = count_nodes_and_edges_per_part(count, chosen, given.edges, bool(undirected))
        features = 0 if given.edge_features is None else given.edge_features.shape[1]
        features += 0 if given.positions is None else given.positions.shape[1] + 1
        return cls._from_hypothetical_part_sizes(sizes, rank % count, features)

    @classmethod
    def from_sizes(
        cls, nodes: Sequence[int], edges: Sequence[int], ghosts: Sequence[int], rank: int = 0, *, edge_features: int = 0
    ) -> Partition:
        """Return a partition over hypothetical ranks when only the sizes of the mesh are known, for `fsdpx.plan` and
        `fsdpx.dry_run(domain=)`. Does not communicate.

        All ghosts of a rank are assumed to belong to the next rank.

        Parameters
        ----------
        nodes, edges, ghosts : number of nodes, of their incoming edges and of ghosts on each rank
        rank : the rank whose part is described; default 0
        edge_features : number of features of each edge; default 0

        Raises
        ------
        ConfigError : if `nodes`, `edges` and `ghosts` are empty or differ in length
        """
        columns = [as_integer_array(name, given, 1).tolist()
                   for name, given in (("nodes", nodes), ("edges", edges), ("ghosts", ghosts))]  # fmt: skip
        ranks = len(columns[0])
        if not ranks or {ranks} != {*map(len, columns)}:
            raise ConfigError("Partition.from_sizes: pass the numbers of nodes, edges and ghosts of each rank")
        sizes = [
            PartSizes(n, g, e, [((r - 1) % ranks, columns[2][r - 1])], [((r + 1) % ranks, g)])
            for r, (n, e, g) in enumerate(zip(*columns, strict=True))
        ]
        return cls._from_hypothetical_part_sizes(
            sizes, rank % ranks, parse_count("edge_features", edge_features, "edge features")
        )

    @classmethod
    def _make_partition(cls, comm: Any, parse: Callable[[], GraphArguments], rows: int | None = None) -> Partition:
        made = cls.__new__(cls)
        made._build_partition(comm, parse, rows)
        return made

    def _build_partition(self, comm: Any, parse: Callable[[], GraphArguments], rows: int | None = None) -> None:
        """Finish constructing the partition from this rank's arguments, which `parse` returns.

        The arguments describe one row per node. The caller's arrays have only the first `rows` of these rows, or all of
        them if `rows` is None."""
        rank, size = get_rank_and_size(comm)
        given = agree_on_optional_arguments(comm, parse_or_raise_on_all_ranks(comm, parse))
        built: BuiltGraph = build_local_graph(comm, rank, size, given)
        self._set_part(built.parts, rank, built.graph)
        self._routes, self._passed_edges = built.routes, -1 if given.undirected else given.edges.shape[1]
        owners = built.owners[:rows]
        self._owned_rows, self._local_rows = np.flatnonzero(owners == rank), owners.size
        self._ghost_rows = [np.flatnonzero(owners == r) if r != rank else self._owned_rows[:0] for r in range(size)]
        lent = exchange_wanted_rows(comm, self.numbers, [given.numbers[rows] for rows in self._ghost_rows])
        self._lent_rows = [self._owned_rows[rows] for rows in lent]
        self._comm, self._free = duplicate_communicator_and_make_finalizer(self, comm)

    def _set_part(self, parts: Sequence[PartSizes], rank: int, graph: LocalGraph) -> None:
        """Set the attributes that are derived from the sizes of all parts and from the graph of `rank`."""
        cuts = tuple(np.cumsum([0, *(part.nodes for part in parts)]).tolist())
        self._parts, self.rank, self.graph, self.dims = tuple(parts), rank, graph, (len(parts),)
        self.total_edges, self.partition = sum(part.edges for part in parts), MeshPartition((cuts,), graph=graph)
        self._joined_graph = self._make_joined_graph()

    def _make_joined_graph(self) -> LocalGraph:
        """Return the whole graph as if a single process held it. The result has the sizes of the graph, but no data."""
        return LocalGraph.from_part_sizes_without_data(
            PartSizes(self.total_nodes, 0, self.total_edges), self.edge_feature_count
        )

    def replace_edges(
        self, edges: Any, *, positions: Any = None, edge_features: Any = None, undirected: bool | None = None
    ) -> None:
        """Replace all edges, for graphs that change from step to step. Nodes and their owners remain the same. Trainers
        that were made with this partition use the new edges from the next call on. Collective over `comm`.

        Parameters
        ----------
        edges : integers (2, edges): global numbers of the sender and receiver of each edge. Any rank may pass any edge,
            and several ranks may pass the same edge
        positions : coordinates (nodes, dims) of the nodes that this rank owns, used as in `Partition`
        edge_features, undirected : as in `Partition`

        Raises
        ------
        ConfigError : on all ranks, as for `Partition`; the edges then remain the same
        """
        comm, own = self.comm, self.numbers

        def parse() -> GraphArguments:
            table = as_integer_array("edges", edges, 2)
            numbers = np.concatenate([own, np.setdiff1d(table, own)])
            if numbers.max(initial=-1) >= self.total_nodes:
                raise ConfigError(f"edges has node {numbers.max()}, but there are {self.total_nodes} nodes")
            rows, mask = find_rows(numbers, table), np.arange(numbers.size) < own.size
            return parse_graph(numbers, mask, rows, positions, edge_features, undirected)

        given = agree_on_optional_arguments(comm, parse_or_raise_on_all_ranks(comm, parse))
        built = build_local_graph(comm, self.rank, self.dims[0], given)
        self.graph.copy_attributes_from(built.graph)
        self._parts, self.total_edges = built.parts, sum(part.edges for part in built.parts)
        self._joined_graph.copy_attributes_from(self._make_joined_graph())
        self._routes, self._passed_edges = built.routes, -1 if given.undirected else given.edges.shape[1]

    def close(self) -> None:
        """Free the partition's duplicate of the communicator; later calls do nothing. Collective.

        Trainers made with the partition remain usable; `all_gather` does not."""
        if self._free is not None and self._free.detach() is not None:
            self._comm.Free()

    def __repr__(self) -> str:
        return f"Partition({self.total_nodes} nodes and {self.total_edges} edges over {self.dims[0]} ranks)"

    @property
    def comm(self) -> Any:
        """The communicator of the ranks that hold the mesh. Raises ConfigError after `close`."""
        if self._free is not None and not self._free.alive:
            raise ConfigError(f"{self} is closed: call close() when nothing needs its communicator any more")
        if self._comm is None:
            raise ConfigError(f"{self}: only sizes are known; pass it to a plan or a dry run")
        return self._comm

    @property
    def total_nodes(self) -> int:
        """Number of nodes in the whole mesh."""
        return self.partition.shape[0]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Number of nodes that this rank owns, as a tuple of one integer."""
        return (self.graph.nodes,)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Total number of nodes owned by lower-numbered ranks, as a tuple of one integer."""
        return (self.partition.cuts[0][self.rank],)

    @property
    def numbers(self) -> np.ndarray:
        """Global numbers of the nodes that this rank owns, in the order of the nodes' rows in arrays."""
        if self.graph.numbers.size < self.graph.nodes:
            raise ConfigError(f"{self}: only sizes are known; pass it to a plan or a dry run")
        return self.graph.numbers[: self.graph.nodes]

    @property
    def edges(self) -> np.ndarray:
        """Array of shape (2, edges) with the global node numbers of the sender and receiver of each edge that this rank
        computes on. Models expect edge values in the same order."""
        return np.stack([self.graph.numbers[self.graph.senders], self.graph.numbers[self.graph.receivers]])

    @property
    def owned_rows(self) -> np.ndarray:
        """Indices of the owned nodes' rows in arrays that also have rows for ghosts."""
        return self._owned_rows

    @property
    def edge_feature_count(self) -> int:
        """Number of features of each edge, including features computed from positions."""
        return int(self.graph.edge_features.shape[1])

    @property
    def row_counts(self) -> tuple[int, int]:
        """The two possible numbers of rows in this rank's arrays: the number of owned nodes, and the number of owned
        nodes and ghosts together."""
        return self.graph.nodes, self._local_rows

    @property
    def joined_partition(self) -> tuple[MeshPartition]:
        return (MeshPartition(((0, self.total_nodes),), graph=self._joined_graph),)

    def shard_model(
        self, model: Layer, parts: Sequence[FieldPartition] | None = None
    ) -> tuple[Layer, tuple[Kind, ...]]:
        nodes = self.partition if parts is None else parts[0]
        assert isinstance(nodes, MeshPartition)
        made = nodes.partition_model(model)
        return made.model, made.outputs

    def make_sample_layout(self, model: Layer, axes: MeshAxes) -> NodeSamples:
        made = self.partition.partition_model(model)
        require_arrays_fit_local_part(made.model, lambda parts: (getattr(parts, "graph", self.graph).nodes,))
        found = [getattr(layer, "parts", None) for _, layer in iterate_layers_including_rollout_nets(made.model)]
        graphs = dict.fromkeys([self.graph, *(parts.graph for parts in found if isinstance(parts, MeshPartition))])
        return NodeSamples(self, made.inputs, made.outputs, axes, tuple(graphs))

    def all_gather_rank_groups_by_sample(self, mesh: Mesh, world: Communicator) -> SampleGroups:
        if mesh.domain not in ((), self.dims):
            raise ConfigError(f"Mesh(domain={mesh.domain}): the partition has {self.dims[0]} ranks; omit one of them")
        if self._comm is None:  # in a dry run, assume that consecutive data ranks share one mesh
            return group_ranks_sharing_samples(mesh, world.rank, self.dims, [None] * world.size)
        mine = [int(r) for r in all_gather_plain_value(self.comm, world.rank)]
        return group_ranks_sharing_samples(mesh, world.rank, self.dims, world.all_gather_value(mine))

    @property
    def busiest_ranks(self) -> tuple[int, ...]:
        parts = self._parts
        computes_most = max(range(len(parts)), key=lambda r: (parts[r].edges, parts[r].nodes))
        return tuple(dict.fromkeys((computes_most, max(range(len(parts)), key=lambda r: parts[r].exchanged))))

    def as_rank(self, rank: int) -> Partition:
        """Return this partition as another rank would see it, for dry runs. Only the sizes of that rank's part are
        known.

        Parameters
        ----------
        rank : number of the rank; taken modulo the number of ranks of the partition

        Returns
        -------
        Partition
        """
        return self._from_hypothetical_part_sizes(self._parts, rank % self.dims[0], self.edge_feature_count)

    @classmethod
    def _from_hypothetical_part_sizes(cls, parts: Sequence[PartSizes], rank: int, edge_features: int) -> Partition:
        """Return the partition that the hypothetical rank `rank` would see. Arrays have rows for the owned nodes,
        followed by rows for the ghosts."""
        made, graph = cls.__new__(cls), LocalGraph.from_part_sizes_without_data(parts[rank], edge_features)
        made._set_part(parts, rank, graph)
        made._owned_rows, made._local_rows, made._comm, made._free = np.arange(graph.nodes), graph.row_count, None, None
        return made

    def compute_local_shapes(
        self, model: Layer, inputs: Sequence[tuple[int, ...]], target: tuple[int, ...]
    ) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        made = self.partition.partition_model(model)
        if len(made.inputs) != len(inputs):
            raise ConfigError(f"{type(model).__name__} has {len(made.inputs)} inputs, and the batch {len(inputs)}")
        found = [self._compute_local_shape(*one) for one in zip(inputs, made.inputs, strict=True)]
        return found, self._compute_local_shape(target, made.outputs[0])

    def _compute_local_shape(self, shape: tuple[int, ...], kind: Kind) -> tuple[int, ...]:
        if not isinstance(kind, MeshPartition):
            return shape
        of_edges = kind.kind == "edges"
        whole = self.total_edges if of_edges else kind.shape[0]
        if len(shape) < 2 or shape[1] != whole:
            wanted = f"(samples, {whole}, features), the values of all {kind.kind}"
            raise ConfigError(f"{self}: an array of the batch has shape {shape}; give {wanted}")
        return (shape[0], kind.graph.edges if of_edges else kind.graph.nodes, *shape[2:])

    def take_owned_rows(self, array: Any) -> Any:
        """Select the rows of this rank's owned nodes from an array (samples, rows, ...).

        Parameters
        ----------
        array : array with a row for each owned node, or for each owned node and ghost, in the caller's order

        Returns
        -------
        array
            (samples, owned nodes, ...); a view if possible
        """
        rows = self._owned_rows
        if array.shape[1] == self.graph.nodes:
            return array
        if rows.size and rows[-1] - rows[0] == rows.size - 1:
            return array[:, rows[0] : rows[-1] + 1]
        return array[:, rows]

    def update_ghosts(self, array: np.ndarray) -> np.ndarray:
        """Overwrite the values of ghosts in place with the values from the ranks that own these nodes. Collective over
        `comm`.

        Parameters
        ----------
        array : array (owned nodes and ghosts, ...) of this rank, in the caller's order; the values of owned nodes are
            sent

        Returns
        -------
        numpy.ndarray
            `array`

        Raises
        ------
        DataError : on all ranks, if any rank's array does not have these rows, or if the ranks' arrays differ in dtype
            or in the sizes of the other dims
        """
        error = ""
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            error = f"{type(array).__name__} that cannot be changed in place: give a writable numpy array"
        elif array.shape[:1] != (self._local_rows,):
            error = f"an array of shape {array.shape}, but the rank has {self._local_rows} rows with ghosts"
        self._all_gather_or_raise("update_ghosts", error, _describe_array(array, 0) if not error else None)
        flat = array.reshape(len(array), int(np.prod(array.shape[1:])))
        found = exchange_arrays(self.comm, [flat[rows] for rows in self._lent_rows])
        for rows, values in zip(self._ghost_rows, found, strict=True):
            array[rows] = values.reshape(len(rows), *array.shape[1:])
        return array

    def exchange_edges(self, array: Any) -> np.ndarray:
        """Send the edge values in `array` to the ranks that compute on these edges. Return the values for the edges
        that this rank computes on, in the order that models expect. Collective over `comm`.

        If several ranks passed an edge, the value from the lowest rank is used.

        Parameters
        ----------
        array : (edges, features) or (samples, edges, features), with one row for each edge that this rank passed to the
            partition, in the same order. If the partition was made by `from_replicated_graph`, these are all edges of
            the graph

        Returns
        -------
        numpy.ndarray
            same shape as the input, but with one row for each edge of this rank

        Raises
        ------
        DataError : on all ranks, if any rank's array does not have one row per edge that the rank passed, or if the
            partition is undirected. Each edge of an undirected partition counts in both directions: use `edges` to
            compute values for each direction
        """
        array, error = np.asarray(array), ""
        if self._passed_edges < 0:
            error = "undirected=True: compute values of each direction, whose ends are in `edges`"
        elif array.ndim not in (2, 3) or array.shape[-2] != self._passed_edges:
            error = f"an array of shape {array.shape} has not the {self._passed_edges} edges that the rank passed"
        self._all_gather_or_raise("exchange_edges", error, _describe_array(array, -2) if not error else None)
        others = (*array.shape[:-2], array.shape[-1])
        flat = np.moveaxis(array, -2, 0).reshape(self._passed_edges, prod(others))
        found = np.concatenate(exchange_arrays(self.comm, [flat[rows] for rows in self._routes.sent]))
        return np.ascontiguousarray(np.moveaxis(found[self._routes.taken].reshape(-1, *others), 0, -2))

    def take_local(self, array: Any) -> Any:
        """Select the rows of this rank's nodes from an array for the whole mesh. Does not communicate.

        Parameters
        ----------
        array : (all nodes, features) or (samples, all nodes, features) in the order of the global numbers, or
            (all nodes,)

        Returns
        -------
        array
            same shape as the input, but with one row for each node that this rank owns

        Raises
        ------
        DataError : if the array does not have one row for each node of the whole mesh
        """
        dim = max(array.ndim - 2, 0)
        if array.ndim < 1 or array.shape[dim] != self.total_nodes:
            raise DataError(
                f"Partition.take_local: an array of shape {tuple(array.shape)} does not have {self.total_nodes} nodes"
            )
        return array[(slice(None),) * dim + (self.numbers,)]

    def all_gather(self, array: Any) -> Any:
        """All-gather the rows of all ranks, and return the array for the whole mesh on every rank, in the order of the
        global numbers. Collective over `comm`.

        Parameters
        ----------
        array : this rank's array (nodes, features), (samples, nodes, features) or (nodes,), with or without ghosts

        Returns
        -------
        numpy.ndarray

        Raises
        ------
        DataError : on all ranks, if any rank's array does not have the rows of that rank's nodes, or if the ranks'
            arrays differ in dtype or in the sizes of the other dims
        """
        array = np.asarray(array)
        dim = max(array.ndim - 2, 0)
        error, kind = "", None
        if array.ndim < 1 or array.shape[dim] not in self.row_counts:
            error = f"an array of shape {array.shape} does not have the {self.graph.nodes} rows of its nodes"
        else:
            kind = _describe_array(array, dim)
            array = self.take_owned_rows(array) if dim else self.take_owned_rows(array[None])[0]
        everyone = self._all_gather_or_raise("all_gather", error, kind, (np.ascontiguousarray(self.numbers), array))
        whole = np.empty((*array.shape[:dim], self.total_nodes, *array.shape[dim + 1 :]), array.dtype)
        for numbers, part in everyone:
            whole[(slice(None),) * dim + (numbers,)] = part
        return whole

    def _all_gather_or_raise(self, method: str, error: str, kind: Any, value: Any = None) -> list[Any]:
        """All-gather `value`. If any rank passes a nonempty `error`, raise DataError on all ranks, with the first such
        `error` as the message. `kind` is the description of the rank's array that `_describe_array` returned; raise
        DataError if the descriptions differ."""
        everyone = all_gather_plain_value(self.comm, (error, kind, value))
        for rank, (text, *_) in enumerate(everyone):
            if text:
                raise DataError(f"Partition.{method}: rank {rank}: {text}")
        for rank, (_, theirs, _) in enumerate(everyone):
            if theirs != everyone[0][1]:
                raise DataError(f"Partition.{method}: rank 0 has {everyone[0][1]}, and rank {rank} {theirs}")
        return [found for *_, found in everyone]


def _as_communicator(comm: Any) -> Any:
    """Return `comm` as an mpi4py or fsdpx communicator. Raise ConfigError if it cannot be used as one."""
    comm = to_mpi4py(comm)
    require_valid_intracomm(comm)
    if not hasattr(comm, "allgather") and not hasattr(comm, "all_gather_value"):
        raise ConfigError(f"Partition: {comm!r} is not a communicator: pass one of mpi4py or of fsdpx")
    return comm


def _describe_array(array: np.ndarray, dim: int) -> str:
    """Describe an array's dtype and shape, except for the number of rows (the size of dim `dim`)."""
    sizes = [str(n) for n in array.shape]
    sizes[dim] = "rows"
    return f"{array.dtype} of shape ({', '.join(sizes)})"
