"""Load checkpoints on any number of ranks. Everything is checked before the trainer is changed. Weights from other
sources are matched to the model by name, and tensors that have no match are reported."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.core.base.messages import ProgressCallback
from fsdpx.core.base.name_hints import require_pattern_matches
from fsdpx.core.checkpoint.atomic_commit import (
    agree_on_choices,
    agree_on_path,
    expanduser_in_checkpoint_path,
    get_path_and_working_folder,
    run_on_all_ranks,
    run_on_rank0,
)
from fsdpx.core.checkpoint.format import STATE_FILE_NAME, STATE_KEY, Tensors, code_to_dtype, dtype_to_code
from fsdpx.core.checkpoint.local_shards import (
    ByteCounter,
    CodecMemoryName,
    LocalShard,
    iterate_codec_reads_and_zero_missing,
    iterate_local_state_shards,
    iterate_shards_then_add_to_targets,
)
from fsdpx.core.checkpoint.read import (
    CheckpointSource,
    compute_partial_crcs,
    fill_shards_from_arrays,
    open_checkpoint,
    open_weights,
    read_shards,
)
from fsdpx.core.checkpoint.save import gather_xor_of_checksums
from fsdpx.core.checkpoint.scalars import CheckpointScalars, require_loader_method, restore_scalars
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.state.ledger import get_dtype_of_checkpoint_tensor, list_checkpoint_tensors
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import CheckpointError
from fsdpx.nn.layer import Layer, join_path
from fsdpx.optim.optimizer import unwrap_optimizer

__all__ = [
    "WeightsReport",
    "fill_state_by_reading_shards",
    "format_first_names",
    "get_dtypes_and_shapes",
    "list_damaged_tensors",
    "load",
    "load_parameters",
    "require_device_holds_data",
    "require_shapes_and_dtypes",
    "verify_checksums_on_all_ranks",
]  # fmt: skip

Wanted = dict[str, tuple[np.dtype, tuple[int, ...]]]
FLOATS = ("F64", "F32", "F16", "BF16")


def load(
    state: TrainState, path: Any, loader: Any, convert: bool, verify: bool, count: ByteCounter
) -> CheckpointScalars:
    """Load the full training state from a checkpoint: weights, optimizer state and scalars. Return the scalars. If the
    checkpoint does not fit the trainer or cannot be read, raise CheckpointError on all ranks before anything changes.
    Collective.

    Parameters
    ----------
    state : train state to fill
    path : folder of the checkpoint
    loader : data loader whose position is restored with `load_state_dict`; if None, the saved position is ignored
    convert : whether to accept weights and optimizer state whose dtype differs from the trainer's dtype, and convert
        them
    verify : whether to check the checksums of all tensors before anything is loaded
    count : counter for the bytes that this rank reads
    """
    world = state.placement.axes.world
    options = f"convert={convert}, verify={verify}, {'no ' if loader is None else ''}loader"
    path = agree_on_path(world, "load", path, options=options)
    where = f"load {path}"
    source = run_on_rank0(world, where, lambda: open_checkpoint(path))
    run_on_all_ranks(world, where, lambda: require_device_holds_data(state))
    if STATE_FILE_NAME not in source.files:
        raise CheckpointError(f"{where}: it holds only weights; use load_parameters")
    scalars = CheckpointScalars.from_json(
        source.files[STATE_FILE_NAME].metadata.get(STATE_KEY), str(source.folder / STATE_FILE_NAME)
    )
    _require_same_tensors(
        get_dtypes_and_shapes(state), source.select_state_or_weights(state=False).tensors, where, convert
    )
    policy, local = state.placement.sync_policy, scalars.local
    if (policy.about is None) != (local is None):
        there, here = ("not ", "") if local is None else ("", "not ")
        raise CheckpointError(
            f"{where}: it was {there}saved in local training, and this trainer is {here}one of it: load_parameters "
            "takes only the weights"
        )
    if local is not None:
        policy.require_resumable(local, where)
    _require_matching_slots(state, scalars, source, where, convert)
    if loader is not None:
        run_on_all_ranks(world, where, lambda: _require_loader_position(loader, scalars))
    if verify:
        verify_checksums_on_all_ranks(world, source, where, count)
    if loader is not None:  # restore the loader first: if it rejects the saved state, nothing else has changed yet
        run_on_all_ranks(world, where, lambda: loader.load_state_dict(scalars.data))
    shapes = {name: shape for name, (_, shape) in source.tensors.items()}

    def read_saved_shards(pieces: Iterable[LocalShard]) -> None:
        codec_shards = iterate_shards_then_add_to_targets(iterate_codec_reads_and_zero_missing(state, shapes))
        read_shards(source, chain(pieces, codec_shards), state.placement.xp, count)

    fill_state_by_reading_shards(state, where, read_saved_shards, scalars.replica_count)
    restore_scalars(state, scalars)
    return scalars


def list_damaged_tensors(source: CheckpointSource, count: ProgressCallback) -> list[str]:
    """Read all tensors on this rank, and return the names of tensors whose checksum differs from the one in the
    manifest. `count` is a progress callback (done, total)."""
    assert source.manifest is not None
    return source.manifest.list_damaged_tensors(source.files, compute_partial_crcs(source, 0, 1, count).tolist())


def verify_checksums_on_all_ranks(
    world: Communicator, source: CheckpointSource, where: str, count: ByteCounter
) -> None:
    """Raise CheckpointError on all ranks unless the checksums of all tensors match the checkpoint's manifest. The bytes
    to read are divided about evenly among the ranks. Each rank adds to `count` the number of bytes that it reads. Error
    messages begin with `where`. Collective."""
    parts: list[np.ndarray] = []
    compute = partial(compute_partial_crcs, source, world.rank, world.size, count=count)
    run_on_all_ranks(world, where, lambda: parts.append(compute()))
    total = gather_xor_of_checksums(world, parts[0])

    def check_digests() -> None:
        assert source.manifest is not None
        if wrong := source.manifest.list_damaged_tensors(source.files, total.tolist()):
            text = f"damaged: the digest of {format_first_names(wrong)} does not fit; take another checkpoint"
            raise CheckpointError(f"{source.folder}: {text}")

    run_on_rank0(world, where, check_digests)


def fill_state_by_reading_shards(
    state: TrainState, where: str, read: Callable[[Iterable[LocalShard]], None], replicas: int | None = None
) -> None:
    """Fill the arrays of the train state by calling `read(shards)`, which must fill the array of each shard. In a load,
    this is the first function that changes the trainer. Collective.

    For `replicas`, see `iterate_local_state_shards`."""
    world = state.placement.axes.world
    # before any array changes, wait for ranks that may still be reading this rank's shared memory
    world.barrier(what=where).wait()
    run_on_all_ranks(world, where, lambda: read(iterate_local_state_shards(state, replicas)))
    state.invalidate_full_parameters()


def require_device_holds_data(state: TrainState) -> None:
    if not state.placement.device.holds_data:
        raise CheckpointError("a dry run has no data to load into")


def _require_loader_position(loader: Any, scalars: CheckpointScalars) -> None:
    require_loader_method(loader, "load_state_dict")
    if scalars.data is None:
        raise CheckpointError("it was saved without a loader, so it has no position in the data")


def get_dtypes_and_shapes(state: TrainState) -> Wanted:
    place = state.placement
    return {
        name: (get_dtype_of_checkpoint_tensor(place, name), spec.shape) for name, spec in place.layout.specs.items()
    }


def _require_matching_slots(
    state: TrainState, scalars: CheckpointScalars, source: CheckpointSource, where: str, convert: bool
) -> None:
    place, slots = state.placement, tuple(state.placement.optimizer.slots)
    if slots != scalars.slots:
        raise CheckpointError(
            f"{where}: the optimizer does not fit: {scalars.optimizer} with {_format_slots(scalars.slots)} in the "
            f"checkpoint, {type(unwrap_optimizer(place.optimizer)).__name__} with {_format_slots(slots)} here; "
            "load_parameters takes only the weights"
        )
    known = list_checkpoint_tensors(place, scalars.replica_count).items()
    rest = {n: (get_dtype_of_checkpoint_tensor(place, n), s.shape) for n, s in known if n not in place.layout.specs}
    slot_entries = source.select_state_or_weights(state=True).tensors
    codecs = {name: slot_entries[name] for name in slot_entries if CodecMemoryName.parse(name) is not None}
    _require_same_tensors(rest, {n: slot_entries[n] for n in slot_entries.keys() - codecs.keys()}, where, convert)
    in_gradient_dtype = {n: (place.formats.gradients, shape) for n, (_, shape) in codecs.items()}
    require_shapes_and_dtypes(in_gradient_dtype, codecs, where, convert)


def _format_slots(slots: tuple[str, ...]) -> str:
    return f"slots {', '.join(slots)}" if slots else "no slots"


def _require_same_tensors(wanted: Wanted, found: Tensors, where: str, convert: bool) -> None:
    """Raise CheckpointError unless the checkpoint (`found`) has exactly the tensors in `wanted`, with the same shapes
    and dtypes. If `convert` is true, float dtypes may differ. Error messages begin with `where`."""
    _require_no_names(where, "missing", wanted.keys() - found.keys())
    _require_no_names(where, "not in the model", found.keys() - wanted.keys())
    require_shapes_and_dtypes(wanted, found, where, convert)


def require_shapes_and_dtypes(wanted: Wanted, found: Tensors, where: str, convert: bool, remedy: str = "") -> None:
    """Raise CheckpointError unless the tensors in `found` have the shapes and dtypes given in `wanted`. If `convert` is
    true, float dtypes may differ. `found` must have all names in `wanted`. `remedy` is advice to append to error
    messages about wrong shapes."""
    shapes = {n: f"{n} is {found[n][1]} instead of {s}" for n, (_, s) in wanted.items() if found[n][1] != s}
    _require_no_names(where, "of the wrong shape", shapes.values(), remedy)
    for name, (dtype, _) in wanted.items():
        code, _ = found[name]
        if code not in FLOATS and code_to_dtype(code) != dtype:
            raise CheckpointError(f"{where}: {name} has the format {code}: weights are {', '.join(FLOATS)}")
        if code_to_dtype(code) != dtype and not convert:
            raise CheckpointError(
                f"{where}: {name} is {code_to_dtype(code)} there and {dtype} in the trainer: "
                "say convert=True to round or widen it"
            )


def _require_no_names(where: str, what: str, names: Any, remedy: str = "") -> None:
    if names:
        raise CheckpointError(f"{where}: {what}: {format_first_names(sorted(names))}{remedy}")


def format_first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


RENAME_HINT = 'rename={"theirs.*": "ours.*"} finds other names, strict=False takes what there is'

LEAVE_OUT_HINT = ' (rename={"theirs": "unused.theirs"} leaves a tensor out)'
"""Advice in error messages if strict=False, that is, if the source may have tensors that the model lacks."""


@dataclass(frozen=True)
class WeightsReport:
    """Names of the tensors that were loaded and of the tensors that were not. `print(report)` lists both.

    Parameters
    ----------
    taken : parameters and statistics of the model that were loaded
    missing : parameters and statistics of the model that the source lacks; they keep their previous values
    extra : tensors of the source that the model lacks; they were ignored
    renamed : dict that maps names in the source to names in the model, for tensors whose names differ
    unused : tensors of the source that the model is known not to need, such as `num_batches_tracked` of PyTorch's
        BatchNorm
    """

    taken: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.taken)} tensors taken"]
        lines += [f"missing, as they were: {', '.join(self.missing)}"] if self.missing else []
        lines += [f"extra, not used: {', '.join(self.extra)}"] if self.extra else []
        lines += [f"renamed: {', '.join(f'{a} -> {b}' for a, b in self.renamed.items())}"] if self.renamed else []
        lines += [f"needed for nothing: {', '.join(self.unused)}"] if self.unused else []
        return "\n".join(lines)


@dataclass(frozen=True)
class WeightsSource:
    """The files or arrays to load weights from.

    Attributes
    ----------
    where : name of the source, for error messages
    tensors : the (dtype code, shape) of each tensor, keyed by name
    read : function (shards, array module) that fills the arrays of shards; the names of the shards must be names of
        tensors in the source
    verify_checksums_on_all_ranks : collective function that raises CheckpointError if checksums do not match; it does
        nothing if the source has no checksums
    """

    where: str
    tensors: Tensors
    read: Callable[[Iterable[LocalShard], Any], None]
    verify_checksums_on_all_ranks: Callable[[], None]


def load_parameters(
    state: TrainState,
    source: Any,
    call: str = "load_parameters",
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    convert: bool = False,
    count: ByteCounter | None = None,
) -> WeightsReport:
    """Load only weights: from a checkpoint, from safetensors files, or from a dict of full arrays that is the same on
    all ranks. Return a report. If the weights do not fit the model or cannot be read, raise CheckpointError on all
    ranks before anything changes. Collective.

    Parameters
    ----------
    state : train state to fill
    source : path of a checkpoint or of safetensors files, or a dict
    call : name of the public method, for error messages
    strict : whether to raise an error if a parameter is missing, or if the source has a tensor that the model lacks
    rename : dict that maps name patterns in the source to names in the model; see `_RenameRules`
    convert : whether to accept weights whose dtype differs from the trainer's dtype, and convert them
    count : counter for the bytes that this rank reads from files
    """
    world, options = state.placement.axes.world, f"{strict=}, {rename=}, {convert=}"
    open_file_source = partial(_open_file_source, count=count or ByteCounter())
    given = (_open_dict_source if isinstance(source, Mapping) else open_file_source)(world, call, source, options)
    where = given.where
    run_on_all_ranks(world, where, lambda: require_device_holds_data(state))
    matches = run_on_all_ranks(world, where, lambda: _match_names(state.placement, given.tensors, rename or {}))
    origin, report = matches[0]
    if strict:
        _require_complete_match(state, report, where, call)
    wanted = get_dtypes_and_shapes(state)
    found = {n: given.tensors[theirs] for n, theirs in origin.items()}
    require_shapes_and_dtypes({n: wanted[n] for n in origin}, found, where, convert, "" if strict else LEAVE_OUT_HINT)
    given.verify_checksums_on_all_ranks()

    def named(pieces: Iterable[LocalShard]) -> Iterator[LocalShard]:
        return (replace(piece, name=origin[piece.name]) for piece in pieces if piece.name in origin)

    fill_state_by_reading_shards(state, where, lambda pieces: given.read(named(pieces), state.placement.xp))
    return report


def _open_file_source(world: Communicator, call: str, given: Any, options: str, count: ByteCounter) -> WeightsSource:
    def describe_path() -> Mapping[str, str]:
        if not isinstance(given, str | PathLike):
            if hasattr(given, "state_dict"):
                raise CheckpointError(f"{type(given).__name__} is a module, not its weights: give module.state_dict()")
            raise CheckpointError(f"{given!r} is neither a path nor a dict of full arrays, which every rank passes")
        return {**get_path_and_working_folder(expanduser_in_checkpoint_path(given)), "options": options}

    path = Path(agree_on_choices(world, call, describe_path)["path"])
    where = f"{call} {path}"
    source = run_on_rank0(world, where, lambda: open_weights(path))

    def check_intact() -> None:
        if source.manifest is not None:
            verify_checksums_on_all_ranks(world, source, where, count)

    return WeightsSource(where, source.tensors, partial(read_shards, source, count=count), check_intact)


def _open_dict_source(world: Communicator, call: str, values: Mapping[str, Any], options: str) -> WeightsSource:
    """Wrap a dict of full arrays as a source of weights. Raise CheckpointError on all ranks unless they all pass the
    same arrays and the same `options` (the other arguments of the call, as text). Collective.

    Ranks compare two CRC-32 values: one of the names, shapes and dtypes, and one of the array contents."""
    arrays: dict[str, np.ndarray] = {}
    tensors: Tensors = {}

    def describe_arrays() -> Mapping[str, str]:
        contents = 0
        for name, value in values.items():
            array = arrays[name] = _to_host_array(name, value)
            tensors[name] = (dtype_to_code(array.dtype), tuple(array.shape))
            if world.size > 1:
                contents = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, contents)
        description = f"{len(tensors)}, digest {zlib.crc32(repr(tensors).encode()):08x}"
        return {"arrays": description, "values": f"digest {contents:08x}", "options": options}

    agree_on_choices(world, call, describe_arrays)
    return WeightsSource(call, tensors, lambda pieces, xp: fill_shards_from_arrays(arrays, pieces, xp), lambda: None)


def _to_host_array(name: Any, value: Any) -> np.ndarray:
    if not isinstance(name, str):
        raise CheckpointError(f"{name!r} is no name of an array: names are text")
    try:
        array = to_host(value)
        dtype_to_code(array.dtype)
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is a {type(value).__name__} that cannot be read as an array of numbers: {error}; "
            "of PyTorch, give tensor.detach().float().cpu()"
        ) from error
    return array


def _match_names(
    placement: Placement, theirs: Iterable[str], rename: Mapping[str, str]
) -> tuple[dict[str, str], WeightsReport]:
    """Match the tensor names of a source (`theirs`) to the parameters of the model. Return a pair: a dict that maps
    names in the model to names in the source, and a report.

    The source may store a tied parameter under any of its names."""
    layout, known, rules = placement.layout, _map_known_aliases(placement), _RenameRules(rename)
    ours: dict[str, str] = {}
    unused: list[str] = []
    for name in theirs:
        given = rules(name)
        new = given if layout.canonical_name(given) in layout.specs else known.get(given, given)
        if new is None:
            unused.append(name)
        elif new in ours:
            raise CheckpointError(f"rename: {ours[new]} and {name} would both be {new}")
        else:
            ours[new] = name
    rules.require_used()
    origin: dict[str, str] = {}
    for new in sorted(ours, key=lambda name: layout.canonical_name(name) != name):
        if layout.canonical_name(new) in layout.specs:
            origin.setdefault(layout.canonical_name(new), ours[new])
    return origin, WeightsReport(
        taken=tuple(name for name in layout.specs if name in origin),
        missing=tuple(name for name in layout.specs if name not in origin),
        extra=tuple(name for new, name in ours.items() if layout.canonical_name(new) not in layout.specs),
        renamed={name: new for new, name in ours.items() if new != name and layout.canonical_name(new) in layout.specs},
        unused=tuple(unused),
    )


class _RenameRules:
    """Rules that rename tensors by pattern. Each * in a pattern matches any text, and this text replaces the
    corresponding * in the new name."""

    def __init__(self, rename: Mapping[str, str]) -> None:
        self._rules: list[tuple[str, re.Pattern[str], str]] = []
        for old, new in rename.items():
            if type(old) is not str or type(new) is not str or old.count("*") != new.count("*"):
                raise CheckpointError(f"rename: {old!r} and {new!r} must be texts with equally many *")
            self._rules.append((old, re.compile("(.*?)".join(map(re.escape, old.split("*")))), new))
        self._unused_patterns, self._names = dict.fromkeys(rename), list[str]()

    def __call__(self, name: str) -> str:
        """Return `name`, renamed using the first pattern that matches it, or unchanged if none does."""
        self._names.append(name)
        for old, pattern, new in self._rules:
            if match := pattern.fullmatch(name):
                self._unused_patterns.pop(old, None)
                first, *rest = new.split("*")
                return first + "".join(group + text for group, text in zip(match.groups(), rest, strict=True))
        return name

    def require_used(self) -> None:
        require_pattern_matches(
            "rename", self._unused_patterns, self._names, "name there", lambda name, old: False, CheckpointError
        )


def _map_known_aliases(placement: Placement) -> dict[str, str | None]:
    """Return a dict that maps parameter names used by other libraries to the names in this model. A tensor that the
    model does not need is mapped to None."""
    return dict(pair for node in placement.model.nodes for pair in _iterate_aliases(node.path, node.layer))


def _iterate_aliases(path: str, layer: Layer) -> Iterator[tuple[str, str | None]]:
    for theirs, ours in layer.aliases.items():
        yield join_path(path, theirs), ours if ours is None else join_path(path, ours)
    for name, child in layer.children().items():
        yield from _iterate_aliases(join_path(path, name), child)


def _require_complete_match(state: TrainState, report: WeightsReport, where: str, call: str) -> None:
    """Raise CheckpointError if the source lacks a parameter of the model, or has a tensor that the model lacks. Running
    statistics may be missing. Error messages begin with `where`."""
    missing = [name for name in report.missing if name not in state.placement.layout.statistic_specs]
    problems = (("missing", missing), ("not in the model", report.extra))
    texts = [f"{what}: {format_first_names(sorted(names))}" for what, names in problems if names]
    if texts:
        raise CheckpointError(f"{where}: {'; '.join(texts)} ({RENAME_HINT})")
