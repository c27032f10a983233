"""How much memory activations take: the distinct arrays that are alive in slots between actions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdpx.program import SLOTS
from fsdpx.state.state import TrainState
from fsdpx.state.transfer import Transfer

__all__ = ["activation_bytes", "roots"]


def activation_bytes(state: TrainState) -> int:
    """Bytes of shape-only arrays in activation slots; views count once, with the array that they are views of.

    Parameters that a layer keeps for backward are not counted: the ledger counts them."""
    found: dict[int, int] = {}
    for slot, value in state.store.items():
        if SLOTS[slot.kind].memory == "activations":
            found.update(roots(value.finish() if isinstance(value, Transfer) else value))  # on its way, or there
    arena = state.arena
    planned = {id(buffer.root) for buffer in (*arena.kept.values(), *([] if arena.slab is None else [arena.slab]))}
    return sum(nbytes for key, nbytes in found.items() if key not in planned)


def roots(value: Any) -> Iterable[tuple[int, int]]:
    """(identity, bytes) of the memory of every shape-only array in tuples, lists and dicts."""
    if getattr(value, "holds_no_data", False):
        yield id(value.root), value.root.nbytes
    elif isinstance(value, dict):
        for one in value.values():
            yield from roots(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from roots(one)
