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
from fsdpx.program import Action, Stage

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

    def units(self, engine: Engine, orders: Sequence[Sequence[Action]], batch: Microbatch | None) -> frozenset[int]:
        """The units of the whole model that run again in a step. orders: of all ranks of the pipe. batch: as large as
        any microbatch of any rank, so that all ranks choose the same."""
        if self.budget is not None and batch is not None:
            ranks = zip(engine.stages, orders, strict=True)
            chosen = [_within(self.budget, engine, stage, order, batch) for stage, order in ranks]
            return frozenset().union(*chosen)
        step = self.every
        return frozenset(u for s in engine.stages for u in s.here[step - 1 :: step]) if step else frozenset()


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


def _within(
    budget: int, engine: Engine, stage: Stage, order: Sequence[Action], batch: Microbatch
) -> frozenset[int]:
    """As few units of one rank of the pipe as it takes: those that save most go first."""
    alive = _alive(stage, order)
    sizes = {u: kept_bytes(engine, stage, u, batch) for u in stage.here}
    kept = {u: whole * alive[u] for u, (whole, _) in sizes.items()}
    least = {u: inputs * alive[u] for u, (_, inputs) in sizes.items()}
    chosen: set[int] = set()
    for u in sorted(kept, key=lambda u: least[u] - kept[u]):
        if sum(kept.values()) <= budget:
            break
        chosen.add(u)
        kept[u] = least[u]
    if sum(kept.values()) > budget:
        raise ConfigError(
            f"recompute: {budget:,} bytes are not enough on rank {stage.rank} of the pipe: with every unit recomputed "
            f"{sum(kept.values()):,} are kept for backward; use more microbatches, or allow more"
        )
    return frozenset(chosen)


def _alive(stage: Stage, order: Sequence[Action]) -> dict[int, int]:
    """Unit -> the most microbatches whose forward is done and whose backward is not."""
    most: dict[int, int] = {}
    for number, units in stage.parts:
        now = best = 0
        for action in order:
            if action.unit == number and action.op in "FBI":
                now += 1 if action.op == "F" else -1
                best = max(best, now)
        most |= dict.fromkeys(units, best)
    return most


def kept_bytes(engine: Engine, stage: Stage, unit: int, batch: Microbatch) -> tuple[int, int]:
    """Bytes that a unit's forward keeps for backward, and bytes of what it reads alone."""
    from fsdpx.array import shapes as xp
    from fsdpx.array.random import Random
    from fsdpx.engine import compute
    from fsdpx.engine.lines import Stacks

    one, spread = engine.layout.units[unit], engine.layout.spread
    values = {v: engine.message(v, batch) for v in (*stage.units[unit].takes, *stage.units[unit].reads)}
    read = list(values.values())
    root = Env(xp, engine.imagined, Random(0), True, recompute=engine.recompute.cores)
    envs = [root.at(node.path) for node in one.nodes]
    params = [
        {name: xp.ShapeArray(spread.shape(spec), engine.dtype) for name, spec in node.layer.specs().items()}
        for node in one.nodes
    ]
    saved = compute.forward(one, envs, params, values, True, Stacks())
    mine = {key for p in params for key, _ in roots(p)}
    return _total(roots(saved), mine), _total(roots(read), mine)


def _total(found: Iterable[tuple[int, int]], but: set[int]) -> int:
    return sum(nbytes for key, nbytes in dict(found).items() if key not in but)
