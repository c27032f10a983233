"""Loading, at any number of ranks: all is checked before anything is changed. Names of weights from any source are
matched, and differences are reported."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.base.name_hints import demand_match
from fsdpx.core.checkpoint.atomic_commit import agreed, alone, located, named, place, together
from fsdpx.core.checkpoint.format import STATE, STATE_KEY, Tensors, array_type, code_of
from fsdpx.core.checkpoint.local_shards import ByteCount, Held, Name, arrivals, held, landed
from fsdpx.core.checkpoint.read import Source, checkpoint, read, sums, take, weights
from fsdpx.core.checkpoint.save import added
from fsdpx.core.checkpoint.scalars import Scalars, demand_state, restore
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.state.ledger import saved_format, saved_tensors
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import TrainState
from fsdpx.errors import CheckpointError
from fsdpx.nn.layer import Layer, dotted
from fsdpx.optim.optimizer import inside

__all__ = [
    "WeightsReport", "damaged", "demand_data_here", "demand_fit", "demand_intact", "fill", "listed", "load",
    "load_weights", "weights_of",
]  # fmt: skip

Wanted = dict[str, tuple[np.dtype, tuple[int, ...]]]
FLOATS = ("F64", "F32", "F16", "BF16")


def load(state: TrainState, path: Any, loader: Any, convert: bool, verify: bool, count: ByteCount) -> Scalars:
    """Take weights, optimiser and everything else from a checkpoint. Collective. count: counts what this rank takes."""
    world = state.placement.axes.world
    options = f"convert={convert}, verify={verify}, {'no ' if loader is None else ''}loader"
    path = place(world, "load", path, options=options)
    where = f"load {path}"
    source = alone(world, where, lambda: checkpoint(path))
    together(world, where, lambda: demand_data_here(state))
    if STATE not in source.files:
        raise CheckpointError(f"{where}: it holds weights alone; use load_weights")
    scalars = Scalars.parse(source.files[STATE].metadata.get(STATE_KEY), str(source.folder / STATE))
    _demand(weights_of(state), source.only(state=False).tensors, where, convert)
    pace, local = state.placement.pace, scalars.local
    if (pace.about is None) != (local is None):
        there, here = ("not ", "") if local is None else ("", "not ")
        raise CheckpointError(
            f"{where}: it was {there}saved in local training, and this trainer is {here}one of it: load_weights takes "
            "the weights alone"
        )
    if local is not None:
        pace.demand_saved(local, where)
    _demand_slots(state, scalars, source, where, convert)
    if loader is not None:
        together(world, where, lambda: _demand_data(loader, scalars))
    if verify:
        demand_intact(world, source, where)
    if loader is not None:  # it may refuse its state, and nothing else has changed then
        together(world, where, lambda: loader.load_state_dict(scalars.data))
    shapes = {name: shape for name, (_, shape) in source.tensors.items()}

    def take(pieces: Iterable[Held]) -> None:
        read(source, chain(count.of(pieces), landed(arrivals(state, shapes))), state.placement.xp)

    fill(state, where, take, scalars.replicas)
    restore(state, scalars)
    return scalars


def damaged(source: Source) -> list[str]:
    """Names of the tensors of a checkpoint whose bytes are not as written."""
    assert source.manifest is not None
    return source.manifest.wrong(source.files, sums(source, 0, 1).tolist())


def demand_intact(world: Communicator, source: Source, where: str) -> None:
    """All bytes are those that were written; each rank looks at an even part of them."""
    parts: list[np.ndarray] = []
    together(world, where, lambda: parts.append(sums(source, world.rank, world.size)))
    total = added(world, parts[0])

    def judge() -> None:
        assert source.manifest is not None
        if wrong := source.manifest.wrong(source.files, total.tolist()):
            text = f"damaged: the digest of {listed(wrong)} does not fit; take another checkpoint"
            raise CheckpointError(f"{source.folder}: {text}")

    alone(world, where, judge)


def fill(state: TrainState, where: str, read: Callable[[Iterable[Held]], None], replicas: int | None = None) -> None:
    """From here on the trainer changes. read: fill these pieces. replicas: see `held`."""
    world = state.placement.axes.world
    world.barrier(what=where).wait()  # others may still read what we share with them
    together(world, where, lambda: read(held(state, replicas)))
    state.replaced()


def demand_data_here(state: TrainState) -> None:
    if not state.placement.device.holds_data:
        raise CheckpointError("a dry run has no data to load into")


def _demand_data(loader: Any, scalars: Scalars) -> None:
    demand_state(loader, "load_state_dict")
    if scalars.data is None:
        raise CheckpointError("it was saved without a loader, so it does not know a place in the data")


def weights_of(state: TrainState) -> Wanted:
    place = state.placement
    return {name: (saved_format(place, name), spec.shape) for name, spec in place.layout.specs.items()}


def _demand_slots(state: TrainState, scalars: Scalars, source: Source, where: str, convert: bool) -> None:
    place, slots = state.placement, tuple(state.placement.optimizer.slots)
    if slots != scalars.slots:
        raise CheckpointError(
            f"{where}: the optimiser does not fit: {scalars.optimizer} with {_slots(scalars.slots)} in the checkpoint, "
            f"{type(inside(place.optimizer)).__name__} with {_slots(slots)} here; load_weights takes the weights alone"
        )
    known = saved_tensors(place, scalars.replicas).items()
    rest = {n: (saved_format(place, n), s.shape) for n, s in known if n not in place.layout.specs}
    found = source.only(state=True).tensors
    codecs = {name: found[name] for name in found if Name.parse(name) is not None}
    _demand(rest, {n: found[n] for n in found.keys() - codecs.keys()}, where, convert)
    demand_fit({n: (place.formats.gradients, shape) for n, (_, shape) in codecs.items()}, codecs, where, convert)


def _slots(slots: tuple[str, ...]) -> str:
    return f"slots {', '.join(slots)}" if slots else "no slots"


def _demand(wanted: Wanted, found: Tensors, where: str, convert: bool) -> None:
    """Names, shapes and formats fit, or CheckpointError says what does not."""
    _none(where, "missing", wanted.keys() - found.keys())
    _none(where, "not in the model", found.keys() - wanted.keys())
    demand_fit(wanted, found, where, convert)


def demand_fit(wanted: Wanted, found: Tensors, where: str, convert: bool, remedy: str = "") -> None:
    """The same of tensors that are all there. remedy: what can be done about a wrong shape."""
    shapes = {n: f"{n} is {found[n][1]} instead of {s}" for n, (_, s) in wanted.items() if found[n][1] != s}
    _none(where, "of the wrong shape", shapes.values(), remedy)
    for name, (dtype, _) in wanted.items():
        code, _ = found[name]
        if code not in FLOATS and array_type(code) != dtype:
            raise CheckpointError(f"{where}: {name} has the format {code}: weights are {', '.join(FLOATS)}")
        if array_type(code) != dtype and not convert:
            raise CheckpointError(
                f"{where}: {name} is {array_type(code)} there and {dtype} in the trainer: "
                "say convert=True to round or widen it"
            )


def _none(where: str, what: str, names: Any, remedy: str = "") -> None:
    if names:
        raise CheckpointError(f"{where}: {what}: {listed(sorted(names))}{remedy}")


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


REMEDY = 'rename={"theirs.*": "ours.*"} finds other names, strict=False takes what there is'

LEFT_OUT = ' (rename={"theirs": "unused.theirs"} leaves a tensor out)'
"""Where the source may have tensors that the model has not."""


@dataclass(frozen=True)
class WeightsReport:
    """What was loaded, by name; `print` it.

    Parameters
    ----------
    taken : of the model, set
    missing : of the model, not in the source: they are as they were
    extra : of the source, not in the model: not used
    renamed : those in the source that have another name in the model -> that name
    unused : of the source, known to be needed for nothing here, as BatchNorm's `num_batches_tracked` of PyTorch
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
class Given:
    """What the caller gave. where: as text. tensors: those it has. read: fill pieces that are named as there.
    demand_intact: look at digests, if there are any; collective."""

    where: str
    tensors: Tensors
    read: Callable[[Iterable[Held], Any], None]
    demand_intact: Callable[[], None]


def load_weights(
    state: TrainState,
    source: Any,
    call: str = "load_weights",
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    convert: bool = False,
    count: ByteCount | None = None,
) -> WeightsReport:
    """Take the weights alone: from a checkpoint, from any safetensors files, or from a dict of whole arrays that every
    rank has. CheckpointError before anything changes. call: the name of the method, for errors. count: counts what this
    rank takes. Collective."""
    world, options = state.placement.axes.world, f"{strict=}, {rename=}, {convert=}"
    given = (_dict if isinstance(source, Mapping) else _file)(world, call, source, options)
    where = given.where
    together(world, where, lambda: demand_data_here(state))
    origin, report = together(world, where, lambda: _match(state.placement, given.tensors, rename or {}))[0]
    if strict:
        _demand_all(state, report, where, call)
    wanted = weights_of(state)
    found = {n: given.tensors[theirs] for n, theirs in origin.items()}
    demand_fit({n: wanted[n] for n in origin}, found, where, convert, "" if strict else LEFT_OUT)
    given.demand_intact()

    def named(pieces: Iterable[Held]) -> Iterator[Held]:
        return (replace(piece, name=origin[piece.name]) for piece in pieces if piece.name in origin)

    count = count or ByteCount()
    fill(state, where, lambda pieces: given.read(count.of(named(pieces)), state.placement.xp))
    return report


def _file(world: Communicator, call: str, given: Any, options: str) -> Given:
    def look() -> Mapping[str, str]:
        if not isinstance(given, str | PathLike):
            if hasattr(given, "state_dict"):
                raise CheckpointError(f"{type(given).__name__} is a module, not its weights: give module.state_dict()")
            raise CheckpointError(f"{given!r} is neither a path nor a dict of whole arrays, which every rank gives")
        return {**located(named(given)), "options": options}

    path = Path(agreed(world, call, look)["path"])
    where = f"{call} {path}"
    found = alone(world, where, lambda: weights(path))

    def intact() -> None:
        if found.manifest is not None:
            demand_intact(world, found, where)

    return Given(where, found.tensors, lambda pieces, xp: read(found, pieces, xp), intact)


def _dict(world: Communicator, call: str, values: Mapping[str, Any], options: str) -> Given:
    """Every rank has all arrays; that they are the same is seen by their names, shapes, formats and contents."""
    arrays: dict[str, np.ndarray] = {}
    tensors: Tensors = {}

    def look() -> Mapping[str, str]:
        contents = 0
        for name, value in values.items():
            array = arrays[name] = _array(name, value)
            tensors[name] = (code_of(array.dtype), tuple(array.shape))
            if world.size > 1:
                contents = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, contents)
        found = f"{len(tensors)}, digest {zlib.crc32(repr(tensors).encode()):08x}"
        return {"arrays": found, "values": f"digest {contents:08x}", "options": options}

    agreed(world, call, look)
    return Given(call, tensors, lambda pieces, xp: take(arrays, pieces, xp), lambda: None)


def _array(name: Any, value: Any) -> np.ndarray:
    if not isinstance(name, str):
        raise CheckpointError(f"{name!r} is no name of an array: names are text")
    try:
        array = to_host(value)
        code_of(array.dtype)
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is a {type(value).__name__} that cannot be read as an array of numbers: {error}; "
            "of PyTorch, give tensor.detach().float().cpu()"
        ) from error
    return array


def _match(
    placement: Placement, theirs: Iterable[str], rename: Mapping[str, str]
) -> tuple[dict[str, str], WeightsReport]:
    """Name in the model -> name there, and what does not fit. A tied parameter may have any of its names."""
    layout, known, rules = placement.layout, _known(placement), _Rules(rename)
    ours: dict[str, str] = {}
    unused: list[str] = []
    for name in theirs:
        given = rules(name)
        new = given if layout.canonical(given) in layout.specs else known.get(given, given)
        if new is None:
            unused.append(name)
        elif new in ours:
            raise CheckpointError(f"rename: {ours[new]} and {name} would both be {new}")
        else:
            ours[new] = name
    rules.demand_used()
    origin: dict[str, str] = {}
    for new in sorted(ours, key=lambda name: layout.canonical(name) != name):
        if layout.canonical(new) in layout.specs:
            origin.setdefault(layout.canonical(new), ours[new])
    return origin, WeightsReport(
        taken=tuple(name for name in layout.specs if name in origin),
        missing=tuple(name for name in layout.specs if name not in origin),
        extra=tuple(name for new, name in ours.items() if layout.canonical(new) not in layout.specs),
        renamed={name: new for new, name in ours.items() if new != name and layout.canonical(new) in layout.specs},
        unused=tuple(unused),
    )


class _Rules:
    """Patterns in which each * stands for any text, which goes to the place of that * in the new name."""

    def __init__(self, rename: Mapping[str, str]) -> None:
        self._rules: list[tuple[str, re.Pattern[str], str]] = []
        for old, new in rename.items():
            if type(old) is not str or type(new) is not str or old.count("*") != new.count("*"):
                raise CheckpointError(f"rename: {old!r} and {new!r} must be texts with equally many *")
            self._rules.append((old, re.compile("(.*?)".join(map(re.escape, old.split("*")))), new))
        self._idle, self._names = dict.fromkeys(rename), list[str]()

    def __call__(self, name: str) -> str:
        """The new name, by the first pattern that fits; else the name itself."""
        self._names.append(name)
        for old, pattern, new in self._rules:
            if match := pattern.fullmatch(name):
                self._idle.pop(old, None)
                first, *rest = new.split("*")
                return first + "".join(group + text for group, text in zip(match.groups(), rest, strict=True))
        return name

    def demand_used(self) -> None:
        demand_match("rename", self._idle, self._names, "name there", lambda name, old: False, CheckpointError)


def _known(placement: Placement) -> dict[str, str | None]:
    """Names that other libraries give to parameters of this model -> our names."""
    return dict(pair for node in placement.model.nodes for pair in _aliases(node.path, node.layer))


def _aliases(path: str, layer: Layer) -> Iterator[tuple[str, str | None]]:
    for theirs, ours in layer.aliases.items():
        yield dotted(path, theirs), ours if ours is None else dotted(path, ours)
    for name, child in layer.children().items():
        yield from _aliases(dotted(path, name), child)


def _demand_all(state: TrainState, report: WeightsReport, where: str, call: str) -> None:
    """Nothing is missing but running statistics, and nothing is left over."""
    missing = [name for name in report.missing if name not in state.placement.layout.state]
    problems = (("missing", missing), ("not in the model", report.extra))
    texts = [f"{what}: {listed(sorted(names))}" for what, names in problems if names]
    if texts:
        other = "" if call == "load_weights" else "load_weights takes options: "
        raise CheckpointError(f"{where}: {'; '.join(texts)} ({other}{REMEDY})")
