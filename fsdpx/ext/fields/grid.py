"""`Grid`: the domain decomposition of a solver. Each rank describes the part of the field that it holds."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from copy import copy
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.messages import shorten_value
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.default_communicator import (
    all_gather_plain_value,
    get_rank_and_size,
    require_valid_intracomm,
    to_mpi4py,
)
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.comm.mesh import Mesh, MeshAxes, SampleGroups
from fsdpx.core.state.sample_layout import Domain
from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.fields.domain_communicator import duplicate_communicator_and_make_finalizer
from fsdpx.ext.fields.local_arrays import require_arrays_fit_local_part
from fsdpx.ext.fields.multi_output import adapt_loss_to_output_shardings
from fsdpx.ext.fields.over_parts import PartitionedModel, partition_model_of_fields
from fsdpx.ext.fields.overlaps import (
    are_parts_of_all_ranks_identical,
    count_overlap_rows_by_dim,
    describe_padding_periodicity_conflict,
    hash_edge_rows_of_part,
    make_overlapping_parts_warning,
    make_same_array_on_all_ranks_warning,
)
from fsdpx.ext.fields.rank_grid import find_rank_grid_of_parts
from fsdpx.ext.fields.sample_groups import group_ranks_sharing_samples
from fsdpx.ext.fields.split_samples import SplitSamples
from fsdpx.ext.fields.staggered import compute_ghost_widths_of_faces, find_face_cuts, list_cell_and_face_partitions
from fsdpx.nn.layer import Layer
from fsdpx.nn.losses import Loss
from fsdpx.nn.shard_specs import FieldPartition, GhostWidths, Kind

__all__ = ["Grid"]

LETTERS = "zyx"

Ghosts = int | Sequence[int | Sequence[int]]


class GridArguments(NamedTuple):
    """One rank's arguments to `Grid`, in a form that ranks can exchange and compare.

    `own` is the number of cells of the rank's part along each dim. `dims` is the number of ranks along each dim, or ()
    if these numbers are derived from the offsets. `coords` are the rank's coordinates on a Cartesian communicator.
    `error` is an error message about the rank's arguments, or "" if they are valid."""

    own: tuple[int, ...]
    layout: str
    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    ghosts: tuple[GhostWidths, ...]
    offsets: tuple[int, ...] | None
    coords: tuple[int, ...] | None
    error: str

    @property
    def dim_letters(self) -> str:
        """Letters of the cell dims in the layout, such as "yx", without the letter "c" for the channels."""
        return self.layout.replace("c", "")


class Grid(Domain):
    """Domain decomposition: a field partitioned over a Cartesian grid of ranks. Collective.

    Parts may have any size and may be empty. Each rank passes the size of its own part, and the ranks exchange these
    sizes. With `offsets`, each rank also passes the position of its part in the full field, and ranks may be numbered
    in any order. If the communicator has k times as many ranks as the grid (the product of `dims`), there are k fields,
    which are the members of an ensemble. The first ranks of the communicator then hold the first member, and so on.

    Parameters
    ----------
    comm : an mpi4py communicator, which is duplicated, or any object with a `tompi4py()` method, such as `PETSc.Comm`;
        a Cartesian communicator (`comm.Create_cart(...)`) determines the number of ranks along each dim
    shape : number of cells of this rank's part along each dim of the grid, without ghost cells
    layout : order of the dims of arrays, one letter for each dim of the grid and "c" for the channels, such as "yxc",
        "cyx" or "zyxc"; without "c", arrays have no channels dim, and the model sees one channel. Default: channels
        last
    dims : number of ranks along each dim. By default, these numbers are taken from a Cartesian `comm` or derived from
        `offsets`; otherwise, all ranks lie along a single dim. Without `offsets`, the last dim varies fastest from rank
        to rank (C order), as in MPI's Cartesian communicators
    offsets : index, in the full field, of the first cell of this rank's part along each dim, not counting ghost cells.
        By default, the parts follow each other in rank order
    ghosts : number of ghost cells that arrays have on each side of the part: one number for all dims, one per dim, or
        (low, high) per dim; the widths may differ between ranks along a dim. A convolution uses ghost cells instead of
        padding if it is the first layer to read the field, or if all layers before it act on each cell separately.
        Sides without ghost cells are padded as usual. Default: no ghost cells
    periods : whether each dim is periodic; `Rollout` fills ghost cells accordingly. By default, the periods of a
        Cartesian `comm`; otherwise, no dim is periodic

    Raises
    ------
    ConfigError : on all ranks, if the parts overlap, leave a gap or do not form a rectangle, if offsets contradict
        `dims` or a Cartesian `comm`, or if ranks pass inconsistent arguments
    """

    _source: Grid | None = None
    """For a grid made by `with_partition`, the grid that owns the communicator. This reference keeps the communicator
    open."""
    _inputs: tuple[Grid, ...] = ()
    """Grids of the model's inputs if they differ from each other, otherwise ()."""
    _cells: Grid | None = None
    """For a grid of faces, the grid of the cells between them."""
    _face_dims: str = ""
    """For a grid of faces, the letters of the dims along which the faces separate neighboring cells."""

    def __init__(
        self,
        comm: Any,
        shape: Sequence[int],
        *,
        layout: str | None = None,
        dims: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        ghosts: Ghosts = 0,
        periods: Sequence[bool] | None = None,
    ) -> None:
        comm = to_mpi4py(comm)
        require_valid_intracomm(comm)
        if not hasattr(comm, "allgather") and not hasattr(comm, "all_gather_value"):
            raise ConfigError(
                f"Grid: {comm!r} is not a communicator: pass one of mpi4py, such as comm.Create_cart(...), or of fsdpx"
            )
        rank, size = get_rank_and_size(comm)
        try:
            mine = _parse_grid_arguments(comm, size, shape, layout, dims, offsets, ghosts, periods)
            mine = mine._replace(error=_find_argument_error(mine, size))
        except (TypeError, ValueError) as error:
            given = {"shape": shape, "dims": dims, "offsets": offsets, "ghosts": ghosts, "periods": periods}
            wrong = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
            mine = GridArguments((), "", (), (), (), None, None, f"{wrong}: {error}")
        facts = [GridArguments(*fact) for fact in all_gather_plain_value(comm, tuple(mine))]
        _require_same_arguments_over_ranks(facts)
        width = prod(mine.dims) if mine.dims else size
        self.member, self.layout, self.periods = rank // width, mine.layout, mine.periods
        fields = [_find_field_cuts(facts[i : i + width], i) for i in range(0, size, width)]
        self.dims, self._ranks, cuts, self._sides = fields[self.member]
        self.parts = FieldPartition(cuts, letters=self._dim_letters)
        self.coords = _unravel_rank(self._ranks.index(rank), self.dims)
        self._own: list[tuple[int, ...] | None] = [fact.own for fact in facts]
        self._comm, self._free = duplicate_communicator_and_make_finalizer(self, comm)

    @classmethod
    def from_shape(
        cls,
        shape: Sequence[int],
        dims: Sequence[int],
        rank: int = 0,
        *,
        layout: str | None = None,
        ghosts: Ghosts = 0,
        periods: Sequence[bool] | None = None,
    ) -> Grid:
        """Return the grid of a field of `shape` cells, partitioned as evenly as possible over hypothetical ranks. Pass
        it to `fsdpx.dry_run(domain=)`.

        Parameters
        ----------
        shape : number of cells of the full field along each dim
        dims : number of ranks along each dim
        rank : the rank whose part the grid describes, in C order; default 0
        layout, periods : as in `Grid`
        ghosts : as in `Grid`, the same on every rank

        Returns
        -------
        Grid
            without a communicator (`comm` is None)

        Raises
        ------
        ConfigError : if `shape` and `dims` differ in length or have an element below 1
        """
        one = (1,) * len(dims)
        if len(shape) != len(dims) or min((*dims, *shape), default=0) < 1:
            raise ConfigError(f"{tuple(shape)} cells over {tuple(dims)} ranks: give a number above 0 for each dim")
        made = cls(make_single_rank_communicator(), shape, layout=layout, dims=one, ghosts=ghosts, periods=periods)
        made.dims = tuple(dims)
        cuts = tuple(tuple(n * r // d for r in range(d + 1)) for n, d in zip(shape, dims, strict=True))
        made.parts = made.parts.with_cuts(cuts)
        made._sides = tuple(sides * d for sides, d in zip(made._sides, dims, strict=True))
        return made.as_rank(rank)

    def close(self) -> None:
        """Free the grid's duplicate of the communicator. Later calls do nothing. Collective.

        The sizes and partitions of the grid remain usable, and so do trainers made with it, but `all_gather` does not.
        If a grid is garbage-collected without `close`, its communicator is freed when the next grid is made."""
        if self._free is not None and self._free.detach() is not None:
            self._comm.Free()

    @property
    def comm(self) -> Any:
        """The communicator of the grid's ranks: a duplicate of the communicator passed to `Grid`, or that communicator
        itself if it cannot be duplicated. None in a dry run.

        Raises ConfigError after `close`."""
        if self._free is not None and not self._free.alive:
            raise ConfigError(f"{self} is closed: call close() of a grid when nothing needs its communicator any more")
        return self._comm

    def as_rank(self, rank: int) -> Grid:
        """Return a copy of this grid as another rank would see it. The copy has no communicator and is meant for dry
        runs.

        Parameters
        ----------
        rank : number of the rank in the grid, in C order; taken modulo the number of ranks in the grid

        Returns
        -------
        Grid
        """
        made = copy(self)
        made._comm, made._free, made.coords = None, None, _unravel_rank(rank % prod(self.dims), self.dims)
        made._inputs = tuple(grid.as_rank(rank) for grid in self._inputs)
        return made

    def with_partition(self, parts: FieldPartition) -> Grid:
        """Return a grid for another field that is partitioned over the same ranks, such as the output of a model.

        Parameters
        ----------
        parts : partition of the other field, without ghost cells

        Returns
        -------
        Grid
            on the same communicator, without ghost cells
        """
        made = copy(self)
        made._inputs, made._cells, made._face_dims = (), None, ""
        made.parts, made._sides = parts, tuple(((0, 0),) * width for width in self.dims)
        made._own = [None] * len(self._own)  # this rank does not know the parts of other ensemble members
        for number, rank in enumerate(self._ranks):
            made._own[rank] = parts.local_shape(_unravel_rank(number, self.dims))
        made._source = self
        return made

    def faces(self, dim: str, shared: bool = False) -> Grid:
        """Return the grid of a staggered field, whose values lie on the faces of this grid's cells along one dim.

        Along a dim that is not periodic, n cells have n + 1 faces: each rank owns the low face of each of its cells,
        and the last rank that has cells also owns the last face. Along a periodic dim, n cells have n faces, which are
        partitioned like the cells.

        Parameters
        ----------
        dim : letter of the dim in the layout, such as "x"
        shared : whether each rank's arrays include both faces of each of its cells. If so, two neighboring ranks both
            hold the face between them. On the lower rank, this face is a ghost cell, which must be filled before each
            call and is left out of results. Default False

        Returns
        -------
        Grid
            on the same communicator, with as many ghost cells as this grid. Pass it as `domain=` if all inputs of the
            model lie on these faces; otherwise pass it to `with_inputs`

        Raises
        ------
        ConfigError : if the layout has no dim `dim`, or if this grid is already a grid of faces across this dim
        """
        if not isinstance(dim, str) or len(dim) != 1 or dim not in self._dim_letters:
            raise ConfigError(f"Grid.faces: dim={dim!r}: choose one of {', '.join(self._dim_letters)}")
        if dim in self._face_dims:
            raise ConfigError(f"Grid.faces: dim={dim!r}: this already is the grid of the faces across it")
        d, cuts, sides = self._dim_letters.index(dim), list(self.parts.cuts), list(self._sides)
        if not self.periods[d]:
            cuts[d] = find_face_cuts(cuts[d])
        if shared:
            sides[d] = compute_ghost_widths_of_faces(self.parts.cuts[d], cuts[d], sides[d])
        made = self.with_partition(self.parts.with_cuts(tuple(cuts)))
        made._sides, made._cells, made._face_dims = tuple(sides), self._cells or self, self._face_dims + dim
        return made

    def with_inputs(self, *grids: Grid) -> Grid:
        """Return this grid for a model whose inputs lie on different grids, such as faces and cells, or fine and coarse
        cells.

        Parameters
        ----------
        grids : one grid for each model input that is a field, in the order of the inputs. Each grid must have the same
            ranks and the same layout as this grid

        Returns
        -------
        Grid
            to be passed as `domain=`. If a model output has the size of one of the inputs, or of the cells or faces of
            this grid, the output is partitioned like that input, or like those cells or faces

        Raises
        ------
        ConfigError : if a grid has different ranks or a different layout than this grid
        """
        for i, grid in enumerate(grids):
            if not isinstance(grid, Grid):
                raise ConfigError(
                    f"Grid.with_inputs: argument {i} is {shorten_value(grid)}: pass one grid for each input, as in "
                    "grid.with_inputs(grid.faces('x'), grid)"
                )
            ours, theirs = ((one.dims, one._ranks, one.layout) for one in (self, grid))
            if ours != theirs:
                raise ConfigError(
                    f"Grid.with_inputs: {grid} of input {i} has other ranks or another layout than {self}"
                )
        made = copy(self)
        made._inputs, made._source = grids, self
        return made

    @property
    def input_grids(self) -> tuple[Grid, ...]:
        """The grids that were passed to `with_inputs`, one for each model input that is a field; () if there are
        none."""
        return self._inputs

    @property
    def busiest_ranks(self) -> tuple[int, ...]:
        """The ranks whose memory and traffic a dry run reports, given as positions in the grid in C order.

        The first has the most cells along each dim, and the second has the most neighbors. A rank that is both is
        listed once."""
        most: list[list[int]] = [[], []]
        for cuts, width, closed in zip(self.parts.cuts, self.dims, self.periods, strict=True):
            sizes = [(cuts[r + 1] - cuts[r], closed or 0 < r < width - 1) for r in range(width)]
            for place, order in zip(most, (1, -1), strict=True):
                place.append(max(range(width), key=lambda r: sizes[r][::order]))
        return tuple(dict.fromkeys(int(np.ravel_multi_index(place, self.dims)) for place in most))

    def local_array_shape(self, shape: Sequence[int], ghosts: bool = False) -> tuple[int, ...]:
        """Return the shape of this rank's part of an array, given the shape of the full array.

        Parameters
        ----------
        shape : shape of the full field's array, in the grid's layout, with or without a samples dim; a shape with fewer
            dims than the layout is returned unchanged
        ghosts : whether to include this rank's ghost cells; default False

        Returns
        -------
        tuple of int
        """
        if len(shape) < len(self.layout):  # an array with fewer dims is not a field, so it is not partitioned
            return tuple(shape)
        for grid in self._inputs:
            if self._replace_cell_sizes_in_shape(grid.shape, shape) == tuple(shape):
                return grid.local_array_shape(shape, ghosts)
        cells = _count_cells_with_ghosts(self.local_shape, self.ghosts) if ghosts else self.local_shape
        return self._replace_cell_sizes_in_shape(cells, shape)

    def compute_local_shapes(
        self, model: Layer, inputs: Sequence[tuple[int, ...]], target: tuple[int, ...]
    ) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        return [self.local_array_shape(shape, ghosts=True) for shape in inputs], self.local_array_shape(target)

    def __repr__(self) -> str:
        each = ["|".join(map(str, dict.fromkeys(_simplify_ghost_widths(sides)))) for sides in self._sides]
        # ranks compare the result, so it must be the same on all of them
        ghosts = f", ghosts=({', '.join(each)})" if self.input_partition.ghosts else ""
        inputs = f", inputs={self._inputs!r}" if self._inputs else ""
        return f"Grid({self.shape} cells over {self.dims} ranks, layout={self.layout!r}{ghosts}{inputs})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells of the full field along each dim."""
        return self.parts.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Number of cells of this rank along each dim, excluding ghost cells."""
        return self.parts.local_shape(self.coords)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Index, in the full field, of the first cell of this rank's part along each dim."""
        return tuple(cuts[r] for cuts, r in zip(self.parts.cuts, self.coords, strict=True))

    @property
    def ghosts(self) -> tuple[GhostWidths, ...]:
        """Widths (before, after) of the ghost cells around this rank's part, along each dim."""
        return tuple(sides[r] for sides, r in zip(self._sides, self.coords, strict=True))

    @property
    def input_partition(self) -> FieldPartition:
        """Partition of the model's input over the ranks, including the ghost cells that the caller's arrays have."""
        some = any(any(side) for sides in self._sides for side in sides)
        return replace(self.parts, ghosts=self._sides, periods=self.periods) if some else self.parts

    @property
    def input_partitions(self) -> tuple[FieldPartition, ...]:
        """Partitions of the model inputs that are fields: one partition shared by all, or one per input."""
        return tuple(grid.input_partition for grid in self._inputs) or (self.input_partition,)

    @property
    def joined_partition(self) -> tuple[FieldPartition, ...] | None:
        """The partitions that the model's inputs would have if a single process held the full fields. These partitions
        keep only the ghost cells outside the domain. The result is None if the grid has no ghost cells."""
        if not any(parts.ghosts for parts in self.input_partitions):
            return None
        return tuple(parts.make_single_rank_partition() for parts in self.input_partitions)

    def shard_model(
        self, model: Layer, parts: Sequence[FieldPartition] | None = None
    ) -> tuple[Layer, tuple[Kind, ...]]:
        """Return the model that each rank runs on its part of the field, and the distribution of each output over the
        ranks. Does not communicate.

        Parameters
        ----------
        model : model of the full field
        parts : partitions of the model's inputs; if None (default), use `input_partitions`

        Returns
        -------
        tuple of (Layer, tuple)
            the tuple has a `FieldPartition` for each output that is a field, and `Replicated()` for scalars, which
            every rank holds in full

        Raises
        ------
        ConfigError : if a layer cannot run on a part of the field; the message contains the path of the layer
        """
        made = self._partition_model(model) if parts is None else partition_model_of_fields(model, parts)
        return made.model, made.outputs

    def _partition_model(self, model: Layer) -> PartitionedModel:
        outputs = list_cell_and_face_partitions((self._cells or self).parts)
        return partition_model_of_fields(model, self.input_partitions, outputs)

    def make_sample_layout(self, model: Layer, axes: MeshAxes) -> FieldSamples:
        """Return an object that describes how the inputs and outputs of `model` are distributed over the ranks of a
        mesh. Does not communicate.

        Parameters
        ----------
        model : model of the full field
        axes : the communicators of the mesh on this rank

        Returns
        -------
        FieldSamples

        Raises
        ------
        ShapeError : if a layer holds an array for this rank's part of a field, such as a mask, and the array does not
            fit this part
        """
        mistake = describe_padding_periodicity_conflict(model, self._dim_letters, self.periods, self.ghosts)
        made = self._partition_model(model)
        if self._comm is not None:  # skipped in a dry run, where one rank's arrays stand in for all ranks' arrays
            require_arrays_fit_local_part(made.model, lambda parts: parts.local_shape(self.coords))
        return FieldSamples(self, made.inputs, made.outputs, axes, mistake)

    def all_gather_rank_groups_by_sample(self, mesh: Mesh, world: Communicator) -> SampleGroups:
        """Return the groups of data-parallel ranks that hold parts of the same fields. Collective.

        Parameters
        ----------
        mesh : mesh that defines the width of each axis
        world : the communicator of all ranks of the mesh

        Returns
        -------
        SampleGroups
            groups derived from the grids of all ranks; in a dry run, groups of consecutive data ranks

        Raises
        ------
        ConfigError : if `mesh.domain` is neither () nor equal to `dims`, the number of ranks along each dim of the grid
        MeshError : if the ranks of a grid are not on one data axis, or their order differs between pipeline stages
        """
        if mesh.domain not in ((), self.dims):
            wrong = f"Mesh(domain={mesh.domain}): the grid has {self.dims} ranks; omit one of them"
            raise ConfigError(wrong)
        mine = self.all_gather_ranks(world.rank)
        grids = [None] * world.size if mine is None else world.all_gather_value(list(mine))
        return group_ranks_sharing_samples(mesh, world.rank, self.dims, grids)

    def all_gather_ranks(self, rank: int) -> tuple[int, ...] | None:
        """All-gather the value of `rank` from each rank of this field, and return these values in the order of the
        grid. Collective over `comm`.

        The result maps positions in the grid to ranks of another communicator, such as the world.

        Parameters
        ----------
        rank : this rank's number in that other communicator

        Returns
        -------
        tuple of int, or None
            None in a dry run
        """
        if self.comm is None:
            return None
        return tuple(np.take(self.all_gather_value(rank), self._ranks).tolist())

    def take_local(self, array_or_index: Any) -> Any:
        """Return this rank's part of an array for the full field, or convert an index into the full field to an index
        into this rank's arrays. Does not communicate.

        Parameters
        ----------
        array_or_index : an array for the full field in the grid's layout, or a mask without channels, both without
            ghost cells; or a tuple with one integer or slice per dim, which selects cells of the full field

        Returns
        -------
        array, or tuple of int and slice, or None
            for an array, a view of this rank's part without ghost cells; for a tuple, the index of the selected cells
            in this rank's arrays (with their ghost cells), or None if this rank holds none of the selected cells

        Raises
        ------
        DataError : if the array does not match the cells of the full field, or if the tuple selects a cell that does
            not exist
        """
        if isinstance(array_or_index, tuple):
            return self._convert_global_to_local_index(array_or_index)
        self._require_array_has_cell_shape("take_local", array_or_index.shape, self.shape, "the whole field")
        return array_or_index[self._make_slices_of_rank_part(self.coords, array_or_index.ndim)]

    def _convert_global_to_local_index(self, index: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(index) != len(self.dims):
            raise DataError(f"Grid.take_local{index}: give a number or a slice for each of the {len(self.dims)} dims")
        found: list[Any] = []
        for d, (cuts, r, (g, _), one) in enumerate(zip(self.parts.cuts, self.coords, self.ghosts, index, strict=True)):
            (a, b), n, name = cuts[r : r + 2], cuts[-1], self.parts.get_dim_name(d)
            if isinstance(one, slice):
                start, stop, step = one.indices(n)
                if step < 1:
                    raise DataError(f"Grid.take_local: {name}: {one} goes backwards")
                first = start + -(-max(a - start, 0) // step) * step
                here, place = first < min(stop, b), slice(first - a + g, min(stop, b) - a + g, step)
            else:
                if not hasattr(one, "__index__") or not -n <= one < n:
                    raise DataError(f"Grid.take_local: {name} has {n} cells, and no cell {one}")
                here, place = a <= one % n < b, one % n - a + g
            if not here:
                return None
            found.append(place)
        return tuple(found)

    def all_gather_value(self, value: Any) -> list[Any]:
        """All-gather a Python value from each rank of `comm`, and return the list on every rank. Collective.

        Parameters
        ----------
        value : a plain Python value

        Returns
        -------
        list
            the values in rank order

        Raises
        ------
        ConfigError : if the grid was made by `from_shape`, and so has no communicator
        """
        if self.comm is None:
            raise ConfigError(f"{self}: only sizes are known; pass it to a plan or a dry run")
        return all_gather_plain_value(self.comm, value)

    def all_gather(self, array: Any) -> Any:
        """All-gather the parts of a field or mask, and return the full array on every rank. Collective over `comm`.

        Every rank allocates the full field, so use this method for small arrays only.

        Parameters
        ----------
        array : this rank's part in the grid's layout, with or without ghost cells; a mask has no channels

        Returns
        -------
        numpy.ndarray
            without ghost cells

        Raises
        ------
        DataError : on all ranks if a rank's array does not have the shape of its part, or if arrays on different ranks
            differ in dtype or in the size of a non-cell dim
        """
        array = self.without_ghosts(np.asarray(array))
        everyone = [(tuple(shape), dtype) for shape, dtype in self.all_gather_value((array.shape, array.dtype.str))]
        shapes = []
        for rank, (own, (shape, dtype)) in enumerate(zip(self._own, everyone, strict=True)):
            if own is not None:
                hint = "; results of another size than the input are parts of trainer.output_grid"
                self._require_array_has_cell_shape("all_gather", shape, own, f"the part of rank {rank}", hint)
            shapes.append(self._replace_cell_sizes_in_shape(own, everyone[0][0]) if own is not None else shape)
            if (shape, dtype) != (shapes[rank], everyone[0][1]):
                raise DataError(f"Grid.all_gather: rank 0 has {everyone[0]}, and rank {rank} {(shape, dtype)}")
        sizes = [prod(shape) for shape in shapes]
        flat, mine = np.empty(sum(sizes), array.dtype), np.ascontiguousarray(array).reshape(-1)
        if hasattr(self.comm, "all_gather"):
            self.comm.all_gather(mine, flat, sizes, what="a field").wait()
        else:
            flat = np.concatenate(self.comm.allgather(mine))
        whole = np.empty(self._replace_cell_sizes_in_shape(self.shape, array.shape), array.dtype)
        ends = np.cumsum(sizes)
        for number, rank in enumerate(self._ranks):
            found = flat[ends[rank] - sizes[rank] : ends[rank]].reshape(shapes[rank])
            whole[self._make_slices_of_rank_part(_unravel_rank(number, self.dims), array.ndim)] = found
        return whole

    def without_ghosts(self, array: Any) -> Any:
        """Return a view of an array without its ghost cells.

        Parameters
        ----------
        array : this rank's part in the grid's layout. An array without ghost cells is returned unchanged

        Returns
        -------
        array
        """
        return self._strip_ghosts(array, self.input_partition)

    def _strip_ghosts(self, array: Any, parts: FieldPartition) -> Any:
        """Return a view of this rank's array without the ghost cells that the partition `parts` specifies. An array
        without ghost cells is returned unchanged."""
        cells, ghosts = parts.local_shape(self.coords), self._get_ghosts_of(parts)
        if not self._has_cells(array, _count_cells_with_ghosts(cells, ghosts)):
            return array
        index = [slice(None)] * array.ndim
        for dim, n, (low, _) in zip(self._find_cell_dims(array.ndim), cells, ghosts, strict=True):
            index[dim] = slice(low, low + n)
        return array[tuple(index)]

    def to_model_layout(self, array: Any, parts: FieldPartition, name: str) -> Any:
        """Return a view of the caller's array as (samples, channels, *cells).

        Parameters
        ----------
        array : this rank's part in the grid's layout, with or without a leading samples dim
        parts : partition of the field; if this partition has ghost cells, the array must have them too
        name : name of the array, for error messages

        Returns
        -------
        array
            with one sample if `array` has no samples dim, and one channel if the layout has no channels

        Raises
        ------
        DataError : if the array does not have the shape of this rank's part
        """
        cells, letters = parts.local_shape(self.coords), self.layout
        if parts.ghosts:
            cells = _count_cells_with_ghosts(cells, self._get_ghosts_of(parts))
        if array.ndim > len(letters) + 1 or not self._has_cells(array, cells):
            wanted = ", ".join(map(str, self._replace_cell_sizes_in_shape(cells, ["channels"] * len(letters))))
            ghosts = ", with ghost cells" if parts.ghosts else ""
            raise DataError(
                f"{name} has shape {tuple(array.shape)}, but this rank's part{ghosts}, in layout {letters!r}, is "
                f"({wanted}), or has a dim of samples before these{self._explain_staggered(array.shape, cells)}"
                f"{self._explain_changed_output_size(parts)}{self._explain_if_array_is_whole_field(array, parts)}"
            )
        whole = array if array.ndim > len(letters) else array[None]
        if "c" not in letters:
            return whole[:, None]
        return whole.transpose(0, 1 + letters.index("c"), *(1 + letters.index(letter) for letter in self._dim_letters))

    def view_in_grid_layout(self, array: Any, batched: bool) -> Any:
        """Return a view, in the grid's layout, of an array (samples, channels, *cells). This is the inverse of
        `to_model_layout`.

        Parameters
        ----------
        array : (samples, channels, *cells)
        batched : whether to keep the samples dim. If False, return the first sample

        Returns
        -------
        array

        Raises
        ------
        DataError : if the array has several channels but the layout has no channels
        """
        if "c" not in self.layout:
            if array.shape[1] != 1:
                raise DataError(
                    f"the result has {array.shape[1]} channels, and the grid's layout {self.layout!r} has room for "
                    "one: put 'c' into it"
                )
            found = array[:, 0]
        else:
            places = {"c": 1} | {letter: 2 + d for d, letter in enumerate(self._dim_letters)}
            found = array.transpose(0, *(places[letter] for letter in self.layout))
        return found if batched else found[0]

    def has_sample_dim(self, array: Any) -> bool:
        """Return whether an array has a samples dim before the dims of the layout.

        Parameters
        ----------
        array : array in the grid's layout

        Returns
        -------
        bool
        """
        return np.ndim(array) > len(self.layout)

    def _get_ghosts_of(self, parts: FieldPartition) -> tuple[GhostWidths, ...]:
        """Return the ghost cell widths (before, after) of this rank's part of a field along each dim."""
        found = tuple(sides[r] for sides, r in zip(parts.ghosts, self.coords, strict=False))
        return found or ((0, 0),) * len(self.dims)

    @property
    def _dim_letters(self) -> str:
        return self.layout.replace("c", "")

    def _has_cells(self, array: Any, cells: Sequence[int]) -> bool:
        """Return whether the cell dims of an array in the grid's layout have the sizes `cells`."""
        shape = tuple(array.shape)
        return len(shape) >= len(self.layout) and self._replace_cell_sizes_in_shape(cells, shape) == shape

    def _make_slices_of_rank_part(self, coords: Sequence[int], ndim: int) -> tuple[slice, ...]:
        """Return the index into a full array with `ndim` dims that selects one rank's part. `coords` are the rank's
        coordinates in the grid."""
        index = [slice(None)] * ndim
        for cuts, dim, r in zip(self.parts.cuts, self._find_cell_dims(ndim), coords, strict=True):
            index[dim] = slice(cuts[r], cuts[r + 1])
        return tuple(index)

    def _replace_cell_sizes_in_shape(self, cells: Sequence[int], shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return `shape` with the sizes of its cell dims replaced with `cells`."""
        found = list(shape)
        for dim, size in zip(self._find_cell_dims(len(shape)), cells, strict=True):
            found[dim] = size
        return tuple(found)

    def _find_cell_dims(self, ndim: int) -> list[int]:
        """Return the indices of the cell dims of an array with `ndim` dims, in the grid's order. An array with fewer
        dims than the layout is assumed to have no channels dim."""
        letters = self._dim_letters if ndim < len(self.layout) else self.layout
        return [ndim - len(letters) + letters.index(letter) for letter in self._dim_letters]

    def _require_array_has_cell_shape(
        self, method: str, shape: tuple[int, ...], cells: Sequence[int], expected: str, hint: str = ""
    ) -> None:
        """Raise DataError if the cell dims of an array of shape `shape` do not have the sizes `cells`."""
        if len(shape) < len(cells) or self._replace_cell_sizes_in_shape(cells, shape) != shape:
            sizes = dict(zip(self._dim_letters, cells, strict=True))
            raise DataError(
                f"Grid.{method}: an array of shape {tuple(shape)} is not {expected}, which has {sizes} in layout "
                f"{self.layout!r}{self._explain_staggered(shape, cells)}{hint}"
            )

    def _explain_changed_output_size(self, parts: FieldPartition) -> str:
        """If the model's output differs in size from the grid's field, return a sentence for error messages. Otherwise,
        return ""."""
        output, field = (" x ".join(str(cuts[-1]) for cuts in one.cuts) for one in (parts, self.parts))
        if output == field:
            return ""
        return (
            f". The model's output has {output} cells, the field {field}; a convolution of 3 cells keeps the size with "
            "padding=1, also next to ghost cells, which replace the padded values"
        )

    def _explain_if_array_is_whole_field(self, array: Any, parts: FieldPartition) -> str:
        """Return a sentence for error messages if an array has as many cells as the whole field. `parts` is the
        partition of this field. Otherwise, return ""."""
        joined = parts.make_single_rank_partition()
        around = [sum(side) for (side,) in joined.ghosts] if joined.ghosts else [0] * len(joined.shape)
        with_ghosts = [n + more for n, more in zip(joined.shape, around, strict=True)]
        if not self._has_cells(array, joined.shape) and not self._has_cells(array, with_ghosts):
            return ""
        ghosts = ", surrounded by its ghost cells" if parts.ghosts else ""
        return f". This is the whole field: give this rank's part, grid.take_local(array){ghosts}"

    def _explain_staggered(self, shape: Sequence[int], cells: Sequence[int]) -> str:
        """If an array has one more value than there are cells along some dims, as on a staggered grid, return advice
        for error messages. Otherwise, return ""."""
        if len(shape) < len(self._dim_letters):
            return ""
        dims = self._find_cell_dims(len(shape))
        more = {letter: shape[dim] - n for letter, dim, n in zip(self._dim_letters, dims, cells, strict=True)}
        along = [letter for letter, one in more.items() if one]
        if not along or not set(more.values()) <= {0, 1}:
            return ""
        made = "".join(f".faces({letter!r})" for letter in along)
        return (
            f". One value more along {', '.join(along)} is what a staggered field has, with values on the faces of "
            f"cells: pass domain=grid{made}, or grid.with_inputs(...) with the grid of each input. On a grid of faces, "
            "each rank has the low face of each of its cells, and the last one the last face as well; if every rank "
            f"has both faces of its cells, pass grid.faces({along[0]!r}, shared=True)"
        )


@dataclass(frozen=True)
class FieldSamples(SplitSamples):
    """The sample layout for fields: each rank holds a part of every sample.

    Attributes
    ----------
    grid : the domain decomposition of the input
    input_kinds, output_kinds : distribution of each model input and output: the partition of a field, or `Replicated`
        for scalars (samples, n), which every rank holds in full
    axes : the communicators of the mesh on this rank
    padding_mistake : warning about a layer whose padding conflicts with the grid's periodicity, or "" if there is none
    """

    grid: Grid
    input_kinds: tuple[Kind, ...]
    output_kinds: tuple[Kind, ...]
    axes: MeshAxes
    padding_mistake: str

    whole = "fields"

    @property
    def has_one_group(self) -> bool:
        return prod(self.grid.dims) == self.axes.world.size

    @property
    def outputs(self) -> FieldPartition:
        """Partition of the first model output that is a field."""
        return next(kind for kind in self.output_kinds if isinstance(kind, FieldPartition))

    def has_sample_dim(self, inputs: Sequence[Any]) -> bool:
        return self.grid.has_sample_dim(self.get_first_split_input(inputs))

    def describe_array(self, array: Any) -> str:
        """Return a description of the array's dtype and number of channels. Ranks compare their descriptions, which
        must be equal. The numbers of samples and cells are left out because they may differ between ranks."""
        return f"{array.dtype} of {array.shape[1] if array.ndim > 1 else 'no'} channels"

    def gather_sharding_warning(self, inputs: Sequence[Any], targets: Sequence[Any], samples: int | None) -> str:
        """Return a warning if the ranks that share a field pass different scalars, if they all pass the same array, if
        the parts of neighboring ranks seem to overlap, or if a layer's padding conflicts with the grid's periodicity;
        otherwise return "". Raise DataError if these ranks pass different samples. Collective."""
        grid, x = self.grid, self.get_first_split_input(inputs)
        if getattr(x, "holds_no_data", False):
            return ""
        parts = next(kind for kind in self.input_kinds if isinstance(kind, FieldPartition))
        mine = hash_edge_rows_of_part(parts.local_shape(grid.coords), grid._get_ghosts_of(parts), x)
        ends, text = self.all_gather_and_check_scalars(inputs, targets, samples, mine)
        if text:
            return text
        if are_parts_of_all_ranks_identical(grid.dims, ends):
            return make_same_array_on_all_ranks_warning(grid.local_shape, len(ends), grid.shape)
        letters = grid.layout.replace("c", "")
        shared = count_overlap_rows_by_dim(grid.dims, letters, grid.periods, ends)
        return make_overlapping_parts_warning(shared) if shared else self.padding_mistake

    def compute_full_input_shape(self, shape: tuple[int, ...], index: int) -> tuple[int, ...]:
        """Return the shape of the full field of the model input with index `index`, including ghost cells outside the
        domain. `shape` is the shape of this rank's part."""
        kind = self.input_kinds[index]
        if not isinstance(kind, FieldPartition):
            return shape
        joined = kind.make_single_rank_partition()
        around = [sum(joined.ghosts[d][0]) if joined.ghosts else 0 for d in range(len(joined.cuts))]
        return (*shape[:2], *(n + g for n, g in zip(joined.shape, around, strict=True)))

    def compute_part_shapes(
        self, shape: tuple[int, ...], kind: FieldPartition
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (*shape[:2], *kind.shape), (*shape[:2], *kind.local_shape(self.grid.coords))

    def to_model_inputs(self, arrays: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
        called = [f"input {name!r}" if len(names) > 1 else "the input" for name in names]
        batched = self.has_sample_dim(arrays)
        return [
            self.grid.to_model_layout(a, kind, text)
            if isinstance(kind, FieldPartition)
            else self.convert_caller_scalars_for_model(a, text, batched)
            for a, text, kind in zip(arrays, called, self.input_kinds, strict=True)
        ]

    def to_model_output(self, array: Any, name: str, index: int, batched: bool) -> Any:
        kind = self.output_kinds[index]
        if isinstance(kind, FieldPartition):
            return self.grid.to_model_layout(array, kind, name)
        return self.convert_caller_scalars_for_model(array, name, batched)

    def to_caller_layout(self, array: Any, batched: bool) -> Any:
        if array.ndim <= 2:  # scalars
            return array if batched else array[0]
        return self.grid.view_in_grid_layout(array, batched)

    def take_local_target(self, y: Any, index: int) -> Any:
        """Return `y` without its ghost cells. `y` is this rank's part of the target of the model output with index
        `index`."""
        for parts in (*self.input_kinds, self.grid.input_partition):
            if isinstance(parts, FieldPartition) and parts.without_ghosts() == self.output_kinds[index]:
                return self.grid._strip_ghosts(y, parts)
        return y

    def bind_loss(self, loss: Loss) -> Loss:
        return adapt_loss_to_output_shardings(loss, self.output_kinds)

    def get_output_domain(self) -> Grid | tuple[Grid | None, ...]:
        kinds = self.output_kinds
        found = tuple(self.grid.with_partition(kind) if isinstance(kind, FieldPartition) else None for kind in kinds)
        if found == (None,):
            raise ConfigError("output_grid: the model's outputs are scalars, which every rank holds in full")
        return found if len(found) > 1 else found[0]  # type: ignore[return-value]


def _count_cells_with_ghosts(cells: Sequence[int], ghosts: Sequence[GhostWidths]) -> tuple[int, ...]:
    """Return the number of cells along each dim, including ghost cells on both sides."""
    return tuple(low + n + high for n, (low, high) in zip(cells, ghosts, strict=True))


def _simplify_ghost_widths(ghosts: Sequence[Any]) -> tuple[Any, ...]:
    """Return one entry per dim: a single number if both sides have the same number of ghost cells, and (low, high)
    otherwise."""
    return tuple(sides[0] if len(set(sides)) == 1 else sides for sides in ghosts)


def _unravel_rank(rank: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's coordinates in the grid. The last coordinate varies fastest."""
    return tuple(int(i) for i in np.unravel_index(rank, dims))


def _convert_to_int_tuple(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers as a tuple of ints. Raise TypeError if any of them is not an integer."""
    for n in numbers:
        if isinstance(n, bool):
            raise TypeError(f"{n} is no whole number")
    return tuple(operator.index(n) for n in numbers)


def _parse_grid_arguments(
    comm: Any, size: int, shape: Any, layout: Any, dims: Any, offsets: Any, ghosts: Any, periods: Any
) -> GridArguments:
    """Return this rank's arguments to `Grid` as `GridArguments`. Raise TypeError or ValueError if any of them is
    invalid."""
    at = None
    if hasattr(comm, "Get_cart_rank"):
        ranks, closed, at = comm.Get_topo()
        if dims is not None and _convert_to_int_tuple(dims) != tuple(ranks):
            raise ValueError(f"the Cartesian communicator has {tuple(ranks)} ranks")
        dims, periods = ranks, closed if periods is None else periods
    begins = None if offsets is None else _convert_to_int_tuple(offsets)
    width = _convert_to_int_tuple(dims) if dims is not None else () if begins is not None else (size,)
    own = _convert_to_int_tuple(shape)
    count = len(width or own)
    letters = f"{LETTERS[3 - count :]}c" if layout is None else str(layout)
    around = ghosts.tolist() if isinstance(ghosts, np.ndarray) else ghosts
    around = [around] * count if hasattr(around, "__index__") else around
    sides: tuple[Any, ...] = tuple(
        _convert_to_int_tuple([one] * 2 if hasattr(one, "__index__") else one) for one in around
    )
    closed = (False,) * count if periods is None else tuple(periods)
    if any(isinstance(one, str) or one not in (False, True) for one in closed):
        raise TypeError("say True or False for each dim")
    at = None if at is None else _convert_to_int_tuple(at)
    return GridArguments(own, letters, width, tuple(map(bool, closed)), sides, begins, at, "")


def _find_argument_error(args: GridArguments, size: int) -> str:
    """Return an error message if one rank's arguments are invalid, or "" if they are valid."""
    width, layout, count = args.dims, args.layout, len(args.dims or args.own)
    if not 1 <= count <= 3:
        return f"a grid of {count} dims: 1 to 3 are taken"
    if width and (min(width) < 1 or size % prod(width)):
        return f"dims={width} are {prod(width)} ranks, the communicator has {size}"
    if len(args.own) != count or min(args.own) < 0:
        more = "" if args.coords or count > 1 else "; without dims= or offsets=, a grid has one dim"
        return f"shape={args.own}: give the cells of this rank's part along each of the {count} dims of the grid{more}"
    if args.offsets is not None and len(args.offsets) != count:
        return f"offsets={args.offsets}: say where this rank's part begins along each of the {count} dims of the grid"
    if len(args.dim_letters) != count or len(set(layout)) != len(layout) or not args.dim_letters.isalpha():
        return f"layout={layout!r}: name each of the {count} dims by a letter, and the channels 'c', as 'yxc'"
    if len(args.ghosts) != count or any(len(sides) != 2 or min(sides) < 0 for sides in args.ghosts):
        return (
            f"ghosts={_simplify_ghost_widths(args.ghosts)}: give the cells beyond each side along each of the {count} "
            "dims, at least "
            "0, or (low, high) for each"
        )
    if len(args.periods) != count:
        return f"periods={args.periods}: say for each of the {count} dims whether it is periodic"
    return ""


def _require_same_arguments_over_ranks(all_args: Sequence[GridArguments]) -> None:
    """Raise ConfigError if any rank's arguments are invalid, or if the ranks' arguments are inconsistent."""
    for rank, fact in enumerate(all_args):
        if fact.error:
            raise ConfigError(f"Grid: rank {rank}: {fact.error}")
    first = all_args[0]
    for rank, fact in enumerate(all_args):
        if (fact.offsets is None) != (first.offsets is None):
            said = [f"offsets={one.offsets}" if one.offsets is not None else "none" for one in (first, fact)]
            raise ConfigError(f"Grid: rank 0 gives {said[0]}, rank {rank} {said[1]}: all ranks give offsets, or none")
        if (fact.layout, fact.dims) != (first.layout, first.dims):
            raise ConfigError(
                f"Grid: rank 0 has layout {first.layout!r} on {first.dims} ranks, rank {rank} {fact.layout!r} on "
                f"{fact.dims}"
            )
        for letter, ours, theirs in zip(first.dim_letters, first.periods, fact.periods, strict=True):
            if ours != theirs:
                kinds = ("walls", "a periodic field")
                raise ConfigError(f"Grid: along dim {letter} rank 0 has {kinds[ours]}, rank {rank} {kinds[theirs]}")


class FieldCuts(NamedTuple):
    """The partition of one field over its ranks.

    Attributes
    ----------
    ranks : ranks of the communicator, in the order of the grid
    cuts : for each dim, the first cell of each slab, followed by the total number of cells. A slab consists of all
        parts at the same position along the dim
    sides : for each dim and slab, the widths (before, after) of its ghost cells
    """

    dims: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    sides: tuple[tuple[GhostWidths, ...], ...]


def _find_field_cuts(all_args: Sequence[GridArguments], rank0: int) -> FieldCuts:
    """Derive the partition of one field from the arguments of its ranks. Raise ConfigError if the parts do not form a
    rectangle.

    `rank0` is the first rank of the communicator that holds a part of this field."""
    dims, ranks = _find_ranks_per_dim_and_rank_order(all_args, rank0)
    cuts, sides = [], []
    for d, letter in enumerate(all_args[0].dim_letters):
        slabs: list[int] = [-1] * dims[d]
        for number, rank in enumerate(ranks):
            place = _unravel_rank(number, dims)[d]
            if slabs[place] < 0:
                slabs[place] = rank
                continue
            for what in ("cells", "ghosts"):
                ours, theirs = (_describe_cell_count_along_dim(all_args[r], d, what) for r in (rank, slabs[place]))
                if ours != theirs:
                    raise ConfigError(
                        f"Grid: the parts make no rectangle: along dim {letter} rank {rank0 + rank} has {ours}, and "
                        f"rank {rank0 + slabs[place]}, next to it, {theirs}"
                    )
        made = np.cumsum([0, *(all_args[rank].own[d] for rank in slabs)])
        cuts.append(tuple(int(n) for n in made))
        sides.append(tuple(all_args[rank].ghosts[d] for rank in slabs))
    return FieldCuts(dims, tuple(rank0 + rank for rank in ranks), tuple(cuts), tuple(sides))


def _describe_cell_count_along_dim(args: GridArguments, d: int, quantity: str) -> str:
    """Return a phrase for error messages that says how many cells a rank has along dim `d`. `quantity` ("cells" or
    "ghosts") tells whether own cells or ghost cells are counted."""
    if quantity == "cells":
        return f"{args.own[d]} cells"
    return "{} ghost cells before and {} after".format(*args.ghosts[d])


def _find_ranks_per_dim_and_rank_order(
    all_args: Sequence[GridArguments], rank0: int
) -> tuple[tuple[int, ...], Sequence[int]]:
    """Return the number of ranks along each dim, and the rank at each position in the grid.

    Raises ConfigError if the offsets contradict `dims` or the Cartesian communicator."""
    said, letters = all_args[0].dims, all_args[0].dim_letters
    if all_args[0].offsets is None:
        return said, range(len(all_args))
    parts = [tuple((a, a + n) for a, n in zip(fact.offsets or (), fact.own, strict=True)) for fact in all_args]
    dims, ranks = find_rank_grid_of_parts(parts, letters, rank0)
    if all_args[0].coords is None:
        if said and said != dims:
            raise ConfigError(f"Grid: dims={said}, and the parts at offsets= are on {dims} ranks: leave dims out")
        return dims, ranks
    remedy = "if offsets are right, give a communicator without this topology, as comm.Split()"
    if said != dims:
        raise ConfigError(
            f"Grid: the Cartesian communicator has {said} ranks along {', '.join(letters)}, and the parts at offsets= "
            f"are on {dims} ranks: {remedy}"
        )
    for rank, fact in enumerate(all_args):
        place = _unravel_rank(ranks.index(rank), dims)
        here = ranks[int(np.ravel_multi_index(fact.coords or (), dims))]
        if parts[here] != parts[rank]:
            raise ConfigError(
                f"Grid: rank {rank0 + rank} is at {fact.coords} of the Cartesian communicator, and at {place} by "
                f"offsets={fact.offsets}: {remedy}"
            )
    return dims, range(len(all_args))
