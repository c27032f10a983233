"""Fields in files: which there are, what their dims are, and how a file is opened."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.data.dataset import mapped
from fsdpx.errors import ConfigError, DataError, FsdpxError
from fsdpx.files import open_file, unreadable

__all__ = [
    "Trajectories",
    "Variable",
    "array_of",
    "cells_of",
    "groups",
    "opened",
    "reading",
    "sizes_of",
    "variables_of",
    "wrong",
]

WELL = ("t0_fields", "t1_fields", "t2_fields")
"""Groups of The Well's files, by the order of their tensors (github.com/PolymathicAI/the_well, data specification)."""


@dataclass(frozen=True)
class Variable:
    """A field of a file. path: in the file. dims: a letter for each dim. packed: factor and offset of numbers stored as
    others, and the number that stands for none, as in NetCDF."""

    name: str
    path: str
    dims: str
    shape: tuple[int, ...]
    packed: tuple[float, float, Any] | None = None

    def size(self, letter: str) -> int | None:
        """Elements along a dim, None without it."""
        return self.shape[self.dims.index(letter)] if letter in self.dims else None

    @property
    def channels(self) -> int:
        return math.prod(n for n, letter in zip(self.shape, self.dims, strict=True) if letter == "c")


@dataclass(frozen=True)
class Trajectories:
    """A file, or a group of it, with trajectories of the same length."""

    file: Path
    group: str
    variables: tuple[Variable, ...]
    count: int
    windows: int = 0


def opened(path: Path) -> Any:
    """What holds the fields of a file, by name."""
    if path.suffix == ".npy":
        return {path.stem: mapped(path, np.dtype(np.uint8))}
    if path.is_dir():
        return _library("zarr", path).open_group(path, mode="r")
    library, file = _library("h5py", path), open_file(path, ours=False)  # whose reads let other threads run
    try:
        root = library.File(file, "r")
    except BaseException:
        file.close()
        raise
    weakref.finalize(root, file.close)
    return root


def array_of(path: Path, root: Any, inside: str) -> Any:
    """A dataset to be read by its index. What lies in an HDF5 file in one piece is mapped: a part whose rows are short
    would be as many calls of Python as it has rows."""
    array = root[inside]
    if getattr(array, "chunks", ()) is None and hasattr(array.id, "get_offset"):
        offset = array.id.get_offset()
        if offset is not None and array.id.get_create_plist().get_layout() == _library("h5py", path).h5d.CONTIGUOUS:
            with open_file(path, ours=False) as file:
                return np.memmap(file, array.dtype, "r", offset, array.shape)
    return array


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"FieldDataset: {path} is read by {name}: pip install 'fsdpx[{name}]'") from error


@contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """What goes wrong inside becomes a DataError that names the file."""
    try:
        yield
    except FsdpxError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise wrong(path, what + unreadable(error, path).removeprefix(f"{path}: ")) from error


def wrong(path: Path, text: str) -> DataError:
    return DataError(f"FieldDataset: {path}: {text}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _items(node: Any) -> Iterable[tuple[str, Any]]:
    """What is in a group, by name; of HDF5, links to elsewhere as links."""
    if isinstance(node, dict):
        return node.items()
    if hasattr(node, "members"):  # of Zarr
        return node.members()
    links = {name: node.get(name, getlink=True) for name in node}
    return [(name, node[name] if type(link).__name__ == "HardLink" else link) for name, link in links.items()]


def _arrays(node: Any, inside: str = "") -> dict[str, tuple[str, Any]]:
    """(path, array) by name: those of a group, and those of The Well's groups in it."""
    found: dict[str, tuple[str, Any]] = {}
    for name, child in _items(node):
        if name in WELL and hasattr(child, "keys"):
            found |= _arrays(child, f"{inside}{name}/")
        elif not hasattr(child, "keys"):
            found[name] = (inside + name, child)
    return found


def groups(root: Any, wanted: tuple[str, ...] | None, cells: int) -> dict[str, dict[str, tuple[str, Any]]]:
    """The arrays of each group with fields: of the file itself, or else of groups in it."""
    inner = {"": _arrays(root)}
    if not _names(inner[""], wanted, cells):
        children = {name: child for name, child in _items(root) if hasattr(child, "keys") and name not in WELL}
        inner |= {name: _arrays(child, f"{name}/") for name, child in children.items()}
    return {name: arrays for name, arrays in inner.items() if _names(arrays, wanted, cells)} or {"": inner[""]}


def _names(arrays: Mapping[str, tuple[str, Any]], wanted: tuple[str, ...] | None, cells: int) -> list[str]:
    """The fields among arrays."""
    if wanted is not None:
        return [name for name in wanted if name in arrays]
    sizes = {name: len(getattr(array, "shape", ())) + path.startswith(WELL) for name, (path, array) in arrays.items()}
    return [name for name, ndim in sizes.items() if ndim > cells]


def cells_of(path: Path, root: Any, dims: str | None, letters: str | None) -> str:
    """The letters of the cells' dims, in the order of the file."""
    if dims is not None:
        cells = "".join(letter for letter in dims if letter not in "ntc")
        if len(set(dims.rstrip("c"))) != len(dims.rstrip("c")) or (letters and sorted(cells) != sorted(letters)):
            raise ConfigError(f"FieldDataset(dims={dims!r}): the grid has the dims {letters!r}, each comes once")
        return cells
    if WELL[0] in root:
        names = [n.decode() if isinstance(n, bytes) else str(n) for n in root["dimensions"].attrs["spatial_dims"]]
        cells = "".join(names) if all(len(name) == 1 for name in names) else "xyz"[: len(names)]
        if letters is None or sorted(cells) == sorted(letters):
            return cells
    if letters is None:
        raise ConfigError(f"FieldDataset: {path} does not say which dims are cells: give a grid, or dims=, as 'ntyx'")
    return letters


def variables_of(
    path: Path, group: str, arrays: Mapping[str, tuple[str, Any]], wanted: tuple[str, ...] | None, cells: str,
    dims: str | None,
) -> tuple[Variable, ...]:  # fmt: skip
    names = wanted or _names(arrays, wanted, len(cells))
    missing = [name for name in names if name not in arrays]
    if missing or not names:
        what = f"no {_listed(missing)}" if missing else "no field"
        raise wrong(path, f"there is {what} in {group or 'it'}, but {_listed(arrays)}")
    return tuple(_variable(path, name, *arrays[name], cells, dims) for name in names)


def _variable(path: Path, name: str, inside: str, array: Any, cells: str, dims: str | None) -> Variable:
    if not hasattr(array, "shape") or getattr(array, "is_virtual", False) or getattr(array, "external", None):
        raise wrong(path, f"{name!r} lies in another file, which is not opened: copy it into this one")
    shape, kind = tuple(array.shape), np.dtype(array.dtype)
    if kind.kind not in "fiu":
        raise wrong(path, f"{name!r} is of {kind}: real numbers are needed")
    attributes, more = getattr(array, "attrs", {}), len(shape) - len(cells)
    if dims is not None:
        found = dims if len(shape) == len(dims) else cells
    elif inside.startswith(WELL):
        varying = ("n", "sample_varying"), ("t", "time_varying")
        found = "".join(letter for letter, flag in varying if attributes.get(flag, True)) + cells
        found += "c" * WELL.index(inside.split("/")[0])
    else:
        found = ("", "t", "nt")[min(max(more, 0), 2)] + cells + "c" * (more - 2)
    if len(found) != len(shape):
        raise wrong(path, f"{name!r} has {shape}, which are not the dims {found!r}: give dims=, a letter for each")
    scale, offset = (float(np.ravel(attributes.get(k, v))[0]) for k, v in (("scale_factor", 1), ("add_offset", 0)))
    none = np.ravel(attributes["_FillValue"])[0] if "_FillValue" in attributes else None
    return Variable(
        name, inside, found, shape, None if (scale, offset, none) == (1, 0, None) else (scale, offset, none)
    )


def sizes_of(path: Path, variables: Sequence[Variable], cells: str, known: Mapping[str, int]) -> dict[str, int]:
    """Trajectories "n", steps "t", and cells along each dim; DataError where fields differ from each other or from what
    is known, such as the grid."""
    sizes = dict(known)
    for v in variables:
        for letter in f"nt{cells}":
            n = v.size(letter)
            if n is None or (n == 1 and letter in cells and v.path.startswith(WELL)):  # alike along this dim
                continue
            if sizes.setdefault(letter, n) != n:
                raise wrong(path, f"{v.name!r} has {v.shape} as {v.dims!r}: {n} along {letter!r}, not {sizes[letter]}")
    absent = [letter for letter in f"t{cells}" if letter not in sizes]
    if absent:
        raise wrong(path, f"no field has the dims {_listed(absent)}, among {_listed(v.name for v in variables)}")
    return {"n": 1} | sizes
