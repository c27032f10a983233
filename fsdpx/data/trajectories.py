"""`TrajectoryDataset` reads trajectories of simulations on meshes, in the file format of the MeshGraphNets datasets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.base.name_hints import wrap_with_option_check
from fsdpx.core.base.safe_files import describe_read_error, expanduser, open_file, read_json
from fsdpx.data.tfrecord import index_records, parse_byte_features, read_record
from fsdpx.errors import ConfigError, DataError

__all__ = ["TrajectoryDataset"]

DTYPES = ("float32", "float64", "int32", "int64", "uint8")
KINDS = ("static", "dynamic", "dynamic_varlen")


class TrajectoryField(NamedTuple):
    """Description of a field in `meta.json`. `kind` is one of `KINDS`."""

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class TrajectoryDataset:
    """Trajectories of simulations on meshes, read without TensorFlow from the TFRecord files of MeshGraphNets (Pfaff et
    al. 2021).

    A folder contains `meta.json` and one file for each split. Sample i is trajectory i, as a dict from field names to
    arrays. Fields that change over time have the shape (steps, nodes, channels), constant fields have the shape (nodes,
    channels), and `cells` contains the indices of the nodes of each cell. A field whose number of rows differs from
    step to step is a list of arrays. Each trajectory has its own mesh.

    The constructor only finds the position of each trajectory in the file; a trajectory is read when it is needed. All
    checksums are verified.

    Parameters
    ----------
    folder : folder with `meta.json`
    split : name of the file without `.tfrecord` (default: "train")
    fields : names of the fields to return (default: all)

    Raises
    ------
    DataError : if a file is missing, truncated or damaged, or does not match `meta.json`; the message names the file
    """

    @wrap_with_option_check
    def __init__(
        self, folder: str | os.PathLike[str], split: str = "train", *, fields: tuple[str, ...] | list[str] | None = None
    ) -> None:
        self.folder = expanduser(folder)
        self.path = self.folder / f"{split}.tfrecord"
        meta = self.folder / "meta.json"
        try:
            described = read_json(meta, ours=False)
        except (OSError, ValueError) as error:
            raise DataError(f"TrajectoryDataset: {describe_read_error(error, meta)}") from error
        try:
            self.steps, known = _parse_meta(described)
        except ValueError as error:
            raise DataError(f"TrajectoryDataset: {meta}: {error}") from error
        if unknown := [name for name in fields or () if name not in known]:
            raise ConfigError(f"TrajectoryDataset: fields={unknown}: {meta} has {', '.join(sorted(known))}")
        self.fields = {name: known[name] for name in (known if fields is None else fields)}
        try:
            with open_file(self.path, ours=False) as file:
                self._records = index_records(file)
        except (OSError, ValueError) as error:
            raise DataError(f"TrajectoryDataset: {describe_read_error(error, self.path)}") from error

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"trajectory {index} of {len(self)}")
        try:
            with open_file(self.path, ours=False) as file:
                features = parse_byte_features(read_record(file, self._records[index]))
            return {name: self._decode_field(name, field, features) for name, field in self.fields.items()}
        except (OSError, ValueError, OverflowError) as error:
            text = describe_read_error(error, self.path).removeprefix(f"{self.path}: ")
            raise DataError(f"TrajectoryDataset: {self.path}: trajectory {index % len(self)}: {text}") from error

    def __repr__(self) -> str:
        return f"TrajectoryDataset({self.path.name}, {len(self)} trajectories of {self.steps} steps)"

    def _decode_field(self, name: str, field: TrajectoryField, features: Mapping[str, memoryview]) -> Any:
        """Return the values of a field in the shape that the docstring of `TrajectoryDataset` describes."""
        values = _view_feature_bytes_as_array(name, features, field.dtype).reshape(field.shape)
        if field.kind == "dynamic_varlen":
            lengths = _view_feature_bytes_as_array(f"length_{name}", features, np.dtype("<i4")).astype(np.int64)
            if (lengths < 0).any() or lengths.sum() != values.shape[0] or lengths.size != self.steps:
                raise ValueError(f"'length_{name}' does not give the rows of {name!r} in each of {self.steps} steps")
            return np.split(values, np.cumsum(lengths)[:-1])
        wanted = self.steps if field.kind == "dynamic" else 1
        if values.shape[0] != wanted:
            raise ValueError(f"{name!r} has {values.shape[0]} steps, and meta.json says {wanted}")
        return values if field.kind == "dynamic" else values[0]


def _view_feature_bytes_as_array(name: str, features: Mapping[str, memoryview], dtype: np.dtype[Any]) -> np.ndarray:
    if name not in features:
        raise ValueError(f"it has no field {name!r}, but {', '.join(sorted(features)) or 'nothing'}")
    if len(features[name]) % dtype.itemsize:
        raise ValueError(f"{name!r} has {len(features[name])} bytes, which are no whole number of {dtype}")
    return np.frombuffer(features[name], dtype)


def _parse_meta(meta: Any) -> tuple[int, dict[str, TrajectoryField]]:
    """Return the number of steps and the fields that the JSON object `meta` describes. Raise ValueError if it does not
    describe them."""
    steps = meta.get("trajectory_length") if isinstance(meta, dict) else None
    features = meta.get("features") if isinstance(meta, dict) else None
    if type(steps) is not int or steps < 1 or not isinstance(features, dict):
        raise ValueError('"trajectory_length", 1 or more, and "features" are needed')
    found = {}
    for name, field in features.items():
        shape = field.get("shape") if isinstance(field, dict) else None
        if not isinstance(shape, list) or not all(type(n) is int and n >= -1 for n in shape):
            raise ValueError(f'{name!r}: "shape" must be a list of whole numbers, with -1 for one of any size')
        kind, dtype = field.get("type"), field.get("dtype")
        least = 1 if kind == "dynamic_varlen" else 2
        if kind not in KINDS or dtype not in DTYPES or len(shape) < least or shape.count(-1) > 1:
            raise ValueError(
                f'{name!r}: "type" must be one of {", ".join(KINDS)}, "dtype" one of {", ".join(DTYPES)}, and "shape" '
                f"{shape} have {least} dims or more and one -1 at most"
            )
        found[name] = TrajectoryField(kind, tuple(shape), np.dtype(dtype).newbyteorder("<"))
    return steps, found
