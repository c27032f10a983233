"""A folder that transformers opens, from what ranks hold: each writes its own elements, under the names they had."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdpx.core.array.namespace import dtype as dtype_of
from fsdpx.core.base.safe_files import Untrusted, open_file, passed_over, place_of, read
from fsdpx.core.base.safe_files import create as new_file
from fsdpx.core.checkpoint.atomic_commit import PARTIAL, alone, leaving, moving, place, put, replaceable, together
from fsdpx.core.checkpoint.format import INDEX, FileLayout, code_of, create, index_of, lay, sync_folder
from fsdpx.core.checkpoint.local_shards import BLOCK, Held, owned
from fsdpx.core.checkpoint.read import Source
from fsdpx.core.checkpoint.write import write
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import CheckpointError
from fsdpx.models.pretrained_reader import CONFIG, Stored, Turned, turned
from fsdpx.models.tokenizer_files import LARGEST

__all__ = ["save_pretrained"]

BESIDE = (
    "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.model", "*preprocessor_config.json",
)  # fmt: skip
"""Files that are copied unchanged."""
LARGEST_BESIDE = 1 << 30


def save_pretrained(trainer: Any, folder: str | os.PathLike[str], *, dtype: str | None = None) -> None:
    """Write the weights of a model of `fsdpx.models.from_pretrained` as the folder that transformers opens, all ranks
    at once: names and files as they were, `config.json` and the tokenizer copied. Collective.

    Parameters
    ----------
    trainer : of the model
    folder : not there yet, or empty
    dtype : of the weights: "bf16", "float16", "float32" or "float64" (default: that of the files that were read)

    Raises
    ------
    CheckpointError : the same on all ranks, if it cannot be written; nothing is left then
    """
    trainer.host.begin("save_pretrained")
    with trainer.host.having("parameters"):
        _save(trainer.host.session.state, folder, dtype)


def _save(state: TrainState, folder: Any, dtype: str | None) -> None:
    world = state.placement.axes.world
    path = place(world, "save_pretrained", folder, dtype=repr(dtype))
    where = f"save_pretrained {path}"
    together(world, where, lambda: _demand(state, dtype))
    stored = _stored(state)
    source = next(iter(stored.values())).source
    plan = _plan(source, {name for one in stored.values() for name in one.names}, dtype)
    partial = alone(world, where, lambda: _begin(path, plan))
    try:
        together(world, where, lambda: write(partial, plan, _pieces(state, stored)))
        alone(world, where, lambda: _finish(path, partial, plan, source, dtype))
    except BaseException:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _stored(state: TrainState) -> dict[str, Stored]:
    """Name in the model, aliases too, -> what it was read from."""
    return {name: init for name, init in state.placement.model.initial.items() if isinstance(init, Stored)}


def _demand(state: TrainState, dtype: str | None) -> None:
    if not state.placement.device.holds_data:
        raise CheckpointError("a dry run has no data to save")
    if dtype is not None and dtype_of(dtype).name not in ("float64", "float32", "float16", "bfloat16"):
        raise CheckpointError(f"dtype={dtype!r}: choose float64, float32, float16 or bf16")
    stored = _stored(state)
    if not stored:
        raise CheckpointError("the model is not of fsdpx.models.from_pretrained; trainer.save writes any model")
    if strange := [name for name in state.placement.layout.specs if name not in stored]:
        raise CheckpointError(f"the architecture has no {', '.join(strange[:5])}; trainer.save writes any model")


def _plan(source: Source, names: set[str], dtype: str | None) -> FileLayout:
    """The files that were read, byte for byte their headers, unless what they hold changes."""
    code = None if dtype is None else code_of(dtype_of(dtype))
    files = {}
    for file, contents in source.files.items():
        kept = {name: entry for name, entry in contents.tensors.items() if name in names}
        same = len(kept) == len(contents.tensors) and all(code in (None, entry.code) for entry in kept.values())
        made = {name: (code or entry.code, entry.shape) for name, entry in kept.items()}
        files[file] = contents if same else lay(made, contents.metadata)
    if not (source.folder / INDEX).is_file():
        return FileLayout(files)
    same = files == source.files
    return FileLayout(files, {INDEX: read(source.folder / INDEX, LARGEST, ours=False) if same else index_of(files)})


def _pieces(state: TrainState, stored: dict[str, Stored]) -> Iterator[Held | Turned]:
    """What this rank writes; of a tied parameter as often as the files have it."""
    layout = state.placement.layout
    tensors: dict[str, dict[str, Stored]] = {}
    for name, one in stored.items():
        tensors.setdefault(layout.canonical(name), {})[one.name] = one
    for piece in owned(state):
        for one in tensors.get(piece.name, {}).values():
            if one.turned and len(piece.spec.shape) == 2:
                yield from turned(one.name, piece)
            elif len(one.names) > 1:
                yield from _apart(piece, one)
            else:
                yield replace(piece, name=one.name)


def _apart(piece: Held, one: Stored) -> Iterator[Held]:
    """A rank's part of a parameter that files have in parts."""
    for block in piece.blocks(BLOCK // piece.array.dtype.itemsize):
        at = 0
        for start, stop in block.runs:
            yield from one.pieces(block.array[at : at + stop - start], start)
            at += stop - start


def _begin(path: Path, plan: FileLayout) -> Path:
    path = replaceable(path)
    if path.exists() and (not path.is_dir() or os.listdir(path)):
        raise CheckpointError(f"{path} is there, and no empty folder: choose another place")
    partial = leaving(path, PARTIAL + secrets.token_hex(4))
    partial.mkdir(parents=True)
    for name, contents in plan.files.items():
        create(partial / name, contents.size)
    return partial


def _finish(path: Path, partial: Path, plan: FileLayout, source: Source, dtype: str | None) -> None:
    for name, contents in plan.files.items():
        put(partial / name, contents.header)
    for name, text in {**plan.texts, CONFIG: _config(source, dtype)}.items():
        create(partial / name, len(text))
        put(partial / name, text)
    for pattern in BESIDE:
        for file in source.folder.glob(pattern):
            if file.is_file():
                _copy(file, partial / file.name)
    sync_folder(partial)
    path = replaceable(path)
    with moving(path):
        if path.exists():
            path.rmdir()
        os.rename(partial, path)
    sync_folder(path.parent)


def _copy(file: Path, target: Path) -> None:
    """Copy a file from beside the weights, with no more rights than it has. What a link out of the folder points at may
    be a secret of this user's, put there by another: it is not copied, but for the one way in which the cache of the
    hub links."""
    folder = file.parent.resolve()
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    try:
        with open_file(file, LARGEST_BESIDE, ours=False) as found:
            real = place_of(found, file)  # of what is open: links may change meanwhile
            if not (real.is_relative_to(folder) or real.parent == blobs):
                passed_over(CheckpointError("this is a link out of its folder, and is not copied"), file)
                return
            mode = os.fstat(found.fileno()).st_mode & 0o666
            with os.fdopen(new_file(target, mode), "wb") as into:
                shutil.copyfileobj(found, into)
    except Untrusted as error:
        passed_over(error)


def _config(source: Source, dtype: str | None) -> bytes:
    """The configuration as it was, but for another format of the weights."""
    text = read(source.folder / CONFIG, LARGEST, ours=False)
    if dtype is None:
        return text
    config = json.loads(text)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype_of(dtype).name
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
