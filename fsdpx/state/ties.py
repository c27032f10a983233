"""Gradients of one parameter that several ranks found apart: copies of a tied parameter on other ranks of the pipe, and
parts that the ranks of the tensor axis found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdpx.comm.communicator import Communicator
from fsdpx.comm.mesh import Axes
from fsdpx.state.placement import Placement

__all__ = ["Tie", "add_together", "connect_ties"]


@dataclass(frozen=True)
class Tie:
    """pages: with copies of one parameter, its first user's first; or a lone page. ranks: of the pipe, of each page.
    comm: the ranks of the pipe that have one, if several. partial: the tensor axis is summed over, too."""

    pages: tuple[int, ...]
    ranks: tuple[int, ...]
    comm: Communicator | None
    partial: bool

    @property
    def order(self) -> list[int]:
        """Positions in `pages` by rank: how they lie when all ranks' are gathered."""
        return sorted(range(len(self.pages)), key=lambda i: self.ranks[i])

    @property
    def held(self) -> list[int]:
        """How many of the pages each rank has, in rank order."""
        return [self.ranks.count(rank) for rank in sorted(set(self.ranks))]

    def elements(self, one: int) -> int:
        """Elements of all ranks' gradients, when a page has `one` here."""
        return one * len(self.pages) if self.comm is not None else 0


def connect_ties(placement: Placement) -> dict[int, Tie]:
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


def add_together(axes: Axes, tie: Tie, totals: Sequence[Any], scratch: Any, what: str) -> None:
    """Sum in place, into all of this rank's `totals`. Bytes per page of n elements here, T tensor ranks, k copies of
    which this rank has some: 2 n (T - 1)/T over the tensor axis, n (k - own) among the ranks that have copies."""
    if tie.partial:
        for total in totals:
            axes.tensor.all_reduce(total, what=what).wait()
    found = list(totals) if tie.comm is None else _gathered(tie, tie.comm, totals, scratch, what)
    total = found[-1]
    for other in reversed(found[:-1]):  # as in one process, where backward comes to later layers first
        total += other
    for mine in totals:
        if mine is not total:
            mine[...] = total


def _gathered(tie: Tie, comm: Communicator, totals: Sequence[Any], every: Any, what: str) -> list[Any]:
    """The gradients of all copies, in the order of `tie.pages`."""
    n, held = totals[0].size, tie.held
    first = n * sum(held[: comm.rank])
    own = every[first : first + n * held[comm.rank]]
    for i, total in enumerate(totals):
        own[i * n : (i + 1) * n] = total
    comm.all_gather(own, every, [n * k for k in held], what=what).wait()
    place = {page: i for i, page in enumerate(tie.order)}
    return [every[place[i] * n : (place[i] + 1) * n] for i in range(len(tie.pages))]
