"""Save a model in a folder that transformers can load. All ranks write their own shards in parallel. File names and
tensor names are the same as in the folder that the model was loaded from."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.base.option_names import DtypeName
from fsdpx.core.base.safe_files import Untrusted, get_path_of_open_file, open_file, read_file, warn_file_ignored
from fsdpx.core.base.safe_files import create_file as new_file
from fsdpx.core.checkpoint.atomic_commit import (
    PARTIAL,
    agree_on_path,
    explaining_rename_errors,
    make_sibling_path,
    resolve_replaceable_folder,
    run_on_all_ranks,
    run_on_rank0,
    write_header_and_sync,
)
from fsdpx.core.checkpoint.format import (
    INDEX_FILE_NAME,
    FileLayout,
    create_zero_filled_file,
    dtype_to_code,
    make_file_header,
    make_index_json,
    sync_folder,
)
from fsdpx.core.checkpoint.local_shards import BLOCK_BYTES, LocalShard, iterate_shards_to_write
from fsdpx.core.checkpoint.read import CheckpointSource
from fsdpx.core.checkpoint.write import write_tensor_shards
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import CheckpointError
from fsdpx.models.pretrained_reader import (
    CONFIG_NAME,
    TensorSource,
    TransposedShard,
    iterate_blocks_of_transposed_shard,
)
from fsdpx.models.tokenizer_files import MAX_JSON_BYTES

__all__ = ["save_pretrained"]

COPIED_PATTERNS = (
    "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.model", "*preprocessor_config.json",
)  # fmt: skip
"""Patterns of files that are copied unchanged."""
MAX_COPIED_BYTES = 1 << 30


def save_pretrained(trainer: Any, folder: str | os.PathLike[str], *, dtype: DtypeName | None = None) -> None:
    """Save a model in a folder that transformers can load. The model must have been loaded by
    `fsdpx.models.from_pretrained`. All ranks write in parallel. Collective.

    Files and tensors have the same names as in the folder that the model was loaded from; `config.json` and the
    tokenizer are copied from that folder.

    Parameters
    ----------
    trainer : trainer of the model
    folder : path of the new folder, which must not exist or must be empty
    dtype : dtype of the written weights: "bf16", "float16", "float32" or "float64"; if None, the dtype of the files
        that were read

    Raises
    ------
    CheckpointError : if the folder cannot be written. All ranks raise the same error, and partial files are removed
    """
    trainer.call_runner.agree_on_call("save_pretrained")
    with trainer.call_runner.using_weights("parameters"):
        _write_pretrained_folder(trainer.call_runner.session.state, folder, dtype)


def _write_pretrained_folder(state: TrainState, folder: Any, dtype: str | None) -> None:
    world = state.placement.axes.world
    path = agree_on_path(world, "save_pretrained", folder, dtype=repr(dtype))
    where = f"save_pretrained {path}"
    run_on_all_ranks(world, where, lambda: _require_saveable(state, dtype))
    stored = _get_sources_by_parameter(state)
    source = next(iter(stored.values())).source
    plan = _plan_file_layout_like_source(source, {name for one in stored.values() for name in one.names}, dtype)
    partial = run_on_rank0(world, where, lambda: _create_partial_folder(path, plan))
    try:
        run_on_all_ranks(world, where, lambda: write_tensor_shards(partial, plan, _iterate_shards(state, stored)))
        run_on_rank0(world, where, lambda: _write_headers_and_commit(path, partial, plan, source, dtype))
    except BaseException:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _get_sources_by_parameter(state: TrainState) -> dict[str, TensorSource]:
    """Return {parameter name: tensors from which the parameter was read} for all parameters that were read from files.
    The names include aliases of tied parameters."""
    return {name: init for name, init in state.placement.model.initial.items() if isinstance(init, TensorSource)}


def _require_saveable(state: TrainState, dtype: str | None) -> None:
    if not state.placement.device.holds_data:
        raise CheckpointError("a dry run has no data to save")
    if dtype is not None and parse_dtype(dtype).name not in ("float64", "float32", "float16", "bfloat16"):
        raise CheckpointError(f"dtype={dtype!r}: choose float64, float32, float16 or bf16")
    stored = _get_sources_by_parameter(state)
    if not stored:
        raise CheckpointError("the model is not of fsdpx.models.from_pretrained; trainer.save writes any model")
    if strange := [name for name in state.placement.layout.specs if name not in stored]:
        raise CheckpointError(f"the architecture has no {', '.join(strange[:5])}; trainer.save writes any model")


def _plan_file_layout_like_source(source: CheckpointSource, names: set[str], dtype: str | None) -> FileLayout:
    """Return the layout of the new files, which have the same names as the files that the model was loaded from. The
    header of a file is copied unless the tensors in the file, or their dtype, change."""
    code = None if dtype is None else dtype_to_code(parse_dtype(dtype))
    files = {}
    for file, contents in source.files.items():
        kept = {name: entry for name, entry in contents.tensors.items() if name in names}
        same = len(kept) == len(contents.tensors) and all(code in (None, entry.code) for entry in kept.values())
        made = {name: (code or entry.code, entry.shape) for name, entry in kept.items()}
        files[file] = contents if same else make_file_header(made, contents.metadata)
    if not (source.folder / INDEX_FILE_NAME).is_file():
        return FileLayout(files)
    same = files == source.files
    return FileLayout(
        files,
        {
            INDEX_FILE_NAME: read_file(source.folder / INDEX_FILE_NAME, MAX_JSON_BYTES, ours=False)
            if same
            else make_index_json(files)
        },
    )


def _iterate_shards(state: TrainState, stored: dict[str, TensorSource]) -> Iterator[LocalShard | TransposedShard]:
    """Yield the shards that this rank writes, each with the name of its tensor in the files. If the files contain
    several copies of a tied parameter, its shard is yielded once for each copy."""
    layout = state.placement.layout
    tensors: dict[str, dict[str, TensorSource]] = {}
    for name, one in stored.items():
        tensors.setdefault(layout.canonical_name(name), {})[one.name] = one
    for piece in iterate_shards_to_write(state):
        for one in tensors.get(piece.name, {}).values():
            if one.transposed and len(piece.spec.shape) == 2:
                yield from iterate_blocks_of_transposed_shard(one.name, piece)
            elif len(one.names) > 1:
                yield from _split_shard_by_file_tensor(piece, one)
            else:
                yield replace(piece, name=one.name)


def _split_shard_by_file_tensor(piece: LocalShard, one: TensorSource) -> Iterator[LocalShard]:
    """Split a rank's shard of a parameter into one shard per tensor in the files. The files may store a parameter as
    several tensors, for example one per expert."""
    for block in piece.iterate_blocks(BLOCK_BYTES // piece.array.dtype.itemsize):
        at = 0
        for start, stop in block.runs:
            yield from one.split_array_by_file_tensor(block.array[at : at + stop - start], start)
            at += stop - start


def _create_partial_folder(path: Path, plan: FileLayout) -> Path:
    path = resolve_replaceable_folder(path)
    if path.exists() and (not path.is_dir() or os.listdir(path)):
        raise CheckpointError(f"{path} is there, and no empty folder: choose another place")
    partial = make_sibling_path(path, PARTIAL + secrets.token_hex(4))
    partial.mkdir(parents=True)
    for name, contents in plan.files.items():
        create_zero_filled_file(partial / name, contents.size)
    return partial


def _write_headers_and_commit(
    path: Path, partial: Path, plan: FileLayout, source: CheckpointSource, dtype: str | None
) -> None:
    for name, contents in plan.files.items():
        write_header_and_sync(partial / name, contents.header)
    for name, text in {**plan.texts, CONFIG_NAME: _make_config(source, dtype)}.items():
        create_zero_filled_file(partial / name, len(text))
        write_header_and_sync(partial / name, text)
    for pattern in COPIED_PATTERNS:
        for file in source.folder.glob(pattern):
            if file.is_file():
                _copy_file_if_trusted(file, partial / file.name)
    sync_folder(partial)
    path = resolve_replaceable_folder(path)
    with explaining_rename_errors(path):
        if path.exists():
            path.rmdir()
        os.rename(partial, path)
    sync_folder(path.parent)


def _copy_file_if_trusted(file: Path, target: Path) -> None:
    """Copy a file, such as the tokenizer, from the folder that the model was loaded from. The copy has at most the
    permissions of the original.

    A link to a file outside of the folder is not copied, because someone else may have created it to expose a private
    file of this user. In the cache of the Hugging Face hub, files are links into the folder `blobs`; the files that
    such links point to are copied."""
    folder = file.parent.resolve()
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    try:
        with open_file(file, MAX_COPIED_BYTES, ours=False) as found:
            real = get_path_of_open_file(
                found, file
            )  # check the opened file, not its path, because links in the path may change at any time
            if not (real.is_relative_to(folder) or real.parent == blobs):
                warn_file_ignored(CheckpointError("this is a link out of its folder, and is not copied"), file)
                return
            mode = os.fstat(found.fileno()).st_mode & 0o666
            with os.fdopen(new_file(target, mode), "wb") as into:
                shutil.copyfileobj(found, into)
    except Untrusted as error:
        warn_file_ignored(error)


def _make_config(source: CheckpointSource, dtype: str | None) -> bytes:
    """Return the contents of `config.json` as they were read. If the weights are written in another dtype, the dtype in
    `config.json` is replaced."""
    text = read_file(source.folder / CONFIG_NAME, MAX_JSON_BYTES, ours=False)
    if dtype is None:
        return text
    config = json.loads(text)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = parse_dtype(dtype).name
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
