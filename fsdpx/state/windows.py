"""Which kept buffers lie where the other ranks of a machine can reach them, and what follows for their layout."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from fsdpx.array.arena import ALIGN, Memory
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.opening import node_of
from fsdpx.engine.engine import Engine

__all__ = ["memory_of", "share_gradients", "share_parameters"]


def memory_of(world: Communicator, xp: Any) -> Memory | None:
    """Memory that ranks share, if arrays are NumPy's and some machine has several ranks: alike on all ranks."""
    node = node_of(world)
    shared = xp.__name__ == "numpy" and node is not None and max(map(len, node.machines)) > 1
    return node if shared else None


def share_parameters(engine: Engine) -> bool:
    """Full parameters once per machine, each rank's shard a part of them: then a gather moves nothing there.

    Where the shard axis lies inside machines; or spans machines and the full parameters are kept anyway. Collective.
    """
    if engine.arena.memory is None:
        return False
    node = node_of(engine.axes.shard)
    fits = node is not None and engine.wire is None and (node.inside or (node.shares and engine.keep_full))
    if not all(engine.axes.world.all_gather_object(fits)):
        return False
    assert node is not None
    pages = [engine.layout.pages[p] for p in engine.stage.pages]
    sizes = [page.size for page in pages]
    block = node.share_one(_nbytes(engine, sizes))
    if block is None:
        _say(engine, "full parameters")
        return False
    engine.arena.blocks.append(block)
    for page, buffer in zip(pages, _cut(engine, block, sizes), strict=True):
        engine.arena.adopt(f"full{page.index}", "parameters", buffer, buffer.nbytes // len(node.machine))
    return True


def share_gradients(engine: Engine) -> None:
    """Full gradients that are kept for the step, where the others can add them up. Collective."""
    memory = engine.arena.memory
    if memory is None or not engine.whole_grads:
        return
    pages = [engine.layout.pages[p] for p in engine.stage.trained]
    sizes = [page.size * engine.copies for page in pages]
    block = memory.share(_nbytes(engine, sizes))
    if block is None:
        return _say(engine, "gradients")
    engine.arena.blocks.append(block)
    for page, buffer in zip(pages, _cut(engine, block, sizes), strict=True):
        engine.arena.adopt(f"grad{page.index}", "gradients", buffer)


def _nbytes(engine: Engine, sizes: Sequence[int]) -> int:
    return sum(_padded(engine, size) for size in sizes) + ALIGN


def _padded(engine: Engine, size: int) -> int:
    return -(-size * engine.dtype.itemsize // ALIGN) * ALIGN


def _cut(engine: Engine, block: Any, sizes: Sequence[int]) -> list[Any]:
    """Arrays of these sizes one after the other, each from a cache line on."""
    start = -block.__array_interface__["data"][0] % ALIGN
    made = []
    for size in sizes:
        made.append(block[start : start + size * engine.dtype.itemsize].view(engine.dtype))
        start += _padded(engine, size)
    return made


def _say(engine: Engine, what: str) -> None:
    """Once, on one rank."""
    if engine.axes.world.rank == 0:
        warnings.warn(
            f"fsdpx: a machine has too little shared memory (/dev/shm) for the {what}, so they travel as MPI messages: "
            "slower, same results. Give it more (containers: docker run --shm-size=4g)",
            RuntimeWarning,
            stacklevel=2,
        )
