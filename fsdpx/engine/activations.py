"""How much memory activations take: the distinct arrays that are alive in slots between actions."""

from collections.abc import Iterable
from typing import Any

from fsdpx.engine.engine import Engine
from fsdpx.program import SLOTS, kind_of

__all__ = ["activation_bytes"]


def activation_bytes(engine: Engine) -> int:
    """Bytes of shape-only arrays in activation slots; views count once, with the array that they are views of.

    Parameters that a layer keeps for backward are not counted: the arena counts them.
    """
    roots: dict[int, int] = {}
    for slot, value in engine.store.items():
        if SLOTS[kind_of(slot)].memory == "activations":
            roots.update(_roots(value))
    arena = engine.arena
    planned = {id(buffer.root) for buffer in (*arena.kept.values(), *([] if arena.slab is None else [arena.slab]))}
    return sum(nbytes for key, nbytes in roots.items() if key not in planned)


def _roots(value: Any) -> Iterable[tuple[int, int]]:
    if getattr(value, "holds_no_data", False):
        yield id(value.root), value.root.nbytes
    elif isinstance(value, dict):
        for one in value.values():
            yield from _roots(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _roots(one)
