"""Recompute (activation checkpointing, Chen et al. 2016): which units keep only what they read, and run forward again
before their backward."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdpx.engine.activations import roots
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Env
from fsdpx.program import Action, Stage

if TYPE_CHECKING:
    from fsdpx.engine.engine import Engine, Microbatch

__all__ = ["Recompute", "recompute"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)\s*")
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


@dataclass(frozen=True)
class Kept:
    """Bytes that a unit keeps of one microbatch. whole: from its forward to its backward; inputs: the same if it runs
    again; late: from the first half of its backward to the second."""

    whole: int
    inputs: int
    late: int


def _within(
    budget: int, engine: Engine, stage: Stage, order: Sequence[Action], batch: Microbatch
) -> frozenset[int]:
    """As few units of one rank of the pipe as it takes: those that save most go first."""
    sizes = {u: kept_bytes(engine, stage, u, batch) for u in stage.here}
    chosen: set[int] = set()
    for u in sorted(sizes, key=lambda u: sizes[u].inputs - sizes[u].whole):
        if _peak(stage, order, sizes, chosen) <= budget:
            return frozenset(chosen)
        chosen.add(u)
    least = _peak(stage, order, sizes, chosen)
    if least > budget:
        where = f" on rank {stage.rank} of the pipe" if len(engine.stages) > 1 else ""
        raise ConfigError(
            f"recompute: {budget:,} bytes are not enough{where}: with every unit recomputed {least:,} are kept for "
            "backward; use more microbatches, or allow more"
        )
    return frozenset(chosen)


def _peak(stage: Stage, order: Sequence[Action], sizes: Mapping[int, Kept], chosen: Collection[int]) -> int:
    """The most bytes that units of one rank keep at once, in a step of this order."""
    parts = dict(stage.parts)
    kept = {u: size.inputs if u in chosen else size.whole for u, size in sizes.items()}
    now = most = 0
    for action in order:
        assert action.unit is not None
        for u in parts[action.unit] if action.op == "F" else reversed(parts[action.unit]):
            if action.op == "F":
                now += kept[u]
            if action.op in "BI":
                most = max(most, now - kept[u] + sizes[u].whole)  # all of it is there once more
                now += (sizes[u].late if action.op == "I" else 0) - kept[u]
            if action.op == "W":
                now -= sizes[u].late
            most = max(most, now)
    return most


def kept_bytes(engine: Engine, stage: Stage, unit: int, batch: Microbatch) -> Kept:
    """The most on any rank of the tensor axis, so that all of them choose the same."""
    found = [_kept_on(engine, stage, unit, batch, tensor) for tensor in range(engine.axes.tensor.size)]
    return Kept(*(max(getattr(one, name) for one in found) for name in ("whole", "inputs", "late")))


def _kept_on(engine: Engine, stage: Stage, unit: int, batch: Microbatch, tensor: int) -> Kept:
    """Forward and the first half of backward on shapes alone."""
    from fsdpx.array import shapes as xp
    from fsdpx.array.random import Random
    from fsdpx.engine import compute
    from fsdpx.engine.lines import Stacks

    one, row = engine.layout.units[unit], stage.units[unit]
    spread = replace(engine.layout.spread, rank=tensor)
    values = {v: engine.message(v, batch, tensor) for v in (*row.takes, *row.reads)}
    read = list(values.values())
    root = Env(xp, engine.imagined(tensor), Random(0), True, recompute=engine.recompute.cores)
    envs = [root.at(node.path) for node in one.nodes]
    params = [
        {name: xp.ShapeArray(spread.shape(spec), engine.dtype) for name, spec in node.layer.specs().items()}
        for node in one.nodes
    ]
    saved = compute.forward(one, envs, params, values, True, Stacks())
    mine = {key for p in params for key, _ in roots(p)}
    whole, inputs = _total(roots(saved), mine), _total(roots(read), mine)
    dvalues = {v: xp.zeros(values[v].shape, dtype=values[v].dtype) for v in row.gives}
    late = compute.backward_input(one, envs, params, saved, dvalues)
    return Kept(whole, inputs, _total(roots(late), mine))


def _total(found: Iterable[tuple[int, int]], but: set[int]) -> int:
    return sum(nbytes for key, nbytes in dict(found).items() if key not in but)
