"""Which rows of the ledger lie where the other ranks of a machine can reach them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.array.arena import ALIGN, Arena, WindowMemory, address
from fsdpx.comm.backend import FakeNode
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.opening import node_of
from fsdpx.state.ledger import LedgerRow
from fsdpx.state.placement import Placement

__all__ = ["lay_out_in_windows", "memory_of", "sharers_of"]


def memory_of(world: Communicator, xp: Any) -> WindowMemory | None:
    """Memory that ranks share, if arrays are NumPy's and some machine has several ranks: alike on all ranks.

    Arrays without data share the memory of ranks that do not exist."""
    node = node_of(world)
    able = xp is np or (getattr(xp, "holds_no_data", False) and isinstance(node, FakeNode))
    return node if able and node is not None and max(map(len, node.machines)) > 1 else None


def sharers_of(placement: Placement, arena: Arena) -> int:
    """How many ranks of this machine can have their full parameters in common, each rank's shard a part of them, so
    that a gather moves nothing there; 0 if they cannot.

    They can where the shard axis lies inside machines; or spans machines and full parameters are kept anyway.
    Collective."""
    if arena.memory is None or placement.offloads("parameters"):
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
        warnings.warn(
            f"fsdpx: a machine has too little shared memory (/dev/shm) for the {what}, so they travel as MPI messages: "
            "slower, same results. Give it more (containers: docker run --shm-size=4g)",
            RuntimeWarning,
            stacklevel=2,
        )
