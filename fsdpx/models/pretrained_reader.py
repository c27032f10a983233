"""Load a model from a transformers folder. The model is built without values, and each rank reads only the elements of
its own shards from the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.safe_files import expanduser
from fsdpx.core.checkpoint.format import cast_array, code_to_dtype
from fsdpx.core.checkpoint.local_shards import BLOCK_BYTES, LocalShard, ShardBlock
from fsdpx.core.checkpoint.read import CheckpointSource, open_weights, read_elements, read_shards
from fsdpx.core.state.flat_parameters import Interval
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.models.architectures import ARCHITECTURES, Architecture, Config
from fsdpx.models.fields import shorten_value
from fsdpx.models.tokenizer_files import find_largest_token, read_json_object
from fsdpx.nn.container import Container
from fsdpx.nn.layer import ParameterSpec
from fsdpx.nn.layer_list import linearize, parameter_specs

__all__ = [
    "CONFIG_NAME",
    "MatrixBlock",
    "TensorSource",
    "TransposedShard",
    "from_pretrained",
    "iterate_blocks_of_transposed_shard",
    "split_ranges_into_matrix_blocks",
]


@dataclass(frozen=True)
class MatrixBlock:
    """A rectangular block of a matrix: the elements [top, bottom) x [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left

    def list_transposed_intervals(self, rows: int) -> list[Interval]:
        """Return the ranges of flat indices, one per column, that this block occupies in the transposed matrix. `rows`
        is the number of rows of the full matrix."""
        return [(column * rows + self.top, column * rows + self.bottom) for column in range(self.left, self.right)]


def split_ranges_into_matrix_blocks(runs: Iterable[Interval], columns: int) -> Iterator[MatrixBlock]:
    """Split ranges of flat indices of a row-major matrix into rectangular blocks, in order. Each range yields up to
    three blocks: the rest of a row, full rows, and the beginning of a row."""
    for start, stop in runs:
        while start < stop:
            (top, left), rest = divmod(start, columns), stop - start
            if left or rest < columns:
                right = min(left + rest, columns)
                yield MatrixBlock(top, top + 1, left, right)
                start += right - left
            else:
                yield MatrixBlock(top, top + rest // columns, 0, columns)
                start += rest // columns * columns


@dataclass(frozen=True)
class TransposedShard:
    """A block of a matrix, for a file that stores the matrix transposed. `rows` is the number of rows of the full
    matrix. The class has the same methods for writing as `LocalShard`."""

    name: str
    array: Any
    box: MatrixBlock
    rows: int

    def iterate_blocks(self, elements: int) -> Iterator[ShardBlock]:
        """Yield the transposed block with its positions in the file. `elements`, the maximum number of elements to
        yield at once, is ignored, because the block is small."""
        part = self.array.reshape(self.box.shape).T
        yield ShardBlock(np.ascontiguousarray(part).reshape(-1), tuple(self.box.list_transposed_intervals(self.rows)))


def iterate_blocks_of_transposed_shard(name: str, held: LocalShard) -> Iterator[TransposedShard]:
    """Split a rank's shard of a matrix into blocks for a file that stores the matrix transposed. Within each block,
    file positions are ascending."""
    rows, columns = held.spec.shape
    for block in held.iterate_blocks(BLOCK_BYTES // held.array.dtype.itemsize):
        host, at = to_host(block.array).reshape(-1), 0
        for box in split_ranges_into_matrix_blocks(block.runs, columns):
            size = box.shape[0] * box.shape[1]
            yield TransposedShard(name, host[at : at + size], box, rows)
            at += size


CONFIG_NAME = "config.json"
COMPARED_ELEMENTS = 1 << 20
FLOAT_CODES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class TensorSource:
    """Initializer that reads a parameter's values from safetensors files: from one tensor, or from several tensors of
    equal size that are stacked along dim 0.

    Attributes
    ----------
    source : the files
    names : names of the tensors
    transposed : whether a single tensor is stored transposed
    """

    source: CheckpointSource = field(repr=False)
    names: tuple[str, ...]
    transposed: bool = False

    @property
    def name(self) -> str:
        """Name of the tensor, or of the first tensor if there are several."""
        return self.names[0]

    def iterate_tensor_slices_in_flat_range(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield the tensor slices that make up elements [start, stop) of the flat parameter, in order. A slice is
        (tensor name, first, end), where both indices count from the start of that tensor."""
        size = self.source.locations[self.name][1].elements
        for index in range(start // size, -(-stop // size)):
            yield self.names[index], max(start - index * size, 0), min(stop - index * size, size)

    def __call__(self, seed: int, name: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        parts = []
        if self.transposed:
            for box in split_ranges_into_matrix_blocks([(start, stop)], shape[1]):
                found = read_elements(self.source, self.name, box.list_transposed_intervals(shape[0]))
                parts.append(found.reshape(box.shape[::-1]).T.reshape(-1))
        else:
            parts = [
                read_elements(self.source, n, [(first, last)])
                for n, first, last in self.iterate_tensor_slices_in_flat_range(start, stop)
            ]
        return _widen_float(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def try_read_into(self, target: Any, start: int) -> bool:
        """Read elements of the parameter, starting at flat index `start`, directly into `target`, without an
        intermediate copy. Return whether this was possible.

        This is impossible if the elements are stored in a different order, or in a dtype whose values the dtype of
        `target` cannot represent exactly."""
        if self.transposed or not isinstance(target, np.ndarray):
            return False
        formats = {code_to_dtype(self.source.locations[other][1].code) for other in self.names}
        if not all(target.dtype == f or (target.dtype == np.float32 and f.itemsize == 2) for f in formats):
            return False
        read_shards(self.source, self.split_array_by_file_tensor(target, start), np)
        return True

    def split_array_by_file_tensor(self, array: Any, start: int) -> Iterator[LocalShard]:
        """Split `array`, which contains the parameter's elements beginning at flat index `start`, into one view per
        tensor in the files."""
        at = 0
        for name, first, last in self.iterate_tensor_slices_in_flat_range(start, start + array.size):
            part = array[at : at + last - first]
            yield LocalShard(name, part, first, ParameterSpec(part.shape), 0, 1)
            at += last - first


def from_pretrained(folder: str | PathLike[str], **options: Any) -> Container:
    """Load a pretrained model from a transformers folder, which contains `config.json` and safetensors files, with or
    without an index.

    This function reads only the headers of the files, with one exception: if the configuration ties the head to the
    embedding but the files contain a head, it also reads and compares the two. A head that differs from the embedding
    becomes a separate parameter. When `distribute` creates the shards, each rank reads the elements that it holds and
    converts them to the dtype of its parameters. `fsdpx.models.save_pretrained` writes such a folder.

    Parameters
    ----------
    folder : path of the folder; nothing is downloaded
    options : options of the model that override the configuration: `dropout=0.1`, `frozen=("blocks.*",)`,
        `segments=True`

    Returns
    -------
    Container : `nn.GPT`, `nn.Llama`, `nn.Bert` or `nn.ViT`

    Raises
    ------
    ConfigError : if the folder or its configuration does not exist, the architecture or a field of the configuration
        is not supported, or the tokenizer has tokens outside of the model's vocabulary
    CheckpointError : if files cannot be read, or tensors are missing, left over or of the wrong shape
    """
    path = expanduser(folder)
    config = _read_config(path)
    architecture = _find_architecture(path, config)
    source = open_weights(path)
    values = architecture.check_and_complete_config(config, str(path / CONFIG_NAME), len(source.locations))
    _require_embedding_row_per_token(path, config)
    tied = _find_tied_tensors(source, architecture, values)
    if "tie_word_embeddings" in values:
        values["tie_word_embeddings"] = next(iter(architecture.tied), None) in tied
    model = architecture.make_model(values, **options)
    model.initial = _map_parameters_to_sources(source, model, architecture, tied)
    return model


def _widen_float(array: np.ndarray) -> np.ndarray:
    """Convert 16-bit floats to float32. Return float32 and float64 arrays unchanged."""
    return array if array.dtype in (np.float32, np.float64) else cast_array(array, np.dtype(np.float32))


def _read_config(path: Path) -> Config:
    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} is no folder here, and nothing is downloaded: give the path of a folder")
    try:
        return read_json_object(path / CONFIG_NAME)
    except FileNotFoundError:
        who = "fsdpx.models.save_pretrained and transformers write one, trainer.save and `fsdpx train` do not"
        raise ConfigError(f"{path}: there is no {CONFIG_NAME}; {who}") from None


def _find_architecture(path: Path, config: Config) -> Architecture:
    classes, kind = config.get("architectures") or [], config.get("model_type")
    names = [*classes, kind] if isinstance(classes, list) else [kind]
    found = next((ARCHITECTURES[name] for name in names if isinstance(name, str) and name in ARCHITECTURES), None)
    if found is None:
        known = ", ".join(name for name in ARCHITECTURES if name.islower())
        raise ConfigError(f"{path / CONFIG_NAME}: the model_type {shorten_value(kind)} is not known; known are {known}")
    return found


def _require_embedding_row_per_token(path: Path, config: Config) -> None:
    """Raise ConfigError if the folder's tokenizer has a token id that has no row in the model's embedding."""
    if "vocab_size" in config and (last := find_largest_token(path)) >= config["vocab_size"]:
        raise ConfigError(
            f"{path}: the tokenizer has the token {last}, the model a vocabulary of {config['vocab_size']}: "
            "they do not belong together"
        )


def _lacks_base_prefix(source: CheckpointSource, architecture: Architecture) -> bool:
    return not any(name.startswith(architecture.base_prefix) for name in source.locations)


def _find_tied_tensors(source: CheckpointSource, architecture: Architecture, values: Config) -> set[str]:
    """Return the names of the tensors that are tied to another tensor, such as a head that is tied to the embedding.

    As in transformers, the files decide: if they contain both tensors with different values, the tensors are not tied
    but are separate parameters."""
    if not values.get("tie_word_embeddings"):
        return set()
    base = architecture.base_prefix if _lacks_base_prefix(source, architecture) else ""
    pairs = [(name, other.removeprefix(base)) for name, other in architecture.tied.items()]
    return {
        name
        for name, other in pairs
        if not {name, other} <= source.locations.keys() or _has_equal_values(source, name, other)
    }


def _has_equal_values(source: CheckpointSource, name: str, other: str) -> bool:
    """Return whether two tensors in files have the same values. The tensors are read block by block up to the first
    difference."""
    one, two = (source.locations[n][1] for n in (name, other))
    if one.shape != two.shape or not {one.code, two.code} <= set(FLOAT_CODES):
        return False
    for start in range(0, one.elements, COMPARED_ELEMENTS):
        run = [(start, min(start + COMPARED_ELEMENTS, one.elements))]
        if not np.array_equal(
            _widen_float(read_elements(source, name, run)), _widen_float(read_elements(source, other, run))
        ):
            return False
    return True


def _map_parameters_to_sources(
    source: CheckpointSource, model: Container, architecture: Architecture, tied: set[str]
) -> dict[str, TensorSource]:
    """Return a dict that maps each parameter name to the tensors that the parameter is read from. Raise CheckpointError
    if tensors are missing or unknown, or have the wrong shape.

    The files may contain a tied parameter once, or once under each of its names."""
    ordered = linearize(model)
    base, headless = architecture.base_prefix, _lacks_base_prefix(source, architecture)
    specs = parameter_specs(ordered)
    rows = {name: (specs[ordered.ties.get(name, name)].shape or (1,))[0] for name in [*specs, *ordered.ties]}
    theirs = {name: architecture.get_names_in_files(name, n) for name, n in rows.items()}
    taken = {other for others in theirs.values() for other in others}
    # some tied tensors are stored only under the name of the tensor that they are tied to
    for name, (first, *_) in theirs.items():
        if first in tied and (twin := architecture.tied[first]) in source.locations and twin not in taken:
            theirs[name] = (twin,)
    if headless:
        theirs = {name: tuple(other.removeprefix(base) for other in others) for name, others in theirs.items()}
    found = {
        name: TensorSource(source, others, architecture.is_stored_transposed(name))
        for name, others in theirs.items()
        if all(other in source.locations for other in others)
    }
    for alias, name in ordered.ties.items():  # some files store a tied parameter only under its alias
        if name not in found and alias in found:
            found[name] = found[alias]
    missing = [other for name in specs if name not in found for other in theirs[name] if other not in source.locations]
    known = {other for others in theirs.values() for other in others}
    extra = [name for name in source.locations if name not in known and not architecture.is_unused(name)]
    problems = [
        *_format_names("missing", missing),
        *_format_names("not in the model", extra),
        *_iterate_shape_and_dtype_errors(found, model),
    ]
    if problems:
        raise CheckpointError(f"{source.folder}: {'; '.join(problems)}")
    return found


def _format_names(what: str, names: list[str]) -> Iterator[str]:
    if names:
        yield f"{what}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _iterate_shape_and_dtype_errors(found: dict[str, TensorSource], model: Container) -> Iterator[str]:
    for name, spec in parameter_specs(linearize(model)).items():
        if name not in found:
            continue
        stored = found[name]
        for other in stored.names:
            code, shape = stored.source.tensors[other]
            wanted = spec.shape[::-1] if stored.transposed and len(spec.shape) == 2 else spec.shape
            wanted = wanted[1:] if len(stored.names) > 1 else wanted
            if tuple(n for n in shape if n != 1) != tuple(n for n in wanted if n != 1):
                yield f"{other} is {shape} instead of {wanted}"
            if code not in FLOAT_CODES:
                yield f"{other} has the format {code}: weights are {', '.join(FLOAT_CODES)}"
