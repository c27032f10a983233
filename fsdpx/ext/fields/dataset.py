"""`FieldDataset`: time windows of simulation data in HDF5, NetCDF, Zarr or NumPy files. Each rank reads only its own
part of each field."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fsdpx.core.array.namespace import to_numpy_dtype
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.safe_files import expanduser
from fsdpx.core.comm.default_communicator import all_gather_plain_value
from fsdpx.data.dataset import OpenFiles
from fsdpx.data.opening import (
    UnreadableMember,
    is_single_array,
    iterate_group_members,
    make_data_error,
    naming_file_in_errors,
    open_array,
    open_fields,
    require_readable_array,
)
from fsdpx.data.storage import NumberEncoding, find_encoding_of_stored_numbers
from fsdpx.errors import ConfigError, DataError, FsdpxError
from fsdpx.nn.container import unwrap_single
from fsdpx.nn.shard_specs import FieldPartition

__all__ = [
    "FieldDataset",
    "FieldVariable",
    "TrajectoryFile",
    "find_cell_dim_letters",
    "find_dim_sizes",
    "find_variables",
    "list_arrays_by_group",
    "read_scalars_of_trajectories",
]

MAX_GAP_ROWS = 64
"""Two nodes of this rank are read in the same block if at most this many nodes of other ranks lie between them in the
file."""
WELL_GROUPS = ("t0_fields", "t1_fields", "t2_fields")
"""Names of the groups in The Well's files, in increasing tensor order (github.com/PolymathicAI/the_well, data
specification)."""


@dataclass(frozen=True)
class FieldVariable:
    """A field stored as an array in a file.

    Attributes
    ----------
    name : name of the field
    path : path of the field's array in the file
    dims : the dims of the array, one letter per dim
    shape : size of the array along each dim
    storage : how packed numbers are decoded; None if numbers are stored unpacked
    """

    name: str
    path: str
    dims: str
    shape: tuple[int, ...]
    storage: NumberEncoding | None = None

    def size_along(self, letter: str) -> int | None:
        """Return the size of the dim with letter `letter`, or None if the field does not have this dim."""
        return self.shape[self.dims.index(letter)] if letter in self.dims else None

    @property
    def channel_count(self) -> int:
        return math.prod(n for n, letter in zip(self.shape, self.dims, strict=True) if letter == "c")


@dataclass(frozen=True)
class TrajectoryFile:
    """A file, or a group in a file, that holds trajectories of equal length.

    Attributes
    ----------
    file, group : path of the file, and name of the group in the file
    variables, forcing : the fields to read as states and as forcing
    names : names of all fields, joined into one string for comparison with other files; "" if the file holds a single
        unnamed array
    count : number of trajectories
    windows : number of time windows in each trajectory
    scalars : for each trajectory, the values of its scalars, such as a Reynolds number
    """

    file: Path
    group: str
    variables: tuple[FieldVariable, ...]
    names: str
    count: int
    forcing: tuple[FieldVariable, ...] = ()
    windows: int = 0
    scalars: tuple[tuple[float, ...], ...] = ()


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _list_arrays(node: Any, prefix: str = "") -> dict[str, tuple[str, Any]]:
    """Return the arrays in a group and in the subgroups that The Well uses, as a dict of name -> (path, array)."""
    found: dict[str, tuple[str, Any]] = {}
    for name, child in iterate_group_members(node):
        if not prefix and name in WELL_GROUPS and hasattr(child, "keys"):
            found |= _list_arrays(child, f"{prefix}{name}/")
        elif not hasattr(child, "keys"):
            found[name] = (prefix + name, child)
    return found


def list_arrays_by_group(
    root: Any, fields: tuple[str, ...] | None, cell_dims: int
) -> dict[str, dict[str, tuple[str, Any]]]:
    """Return the arrays of each group that contains fields, as a dict of group name -> {name: (path, array)}.

    If the root contains fields, or if no group does, the only key is "", which stands for the root. Otherwise, the keys
    are the names of the groups in the root that contain fields."""
    inner = {"": _list_arrays(root)}
    if not _select_field_names(inner[""], fields, cell_dims):
        children = {
            name: child
            for name, child in iterate_group_members(root)
            if hasattr(child, "keys") and name not in WELL_GROUPS
        }
        inner |= {name: _list_arrays(child, f"{name}/") for name, child in children.items()}
    return {name: arrays for name, arrays in inner.items() if _select_field_names(arrays, fields, cell_dims)} or {
        "": inner[""]
    }


def _select_field_names(
    arrays: Mapping[str, tuple[str, Any]], fields: tuple[str, ...] | None, cell_dims: int
) -> list[str]:
    """Return the names of the arrays to read as fields: the names in `fields` or, if `fields` is None, all arrays with
    more than `cell_dims` dims."""
    if fields is not None:
        return [name for name in fields if name in arrays]
    sizes = {
        name: len(getattr(array, "shape", ())) + path.startswith(WELL_GROUPS) for name, (path, array) in arrays.items()
    }
    return [name for name, ndim in sizes.items() if ndim > cell_dims or isinstance(arrays[name][1], UnreadableMember)]


def find_cell_dim_letters(path: Path, root: Any, dims: str | None, letters: str | None) -> str:
    """Return the letters of the cell dims, such as "yx", in the order of the dims in the file."""
    if dims is not None:
        cells = "".join(letter for letter in dims if letter not in "ntc")
        if len(set(dims.rstrip("c"))) != len(dims.rstrip("c")) or (letters and sorted(cells) != sorted(letters)):
            raise ConfigError(f"FieldDataset(dims={dims!r}): the grid has the dims {letters!r}, each comes once")
        return cells
    inside = dict(iterate_group_members(root))
    if WELL_GROUPS[0] in inside and hasattr(inside.get("dimensions"), "attrs"):
        names = [n.decode() if isinstance(n, bytes) else str(n) for n in inside["dimensions"].attrs["spatial_dims"]]
        cells = "".join(names) if all(len(name) == 1 for name in names) else "xyz"[: len(names)]
        if letters is None or sorted(cells) == sorted(letters):
            return cells
    if letters is None:
        raise ConfigError(f"FieldDataset: {path} does not say which dims are cells: give a grid, or dims=, as 'ntyx'")
    return letters


def find_variables(
    path: Path, group: str, arrays: Mapping[str, tuple[str, Any]], fields: tuple[str, ...] | None, cell_letters: str,
    dims: str | None,
) -> tuple[FieldVariable, ...]:  # fmt: skip
    names = fields or _select_field_names(arrays, fields, len(cell_letters))
    missing = [name for name in names if name not in arrays]
    if missing or not names:
        what = f"no {_format_names(missing)}" if missing else "no field"
        raise make_data_error(path, f"there is {what} in {group or 'it'}, but {_format_names(arrays)}")
    # in PDEBench, each trajectory has its own group, whose name is a number
    one_run = group[-1:].isdigit()
    return tuple(_make_variable(path, name, *arrays[name], cell_letters, dims, one_run) for name in names)


def _make_variable(
    path: Path, name: str, array_path: str, array: Any, cell_letters: str, dims: str | None, is_single_run: bool
) -> FieldVariable:
    require_readable_array(path, name, array)
    shape, kind = tuple(array.shape), np.dtype(array.dtype)
    if kind.kind not in "fiu":
        raise make_data_error(path, f"{name!r} is of {kind}: real numbers are needed")
    attributes, more = getattr(array, "attrs", {}), len(shape) - len(cell_letters)
    if dims is not None:
        found = dims if len(shape) == len(dims) else cell_letters
    elif array_path.startswith(WELL_GROUPS):
        varying = ("n", "sample_varying"), ("t", "time_varying")
        found = "".join(letter for letter, flag in varying if attributes.get(flag, True)) + cell_letters
        found += "c" * WELL_GROUPS.index(array_path.split("/")[0])
    else:
        before = ("", "t", "t" if is_single_run else "nt")[min(max(more, 0), 2)]
        found = before + cell_letters + "c" * (more - len(before))
    if len(found) != len(shape):
        raise make_data_error(
            path, f"{name!r} has {shape}, which are not the dims {found!r}: give dims=, a letter for each"
        )
    return FieldVariable(name, array_path, found, shape, find_encoding_of_stored_numbers(path, array))


def read_scalars_of_trajectories(
    path: Path, root: Any, group: str, arrays: Mapping[str, tuple[str, Any]], names: Sequence[str], count: int
) -> tuple[tuple[float, ...], ...]:
    """Return the scalars in `names` for each of the `count` trajectories.

    The scalars are looked up among the arrays of the group, in the group "scalars" (The Well), and among the attributes
    of the group and the file. Raises DataError unless each scalar has one value, or one value per trajectory."""
    members = dict(iterate_group_members(root))
    places = [{name: array for name, (_, array) in arrays.items()}]
    places += [dict(iterate_group_members(members["scalars"]))] if hasattr(members.get("scalars"), "keys") else []
    places += [getattr(node, "attrs", {}) for node in (members.get(group), root)]
    rows = []
    for name in names:
        found = next((place[name] for place in places if name in place), None)
        if found is None:
            raise make_data_error(path, f"there is no scalar {name!r} in {group or 'it'}, nor among its attributes")
        require_readable_array(path, name, found)
        values = np.asarray(found[()] if hasattr(found, "shape") else found)
        if values.dtype.kind not in "fiu" or values.shape not in ((), (1,), (count,)):
            raise make_data_error(
                path, f"scalar {name!r} has shape {values.shape} of {values.dtype}: give one real number, or one for "
                f"each of {count} trajectories, and name what varies in time or space in forcing="
            )  # fmt: skip
        rows.append(np.broadcast_to(values.reshape(-1), (count,)).tolist())
    return tuple(zip(*rows, strict=True))


def find_dim_sizes(
    path: Path, variables: Sequence[FieldVariable], cells: str, known: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of the variables' dims, as a dict of dim letter -> size. The letter "n" stands for trajectories,
    "t" for time steps, and all other letters for cell dims.

    `known` contains sizes that are known in advance, such as the number of cells of the grid. Raises DataError if the
    size of a field along a dim differs from `known` or from the size of another field."""
    sizes = dict(known)
    for v in variables:
        for letter in f"nt{cells}":
            n = v.size_along(letter)
            # if a field is constant along a dim, The Well stores the field with size 1 along that dim
            if n is None or (n == 1 and letter in cells and v.path.startswith(WELL_GROUPS)):
                continue
            if sizes.setdefault(letter, n) != n:
                raise make_data_error(
                    path, f"{v.name!r} has {v.shape} as {v.dims!r}: {n} along {letter!r}, not {sizes[letter]}"
                )
    absent = [letter for letter in f"t{cells}" if letter not in sizes]
    if absent:
        raise make_data_error(
            path, f"no field has the dims {_format_names(absent)}, among {_format_names(v.name for v in variables)}"
        )
    return {"n": 1} | sizes


Name = str | os.PathLike[str]
Names = str | Sequence[str | Sequence[str]]


class GridLike(Protocol):
    """Protocol with the attributes of `fsdpx.Grid` that `FieldDataset` uses."""

    layout: str
    coords: tuple[int, ...]
    periods: tuple[bool, ...]
    parts: Any

    @property
    def ghosts(self) -> tuple[tuple[int, int], ...]: ...

    def all_gather_value(self, value: Any) -> list[Any]: ...


@runtime_checkable
class MeshLike(Protocol):
    """Protocol with the attributes of `fsdpx.Partition` that `FieldDataset` uses."""

    @property
    def numbers(self) -> np.ndarray: ...

    @property
    def total_nodes(self) -> int: ...

    @property
    def comm(self) -> Any: ...


class NodeRows:
    """Presents the nodes of a `Partition` as the cells of a one-dimensional grid. The cells of a rank need not be
    consecutive.

    Attributes
    ----------
    rows : global indices of the nodes that this rank owns
    """

    layout: str = "ic"
    coords: tuple[int, ...] = (0,)
    ghosts: tuple[tuple[int, int], ...] = ((0, 0),)
    periods: tuple[bool, ...] = (False,)
    parts: Any

    def __init__(self, mesh: MeshLike) -> None:
        self.rows, self._mesh = np.asarray(mesh.numbers), mesh  # type: np.ndarray, Any
        self.parts = FieldPartition.on_one_rank((mesh.total_nodes,))

    def __getstate__(self) -> dict[str, Any]:
        # the process that unpickles this object is not a rank of the mesh, so the copy has no mesh
        return self.__dict__ | {"_mesh": None}

    def all_gather_value(self, value: Any) -> list[Any]:
        return all_gather_plain_value(self._mesh.comm, value)


def _has_ghosts_beyond_walls(grid: GridLike) -> bool:
    """Return whether this rank's arrays have ghost cells beyond a wall. A wall is an end of a non-periodic dim."""
    dims = zip(grid.parts.cuts, grid.coords, grid.ghosts, grid.periods, strict=True)
    return any(
        not periodic and (cuts[r] < low or cuts[r + 1] + high > cuts[-1]) for cuts, r, (low, high), periodic in dims
    )


class FieldDataset:
    """Time windows of fields that are stored in files, as samples (x, y) for training. Collective if `grid` is given.

    In each sample, `x` holds `inputs` states, stacked along the channels, and `y` holds the `targets` states that
    follow them. Both hold only this rank's part, in the grid's layout. For each sample, a field is read in one block:
    the cells of this rank, including the grid's ghost cells, at all steps of the window. Ghost cells beyond walls are
    not read, because files do not contain these cells. The dataset reads nothing else and keeps the files open. Fields
    without a time dim, such as a mask, are appended once to `x`, after its states, and do not appear in `y`.

    With `forcing`, samples are ((x, f), y), where `f` holds the forcing at the start of each of the `targets` steps: at
    the time of the last state in `x`, and at the times of all states in `y` except the last. `nn.Rollout(net,
    steps=targets, inputs=inputs, constants=dataset.constants, forcing=...)` accepts these inputs.

    With `scalars`, samples are ((x, s), y). With both `forcing` and `scalars`, samples are ((x, f, s), y). `s`, of
    shape (n,), holds the n scalars of the trajectory.

    If `grid` was made by `Grid.with_inputs`, it holds one grid for each input of the model, and the state consists of
    several fields, such as velocities on faces and a pressure in cells. `fields` and `forcing` then have one entry for
    each of these grids, in this order, and samples are ((x1, x2, ..., f1, f2, ..., s), (y1, y2, ...)), as a Rollout of
    several fields takes them. An entry is the name of a dataset, or a sequence of names whose datasets are stacked
    along the channels.

    Supported files are HDF5 (with the groups of The Well, or with PDEBench's datasets in one group or in one group per
    trajectory) and NetCDF-4, both read by h5py; Zarr folders that hold a group or an array; and `.npy` files. If an
    HDF5 file refers to an array in another file, by an external link or as a virtual dataset, DataError is raised.
    Missing values become NaN, and packed numbers are unpacked, as in netCDF4 and xarray.

    A dataset can be pickled, for example for spawned workers of a PyTorch DataLoader. The unpickled copy reads the same
    part of the fields, but has no grid.

    Parameters
    ----------
    files : one file, or several files whose trajectories are concatenated
    grid : the `fsdpx.Grid` of the trainer; if None (default), samples are full fields (channels, *cells), as layers
        expect. With a `fsdpx.Partition`, files hold the values of all nodes, in the order of their global numbers, and
        samples are (nodes, channels) for the nodes that this rank owns
    fields : names of the datasets to read, in the order of the channels; by default, all datasets with more dims than
        there are cell dims. With `Grid.with_inputs`, one entry for each field of the state
    inputs, targets : number of states in `x` and in `y`; default 1
    forcing : names of datasets with a time dim whose future values are known in advance, such as solar radiation. These
        datasets are not part of the states. With `Grid.with_inputs`, one entry for each forcing. Default: none
    scalars : names of scalars that belong to a trajectory, such as a Reynolds number. Each scalar is an attribute, or
        an array in the group of the fields or in The Well's group "scalars". Each scalar has one value, or one value
        per trajectory. Default: none
    stride : number of file steps from one state to the next; default 1
    every : number of file steps from the start of one window to the start of the next; default 1
    dims : order of the dims of a dataset, one letter per dim, such as "tyx": "n" for trajectories, "t" for time steps,
        the grid's letters ("i" for the nodes of a mesh), and "c" for components. Default None: "nt", then the cell dims
        in the grid's order, then components (The Well's files record the order of their dims). A group whose name ends
        in a digit is a single trajectory and has no dim "n"
    dtype : dtype of samples; default float32

    Raises
    ------
    ConfigError : on all ranks if `fields` and `forcing` do not have one entry for each grid of `Grid.with_inputs`, or
        if both name the same dataset
    DataError : on all ranks if a file cannot be read, or if a dataset is missing, does not hold real numbers, or does
        not match the grid's number of cells. With several grids, also if the fields of two grids are in different
        groups of a file, or differ in their numbers of trajectories or steps. The message names the file
    """

    _reads_states = True
    """Whether the dataset reads states; otherwise, it reads only forcing."""
    sources: Any
    """List of the files, or groups of files, that hold trajectories; a tuple of lists if there are several fields."""
    shape: Any
    """Number of cells of the full field along each dim; a tuple of shapes if there are several fields."""
    layout: Any
    """Letters of the dims of an array; a tuple of layouts if there are several fields."""

    def __init__(
        self,
        files: Name | Sequence[Name],
        grid: GridLike | MeshLike | None = None,
        fields: Names | None = None,
        *,
        inputs: int = 1,
        targets: int = 1,
        forcing: Names = (),
        scalars: str | Sequence[str] = (),
        stride: int = 1,
        every: int = 1,
        dims: str | None = None,
        dtype: Any = np.float32,
    ) -> None:
        for key, value in {"inputs": inputs, "targets": targets, "stride": stride, "every": every}.items():
            if not hasattr(value, "__index__") or isinstance(value, bool) or value < 1:
                raise ConfigError(f"FieldDataset({key}={value!r}): a whole number, 1 or more, is needed")
        self.inputs, self.targets, self.stride, self.every = map(int, (inputs, targets, stride, every))
        self.forcing = _to_entries(forcing)
        self.scalars = (scalars,) if isinstance(scalars, str) else tuple(scalars)
        self.grid: GridLike | None = NodeRows(grid) if isinstance(grid, MeshLike) else grid
        self.dtype = to_numpy_dtype("FieldDataset", dtype)
        if self.dtype.kind not in "fV":
            raise ConfigError(f"FieldDataset(dtype={dtype!r}): samples are real numbers, such as float32")
        self._open = OpenFiles(open_fields)
        wanted: Any = None if fields is None else _to_entries(fields)
        problem: FsdpxError | None = None
        if both := [name for name in _flatten_entries(self.forcing) if name in _flatten_entries(wanted or ())]:
            problem = ConfigError(f"FieldDataset: fields and forcing both name {_format_names(both)}: leave out one")
        paths = [expanduser(one) for one in ([files] if isinstance(files, str | os.PathLike) else files)]
        self._each: tuple[FieldDataset, ...] = ()
        if grids := getattr(grid, "input_grids", ()):
            self._open_for_each_grid(paths, grids, wanted or (), dims, problem)
            return
        try:
            if problem is None:
                self._open_sources(paths, wanted, dims)
        except (ConfigError, DataError) as error:
            problem = error
        if self.grid is None:
            if problem is not None:
                raise problem
            return
        own = ""
        if problem is None:
            own = f"{len(self)} samples of {self.channels} and {self.constants} constant channels"
            own += f", and {self.forcing_channels} of forcing" * bool(self.forcing)
            own += f", and scalars {_format_names(self.scalars)}" * bool(self.scalars)
            own += f", {self.sources[0].names}" * bool(self.sources[0].names)
        self._require_agreement(self.grid, problem, own)

    def _require_agreement(self, grid: GridLike, problem: FsdpxError | None, own: str) -> None:
        """Raise an error on all ranks if `problem` is not None on any rank, or if `own`, each rank's description of
        what it reads, differs between ranks. Collective."""
        everyone = grid.all_gather_value((str(problem or ""), isinstance(problem, ConfigError), own))
        for rank, (text, config, found) in enumerate(everyone):
            if text:
                raise (ConfigError if config else DataError)(f"rank {rank}: {text}") from problem
            if found != everyone[0][2] and not any(one[0] for one in everyone):
                raise DataError(f"FieldDataset: rank 0 has {everyone[0][2]}, rank {rank} has {found}")

    def _open_for_each_grid(
        self, paths: Sequence[Path], grids: Sequence[Any], fields: tuple[Any, ...], dims: str | None,
        problem: FsdpxError | None,
    ) -> None:  # fmt: skip
        """Open one dataset for each grid: first the datasets with the fields of the state, then the datasets with
        forcing. If `problem` is not None on any rank, raise it on all ranks. Collective."""
        given = f"fields={fields!r} and forcing={self.forcing!r}"
        if problem is None and (len(grids) != len(fields) + len(self.forcing) or not fields):
            problem = ConfigError(
                f"FieldDataset: the grid has the grids of {len(grids)} inputs: give fields and forcing one entry for "
                f"each of them, got {given}"
            )
        self._require_agreement(grids[0], problem, given)
        options: Any = {"inputs": self.inputs, "targets": self.targets, "stride": self.stride, "every": self.every}
        options |= {"dims": dims, "dtype": self.dtype}
        for number, (grid, names) in enumerate(zip(grids, fields, strict=False)):
            self._each += (FieldDataset(paths, grid, names, scalars=() if number else self.scalars, **options),)
        for grid, names in zip(grids[len(fields) :], self.forcing, strict=True):
            self._each += (_ForcingDataset(paths, grid, forcing=names, **options),)
        try:
            for one, names in zip(self._each, (*fields, *self.forcing), strict=True):
                _require_same_trajectories((fields[0], names), self._each[0].sources, one.sources)
        except DataError as error:
            problem = error
        self._require_agreement(grids[0], problem, given)
        for key in ("sources", "shape", "layout"):
            setattr(self, key, unwrap_single([getattr(one, key) for one in self._fields]))

    def _open_sources(self, paths: Sequence[Path], fields: tuple[str, ...] | None, dims: str | None) -> None:
        if not paths:
            raise DataError("FieldDataset: no files are given")
        if self.grid is not None and _has_ghosts_beyond_walls(self.grid):
            raise ConfigError(
                f"FieldDataset: the grid has ghost cells {self.grid.ghosts} and periods {self.grid.periods}: files "
                "have no cells beyond walls; use ghost cells at the ends of the field only along periodic dims"
            )
        letters = None if self.grid is None else self.grid.layout.replace("c", "")
        shape = None if self.grid is None else self.grid.parts.shape
        self.sources = []
        for path in paths:
            with naming_file_in_errors(path):
                root = self._open(path)
                cells = find_cell_dim_letters(path, root, dims, letters)
                letters = letters or cells
                names_in_group = fields if self._reads_states else self.forcing
                for group, arrays in list_arrays_by_group(root, names_in_group, len(cells)).items():
                    states = {name: array for name, array in arrays.items() if name not in self.forcing}
                    variables = find_variables(path, group, states, fields, cells, dims) if self._reads_states else ()
                    given = find_variables(path, group, arrays, self.forcing, cells, dims) if self.forcing else ()
                    known = {} if shape is None else dict(zip(letters, shape, strict=True))
                    sizes = find_dim_sizes(path, (*variables, *given), cells, known)
                    names = "" if is_single_array(root) else _format_names(v.name for v in (*variables, *given))
                    shape = tuple(sizes[letter] for letter in letters)
                    given_scalars = path, root, group, arrays, self.scalars, sizes["n"]
                    numbers = read_scalars_of_trajectories(*given_scalars) if self.scalars else ()
                    source = TrajectoryFile(path, group, variables, names, sizes["n"], given, scalars=numbers)
                    self.sources.append(self._copy_source_with_window_count(source, sizes["t"]))
        assert letters is not None
        self.shape = shape or ()
        self.layout = f"c{letters}" if self.grid is None else self.grid.layout
        self._bounds = self._find_bounds_with_ghosts()
        most = max(self.channels * self.inputs + self.constants, self.forcing_channels * self.targets)
        if "c" not in self.layout and (most, self.targets) != (1, 1):
            raise DataError(
                f"FieldDataset: a grid of layout {self.layout!r} has one channel, not {self.inputs} states of "
                f"{self.channels} and {self.constants} constant ones: put 'c' into its layout"
            )
        self._ends = list(accumulate(source.count * source.windows for source in self.sources))

    def _copy_source_with_window_count(self, source: TrajectoryFile, steps: int) -> TrajectoryFile:
        """Return a copy of `source` with its `windows` set to the number of time windows in a trajectory of `steps`
        steps.

        Raises DataError if `source` is too short for one window, or if it differs from the first file in its fields or
        their numbers of channels."""
        span = (self.inputs + self.targets - 1) * self.stride + 1
        if source.count == 0:
            raise make_data_error(source.file, f"{source.group or 'it'} has no trajectories")
        if steps < span:
            raise make_data_error(source.file, f"{source.group or 'it'} has {steps} steps, and a window has {span}")
        first = self.sources[0] if self.sources else source
        if still := [v.name for v in source.forcing if "t" not in v.dims]:
            raise make_data_error(
                source.file, f"{_format_names(still)} of forcing has no time dim: leave it among the fields"
            )
        kinds = [[("t" in v.dims, v.channel_count) for v in (*one.variables, *one.forcing)] for one in (source, first)]
        if kinds[0] != kinds[1]:
            raise make_data_error(source.file, f"its fields have other channels than those of {first.file}")
        if source.names != first.names:
            raise make_data_error(
                source.file, f"it has {source.names}, and {first.file} has {first.names}: give fields="
            )
        return replace(source, windows=(steps - span) // self.every + 1)

    def __getstate__(self) -> dict[str, Any]:
        # the process that unpickles this object is not a rank of the grid, so the copy has no grid
        return self.__dict__ | {"grid": None if self._node_rows is None else self.grid}

    @property
    def _letters(self) -> str:
        """Letters of the cell dims, in the order of the layout."""
        return self.layout.replace("c", "")

    @property
    def _fields(self) -> tuple[FieldDataset, ...]:
        """One dataset for each field of the state if the grid was made by `Grid.with_inputs`; otherwise ()."""
        return self._each[: len(self._each) - len(self.forcing)] if self._each else ()

    @property
    def _node_rows(self) -> np.ndarray | None:
        """Global indices of the nodes that this rank owns, or None if samples are not node values."""
        return self.grid.rows if isinstance(self.grid, NodeRows) else None

    @property
    def channels(self) -> Any:
        """Number of channels of a state; a tuple if there are several fields."""
        each = [one.sources[0].variables for one in self._fields or (self,)]
        return unwrap_single([sum(v.channel_count for v in one if "t" in v.dims) for one in each])

    @property
    def constants(self) -> Any:
        """Number of channels in `x` that come from fields without a time dim. These channels follow the states. A tuple
        if there are several fields."""
        each = [one.sources[0].variables for one in self._fields or (self,)]
        return unwrap_single([sum(v.channel_count for v in one if "t" not in v.dims) for one in each])

    @property
    def forcing_channels(self) -> Any:
        """Number of forcing channels in one step; a tuple if there are several forcings, each on its own grid."""
        each = [one.sources[0].forcing for one in (self._each[len(self._fields) :] if self._each else (self,))]
        return unwrap_single([sum(v.channel_count for v in one) for one in each])

    def __len__(self) -> int:
        return len(self._fields[0]) if self._fields else self._ends[-1]

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        x, y = (tuple(a[0] for a in _as_tuple(one)) for one in self.read_samples(np.array([i % len(self)])))
        return unwrap_single(x), unwrap_single(y)

    def __repr__(self) -> str:
        each = self._fields or (self,)
        fields = (f"{one.channels} channels on {' x '.join(map(str, one.shape))} cells" for one in each)
        return f"FieldDataset({len(self)} windows of {', '.join(fields)})"

    def read_samples(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Return this rank's part of the samples at `indices`, as a batch. Does not communicate.

        Parameters
        ----------
        indices : indices of the samples, as `(k,)` integers; k may be 0

        Returns
        -------
        tuple of (numpy.ndarray, numpy.ndarray)
            x and y, in the grid's layout, with a leading dim of k samples; with `forcing` and `scalars`, x is a tuple
            (x, f, s), and s has the shape (k, n). For several fields, y is a tuple as well

        Raises
        ------
        DataError : if a file cannot be read
        """
        if self._fields:
            pairs = [one.read_samples(indices) for one in self._fields]
            (first, *scalars), *others = [_as_tuple(x) for x, _ in pairs]
            forcing = [one.read_samples(indices)[0][1] for one in self._each[len(self._fields) :]]
            y = unwrap_single([y for _, y in pairs])
            return unwrap_single([first, *(x for (x,) in others), *forcing, *scalars]), y
        x = self._allocate_samples(len(indices), self.inputs * self.channels + self.constants)
        y = self._allocate_samples(len(indices), self.targets * self.channels)
        f = self._allocate_samples(len(indices), self.targets * self.forcing_channels) if self.forcing else None
        for row, i in enumerate(indices):
            given = None if f is None else self._view_channels_first(f[row])
            self._read_sample_into(self._view_channels_first(x[row]), self._view_channels_first(y[row]), given, int(i))
        inputs = [x] if f is None else [x, f]
        if self.scalars:
            rows = [self._locate_sample(int(i))[0].scalars[self._locate_sample(int(i))[1]] for i in indices]
            inputs.append(np.array(rows, self.dtype).reshape(len(rows), len(self.scalars)))
        return x if len(inputs) == 1 else tuple(inputs), y

    def _allocate_samples(self, rows: int, channels: int) -> np.ndarray:
        sizes = {letter: stop - start for letter, (start, stop) in self._bounds.items()} | {"c": channels}
        if self._node_rows is not None:
            sizes["i"] = self._node_rows.size
        return np.empty((rows, *(sizes[letter] for letter in self.layout)), self.dtype)

    def _view_channels_first(self, array: np.ndarray) -> np.ndarray:
        """Return a view (channels, *cells) of `array`, which is in the grid's layout."""
        return np.moveaxis(array, self.layout.index("c"), 0) if "c" in self.layout else array[None]

    def _find_bounds_with_ghosts(self) -> dict[str, tuple[int, int]]:
        """Return the range of cells that this rank reads along each dim, including ghost cells, as a dict of dim letter
        -> (start, stop)."""
        if self.grid is None:
            return {letter: (0, n) for letter, n in zip(self._letters, self.shape, strict=True)}
        cuts = zip(self._letters, self.grid.parts.cuts, self.grid.coords, self.grid.ghosts, strict=True)
        return {letter: (edges[r] - low, edges[r + 1] + high) for letter, edges, r, (low, high) in cuts}

    def _locate_sample(self, i: int) -> tuple[TrajectoryFile, int, int]:
        """Return the file that contains sample `i`, and the indices of the sample's trajectory and time window in this
        file."""
        k = int(np.searchsorted(self._ends, i, "right"))
        source = self.sources[k]
        return source, *divmod(i - (self._ends[k - 1] if k else 0), source.windows)

    def _read_sample_into(self, x: np.ndarray, y: np.ndarray, f: np.ndarray | None, i: int) -> None:
        """Read sample `i` into the arrays `x`, `y` and, if there is forcing, `f`, which are (channels, *cells)."""
        source, trajectory, window = self._locate_sample(i)
        at, fixed = 0, self.inputs * self.channels
        for variable in source.variables:
            if "t" not in variable.dims:
                (values,) = self._read_field(source, variable, trajectory, slice(None))
                x[fixed : fixed + variable.channel_count] = values
                fixed += variable.channel_count
                continue
            states = self._iterate_states(source, variable, trajectory, window * self.every, self.inputs + self.targets)
            for step, state in enumerate(states):
                into, row = (x, step) if step < self.inputs else (y, step - self.inputs)
                into[row * self.channels + at :][: variable.channel_count] = state
            at += variable.channel_count
        if f is not None:
            self._read_forcing_into(f, source, trajectory, window * self.every + (self.inputs - 1) * self.stride)

    def _read_forcing_into(self, f: np.ndarray, source: TrajectoryFile, trajectory: int, first_step: int) -> None:
        """Read the forcing for all steps of a sample into `f`, which has the shape (channels, *cells). The first of
        these steps is step `first_step` of the file."""
        at = 0
        for variable in source.forcing:
            for step, values in enumerate(self._iterate_states(source, variable, trajectory, first_step, self.targets)):
                f[step * self.forcing_channels + at :][: variable.channel_count] = values
            at += variable.channel_count

    def _iterate_states(
        self, source: TrajectoryFile, variable: FieldVariable, trajectory: int, first_step: int, count: int
    ) -> Iterator[np.ndarray]:
        """Yield `count` states of a field in order, each of shape (channels, *cells), starting at file step
        `first_step`. Consecutive steps are read in one block."""
        if self.stride == 1:
            yield from self._read_field(source, variable, trajectory, slice(first_step, first_step + count))
            return
        for step in range(first_step, first_step + count * self.stride, self.stride):
            yield from self._read_field(source, variable, trajectory, slice(step, step + 1))

    def _read_field(self, source: TrajectoryFile, variable: FieldVariable, trajectory: int, steps: slice) -> np.ndarray:
        """Return this rank's part of a field at the given file steps, as (steps, channels, *cells).

        Dims that the field does not have are added with size 1."""
        known: dict[str, list[Any]] = {"n": [trajectory], "t": [steps]}
        bounds, runs = self._bounds, []
        known |= {} if self._node_rows is None else {"i": _merge_close_rows_into_slices(self._node_rows)}
        for letter, n in zip(variable.dims, variable.shape, strict=True):
            whole = [slice(n)] if n == 1 else _split_periodic_range(*bounds.get(letter, (0, n)), n)
            runs.append(known.get(letter) or whole)
        what = f"{variable.name!r} of trajectory {trajectory}, steps {steps.start} to {steps.stop}"
        with naming_file_in_errors(source.file, f"{what}, cannot be read: "):
            block = _read_slice_combinations(open_array(source.file, self._open(source.file), variable.path), (), runs)
        if variable.storage is not None:
            block = variable.storage.decode(block)
        letters = variable.dims.replace("n", "")
        if self._node_rows is not None and "i" in letters:
            rows = _find_rows_in_concatenated_slices(self._node_rows, known["i"])
            block = np.take(block, rows, axis=letters.index("i"))
        order = [d for wanted in ("t", "c", *self._letters) for d, letter in enumerate(letters) if letter == wanted]
        block = block.transpose(order)
        cells = block.shape[block.ndim - len(self._letters) :]
        return block.reshape(block.shape[0] if "t" in letters else 1, variable.channel_count, *cells)


class _ForcingDataset(FieldDataset):
    """Time windows of a forcing that is defined on a different grid than the states. This dataset reads no states:
    samples are ((x, f), y), where x and y are empty."""

    _reads_states = False


def _to_entries(names: Any) -> tuple[Any, ...]:
    """Return the argument `fields` or `forcing` as a tuple, in which each list of names is converted to a tuple. Ranks
    compare text descriptions of their entries, so a list must give the same text as a tuple of the same names."""
    given = (names,) if isinstance(names, str) else names
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in given)


def _flatten_entries(entries: Sequence[Any]) -> list[Any]:
    """Return all names in `entries`, each of which is a name or a tuple of names."""
    return [name for entry in entries for name in _as_tuple(entry)]


def _require_same_trajectories(
    names: tuple[Any, Any], sources: Sequence[TrajectoryFile], others: Sequence[TrajectoryFile]
) -> None:
    """Raise DataError unless the two fields `names` were found in the same groups of each file, and have the same
    number of trajectories and the same number of windows in each group. If each field is in only one group of a file,
    the two fields may be in different groups."""
    groups = [{(source.file, source.group) for source in each} for each in (sources, others)]
    counts = Counter(file for each in groups for file, _ in each)
    if unpaired := [place for place in groups[0] ^ groups[1] if counts[place[0]] > 2]:
        file, group = min(unpaired)
        has, lacks = names if (file, group) in groups[0] else names[::-1]
        group = repr(group or "/")
        raise make_data_error(file, f"group {group} has {has!r}, but not {lacks!r}: store both in it, or delete it")
    for one, other in zip(sources, others, strict=True):
        if (one.count, one.windows) != (other.count, other.windows):
            found = f"{names[0]!r} has {one.count} trajectories of {one.windows} windows, and {names[1]!r} "
            found += f"{other.count} of {other.windows}: store as many trajectories and steps of each field"
            raise make_data_error(one.file, f"in group {one.group!r}, " * bool(one.group) + found)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _merge_close_rows_into_slices(rows: np.ndarray) -> list[slice]:
    """Return slices that cover `rows`. Rows that are close to each other share a slice so that they are read
    together."""
    if not rows.size:
        return [slice(0)]
    found = np.sort(rows)
    ends = np.flatnonzero(np.diff(found) > MAX_GAP_ROWS)
    starts, stops = found[np.append(0, ends + 1)], found[np.append(ends, -1)] + 1
    return [slice(int(a), int(b)) for a, b in zip(starts, stops, strict=True)]


def _find_rows_in_concatenated_slices(rows: np.ndarray, runs: Sequence[slice]) -> np.ndarray:
    """Return the position of each of `rows` in the concatenation of the slices `runs`. These slices are the result of
    `_merge_close_rows_into_slices` for the same rows."""
    starts = np.array([run.start or 0 for run in runs])
    before = np.cumsum([0, *(run.stop - (run.start or 0) for run in runs)])[:-1]
    k = np.searchsorted(starts, rows, "right") - 1
    return rows - starts[k] + before[k]


def _split_periodic_range(start: int, stop: int, n: int) -> list[slice]:
    """Return consecutive slices that cover the cells [start, stop) of a periodic dim with n cells, wrapping around at
    its ends."""
    found, at = [], start
    while at < stop:
        end = min(at + n - at % n, stop)
        found.append(slice(at % n, at % n + end - at))
        at = end
    return found or [slice(0)]


def _read_slice_combinations(
    array: Any, index_prefix: tuple[Any, ...], slices_per_dim: Sequence[Sequence[Any]]
) -> np.ndarray:
    """Read several blocks of `array`, and return them joined into one array. `slices_per_dim` has one list of slices
    per dim. Each combination of one slice per dim selects one block.

    `index_prefix` is the index for the leading dims of `array`. `slices_per_dim` is for the remaining dims."""
    if not slices_per_dim:
        return np.asarray(array[index_prefix])
    found = [_read_slice_combinations(array, (*index_prefix, one), slices_per_dim[1:]) for one in slices_per_dim[0]]
    return found[0] if len(found) == 1 else np.concatenate(found, sum(isinstance(one, slice) for one in index_prefix))
