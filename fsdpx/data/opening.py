"""Opens files of fields (HDF5, NetCDF, Zarr, NumPy) with the library for their format, follows links inside HDF5
files, and explains why a file cannot be read."""

from __future__ import annotations

import importlib
import os
import shlex
import struct
import weakref
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.base.safe_files import describe_read_error, open_file
from fsdpx.data.dataset import memory_map_array, read_npy_header
from fsdpx.errors import ConfigError, DataError, FsdpxError, install_hint

__all__ = [
    "UnreadableMember",
    "is_single_array",
    "iterate_group_members",
    "make_data_error",
    "naming_file_in_errors",
    "open_array",
    "open_fields",
    "require_readable_array",
]

_SIGNATURES = {
    b"CDF\x01": "netcdf-3", b"CDF\x02": "netcdf-3", b"CDF\x05": "netcdf-3",
    b"PK\x03\x04": "zip", b"PK\x05\x06": "zip",
    b"GRIB": "GRIB: convert it to NetCDF-4, by cdo -f nc4 copy or cfgrib",
    b"\x0e\x03\x13\x01": "HDF4: convert it to HDF5, by h4toh5",
    b"\x1f\x8b": "compressed by gzip: unpack it, by gunzip",
    b"BZh": "compressed by bzip2: unpack it, by bunzip2",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it, by unzstd",
    b"\x93NUMPY": "of NumPy: give its name the end .npy",
}  # fmt: skip
"""File formats that h5py cannot read. Maps the first bytes of a file to the name of its format, or to text that says
how to convert the file."""
_FILTERS = {
    307: "bzip2", 32000: "LZF", 32001: "Blosc", 32004: "LZ4", 32008: "Bitshuffle", 32013: "ZFP", 32015: "Zstandard",
    32017: "SZ", 32018: "FCIDECOMP", 32024: "SZ3", 32026: "Blosc2", 32028: "SPERR",
}  # fmt: skip
"""Names of the HDF5 filters in the package hdf5plugin, by number."""
_ZIP_HEADER_BYTES = 30
"""Size of the header before each file in a zip archive, excluding the file name after the header."""
_MAX_LINKS = 16
"""Maximum number of soft links to follow in one chain."""


def open_fields(path: Path) -> Any:
    """Open a file of fields and return its root group. For a single array, a folder of arrays, or an `.npz` file,
    return a dict of the arrays, keyed by name."""
    if path.suffix == ".npy":
        return {path.stem: memory_map_array(path, np.dtype(np.uint8))}
    if path.suffix == ".npz":
        return _map_npz(path)
    if path.is_dir():
        return _open_zarr(path)
    # h5py gets a Python file object, because reads from such an object release the GIL
    library, file = _import_library("h5py", path), open_file(path, ours=False)
    try:
        root = library.File(file, "r")
    except OSError as error:
        with file:
            file.seek(0)
            begin = file.read(8)
            known = next((kind for signature, kind in _SIGNATURES.items() if begin.startswith(signature)), None)
            raise (
                error if known is None else make_data_error(path, _explain_unsupported_format(path, file, known))
            ) from error
    except BaseException:
        file.close()
        raise
    weakref.finalize(root, file.close)
    return root


def _map_npz(path: Path) -> dict[str, np.ndarray | UnreadableMember]:
    """Memory-map a file written by `np.savez`, in which each array is stored as a `.npy` file, and return views of the
    arrays. An array that cannot be mapped, for example because it is compressed, is returned as an
    `UnreadableMember`."""
    found: dict[str, np.ndarray | UnreadableMember] = {}
    with open_file(path, ours=False) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        except zipfile.BadZipFile as error:
            raise ValueError(str(error)) from error
        whole = np.memmap(file, np.uint8, "r")  # one map for all arrays, since each map keeps a file open
        for entry in entries:
            try:
                array: np.ndarray | UnreadableMember = _map_npz_entry(file, entry, whole, size)
            except (ValueError, TypeError, OverflowError) as error:
                array = UnreadableMember(f"{error}, or leave it out by fields=")
            found[entry.filename.removesuffix(".npy")] = array
    return found


def _map_npz_entry(file: Any, entry: zipfile.ZipInfo, whole: np.ndarray, size: int) -> np.ndarray:
    """Return a view of the array in an entry of an `.npz` file. `size` is the size of the file in bytes, and `whole` is
    its memory map. If the array cannot be read, raise ValueError or TypeError. The text of the error is only the end of
    a sentence; the caller puts the name of the array before it."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("is compressed, so that no part of it can be read: use np.savez")
    file.seek(entry.header_offset)
    head = file.read(_ZIP_HEADER_BYTES)
    if len(head) < _ZIP_HEADER_BYTES or not head.startswith(b"PK\x03\x04"):
        raise ValueError("is not where the directory of the archive says: save the file again")
    name_bytes, more_bytes = struct.unpack("<HH", head[-4:])
    start = entry.header_offset + _ZIP_HEADER_BYTES + name_bytes + more_bytes
    try:
        shape, order, dtype, first = read_npy_header(file, start, min(start + entry.file_size, size))
        return np.ndarray(shape, dtype, whole, first, order=order)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"cannot be read ({error}): save it again by np.savez") from error


def is_single_array(root: Any) -> bool:
    """Return whether an opened file contains only a single array, so that no name is needed to select it."""
    return isinstance(root, dict) and len(root) == 1


def _open_zarr(path: Path) -> Any:
    """Open a Zarr group. A Zarr array, or a plain folder of Zarr arrays, is returned as a dict keyed by name."""
    zarr = _import_library("zarr", path)
    with suppress(FileNotFoundError):
        root = zarr.open(path, mode="r")
        return root if hasattr(root, "members") else {path.stem: root}
    found = {child.stem: zarr.open(child, mode="r") for child in sorted(path.iterdir()) if _is_zarr(child)}
    if not (arrays := {name: one for name, one in found.items() if not hasattr(one, "members")}):
        raise make_data_error(
            path, "this folder is no Zarr group or array, and has no Zarr arrays in it: give files by name"
        )
    return arrays


def _is_zarr(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("zarr.json", ".zarray", ".zgroup"))


def _explain_unsupported_format(path: Path, file: Any, known: str) -> str:
    """Return an error message for a file in the unsupported format `known`. The message says how to convert or unpack
    the file."""
    name = shlex.quote(str(path))
    if known == "netcdf-3":
        into = shlex.quote(str(path.with_name(f"{path.stem}-4.nc")))
        return f"this is NetCDF-3, which h5py does not read: convert it to NetCDF-4, by nccopy -k nc4 {name} {into}"
    if known != "zip":
        return f"this file is {known}"
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
        if any(inside.endswith(".npy") for inside in archive.namelist()):
            return "this is .npz, of which no part can be read by itself: write each array as .npy, by np.save"
    into = shlex.quote(str(path.with_suffix("")))
    return f"this is a zip archive, which is not read by parts: unpack it, by unzip {name} -d {into}"


def open_array(path: Path, root: Any, inside: str) -> Any:
    """Return the array at the path `inside` of an opened file. Its data are read from the file when the array is
    indexed.

    A contiguous HDF5 dataset is memory-mapped, because reading many short rows with h5py would take one Python call per
    row."""
    array = root[inside]
    if getattr(array, "chunks", ()) is None and hasattr(array.id, "get_offset"):
        offset = array.id.get_offset()
        if (
            offset is not None
            and array.id.get_create_plist().get_layout() == _import_library("h5py", path).h5d.CONTIGUOUS
        ):
            with open_file(path, ours=False) as file:
                return np.memmap(file, array.dtype, "r", offset, array.shape)
    return array


def _import_library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"FieldDataset: {path} is read by {name}: {install_hint(name)}") from error


@contextmanager
def naming_file_in_errors(path: Path, what: str = "") -> Iterator[None]:
    """Return a context manager that converts read errors to a DataError whose message consists of the file's path,
    `what` and the original error."""
    try:
        yield
    except FsdpxError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise make_data_error(path, what + describe_read_error(error, path).removeprefix(f"{path}: ")) from error


def make_data_error(path: Path, text: str) -> DataError:
    return DataError(f"FieldDataset: {path}: {text}")


class UnreadableMember(NamedTuple):
    """Placeholder for an HDF5 link whose target is not in the file, or for a member of an `.npz` file that cannot be
    read. `why` is a phrase for error messages that says why it cannot be used."""

    why: str


def iterate_group_members(node: Any) -> Iterable[tuple[str, Any]]:
    """Return the members of a group as (name, object) pairs. HDF5 links are followed if they stay inside the file."""
    if isinstance(node, dict):
        return node.items()
    if hasattr(node, "members"):  # sorted, because Zarr lists members in no fixed order
        return sorted(node.members())
    return [(name, _follow_hdf5_link(node, name, _MAX_LINKS)) for name in node]


def _follow_hdf5_link(node: Any, path: str, links: int) -> Any:
    """Return the object at a path below an HDF5 group, or an `UnreadableMember` if there is no such object in the file.
    This function follows links itself, because h5py would open any file that a link names."""
    if path.startswith("/"):
        node = node.file["/"]
    for part in path.split("/"):
        if part in ("", "."):
            continue
        link = node.get(part, getlink=True) if hasattr(node, "keys") else None
        kind = type(link).__name__
        if link is None:
            return UnreadableMember(f"is a link to {path!r}, where nothing is")
        if kind == "ExternalLink":
            return UnreadableMember(_describe_external_files([link.filename]))
        if kind == "HardLink":
            node = node[part]
        elif links == 0 or kind != "SoftLink":
            return UnreadableMember("is a link that leads to no end")
        elif isinstance(node := _follow_hdf5_link(node, link.path, links - 1), UnreadableMember):
            return node
    return node


def _describe_external_files(names: Iterable[str]) -> str:
    files = ", ".join(sorted(set(names)))
    return f"is stored in another file, {files}, which is not opened: copy it into this one, or leave it out by fields="


def require_readable_array(path: Path, name: str, array: Any) -> None:
    """Raise DataError unless all data of an array are stored in the file itself and can be decompressed."""
    why = ""
    if isinstance(array, UnreadableMember):
        why = array.why
    elif getattr(array, "is_virtual", False):
        why = _describe_external_files(source.file_name for source in array.virtual_sources())
    elif external := getattr(array, "external", None):
        why = _describe_external_files(part[0] for part in external)
    elif hasattr(getattr(array, "id", None), "get_create_plist"):
        why = _describe_missing_filter(path, array)
    if why:
        raise make_data_error(path, f"{name!r} {why}")


def _describe_missing_filter(path: Path, array: Any) -> str:
    """If the compression filter of an HDF5 dataset is not installed, return a phrase that names the filter, for use in
    an error message. Return "" if the dataset can be read."""
    is_here, plist = _import_library("h5py", path).h5z.filter_avail, array.id.get_create_plist()
    found = {code: name for code, _, _, name in map(plist.get_filter, range(plist.get_nfilters()))}
    if all(map(is_here, found)):
        return ""
    with suppress(ImportError):
        importlib.import_module("hdf5plugin")  # importing this package registers its compression filters
    code = next((code for code in found if not is_here(code)), None)
    if code is None or 0 in array.shape:
        return ""
    with suppress(OSError):
        # try to read one element: if the program that wrote the file lacked the filter, chunks may be uncompressed and
        # readable
        array[(0,) * len(array.shape)]
        return ""
    named = f"{_FILTERS.get(code) or found[code].decode(errors='replace') or 'a filter'} (HDF5 filter {code})"
    remedy = "pip install hdf5plugin" if code in _FILTERS else "HDF5_PLUGIN_PATH names the folder of its plugin"
    return f"is compressed by {named}, which is not installed: {remedy}, or rewrite the file by h5repack -f GZIP=1"
