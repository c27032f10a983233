"""Recompute (activation checkpointing, Chen et al. 2016): which units keep only what they read, and run forward again
before their backward."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdpx.engine.activations import roots
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Env
from fsdpx.program import Action

if TYPE_CHECKING:
    from fsdpx.engine.engine import Engine, Microbatch

__all__ = ["Recompute", "recompute"]

_SIZE = re.compile(r"\s*([0-9.]+)\s*([KMG]i?B|B)\s*")
_BYTES = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Recompute:
    """every: each so many units one, 0 none. budget: bytes that what backward needs may take on a rank, or None.
    cores: kinds of layers that keep less inside their unit."""

    every: int = 0
    budget: int | None = None
    cores: frozenset[str] = frozenset()

    def units(self, engine: Engine, order: Sequence[Action], batches: Sequence[Microbatch | None]) -> frozenset[int]:
        """The units of this rank that run again, in a step of these microbatches."""
        here = engine.stage.here
        if self.budget is not None:
            return _within(self.budget, engine, order, [b for b in batches if b is not None])
        return frozenset(here[self.every - 1 :: self.every]) if self.every else frozenset()


def recompute(choice: Any) -> Recompute:
    """From what a user says: None, "all", "attention", every k-th unit as a number, or a budget such as "512MiB"."""
    if choice is None:
        return Recompute()
    if choice is True or choice == "all":
        return Recompute(every=1)
    if choice == "attention":
        return Recompute(cores=frozenset({"attention"}))
    if isinstance(choice, int) and not isinstance(choice, bool) and choice > 0:
        return Recompute(every=choice)
    match = _SIZE.fullmatch(choice) if isinstance(choice, str) else None
    if match is None:
        raise ConfigError(
            f"recompute={choice!r}: choose 'all', 'attention', a number k for every k-th unit, or the bytes that may "
            "be kept for backward, such as '512MiB'"
        )
    return Recompute(budget=int(float(match[1]) * _BYTES[match[2][0]]))


def _within(budget: int, engine: Engine, order: Sequence[Action], batches: Sequence[Microbatch]) -> frozenset[int]:
    """As few units as it takes: those that save most go first."""
    if not batches:
        return frozenset()
    largest = max(batches, key=lambda b: b.inputs[0].shape[0])
    alive = _alive(engine, order)
    kept, least = {}, {}
    for u in engine.stage.here:
        whole, inputs = kept_bytes(engine, u, largest)
        kept[u], least[u] = whole * alive[u], inputs * alive[u]
    chosen: set[int] = set()
    for u in sorted(kept, key=lambda u: least[u] - kept[u]):
        if sum(kept.values()) <= budget:
            break
        chosen.add(u)
        kept[u] = least[u]
    if sum(kept.values()) > budget:
        raise ConfigError(
            f"recompute: {budget:,} bytes are not enough on rank {engine.axes.world.rank}: with every unit recomputed "
            f"{sum(kept.values()):,} are kept for backward; use more microbatches, or allow more"
        )
    return frozenset(chosen)


def _alive(engine: Engine, order: Sequence[Action]) -> dict[int, int]:
    """Unit -> the most microbatches whose forward is done and whose backward is not."""
    most: dict[int, int] = {}
    for stage, units in engine.stage.parts:
        now = best = 0
        for action in order:
            if action.unit == stage and action.op in "FBI":
                now += 1 if action.op == "F" else -1
                best = max(best, now)
        most |= dict.fromkeys(units, best)
    return most


def kept_bytes(engine: Engine, unit: int, batch: Microbatch) -> tuple[int, int]:
    """Bytes that a unit's forward keeps for backward, and bytes of what it reads alone."""
    from fsdpx.array import shapes as xp
    from fsdpx.array.random import Random
    from fsdpx.engine import compute
    from fsdpx.engine.lines import Stacks

    one, stage = engine.layout.units[unit], engine.stage.units[unit]
    values = {v: engine.message(v, batch) for v in (*stage.takes, *stage.reads)}
    read = list(values.values())
    root = Env(xp, engine.imagined, Random(0), True, recompute=engine.recompute.cores)
    envs, spread = [root.at(node.path) for node in one.nodes], engine.layout.spread
    params = [
        {name: xp.ShapeArray(spread.shape(spec), engine.dtype) for name, spec in node.layer.specs().items()}
        for node in one.nodes
    ]
    saved = compute.forward(one, envs, params, values, True, Stacks())
    mine = {key for p in params for key, _ in roots(p)}
    return _total(roots(saved), mine), _total(roots(read), mine)


def _total(found: Iterable[tuple[int, int]], but: set[int]) -> int:
    return sum(nbytes for key, nbytes in dict(found).items() if key not in but)
