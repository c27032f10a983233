"""Memory of the state, in windows that a host shares or of a rank's own, and its first values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fsdpx.core.array.arena import ALIGN, Arena, WindowMemory, address
from fsdpx.core.array.namespace import from_host
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import node_of
from fsdpx.core.comm.mesh import Axes
from fsdpx.core.state.flat_parameters import Range, Run, near
from fsdpx.core.state.ledger import Key, Ledger, LedgerRow, rows_of
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.storage import StateStorage
from fsdpx.core.state.train_state import Tie, TrainState
from fsdpx.errors import warn
from fsdpx.nn.layer import Spec

__all__ = ["allocate", "fill", "initialise", "lay_out_in_windows", "memory_of", "sharers_of"]

def memory_of(world: Communicator, xp: Any) -> WindowMemory | None:
    """Memory that ranks share, if it is of arrays of `xp` and some machine has several ranks: alike on all ranks."""
    node = node_of(world)
    if node is None or node.xp is not xp or max(map(len, node.machines)) == 1:
        return None
    return node


def sharers_of(placement: Placement, arena: Arena) -> int:
    """How many ranks of this machine can have their full parameters in common, each rank's shard a part of them, so
    that a gather moves nothing there; 0 if they cannot.

    They can where the shard axis lies inside machines; or spans machines and full parameters are kept anyway.
    Collective."""
    if arena.memory is None or not _in_memory(placement, "master"):
        return 0
    node, own_format = node_of(placement.axes.shard), placement.formats.wire is None
    fits = node is not None and own_format and (node.inside or (node.shares and placement.keep_full))
    if not all(placement.axes.world.all_gather_plain(fits)):
        return 0
    assert node is not None
    return len(node.machine)


def lay_out_in_windows(
    placement: Placement, arena: Arena, rows: Sequence[LedgerRow], what: str, together: bool
) -> bool:
    """Let the arena keep these rows in one block of shared memory: `together`, one for all ranks of a machine; else one
    for each rank, where the others can read it. False, with a warning, if a machine has no room. Collective."""
    nbytes, node, block = sum(map(_padded, rows)) + ALIGN, node_of(placement.axes.shard), None
    if together and node is not None:
        block = node.share_one(nbytes)
    elif arena.memory is not None:
        block = arena.memory.share(nbytes)
    if block is None:
        _warn(placement, what)
        return False
    arena.blocks.append(block)
    start = -address(block) % ALIGN  # each from a cache line on
    for row in rows:
        arena.adopt(row.key, block[start : start + row.nbytes].view(row.dtype))
        start += _padded(row)
    return True


def _padded(row: LedgerRow) -> int:
    return -(-row.nbytes // ALIGN) * ALIGN


def _warn(placement: Placement, what: str) -> None:
    """Once, on one rank."""
    if placement.axes.world.rank == 0:
        warn(
            f"fsdpx: a machine has too little shared memory (/dev/shm) for the {what}, so they travel as MPI messages: "
            "slower, same results. Give it more (containers: docker run --shm-size=4g)",
        )


BLOCK = 1 << 20
"""Elements of a parameter that are made at once: what they are made of is larger than they are."""


def allocate(placement: Placement, initial: bool = True) -> TrainState:
    """The state of this rank. Collective. initial: with initial parameters; else the caller fills them in."""
    world, xp = placement.axes.world, placement.xp
    common = list(placement.pace.connect())
    # ranks that do not make every step together do not come together to make shared memory
    arena = Arena(xp, memory_of(world, xp) if placement.pace.together else None)
    rows = _placed(placement, arena)
    for key, array in common:
        arena.adopt(key, array)
    storage = placement.options.storage.open(placement, rows)
    ledger = Ledger(rows, storage.mapped)
    for row in rows:
        if row.kept and not row.passing:
            ledger.arrays[row.key] = _memory(arena, ledger, row, storage)
    state = TrainState(placement, arena, ledger, _connect_ties(placement), storage)
    _initial_statistics(placement, ledger)
    if initial:
        initialise(state)
    return state


def _placed(placement: Placement, arena: Arena) -> list[LedgerRow]:
    """The rows of this rank, those that ranks share in shared memory already."""
    sharers = sharers_of(placement, arena)
    rows = list(rows_of(placement, arena.memory is not None, sharers))
    if sharers:
        full = [row for row in rows if row.key.kind == "full"]
        if not lay_out_in_windows(placement, arena, full, "full parameters", together=True):
            rows = list(rows_of(placement, True, 0))
    gradients = [row for row in rows if row.key.kind == "grad"]
    if arena.memory is not None and placement.keep_grads and _in_memory(placement, "grad"):
        lay_out_in_windows(placement, arena, gradients, "gradients", together=False)
    return rows


def _in_memory(placement: Placement, kind: str) -> bool:
    """Whether rows of this kind lie in memory: an answer that all ranks have alike, also those without such a row."""
    row = LedgerRow(Key(kind, 0), placement.formats.gradients, Range(0, 0), lifetime="step")
    return bool(placement.options.storage.place(row).level == "device")


def _memory(arena: Arena, ledger: Ledger, row: LedgerRow, storage: StateStorage) -> Any:
    if row.inside is not None:
        return ledger.arrays[row.inside][row.at : row.at + row.elements]
    if row.level == "map":
        return storage.mapped(row)
    return arena.keep(row.key, row.elements, row.dtype)


def _initial_statistics(placement: Placement, ledger: Ledger) -> None:
    for row in ledger:
        if row.key.kind == "statistic":
            spec, seed = placement.layout.state[row.key.name], placement.options.seed
            values = spec.init(seed, row.key.name, 0, spec.size, spec.shape).astype(row.dtype)
            ledger.arrays[row.key][...] = from_host(placement.xp, values)


def initialise(state: TrainState) -> None:
    """Fill this rank's shards by (seed, name, global range): the values do not see the layout."""
    layout, seed = state.placement.layout, state.seed
    spread = layout.spread

    def values(name: str, start: int, stop: int) -> np.ndarray:
        spec = layout.specs[name]
        if spec.cut is None or spread.width == 1:
            return spec.init(seed, name, start, stop, spec.shape)
        runs = spec.cut.runs(spec.shape, spread.rank, spread.width, start, stop)
        return np.concatenate([part for some in near(runs, BLOCK) for part in _of_runs(spec, seed, name, some)])

    def read(name: str, start: int, target: Any) -> bool:
        """Whether what is in a file is there now: it goes to its place without a copy in between."""
        spec = layout.specs[name]
        into = getattr(spec.init, "into", None) if spec.cut is None or spread.width == 1 else None
        return into is not None and into(target, start)

    fill(state, values, BLOCK, read)
    state.placement.pace.initialised(state)


def fill(
    state: TrainState, values: Any, most: int = sys.maxsize, read: Callable[[str, int, Any], bool] | None = None
) -> None:
    """Set this rank's shards from `values(parameter name, first element, one past the last)`, of what its line of the
    tensor axis holds of the parameter. most: elements of values that are asked for at a time. read: fills an array with
    the elements from one on by itself, or says that it does not."""
    for p, page in state.placement.pages.items():
        for field, first, own in page.page.held(state.ledger.array("master", p), page.mine):
            size = int(own.size)
            if read is not None and size and read(field.source, first, own):
                continue
            for start in range(0, size, most):
                stop = min(start + most, size)
                target, host = own[start:stop], values(field.source, first + start, first + stop)
                target[...] = from_host(state.placement.xp, host.astype(target.dtype, copy=False))


def _of_runs(spec: Spec, seed: int, name: str, runs: Sequence[Run]) -> list[Any]:
    first, last = runs[0][0], runs[-1][1]
    made = spec.init(seed, name, first, last, spec.shape)
    return [made[a - first : b - first] for a, b in runs]


def _connect_ties(placement: Placement) -> dict[int, Tie]:
    """The ties of this rank by their first page. Collective."""
    layout, axes, place = placement.layout, placement.axes, placement.axes.coordinates
    home = {p: stage.rank for stage in reversed(placement.stages) for p in stage.pages}
    ties: dict[int, Tie] = {}
    for pages in layout.twins:
        ranks = tuple(home[p] for p in pages)
        comm = _peers(axes, sorted(set(ranks))) if len(set(ranks)) > 1 else None
        if pages[0] in placement.stage.ties:
            ties[pages[0]] = Tie(pages, ranks, comm, layout.pages[pages[0]].partial)
        elif comm is not None:
            comm.close()
    for p in placement.stage.ties.keys() - ties.keys():
        ties[p] = Tie((p,), (place.pipe,), None, True)
    return ties


def _peers(axes: Axes, ranks: Sequence[int]) -> Communicator:
    """The ranks of this line of the pipe that stand at `ranks`; alone, where this one does not. Collective."""
    place = axes.coordinates
    line = [axes.mesh.rank(place._replace(pipe=rank)) for rank in ranks]
    return axes.subgroup("peers", line if place.pipe in ranks else [axes.world.rank])
