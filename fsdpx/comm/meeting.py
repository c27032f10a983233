"""The handle of a collective inside one machine: all post, each does its share of the work, all have finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fsdpx.comm.board import Board
from fsdpx.comm.calls import Call, named
from fsdpx.comm.steps import Progress, spin
from fsdpx.errors import CommTimeout

__all__ = ["Meeting", "late"]

GLANCES = 32
"""Looks at the board before a wait moves other transfers on, too: most ranks come together."""


class Group(Protocol):
    """Who meets: neighbours, as far as a meeting looks."""

    rank: int
    size: int
    timeout: float
    progress: Progress
    board: Board
    ranks: list[int]
    others: list[int]


def late(call: object, group: Group, missing: Sequence[int]) -> CommTimeout:
    """What a wait raises when it has lasted too long. missing: who of the machine did not come."""
    ranks = [group.ranks[index] for index in missing]
    return CommTimeout(
        f"{call} is not complete after {group.timeout:g} s: ranks {ranks} did not call it with an array of a "
        "window, or have ended"
    )


class Meeting:
    """work: what this rank does when all of `of` have posted (indices of the machine), or None. held: the others read
    this rank's data, so it is complete when they have finished. last: what this rank does at the very end."""

    __slots__ = ("_group", "_held", "_last", "_missing", "_number", "_stage", "_verb", "_what", "_work")

    def __init__(
        self,
        group: Group,
        number: int,
        call: Call,
        work: Callable[[], None] | None = None,
        *,
        of: Sequence[int] | None = None,
        held: bool = True,
        last: Callable[[], None] | None = None,
    ) -> None:
        self._group, self._number, self._verb, self._what = group, number, call.verb, call.what
        self._work, self._held, self._last = work, held, last
        self._missing = list(group.others if of is None else of)
        self._stage = 0
        if not self.test():
            group.progress.pending.append(self)

    def test(self) -> bool:
        if self._stage == 2:
            return True
        board, number = self._group.board, self._number
        if self._stage == 0:
            if self._waits_for(board.posted):
                return False
            self._stage = 1
            if self._work is not None:
                self._work()
                board.finish(number)
            self._missing = list(self._group.others) if self._held else []
        if self._waits_for(board.finished):
            return False
        self._end()
        return True

    def wait(self) -> None:
        group = self._group
        if any(self.test() for _ in range(GLANCES)) or spin(self.test, group.progress, group.timeout):
            return
        raise late(self, group, self._missing)

    def free(self) -> bool:
        """Whether all have read this rank's record, so that its place on the board can be used anew."""
        board, number = self._group.board, self._number
        return self.test() and (self._work is None or all(board.finished(o, number) for o in self._group.others))

    def __str__(self) -> str:
        return f"{named(self._verb, self._what)} on rank {self._group.rank} of {self._group.size}"

    def _waits_for(self, there: Callable[[int, int], bool]) -> bool:
        missing, number = self._missing, self._number
        while missing and there(missing[-1], number):
            missing.pop()
        return bool(missing)

    def _end(self) -> None:
        self._stage = 2
        if self._last is not None:
            self._last()
        pending = self._group.progress.pending
        if self in pending:
            pending.remove(self)
