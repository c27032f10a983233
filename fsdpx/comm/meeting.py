"""The handle of a collective inside one machine: all post, each does its share of the work, all have finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from fsdpx.comm.board import Board
from fsdpx.comm.calls import DONE, Call, Handle, named
from fsdpx.comm.steps import Progress, Steps, spin
from fsdpx.errors import CommTimeout

__all__ = ["Meeting", "late"]

GLANCES = 32
"""Looks at the board before a wait moves other transfers on, too: most ranks come together."""


class Group(Protocol):
    """The part of `Neighbours` that a meeting needs."""

    rank: int
    size: int
    timeout: float
    progress: Progress
    board: Board
    ranks: list[int]
    others: list[int]


def late(call: object, group: Group, missing: Sequence[int]) -> CommTimeout:
    """The error of a wait that has lasted too long. missing: the ranks of the machine that did not come."""
    ranks = [group.ranks[index] for index in missing]
    reason = f"ranks {ranks} did not call it, called it with an array outside of windows, or have ended"
    return CommTimeout(f"{call} is not complete after {group.timeout:g} s: {reason}")


class Arrivals:
    """The handle of a stage: complete when `seen(rank, number)` is true of all others of the machine."""

    __slots__ = ("_group", "_missing", "_name", "_number", "_seen")

    def __init__(self, group: Group, number: int, name: str, seen: Callable[[int, int], bool]) -> None:
        self._group, self._number, self._name, self._seen = group, number, name, seen
        self._missing = list(group.others)

    def test(self) -> bool:
        missing, seen, number = self._missing, self._seen, self._number
        while missing and seen(missing[-1], number):
            missing.pop()
        return not missing

    def wait(self) -> None:
        group = self._group
        if any(self.test() for _ in range(GLANCES)) or spin(self.test, group.progress, group.timeout):
            return
        raise late(str(self), group, self._missing)

    def __str__(self) -> str:
        return f"{self._name} on rank {self._group.rank} of {self._group.size}"


class Meeting(Steps):
    """work: what this rank does when all have posted, or None. held: the others read this rank's data, so it is
    complete when they have finished. last: what this rank does at the very end."""

    __slots__ = ("_free",)

    def __init__(
        self, group: Group, number: int, call: Call, work: Callable[[], None] | None = None,
        *, held: bool = True, last: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        board, name = group.board, named(call.verb, call.what)
        read = Arrivals(group, number, name, board.finished)

        def stages() -> Iterator[Handle]:
            yield Arrivals(group, number, name, board.posted)
            if work is not None:
                work()
                board.finish(number)
            if held:
                yield read
            if last is not None:
                last()

        self._free = read if work is not None else DONE
        super().__init__(stages(), group.progress)

    def free(self) -> bool:
        """Whether all have read this rank's record, so that its place on the board can be used again."""
        return self.test() and self._free.test()
