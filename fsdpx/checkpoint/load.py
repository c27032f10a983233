"""Loading, at any number of ranks: all is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.checkpoint.agree import alone, same, together
from fsdpx.checkpoint.format import Entry, array_type
from fsdpx.checkpoint.pieces import held, slot_name
from fsdpx.checkpoint.plan import STATE, STATE_KEY
from fsdpx.checkpoint.read import read, sums
from fsdpx.checkpoint.save import added
from fsdpx.checkpoint.source import Source, checkpoint, weights
from fsdpx.checkpoint.state import State, demand_state, restore
from fsdpx.comm.communicator import Communicator
from fsdpx.engine.engine import Engine
from fsdpx.errors import CheckpointError

__all__ = ["damaged", "load", "load_weights"]

Wanted = dict[str, tuple[np.dtype, tuple[int, ...]]]
FLOATS = ("F64", "F32", "F16", "BF16")


def load(engine: Engine, path: Path, loader: Any, convert: bool, verify: bool) -> State:
    """Take weights, optimiser and everything else from a checkpoint. Collective."""
    world, where = engine.axes.world, f"load {path}"
    same(world, "load", path=str(path), options=f"convert={convert}, verify={verify}")
    source = alone(world, where, lambda: checkpoint(path))
    together(world, where, lambda: _demand_idle(engine))
    if STATE not in source.files:
        raise CheckpointError(f"{where}: it holds weights alone; use load_weights")
    state = State.parse(source.files[STATE].metadata.get(STATE_KEY), str(source.folder / STATE))
    _demand(_weights_of(engine), source.only(state=False), where, convert)
    _demand_slots(engine, state, source, where, convert)
    if loader is not None:
        together(world, where, lambda: _demand_data(loader, state))
    if verify:
        _demand_intact(world, source, where)
    _fill(engine, source, where, lambda name: True)
    restore(engine, state)
    if loader is not None:
        together(world, where, lambda: loader.load_state_dict(state.data))
    return state


def load_weights(engine: Engine, path: Path, convert: bool) -> None:
    """Take the weights alone, from a checkpoint or from safetensors files of anybody. Collective."""
    world, where = engine.axes.world, f"load_weights {path}"
    same(world, "load_weights", path=str(path), options=f"convert={convert}")
    source = _named(engine, alone(world, where, lambda: weights(path)))
    together(world, where, lambda: _demand_idle(engine))
    wanted = _weights_of(engine)
    state = engine.layout.state.keys() - source.places.keys()
    _demand({n: w for n, w in wanted.items() if n not in state}, source, where, convert)
    if source.manifest is not None:
        _demand_intact(world, source, where)
    chosen = wanted.keys() - state
    _fill(engine, source, where, lambda name: name in chosen)


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


def _fill(engine: Engine, source: Source, where: str, chosen: Callable[[str], bool]) -> None:
    """From here on the trainer changes."""
    world = engine.axes.world
    world.barrier(what=where).wait()  # others may still read what we share with them
    pieces = (piece for piece in held(engine) if piece.name in source.places and chosen(piece.name))
    together(world, where, lambda: read(source, pieces, engine.xp))
    for slot in [slot for slot in engine.store if slot.startswith("full")]:
        del engine.store[slot]


def _demand_idle(engine: Engine) -> None:
    if getattr(engine.xp, "holds_no_data", False):
        raise CheckpointError("a dry run has no data to load into")


def _demand_data(loader: Any, state: State) -> None:
    demand_state(loader, "load_state_dict")
    if state.data is None:
        raise CheckpointError("it was saved without a loader, so it does not know a place in the data")


def _weights_of(engine: Engine) -> Wanted:
    return {name: (engine.dtype, spec.shape) for name, spec in engine.layout.specs.items()}


def _demand_slots(engine: Engine, state: State, source: Source, where: str, convert: bool) -> None:
    slots = tuple(engine.optimizer.slots)
    if slots != state.slots:
        raise CheckpointError(
            f"{where}: the optimiser does not fit: {state.optimizer} with {_slots(state.slots)} in the checkpoint, "
            f"{type(engine.optimizer).__name__} with {_slots(slots)} here; load_weights takes the weights alone"
        )
    specs = engine.layout.specs.items()
    wanted = {slot_name(s, n): (engine.dtype, spec.shape) for s in slots for n, spec in specs if spec.trainable}
    _demand(wanted, source.only(state=True), where, convert)


def _slots(slots: tuple[str, ...]) -> str:
    return f"slots {', '.join(slots)}" if slots else "no slots"


def _named(engine: Engine, source: Source) -> Source:
    """The source with the canonical names of tied parameters; a second copy of one is left out."""
    layout, files = engine.layout, {}
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
