"""Saving: what is written about a run, who writes which part, and a save in a thread of each rank while training goes
on."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import parse_dtype as dtype_of
from fsdpx.core.array.namespace import to_host
from fsdpx.core.base.config import PRECISIONS, PRESETS, PRESETS_BY_MEMORY, Sharding
from fsdpx.core.base.config import resolve_sharding as sharding_of
from fsdpx.core.base.option_names import DtypeName, WeightsChoice
from fsdpx.core.base.safe_files import parse_json, read_json
from fsdpx.core.base.version import __version__
from fsdpx.core.checkpoint.atomic_commit import (
    SaveTarget,
    agree_on_path,
    error_to_text,
    prune_checkpoints,
    require_equal,
    run_on_all_ranks,
    run_on_rank0,
    strip_number,
)
from fsdpx.core.checkpoint.format import (
    NOTE_FILE_NAME,
    FileLayout,
    dtype_to_code,
    lay_out_files,
    open_checked,
    read_at,
    write_at,
)
from fsdpx.core.checkpoint.local_shards import ByteCounter, LocalShard, codec_memory_to_write, shards_to_write
from fsdpx.core.checkpoint.read import CheckpointSource
from fsdpx.core.checkpoint.scalars import RunScalars, collect_scalars
from fsdpx.core.checkpoint.write import CHECKSUM_PREFIX, Manifest, write_shards
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.state.ledger import get_saved_format, list_saved_tensors
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import CheckpointError

__all__ = [
    "BackgroundSave",
    "PreparedSave",
    "SaveChoices",
    "gather_checksums",
    "make_file_layout",
    "make_note",
    "note_text",
    "prepare_save",
    "read_note",
    "save",
]

MAX_NOTE_BYTES = 1 << 20
UNKNOWN = "unknown software"


def make_note(placement: Placement) -> bytes:
    """The note of this run, as JSON."""
    options, axes, precision = placement.options, placement.axes, placement.formats.precision
    description = {
        "strategy": _name_strategy(placement.sharding),
        "local training": placement.sync_policy.about,
        "mesh": str(axes.mesh),
        "ranks": axes.world.size,
        "precision": next((name for name, known in PRECISIONS.items() if known == precision), str(precision)),
        "chunks": options.reproducible_chunks,
        "schedule": options.schedule if axes.pipe.size > 1 else None,
        "fsdpx": __version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "MPI": _get_mpi_library(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    known = {name: value for name, value in description.items() if value is not None}
    return (json.dumps(known, ensure_ascii=False, indent=1) + "\n").encode()


def read_note(source: CheckpointSource) -> bytes | None:
    """The note beside the files of `source` as it is there, if it can be read."""
    if source.manifest is None:
        return None
    try:
        with open_checked(source.folder / NOTE_FILE_NAME) as fd:
            data = bytearray(min(MAX_NOTE_BYTES, os.fstat(fd).st_size))
            read_at(fd, data, 0)
    except (OSError, CheckpointError):
        return None
    return bytes(data)


def note_text(note: bytes | None) -> str:
    """A note in one line; whatever is in the file, no error: it is information only."""
    if note is None:
        return UNKNOWN
    try:
        table = parse_json(note)
        return ", ".join(f"{name} {value}" for name, value in table.items())
    except (ValueError, AttributeError):
        return f"{NOTE_FILE_NAME} cannot be read"


def _name_strategy(sharding: Sharding) -> str:
    """The name of a sharding, if it has one."""
    ranks = (sharding.replica or 1) * (sharding.shard or 1)
    for name in (*PRESETS_BY_MEMORY, *PRESETS):
        if replace(sharding_of(PRESETS[name], ranks), prefetch=sharding.prefetch) == sharding:
            return name
    return str(sharding)


def _get_mpi_library() -> str | None:
    """The library, if this process has loaded one."""
    loaded: Any = sys.modules.get("mpi4py.MPI")
    return None if loaded is None else " ".join(loaded.Get_library_version().strip("\0\n ").split("\n")[0].split())


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SaveChoices:
    """How to save. dtype: of the weights in the file, None for the trainer's. shard_bytes: most bytes of one file of
    weights. keep: how many numbered checkpoints stay, None for all. spare: the name of one that stays beside
    them. weights: "average": the weights alone, which are averages."""

    dtype: DtypeName | None = None
    shard_bytes: int | None = None
    keep: int | None = None
    spare: str | None = None
    weights: WeightsChoice = "parameters"

    def require_valid(self, path: Path) -> None:
        if self.dtype is not None and dtype_of(self.dtype).name not in ("float64", "float32", "float16", "bfloat16"):
            raise CheckpointError(f"dtype={self.dtype!r}: choose float64, float32, float16 or bf16")
        for name in ("shard_bytes", "keep"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise CheckpointError(f"{name}={value!r}: a whole number, 1 or more, or None")
        if self.keep is not None:
            strip_number(path)


@dataclass(frozen=True)
class PreparedSave:
    """All ranks have agreed, the empty files are there. target: on rank 0. folder: where to write."""

    where: str
    plan: FileLayout
    folder: Path
    target: SaveTarget | None
    path: Path
    choices: SaveChoices

    def iterate_shards(self, state: TrainState) -> Iterator[LocalShard]:
        """Iterate over the shards that this rank writes."""
        return (
            piece
            for piece in chain(shards_to_write(state), codec_memory_to_write(state))
            if piece.name in self.plan.locations
        )

    def commit_save(self, sums: np.ndarray) -> None:
        """Rank 0, when all data are on the disk: make it the checkpoint, then remove old ones."""
        assert self.target is not None
        self.target.commit(self.plan, Manifest.from_layout(self.plan, sums.tolist()))
        if self.choices.keep is not None:
            prune_checkpoints(self.path, self.choices.keep, self.choices.spare)

    def abandon(self) -> None:
        if self.target is not None:
            self.target.abandon()


def save(
    state: TrainState, path: Any, choices: SaveChoices, loader: Any, fit: Mapping[str, Any] | None, count: ByteCounter
) -> None:
    """Write the checkpoint `path`. Collective; returns when it is whole on disk, or raises alike on all ranks. count:
    counts what this rank writes."""
    world = state.placement.axes.world
    prepared = prepare_save(state, path, choices, loader, fit)
    try:
        sums: list[np.ndarray] = []
        own_shards = count.count_shards(prepared.iterate_shards(state))
        run_on_all_ranks(
            world, prepared.where, lambda: sums.append(write_shards(prepared.folder, prepared.plan, own_shards))
        )
        total = gather_checksums(world, sums[0])
        run_on_rank0(world, prepared.where, lambda: prepared.commit_save(total))
    except BaseException:
        prepared.abandon()
        raise


def prepare_save(
    state: TrainState, path: Any, choices: SaveChoices, loader: Any, fit: Mapping[str, Any] | None
) -> PreparedSave:
    """Everything up to the first byte of data. Collective."""
    world = state.placement.axes.world
    path = agree_on_path(world, "save", path, options=repr(choices))
    where, local = f"save to {path}", state.placement.sync_policy.gather_checkpoint_data(state)
    all_scalars = run_on_all_ranks(
        world, where, lambda: _check_can_save(state, path, choices, collect_scalars(state, loader, fit, local))
    )
    require_equal(world, where, state=all_scalars[world.rank].to_json())
    everyone = world.all_gather_data({piece.name: piece.spec.shape for piece in codec_memory_to_write(state)})
    plan = make_file_layout(
        state.placement, choices, all_scalars[0], {n: shape for one in everyone for n, shape in one.items()}
    )
    require_equal(world, where, layout=str({name: contents.size for name, contents in plan.files.items()}))
    opened: list[SaveTarget] = []

    def open_target() -> Path:
        opened.append(SaveTarget.open(path, secrets.token_hex(4), plan))
        return opened[0].partial

    try:
        folder = run_on_rank0(world, where, open_target)
    except BaseException:
        for target in opened:
            target.abandon()
        raise
    return PreparedSave(where, plan, folder, opened[0] if opened else None, path, choices)


def _check_can_save(state: TrainState, path: Path, choices: SaveChoices, scalars: RunScalars) -> RunScalars:
    if not state.placement.device.holds_data:
        raise CheckpointError("a dry run has no data to save")
    if state.adding:
        raise CheckpointError("gradients of accumulate or backward are waiting and are not saved: call update before")
    choices.require_valid(path)
    scalars.to_json()  # can be written
    return scalars


def make_file_layout(placement: Placement, choices: SaveChoices, scalars: RunScalars, kept: Shapes) -> FileLayout:
    """The same on every rank: from the model, the optimiser, the options and what codecs of all ranks have `kept`; the
    note tells the mesh, too."""
    specs, asked = placement.layout.specs, None if choices.dtype is None else dtype_to_code(dtype_of(choices.dtype))
    known = {
        n: (dtype_to_code(get_saved_format(placement, n)), s.shape) for n, s in list_saved_tensors(placement).items()
    }
    weights = {n: (asked or code, shape) for n, (code, shape) in known.items() if n in specs}
    rest = {n: tensor for n, tensor in known.items() if n not in specs}
    rest |= {n: (dtype_to_code(placement.formats.gradients), shape) for n, shape in kept.items()}
    state = scalars.to_json() if choices.weights == "parameters" else None
    layout = lay_out_files(weights, rest, state, choices.shard_bytes)
    return replace(layout, note=make_note(placement))


def gather_checksums(world: Communicator, sums: np.ndarray) -> np.ndarray:
    """The exclusive or of all ranks' sums, on rank 0."""
    if world.size == 1 or sums.size == 0:
        return sums
    everyone = np.empty(sums.size * world.size, np.uint64) if world.rank == 0 else None
    world.gather(sums, everyone, 0, [sums.size] * world.size, what="digests of the checkpoint").wait()
    return sums if everyone is None else np.bitwise_xor.reduce(everyone.reshape(world.size, -1))


POLL_SECONDS = 0.01  # seconds between rank 0's looks at what the others have done
GRACE_SECONDS = 10.0  # seconds that the others have when the main program has ended


class BackgroundSave:
    """A save under way. What this rank writes is copied at once; the rest is the thread's. Rank 0's commits when all
    ranks have left their sums in the folder, so that the checkpoint is whole without another call to the trainer."""

    def __init__(self, state: TrainState, prepared: PreparedSave, count: ByteCounter) -> None:
        self.world, self.prepared = state.placement.axes.world, prepared
        self._problem: str | None = None  # why it could not be written, or not committed
        self._wrote, self._stopped = threading.Event(), threading.Event()
        self._running = threading.Lock()  # a `join` that Ctrl-C breaks off takes the thread for ended (Python 3.11)
        try:
            pieces = count.count_shards(prepared.iterate_shards(state))
            self._copies = [replace(piece, array=np.array(to_host(piece.array))) for piece in pieces]
            threading.Thread(target=self._run_thread, name=f"fsdpx save (rank {self.world.rank})").start()
        except BaseException:
            self.abandon()
            raise

    def wait(self) -> None:
        """Return when the checkpoint is whole; CheckpointError, the same on all ranks, if it cannot be. Collective."""
        where = self.prepared.where
        try:
            run_on_all_ranks(self.world, where, self._require_written)
            run_on_rank0(self.world, where, self._require_committed)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Another rank has died: no rank will find it whole. What was there before stays."""
        self._stopped.set()
        with self._running:
            self.prepared.abandon()

    def _require_written(self) -> None:
        self._wrote.wait()
        if self._problem is not None:
            raise CheckpointError(self._problem)

    def _require_committed(self) -> None:
        with self._running:
            self._require_written()

    def _run_thread(self) -> None:
        with self._running:
            try:
                if not self._stopped.is_set():
                    self._write_and_commit()
            except BaseException as error:
                self._problem = error_to_text(error)
            finally:
                self._wrote.set()

    def _write_and_commit(self) -> None:
        prepared, rank = self.prepared, self.world.rank
        sums = write_shards(prepared.folder, prepared.plan, self._copies)
        self._copies = []
        if rank > 0:
            _leave_checksums(prepared.folder, rank, sums)
        self._wrote.set()
        if rank == 0 and (total := self._combine_checksums(sums)) is not None:
            prepared.commit_save(total)

    def _combine_checksums(self, sums: np.ndarray) -> np.ndarray | None:
        """All ranks' sums together; None if one of them says that it cannot write."""
        end = math.inf
        for rank in range(1, self.world.size):
            path = _get_checksum_path(self.prepared.folder, rank)
            while not path.exists():
                if end == math.inf and not threading.main_thread().is_alive():
                    end = time.monotonic() + GRACE_SECONDS
                if self._stopped.is_set() or time.monotonic() > end:
                    return None
                time.sleep(POLL_SECONDS)
            sums = sums ^ np.array(read_json(path, ours=False), np.uint64)
            path.unlink()
        return sums


def _leave_checksums(folder: Path, rank: int, sums: np.ndarray) -> None:
    """Seen by rank 0 when it is whole."""
    place = _get_checksum_path(folder, rank)
    unseen: Any = place.with_name(place.name + "-unseen")
    unseen.touch()
    with open_checked(unseen, writing=True) as fd:
        write_at(fd, json.dumps(sums.tolist()).encode(), 0)
    unseen.rename(place)


def _get_checksum_path(folder: Path, rank: int) -> Path:
    return folder / f"{CHECKSUM_PREFIX}{rank}"
