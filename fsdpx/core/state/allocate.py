"""Allocate and initialize the training state of a rank, in private memory or in memory that the ranks of a host
share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fsdpx.core.array.arena import ALIGN, Arena, WindowMemory, get_data_pointer
from fsdpx.core.array.namespace import from_host
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import find_node_communicator
from fsdpx.core.comm.mesh import MeshAxes
from fsdpx.core.state.flat_parameters import ElementRange, Interval, group_nearby_runs
from fsdpx.core.state.ledger import Ledger, LedgerKey, LedgerRow, list_ledger_rows
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.storage import StateStorage
from fsdpx.core.state.train_state import TieGroup, TrainState
from fsdpx.errors import warn
from fsdpx.nn.layer import ParameterSpec

__all__ = [
    "agree_on_sharer_count",
    "allocate_state",
    "fill_parameter_shards_by_function",
    "find_shared_memory_allocator",
    "initialize_parameters",
    "try_allocate_ledger_rows_in_windows",
]


def find_shared_memory_allocator(world: Communicator, xp: Any) -> WindowMemory | None:
    """Return an allocator of memory that the ranks of a host share. Return None on all ranks if no host has several
    ranks, or if shared memory cannot hold arrays of the array module `xp`."""
    node = find_node_communicator(world)
    if node is None or node.xp is not xp or max(map(len, node.ranks_by_host)) == 1:
        return None
    return node


def agree_on_sharer_count(placement: Placement, arena: Arena) -> int:
    """Return the number of ranks on this host that can share one copy of the full parameters, or 0 if they cannot share
    one. With a shared copy, the shard of each rank is a view of it, so an all-gather moves no data within the host.
    Collective.

    Ranks can share a copy if all ranks along each shard axis are on one host, or if full parameters are kept until the
    update."""
    if arena.memory is None or not _are_rows_in_memory(placement, "master"):
        return 0
    node, own_format = find_node_communicator(placement.axes.shard), placement.formats.wire is None
    fits = (
        node is not None
        and own_format
        and (node.is_single_host or (node.is_sharing_useful and placement.keeps_full_parameters))
    )
    if not all(placement.axes.world.all_gather_value(fits)):
        return 0
    assert node is not None
    return len(node.ranks_on_host)


def try_allocate_ledger_rows_in_windows(
    placement: Placement, arena: Arena, rows: Sequence[LedgerRow], what: str, together: bool
) -> bool:
    """Allocate the arrays in these rows of the ledger (table of a rank's arrays) in shared memory, and return True. If
    `together` is True, all ranks of a host share one block; otherwise, each rank has its own block, which other ranks
    can read. If a host has too little shared memory, issue a warning and return False. `what` names the arrays in the
    warning. Collective."""
    nbytes, node, block = (
        sum(map(_count_aligned_bytes, rows)) + ALIGN,
        find_node_communicator(placement.axes.shard),
        None,
    )
    if together and node is not None:
        block = node.allocate_node_buffer(nbytes)
    elif arena.memory is not None:
        block = arena.memory.allocate_shared(nbytes)
    if block is None:
        _warn_on_rank0_of_little_shared_memory(placement, what)
        return False
    arena.blocks.append(block)
    start = -get_data_pointer(block) % ALIGN  # align the first row to a cache line
    for row in rows:
        arena.register_buffer(row.key, block[start : start + row.nbytes].view(row.dtype))
        start += _count_aligned_bytes(row)
    return True


def _count_aligned_bytes(row: LedgerRow) -> int:
    return -(-row.nbytes // ALIGN) * ALIGN


def _warn_on_rank0_of_little_shared_memory(placement: Placement, what: str) -> None:
    if placement.axes.world.rank == 0:
        warn(
            f"fsdpx: a machine has too little shared memory (/dev/shm) for the {what}, so they are sent as MPI "
            "messages, which is slower with the same results. Provide more (containers: docker run --shm-size=4g)"
        )


BLOCK_ELEMENTS = 1 << 20
"""Maximum number of parameter elements that are initialized at a time. This limits the temporary arrays of the
initialization, which are larger than the elements themselves."""


def allocate_state(placement: Placement, initial: bool = True) -> TrainState:
    """Allocate the training state of this rank. If `initial` is True, also initialize the parameters; otherwise the
    caller must fill them. Collective."""
    world, xp = placement.axes.world, placement.xp
    common = list(placement.sync_policy.open_shared_memory())
    # asynchronous training does not use shared memory, because ranks would have to wait for each other during
    # allocation
    arena = Arena(xp, find_shared_memory_allocator(world, xp) if placement.sync_policy.is_synchronous else None)
    rows = _list_arrays_and_allocate_shared(placement, arena)
    for key, array in common:
        arena.register_buffer(key, array)
    storage = placement.options.storage.open_storage(placement, rows)
    ledger = Ledger(rows, storage.map_array)
    for row in rows:
        if row.is_kept and not row.is_freed_by_update:
            ledger.arrays[row.key] = _allocate_ledger_row(arena, ledger, row, storage)
    state = TrainState(placement, arena, ledger, _create_tie_group_communicators(placement), storage)
    _fill_initial_statistics(placement, ledger)
    if initial:
        initialize_parameters(state)
    return state


def _list_arrays_and_allocate_shared(placement: Placement, arena: Arena) -> list[LedgerRow]:
    """Return this rank's rows of the ledger (table of its arrays), one for each array. Also allocate the arrays in
    shared memory. Collective."""
    sharers = agree_on_sharer_count(placement, arena)
    rows = list(list_ledger_rows(placement, arena.memory is not None, sharers))
    if sharers:
        full = [row for row in rows if row.key.kind == "full"]
        if not try_allocate_ledger_rows_in_windows(placement, arena, full, "full parameters", together=True):
            rows = list(list_ledger_rows(placement, True, 0))
    gradients = [row for row in rows if row.key.kind == "grad"]
    if arena.memory is not None and placement.keeps_full_gradients and _are_rows_in_memory(placement, "grad"):
        try_allocate_ledger_rows_in_windows(placement, arena, gradients, "gradients", together=False)
    return rows


def _are_rows_in_memory(placement: Placement, kind: str) -> bool:
    """Return whether arrays of this kind, such as "master" or "grad", are kept in device memory and not offloaded. The
    result is the same on all ranks, including ranks without arrays of this kind."""
    row = LedgerRow(LedgerKey(kind, 0), placement.formats.gradients, ElementRange(0, 0), lifetime="step")
    return bool(placement.options.storage.assign_row_level(row).level == "device")


def _allocate_ledger_row(arena: Arena, ledger: Ledger, row: LedgerRow, storage: StateStorage) -> Any:
    if row.inside is not None:
        return ledger.arrays[row.inside][row.at : row.at + row.elements]
    if row.level == "map":
        return storage.map_array(row)
    return arena.get_or_create_buffer(row.key, row.elements, row.dtype)


def _fill_initial_statistics(placement: Placement, ledger: Ledger) -> None:
    for row in ledger:
        if row.key.kind == "statistic":
            spec, seed = placement.layout.statistic_specs[row.key.name], placement.options.seed
            values = spec.init(seed, row.key.name, 0, spec.size, spec.shape).astype(row.dtype)
            ledger.arrays[row.key][...] = from_host(placement.xp, values)


def initialize_parameters(state: TrainState) -> None:
    """Initialize this rank's parameter shards. The value of an element depends only on the seed, the parameter name and
    the element's index in the full parameter. It does not depend on how parameters are sharded."""
    layout, seed = state.placement.layout, state.seed
    spread = layout.spread

    def draw_values(name: str, start: int, stop: int) -> np.ndarray:
        spec = layout.specs[name]
        if spec.cut is None or spread.width == 1:
            return spec.init(seed, name, start, stop, spec.shape)
        runs = spec.cut.iterate_full_intervals(spec.shape, spread.rank, spread.width, start, stop)
        return np.concatenate(
            [
                part
                for some in group_nearby_runs(runs, BLOCK_ELEMENTS)
                for part in _draw_initial_values(spec, seed, name, some)
            ]
        )

    def read_values_into(name: str, start: int, target: Any) -> bool:
        """Read initial values from a file directly into `target`, and return True. If the parameter is not initialized
        from a file, or only part of it is needed because of tensor parallelism, do nothing and return False."""
        spec = layout.specs[name]
        into = getattr(spec.init, "try_read_into", None) if spec.cut is None or spread.width == 1 else None
        return into is not None and into(target, start)

    fill_parameter_shards_by_function(state, draw_values, BLOCK_ELEMENTS, read_values_into)
    state.placement.sync_policy.on_initialized(state)


def fill_parameter_shards_by_function(
    state: TrainState,
    values: Any,
    max_elements: int = sys.maxsize,
    read_into: Callable[[str, int, Any], bool] | None = None,
) -> None:
    """Fill this rank's parameter shards with the results of `values(parameter name, start, stop)`.

    `start` and `stop` are element indices within the part of the parameter that this tensor rank holds. They are at
    most `max_elements` apart. `read_into` is an optional function (name, start, array). It fills the array and returns
    True, or returns False if `values` must be called instead."""
    for p, page in state.placement.pages.items():
        for field, first, own_array in page.page.iterate_fields_in_range(
            state.ledger.get_array("master", p), page.own_range
        ):
            size = int(own_array.size)
            if read_into is not None and size and read_into(field.source, first, own_array):
                continue
            for start in range(0, size, max_elements):
                stop = min(start + max_elements, size)
                target, host = own_array[start:stop], values(field.source, first + start, first + stop)
                target[...] = from_host(state.placement.xp, host.astype(target.dtype, copy=False))


def _draw_initial_values(spec: ParameterSpec, seed: int, name: str, runs: Sequence[Interval]) -> list[Any]:
    first, last = runs[0][0], runs[-1][1]
    initial_values = spec.init(seed, name, first, last, spec.shape)
    return [initial_values[a - first : b - first] for a, b in runs]


def _create_tie_group_communicators(placement: Placement) -> dict[int, TieGroup]:
    """Create the communicators for tied parameters, and return a dict of this rank's tie groups, keyed by the index of
    their first page (flat parameter buffer). Collective."""
    layout, axes, place = placement.layout, placement.axes, placement.axes.coordinates
    home = {p: stage.rank for stage in reversed(placement.stages) for p in stage.pages}
    ties: dict[int, TieGroup] = {}
    for pages in layout.twins:
        ranks = tuple(home[p] for p in pages)
        comm = _make_pipe_subgroup(axes, sorted(set(ranks))) if len(set(ranks)) > 1 else None
        if pages[0] in placement.stage.page_groups_with_summed_gradients:
            ties[pages[0]] = TieGroup(pages, ranks, comm, layout.pages[pages[0]].partial)
        elif comm is not None:
            comm.close()
    for p in placement.stage.page_groups_with_summed_gradients.keys() - ties.keys():
        ties[p] = TieGroup((p,), (place.pipe,), None, True)
    return ties


def _make_pipe_subgroup(axes: MeshAxes, ranks: Sequence[int]) -> Communicator:
    """Return a communicator for the given `ranks` of this rank's pipeline. All other ranks get a communicator that
    contains only themselves. Collective."""
    place = axes.coordinates
    line = [axes.mesh.rank_of(place._replace(pipe=rank)) for rank in ranks]
    return axes.subgroup("peers", line if place.pipe in ranks else [axes.world.rank])
