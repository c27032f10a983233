"""Communicators whose ranks may die: how the others learn of it, and what they can do."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from fsdpx.comm.calls import Handle
from fsdpx.comm.communicator import Communicator
from fsdpx.errors import CommError, RankLost

__all__ = ["Survivor", "loss", "settle", "survives"]

_NAP = 1e-4


class Survivor(Communicator):
    """A communicator that tells its ranks of deaths, and outlives them (Bland et al. 2013, user-level failure
    mitigation).

    A call that needs a dead rank raises RankLost, when it is issued or in `test` and `wait`; other calls may go on, so
    ranks hear of a death at different places. Every rank that hears of it recovers in these steps: `revoke`, so that
    ranks waiting for this one hear of it, too; `agree`, which ranks that have heard of nothing also reach; `shrink`;
    then go on with the new communicator and groups of it."""

    survives: bool
    """Whether the others live on when a rank dies. If not, a death ends the job; RankLost then only says why."""

    @abstractmethod
    def revoke(self) -> None:
        """Give up this communicator and the groups that this rank is in that `split` and `subgroup` made from it: every
        call that any rank has under way or begins there, except `agree` and `shrink`, raises RankLost. Local: it waits
        for no other, and any rank may call it at any time."""

    @abstractmethod
    def agree(self, flags: int) -> int:
        """The bitwise AND of every rank's `flags` (0 <= flags < 2^31), 0 if any rank has died: the same on all ranks
        that live. Blocking; works on a revoked communicator, never raises for a death."""

    @abstractmethod
    def shrink(self) -> Survivor:
        """A new communicator of the ranks that live, in rank order. Blocking; all that live call it. No rank in it is
        known to be dead when it is made; a death meanwhile is found out with the next call. It has a `progress` of its
        own: its waits do not run into leftovers of the old one."""

    @abstractmethod
    def lost(self) -> tuple[int, ...]:
        """Ranks of this communicator that are known here to be dead."""


def survives(comm: Communicator) -> bool:
    """Whether `comm` is a `Survivor` whose ranks live on when one of them dies."""
    return isinstance(comm, Survivor) and comm.survives


def loss(where: str, ranks: Sequence[int]) -> RankLost:
    """The error of a call, described by `where`, that will not be complete because `ranks` have died; none: because
    a rank gave the communicator up."""
    if not ranks:
        return RankLost(f"{where}: another rank has given this communicator up, for a rank that has died")
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return RankLost(f"{where}: {who} died", ranks)


def settle(handles: Iterable[Handle], seconds: float = 1.0) -> list[Handle]:
    """Test transfers whose result is no longer wanted until each is complete or broken; then their buffers are free.

    For what was under way on a revoked communicator: its errors are expected and dropped. Returns those that are
    neither after `seconds`; their buffers must stay."""
    left, deadline = [handle for handle in handles if not _over(handle)], time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(_NAP)
        left = [handle for handle in left if not _over(handle)]
    return left


def _over(handle: Handle) -> bool:
    try:
        return handle.test()
    except CommError:
        return not getattr(handle, "active", False)
