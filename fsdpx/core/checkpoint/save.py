"""Save checkpoints: the options of a save, the description of the run, the collective save, and the background save
(each rank has a thread that writes while training continues)."""

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
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import parse_dtype, to_host
from fsdpx.core.base.config import PRECISIONS, PRESETS, PRESETS_BY_MEMORY, Sharding
from fsdpx.core.base.config import resolve_sharding as sharding_of
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.option_names import DtypeName, WeightsChoice
from fsdpx.core.base.safe_files import parse_json, read_json
from fsdpx.core.base.version import __version__
from fsdpx.core.checkpoint.atomic_commit import (
    SaveTarget,
    agree_on_equal_choices,
    agree_on_path,
    format_os_independent_error_text,
    prune_checkpoints,
    run_on_all_ranks,
    run_on_rank0,
    strip_trailing_number,
)
from fsdpx.core.checkpoint.format import (
    NOTE_FILE_NAME,
    FileLayout,
    dtype_to_code,
    lay_out_files,
    open_regular_file,
    read_at,
    write_at,
)
from fsdpx.core.checkpoint.local_shards import (
    ByteCounter,
    LocalShard,
    iterate_codec_memory_to_write,
    iterate_shards_to_write,
)
from fsdpx.core.checkpoint.read import CheckpointSource
from fsdpx.core.checkpoint.scalars import CheckpointScalars, collect_checkpoint_scalars
from fsdpx.core.checkpoint.write import CHECKSUM_PREFIX, Manifest, write_tensor_shards
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.state.ledger import get_dtype_of_checkpoint_tensor, list_checkpoint_tensors
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import CheckpointError

__all__ = [
    "BackgroundSave",
    "PreparedSave",
    "SaveChoices",
    "create_empty_checkpoint_files",
    "format_run_description",
    "gather_xor_of_checksums",
    "make_file_layout",
    "make_run_description",
    "read_run_description",
    "save",
]

MAX_NOTE_BYTES = 1 << 20
UNKNOWN = "unknown software"


def make_run_description(placement: Placement) -> bytes:
    """Return a JSON description of this run for the file `NOTE_FILE_NAME`: strategy, mesh, precision and software
    versions."""
    options, axes, precision = placement.options, placement.axes, placement.formats.precision
    description = {
        "strategy": _find_strategy_name_of_sharding(placement.sharding),
        "local training": placement.sync_policy.about,
        "mesh": str(axes.mesh),
        "ranks": axes.world.size,
        "precision": next((name for name, known in PRECISIONS.items() if known == precision), str(precision)),
        "chunks": options.reproducible_chunks,
        "schedule": options.schedule if axes.pipe.size > 1 else None,
        "fsdpx": __version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "MPI": _get_mpi_library_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    known = {name: value for name, value in description.items() if value is not None}
    return (json.dumps(known, ensure_ascii=False, indent=1) + "\n").encode()


def read_run_description(source: CheckpointSource) -> bytes | None:
    """Return the description of the run that wrote a checkpoint (the contents of `NOTE_FILE_NAME`). Return None if
    `source` is not a checkpoint or if the file cannot be read."""
    if source.manifest is None:
        return None
    try:
        with open_regular_file(source.folder / NOTE_FILE_NAME) as fd:
            data = bytearray(min(MAX_NOTE_BYTES, os.fstat(fd).st_size))
            read_at(fd, data, 0)
    except (OSError, CheckpointError):
        return None
    return bytes(data)


def format_run_description(note: bytes | None) -> str:
    """Format the description of a run as one line of text. The description is only informational, so no error is raised
    if it is malformed."""
    if note is None:
        return UNKNOWN
    try:
        table = parse_json(note)
        return ", ".join(f"{name} {value}" for name, value in table.items())
    except (ValueError, AttributeError):
        return f"{NOTE_FILE_NAME} cannot be read"


def _find_strategy_name_of_sharding(sharding: Sharding) -> str:
    """Return the name of the strategy that has this sharding, such as "fsdp". If no strategy has it, return the
    sharding as text."""
    ranks = (sharding.replica or 1) * (sharding.shard or 1)
    for name in (*PRESETS_BY_MEMORY, *PRESETS):
        if replace(sharding_of(PRESETS[name], ranks), prefetch=sharding.prefetch) == sharding:
            return name
    return str(sharding)


def _get_mpi_library_version() -> str | None:
    """Return the first line of the MPI library's version string, or None if this process has not loaded MPI."""
    loaded: Any = sys.modules.get("mpi4py.MPI")
    return None if loaded is None else " ".join(loaded.Get_library_version().strip("\0\n ").split("\n")[0].split())


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SaveChoices:
    """The options of a save.

    Attributes
    ----------
    dtype : dtype of the weights in the files; if None, the same as in the trainer
    shard_bytes : maximum number of bytes per weights file, or None for a single file
    keep : how many checkpoints with numbered names to keep, or None to keep all
    keep_also : name of another checkpoint that is kept
    weights : "parameters", or "average" to save only the averaged weights, without training state
    """

    dtype: DtypeName | None = None
    shard_bytes: int | None = None
    keep: int | None = None
    keep_also: str | None = None
    weights: WeightsChoice = "parameters"

    def require_valid(self, path: Path) -> None:
        if self.dtype is not None and parse_dtype(self.dtype).name not in ("float64", "float32", "float16", "bfloat16"):
            raise CheckpointError(f"dtype={self.dtype!r}: choose float64, float32, float16 or bf16")
        for name in ("shard_bytes", "keep"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise CheckpointError(f"{name}={value!r}: a whole number, 1 or more, or None")
        if self.keep is not None:
            strip_trailing_number(path)


@dataclass(frozen=True)
class PreparedSave:
    """A save that all ranks have agreed on. Its files exist and are filled with zeros.

    Attributes
    ----------
    where : name of the call and path, for error messages
    layout : layout of the checkpoint's files
    folder : temporary folder that all ranks write to
    target : on rank 0, the folders and the lock of the checkpoint; None on other ranks
    """

    where: str
    layout: FileLayout
    folder: Path
    target: SaveTarget | None
    path: Path
    choices: SaveChoices

    def iterate_shards(self, state: TrainState) -> Iterator[LocalShard]:
        """Yield the shards that this rank writes."""
        return (
            piece
            for piece in chain(iterate_shards_to_write(state), iterate_codec_memory_to_write(state))
            if piece.name in self.layout.locations
        )

    def commit_and_prune(self, sums: np.ndarray) -> None:
        """Commit the checkpoint and delete old ones. Only rank 0 calls this, once the data of all ranks is on disk.

        `sums` is the xor of the partial CRCs of all ranks, as returned by `gather_xor_of_checksums`."""
        assert self.target is not None
        self.target.commit(self.layout, Manifest.from_layout(self.layout, sums.tolist()))
        if self.choices.keep is not None:
            prune_checkpoints(self.path, self.choices.keep, self.choices.keep_also)

    def abandon(self) -> None:
        if self.target is not None:
            self.target.abandon()


def save(
    state: TrainState, path: Any, choices: SaveChoices, loader: Any, fit: Mapping[str, Any] | None, count: ByteCounter
) -> None:
    """Write the checkpoint `path`, and return when it is complete on disk. If the save fails on any rank, all ranks
    raise the same error. Collective.

    For `loader` and `fit`, see `collect_checkpoint_scalars`. The number of bytes that this rank writes is added to
    `count`."""
    world = state.placement.axes.world
    prepared = create_empty_checkpoint_files(state, path, choices, loader, fit)
    try:
        sums: list[np.ndarray] = []
        own_shards = count.iterate_and_count(prepared.iterate_shards(state))
        run_on_all_ranks(
            world,
            prepared.where,
            lambda: sums.append(write_tensor_shards(prepared.folder, prepared.layout, own_shards)),
        )
        total = gather_xor_of_checksums(world, sums[0])
        run_on_rank0(world, prepared.where, lambda: prepared.commit_and_prune(total))
    except BaseException:
        prepared.abandon()
        raise


def create_empty_checkpoint_files(
    state: TrainState, path: Any, choices: SaveChoices, loader: Any, fit: Mapping[str, Any] | None
) -> PreparedSave:
    """Check that all ranks pass the same path and options, and create the files of a checkpoint without writing data
    to them. Collective.

    Raise CheckpointError on all ranks if paths or options differ between ranks, or if some rank cannot save."""
    world = state.placement.axes.world
    path = agree_on_path(world, "save", path, options=repr(choices))
    where, local = f"save to {path}", state.placement.sync_policy.gather_checkpoint_counters(state)
    all_scalars = run_on_all_ranks(
        world,
        where,
        lambda: _require_savable_state(state, path, choices, collect_checkpoint_scalars(state, loader, fit, local)),
    )
    agree_on_equal_choices(world, where, state=all_scalars[world.rank].to_json())
    everyone = world.all_gather_value({piece.name: piece.spec.shape for piece in iterate_codec_memory_to_write(state)})
    layout = make_file_layout(
        state.placement, choices, all_scalars[0], {n: shape for one in everyone for n, shape in one.items()}
    )
    agree_on_equal_choices(world, where, layout=str({name: contents.size for name, contents in layout.files.items()}))
    opened: list[SaveTarget] = []

    def open_target() -> Path:
        opened.append(SaveTarget.lock_and_create_files(path, secrets.token_hex(4), layout))
        return opened[0].partial

    try:
        folder = run_on_rank0(world, where, open_target)
    except BaseException:
        for target in opened:
            target.abandon()
        raise
    return PreparedSave(where, layout, folder, opened[0] if opened else None, path, choices)


def _require_savable_state(
    state: TrainState, path: Path, choices: SaveChoices, scalars: CheckpointScalars
) -> CheckpointScalars:
    if not state.placement.device.holds_data:
        raise CheckpointError("a dry run has no data to save")
    if state.gradient_source:
        raise CheckpointError("gradients of accumulate or backward are waiting and are not saved: call update before")
    choices.require_valid(path)
    scalars.to_json()  # called only to raise an error early if the loader's state cannot be stored as JSON
    return scalars


def make_file_layout(
    placement: Placement, choices: SaveChoices, scalars: CheckpointScalars, memory: Shapes
) -> FileLayout:
    """Return the layout of a checkpoint's files. It is the same on all ranks. `memory` maps names to shapes for all
    arrays that compression codecs keep between steps, including arrays on other ranks."""
    specs, asked = placement.layout.specs, None if choices.dtype is None else dtype_to_code(parse_dtype(choices.dtype))
    known = {
        n: (dtype_to_code(get_dtype_of_checkpoint_tensor(placement, n)), s.shape)
        for n, s in list_checkpoint_tensors(placement).items()
    }
    weights = {n: (asked or code, shape) for n, (code, shape) in known.items() if n in specs}
    rest = {n: tensor for n, tensor in known.items() if n not in specs}
    rest |= {n: (dtype_to_code(placement.formats.gradients), shape) for n, shape in memory.items()}
    state = scalars.to_json() if choices.weights == "parameters" else None
    layout = lay_out_files(weights, rest, state, choices.shard_bytes)
    return replace(layout, note=make_run_description(placement))


def gather_xor_of_checksums(world: Communicator, sums: np.ndarray) -> np.ndarray:
    """On rank 0, return the elementwise xor of the uint64 arrays `sums` of all ranks. On other ranks, return `sums`
    unchanged. Collective."""
    if world.size == 1 or sums.size == 0:
        return sums
    everyone = np.empty(sums.size * world.size, np.uint64) if world.rank == 0 else None
    world.gather(sums, everyone, 0, [sums.size] * world.size, what="digests of the checkpoint").wait()
    return sums if everyone is None else np.bitwise_xor.reduce(everyone.reshape(world.size, -1))


POLL_SECONDS = 0.01  # interval at which rank 0 checks for the checksum files of other ranks
GRACE_SECONDS = 10.0  # how long rank 0 waits for checksum files after the main program has ended


class BackgroundSave:
    """A save in which each rank has a thread that writes while training continues.

    The constructor copies the shards that this rank must write, and starts the thread. The thread writes the copies and
    then, on ranks other than 0, a file with the rank's checksums to the temporary folder. Once all these files exist,
    rank 0's thread commits the checkpoint. The commit does not require a call to the trainer."""

    def __init__(self, state: TrainState, prepared: PreparedSave, count: ByteCounter) -> None:
        self.world, self.prepared = state.placement.axes.world, prepared
        self._problem: str | None = None  # error message, if writing or committing has failed
        self._wrote, self._stopped = threading.Event(), threading.Event()
        # `abandon` and `wait` acquire this lock instead of calling Thread.join: in Python 3.11, Ctrl-C during
        # Thread.join marks the thread as ended although it is still running
        self._running = threading.Lock()
        try:
            pieces = count.iterate_and_count(prepared.iterate_shards(state))
            self._copies = [replace(piece, array=np.array(to_host(piece.array))) for piece in pieces]
            threading.Thread(target=self._run_thread, name=f"fsdpx save (rank {self.world.rank})").start()
        except BaseException:
            self.abandon()
            raise

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raise CheckpointError on all ranks if the save failed. Collective."""
        where = self.prepared.where
        try:
            run_on_all_ranks(self.world, where, self._wait_until_written)
            run_on_rank0(self.world, where, self._wait_until_committed)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Stop the save, for example because another rank has died. The old checkpoint at this path is kept, if there
        is one."""
        self._stopped.set()
        with self._running:
            self.prepared.abandon()

    def _wait_until_written(self) -> None:
        self._wrote.wait()
        if self._problem is not None:
            raise CheckpointError(self._problem)

    def _wait_until_committed(self) -> None:
        with self._running:
            self._wait_until_written()

    def _run_thread(self) -> None:
        with self._running:
            try:
                if not self._stopped.is_set():
                    self._write_and_commit()
            except BaseException as error:
                self._problem = format_os_independent_error_text(error)
            finally:
                self._wrote.set()

    def _write_and_commit(self) -> None:
        prepared, rank = self.prepared, self.world.rank
        sums = write_tensor_shards(prepared.folder, prepared.layout, self._copies)
        self._copies = []
        if rank > 0:
            _write_checksum_file(prepared.folder, rank, sums)
        self._wrote.set()
        if rank == 0 and (total := self._wait_for_and_xor_checksums_of_ranks(sums)) is not None:
            prepared.commit_and_prune(total)

    def _wait_for_and_xor_checksums_of_ranks(self, sums: np.ndarray) -> np.ndarray | None:
        """Wait for the checksum files of all other ranks, and return the elementwise xor of `sums` and their checksums.

        Return None if the save is abandoned, or if a file is still missing `GRACE_SECONDS` after the main program has
        ended."""
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


def _write_checksum_file(folder: Path, rank: int, sums: np.ndarray) -> None:
    """Write this rank's checksums to the file that rank 0 waits for. The file gets its final name only when it is
    complete, so that rank 0 never reads an incomplete file."""
    place = _get_checksum_path(folder, rank)
    unseen: Any = place.with_name(place.name + "-unseen")
    unseen.touch()
    with open_regular_file(unseen, writing=True) as fd:
        write_at(fd, json.dumps(sums.tolist()).encode(), 0)
    unseen.rename(place)


def _get_checksum_path(folder: Path, rank: int) -> Path:
    return folder / f"{CHECKSUM_PREFIX}{rank}"
