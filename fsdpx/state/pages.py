"""The train state of one rank: for every page its piece of parameters, gradients and optimiser slots, as plain data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fsdpx.array.arena import Arena
from fsdpx.array.namespace import from_host
from fsdpx.layout.pages import Page, cut
from fsdpx.layout.ranges import Range
from fsdpx.layout.units import Layout
from fsdpx.nn.layer import Spec

__all__ = ["Holding", "PageState", "each_piece", "hold", "initialise", "state_arrays"]


BLOCK = 1 << 20
"""Elements of a whole parameter that are made at once when only columns of it are kept."""


@dataclass(frozen=True)
class Holding:
    """How a page is held: cut into `width` shards of which this rank has number `rank`.

    params: "shard" keeps only this rank's piece, "whole" the full buffer of which the piece is a view, "apart" both
    (when gathered parameters are rounded to another format). whole_grads: the full gradient is kept and the reduced
    part lies in it. copies: partial gradients alive at once. snap: cuts fall on block edges. at_home: a reduced part
    lies at its own place in the full gradient (which others may be reading elsewhere), else at the start.
    """

    width: int
    rank: int
    params: Literal["shard", "whole", "apart"]
    whole_grads: bool
    copies: int = 1
    snap: bool = False
    at_home: bool = False


@dataclass
class PageState:
    """master: this rank's parameters. full: the kept full buffer, if any. grad, part: kept gradient buffers, if any."""

    page: Page
    shards: tuple[Range, ...]
    rank: int
    master: Any
    full: Any = None
    grad: Any = None
    part: Any = None
    at_home: bool = False
    slots: dict[str, Any] = field(default_factory=dict)

    @property
    def mine(self) -> Range:
        return self.shards[self.rank]

    @property
    def counts(self) -> list[int]:
        return [r.size for r in self.shards]

    def reduced(self, full: Any) -> Any:
        """Where in a full gradient this rank's reduced part goes."""
        return full[self.mine.start : self.mine.stop] if self.at_home else full[: self.mine.size]


def hold(page: Page, holding: Holding, arena: Arena, dtype: Any, slots: Sequence[str]) -> PageState:
    """Allocate what a rank keeps of a page: nothing whole unless the placement says so."""
    shards = cut(page, holding.width, holding.snap)
    mine, p = shards[holding.rank], page.index
    full: Any = arena.keep(f"full{p}", "parameters", page.size, dtype) if holding.params != "shard" else None
    master = (
        full[mine.start : mine.stop]
        if holding.params == "whole"
        else arena.keep(f"shard{p}", "parameters", mine.size, dtype)
    )
    state = PageState(page, shards, holding.rank, master, full, at_home=holding.at_home)
    if page.trainable:
        if holding.whole_grads:
            state.grad = arena.keep(f"grad{p}", "gradients", page.size * holding.copies, dtype)
            state.part = state.reduced(state.grad)
        else:
            state.part = arena.keep(f"part{p}", "gradients", mine.size, dtype)
        state.slots = {s: arena.keep(f"{s}{p}", "optimiser", mine.size, dtype) for s in slots}
    return state


def initialise(state: PageState, layout: Layout, seed: int, xp: Any) -> None:
    """Fill this rank's shard by (seed, name, global range): the values do not see the layout."""
    spread = layout.spread

    def values(name: str, start: int, stop: int) -> Any:
        spec = layout.specs[name]
        if spec.cut is None or spread.width == 1:
            return spec.init(seed, name, start, stop, spec.shape)
        runs = list(spec.cut.runs(spec.shape, spread.rank, spread.width, start, stop))
        return np.concatenate([part for some in _near(runs) for part in _of_runs(spec, seed, name, some)])

    each_piece(state, values, xp)


Runs = list[tuple[int, int]]


def _near(runs: Runs) -> Iterator[Runs]:
    """Runs in groups that lie within BLOCK elements: fewer calls than one per row."""
    group: Runs = []
    for run in runs:
        if group and run[1] - group[0][0] > BLOCK:
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _of_runs(spec: Spec, seed: int, name: str, runs: Runs) -> list[Any]:
    first, last = runs[0][0], runs[-1][1]
    made = spec.init(seed, name, first, last, spec.shape)
    return [made[a - first : b - first] for a, b in runs]


def each_piece(state: PageState, values: Callable[[str, int, int], Any], xp: Any) -> None:
    """Set the shard from `values(parameter name, first element, one past the last)`, of what its line of the tensor
    axis holds of the parameter."""
    for piece in state.page.pieces(state.mine):
        f = state.page.fields[piece.have]
        host = values(f.source, piece.start - f.offset, piece.stop - f.offset)
        target = state.master[piece.start - state.mine.start : piece.stop - state.mine.start]
        target[...] = from_host(xp, host.astype(target.dtype, copy=False))


def state_arrays(layout: Layout, arena: Arena, dtype: Any, seed: int, xp: Any) -> dict[str, Any]:
    """Non-trainable state (running statistics): small, whole on every rank."""
    arrays = {}
    for name, spec in layout.state.items():
        buffer = arena.keep(f"state:{name}", "state", spec.size, dtype)
        buffer[...] = from_host(xp, spec.init(seed, name, 0, spec.size, spec.shape).astype(dtype))
        arrays[name] = buffer.reshape(spec.shape)
    return arrays
