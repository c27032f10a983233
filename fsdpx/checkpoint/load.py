"""Loading, at any number of ranks: all is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from fsdpx.checkpoint.commit import alone, place, together
from fsdpx.checkpoint.disk import STATE, STATE_KEY, Tensors
from fsdpx.checkpoint.format import array_type
from fsdpx.checkpoint.pieces import Held, Name, arrivals, held, landed
from fsdpx.checkpoint.read import Source, checkpoint, read, sums
from fsdpx.checkpoint.save import added
from fsdpx.checkpoint.state import Scalars, demand_state, restore
from fsdpx.comm.communicator import Communicator
from fsdpx.errors import CheckpointError
from fsdpx.optim.optimizer import inside
from fsdpx.state.ledger import saved_format, saved_tensors
from fsdpx.state.state import TrainState
from fsdpx.words import left

__all__ = ["damaged", "demand_data_here", "demand_fit", "demand_intact", "fill", "listed", "load", "weights_of"]

Wanted = dict[str, tuple[np.dtype, tuple[int, ...]]]
FLOATS = ("F64", "F32", "F16", "BF16")


def load(state: TrainState, path: Any, loader: Any, convert: bool, verify: bool) -> Scalars:
    """Take weights, optimiser and everything else from a checkpoint. Collective."""
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
        read(source, chain(pieces, landed(arrivals(state, shapes))), state.placement.xp)

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
    if state.placement.imaginary:
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
            + (f". {gone}" if (gone := left(scalars.optimizer)) else "")
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
