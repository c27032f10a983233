"""Loading, at any number of ranks: all is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpx.checkpoint.agree import alone, place, together
from fsdpx.checkpoint.files import STATE, STATE_KEY
from fsdpx.checkpoint.format import Entry, array_type
from fsdpx.checkpoint.pieces import held
from fsdpx.checkpoint.read import read, sums
from fsdpx.checkpoint.save import added
from fsdpx.checkpoint.source import Source, checkpoint, weights
from fsdpx.checkpoint.state import Scalars, demand_state, restore
from fsdpx.comm.communicator import Communicator
from fsdpx.errors import CheckpointError
from fsdpx.state.rows import saved_tensors
from fsdpx.state.state import TrainState

__all__ = ["damaged", "load", "load_weights"]

Wanted = dict[str, tuple[np.dtype, tuple[int, ...]]]
FLOATS = ("F64", "F32", "F16", "BF16")


def load(state: TrainState, path: Any, loader: Any, convert: bool, verify: bool) -> Scalars:
    """Take weights, optimiser and everything else from a checkpoint. Collective."""
    world = state.placement.axes.world
    options = f"convert={convert}, verify={verify}, {'no ' if loader is None else ''}loader"
    path = place(world, "load", path, options=options)
    where = f"load {path}"
    source = alone(world, where, lambda: checkpoint(path))
    together(world, where, lambda: _demand_data_here(state))
    if STATE not in source.files:
        raise CheckpointError(f"{where}: it holds weights alone; use load_weights")
    scalars = Scalars.parse(source.files[STATE].metadata.get(STATE_KEY), str(source.folder / STATE))
    _demand(_weights_of(state), source.only(state=False), where, convert)
    _demand_slots(state, scalars, source, where, convert)
    if loader is not None:
        together(world, where, lambda: _demand_data(loader, scalars))
    if verify:
        _demand_intact(world, source, where)
    if loader is not None:  # it may refuse its state, and nothing else has changed then
        together(world, where, lambda: loader.load_state_dict(scalars.data))
    _fill(state, source, where, lambda name: True)
    restore(state, scalars)
    return scalars


def load_weights(state: TrainState, path: Any, convert: bool) -> None:
    """Take the weights alone, from a checkpoint or from safetensors files of anybody. Collective."""
    world = state.placement.axes.world
    path = place(world, "load_weights", path, options=f"convert={convert}")
    where = f"load_weights {path}"
    source = _named(state, alone(world, where, lambda: weights(path)))
    together(world, where, lambda: _demand_data_here(state))
    wanted = _weights_of(state)
    missing = state.placement.layout.state.keys() - source.places.keys()
    _demand({n: w for n, w in wanted.items() if n not in missing}, source, where, convert)
    if source.manifest is not None:
        _demand_intact(world, source, where)
    chosen = wanted.keys() - missing
    _fill(state, source, where, lambda name: name in chosen)


def damaged(source: Source, rank: int = 0, world: Communicator | None = None) -> list[str]:
    """Names of the tensors of a checkpoint whose bytes are not as written, on rank 0. Collective over `world`."""
    assert source.manifest is not None
    found = sums(source, rank, 1 if world is None else world.size)
    total = found if world is None else added(world, found)
    return source.manifest.wrong(source.files, total.tolist()) if rank == 0 else []


def _demand_intact(world: Communicator, source: Source, where: str) -> None:
    """All bytes are those that were written; each rank looks at an even part of them."""
    parts: list[np.ndarray] = []
    together(world, where, lambda: parts.append(sums(source, world.rank, world.size)))
    total = added(world, parts[0])

    def judge() -> None:
        assert source.manifest is not None
        if wrong := source.manifest.wrong(source.files, total.tolist()):
            raise CheckpointError(f"{source.folder}: damaged: the digest does not fit of {_listed(wrong)}")

    alone(world, where, judge)


def _fill(state: TrainState, source: Source, where: str, chosen: Callable[[str], bool]) -> None:
    """From here on the trainer changes."""
    world = state.placement.axes.world
    world.barrier(what=where).wait()  # others may still read what we share with them
    pieces = (piece for piece in held(state) if piece.name in source.places and chosen(piece.name))
    together(world, where, lambda: read(source, pieces, state.placement.xp))
    state.replaced()


def _demand_data_here(state: TrainState) -> None:
    if state.placement.imaginary:
        raise CheckpointError("a dry run has no data to load into")


def _demand_data(loader: Any, scalars: Scalars) -> None:
    demand_state(loader, "load_state_dict")
    if scalars.data is None:
        raise CheckpointError("it was saved without a loader, so it does not know a place in the data")


def _weights_of(state: TrainState) -> Wanted:
    return {name: (state.placement.dtype, spec.shape) for name, spec in state.placement.layout.specs.items()}


def _demand_slots(state: TrainState, scalars: Scalars, source: Source, where: str, convert: bool) -> None:
    place, slots = state.placement, tuple(state.placement.optimizer.slots)
    if slots != scalars.slots:
        raise CheckpointError(
            f"{where}: the optimiser does not fit: {scalars.optimizer} with {_slots(scalars.slots)} in the checkpoint, "
            f"{type(place.optimizer).__name__} with {_slots(slots)} here; load_weights takes the weights alone"
        )
    rest = {n: (place.dtype, s.shape) for n, s in saved_tensors(place).items() if n not in place.layout.specs}
    _demand(rest, source.only(state=True), where, convert)


def _slots(slots: tuple[str, ...]) -> str:
    return f"slots {', '.join(slots)}" if slots else "no slots"


def _named(state: TrainState, source: Source) -> Source:
    """The source with the canonical names of tied parameters; a second copy of one is left out."""
    layout, files = state.placement.layout, {}
    seen: set[str] = {name for name in source.places if layout.canonical(name) == name}
    for file, contents in source.files.items():
        tensors: dict[str, Entry] = {}
        for name, entry in contents.tensors.items():
            canonical = layout.canonical(name)
            if canonical == name or canonical not in seen:
                tensors[canonical] = entry
                seen.add(canonical)
        files[file] = type(contents)(tensors, contents.metadata, contents.header, contents.size)
    return Source(source.folder, files, source.manifest)


def _demand(wanted: Wanted, source: Source, where: str, convert: bool) -> None:
    """Names, shapes and formats fit, or CheckpointError says what does not."""
    found = {name: entry for name, (_, entry) in source.places.items()}
    _none(where, "missing", wanted.keys() - found.keys())
    _none(where, "not in the model", found.keys() - wanted.keys())
    shapes = {n: f"{n} is {found[n].shape} instead of {s}" for n, (_, s) in wanted.items() if found[n].shape != s}
    _none(where, "of the wrong shape", shapes.values())
    for name, (dtype, _) in wanted.items():
        code = found[name].code
        if code not in FLOATS:
            raise CheckpointError(f"{where}: {name} has the format {code}: weights are {', '.join(FLOATS)}")
        if array_type(code) != dtype and not convert:
            raise CheckpointError(
                f"{where}: {name} is {array_type(code)} in the file and {dtype} in the trainer: "
                "say convert=True to round or widen it"
            )


def _none(where: str, what: str, names: Any) -> None:
    if names:
        raise CheckpointError(f"{where}: {what}: {_listed(sorted(names))}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
