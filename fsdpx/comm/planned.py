"""Meetings that repeat: arguments checked and addresses found once per array, then waiting and adding as compiled code.

They keep to the board of `Meeting`, so a rank that uses one meets ranks that use the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import numpy as np

from fsdpx.array.kernels.compiled import shared
from fsdpx.comm import meeting
from fsdpx.comm.board import SLOTS
from fsdpx.comm.checks import address
from fsdpx.comm.communicator import Array, Pieces, ReduceOp
from fsdpx.comm.host import Host, Place
from fsdpx.comm.meeting import late
from fsdpx.comm.steps import spin

__all__ = ["STREAM", "Plan", "Planned", "added", "barrier", "gathered"]

LOOKS = 512
"""How often compiled code looks at a flag, about 20 us, before Python waits and moves other transfers on, too."""
STREAM = 4 << 20
"""Bytes of a result that would only drive others out of the caches: it is written past them. Below it, reading it
soon after from a cache is worth more."""

Run = Callable[[int, int, int, int], int]
_SUMS: dict[str, Run] = {"f": shared.meet32, "d": shared.meet64}


class Group(meeting.Group, Protocol):
    """Who meets: a communicator of one machine, as far as a plan looks."""

    host: Host
    lane: int
    latest: list[Any]


def gathered(group: Group, arrays: Sequence[Array], own: Array | None) -> Plan:
    """An all-gather of arrays[0] into arrays[1], which all share. own: where it goes there, if it is not there yet."""
    return Plan(group, "all_gather", arrays, shared.come, None, own, _row(group, 0, 1, []))


def barrier(group: Group) -> Plan:
    row = _row(group, 0, 1, [])
    return Plan(group, "barrier", [row], shared.come, None, None, row)


def added(group: Group, verb: str, arrays: Sequence[Array], place: Place, op: ReduceOp, cut: Pieces) -> Plan:
    """This rank's piece of everybody's arrays[0], of which ours lies at `place`, is added up: into arrays[1], or, if
    there is none, into everybody's arrays[0]."""
    first, rank = arrays[0], group.rank
    outs = [address(arrays[1])] if len(arrays) > 1 else [0] * group.size
    divisor = group.size if op is ReduceOp.AVG else 1
    row = _row(group, cut.counts[rank], divisor, outs, stream=len(arrays) > 1 and arrays[1].nbytes >= STREAM)
    plan = Plan(group, verb, arrays, _SUMS[first.dtype.char], place, None, row)
    plan.skip = cut.displs[rank] * first.dtype.itemsize
    plan.take(group.lane, place)
    return plan


def _row(group: Group, n: int, divisor: int, outs: list[int], stream: bool = False) -> Array:
    """What compiled code reads, without addresses of arrays."""
    ranks = group.size
    head = [ranks, group.lane, n, divisor, int(stream), len(outs)]
    return np.array([*head, *group.board.addresses, *[0] * ranks, *[-1] * (shared.PLACE * ranks), *outs], np.int64)


class Plan:
    """What a call with these arrays does, whenever it is made. They are not held: they may be large.

    run: the compiled code, `row` what it reads. place: where this rank's array lies, if others read it. own: what
    arrays[0] is copied to before. skip: bytes of every rank's array before those that this rank adds.
    """

    __slots__ = (
        "_everywhere", "_first", "_group", "_last", "_row", "_words", "own", "place", "run", "skip", "start", "verb"
    )  # fmt: skip

    def __init__(
        self,
        group: Group,
        verb: str,
        arrays: Sequence[Array],
        run: Run,
        place: Place | None,
        own: Array | None,
        row: Array,
    ) -> None:
        self._group, self.verb, self.run, self.place, self.own = group, verb, run, place, own
        self._first, self._last = ref(arrays[0]), ref(arrays[-1])
        self._everywhere = place is not None and len(arrays) == 1
        self._row, self._words, self.start = row, memoryview(row), address(row)
        self.skip = 0

    def fits(self, first: Array, last: Array) -> bool:
        """Whether it was made for these very arrays: their ids may belong to others by now. That nobody gives an array
        another shape or dtype in place is taken for granted."""
        return self._first() is first and self._last() is last

    def issue(self, number: int, what: str) -> Planned:
        return Planned(self._group, self, number, what)

    def find(self, number: int) -> None:
        """Learn where the others' arrays lie in the meeting of this number."""
        for lane in self._group.others:
            self.take(lane, self._group.board.words(lane, number, shared.PLACE))

    def take(self, lane: int, place: Sequence[int]) -> None:
        """Note where the array of a rank lies."""
        words, ranks, (window, owner, offset) = self._words, self._group.size, place
        found = self._group.host.address(window, owner) + offset + self.skip
        words[shared.HEAD + ranks + lane] = found
        for i, word in enumerate(place):
            words[shared.HEAD + 2 * ranks + shared.PLACE * lane + i] = word
        if self._everywhere:
            words[shared.HEAD + (2 + shared.PLACE) * ranks + lane] = found


class Planned:
    """The handle of one call of a plan: what `Meeting` is to any other call."""

    __slots__ = ("_at", "_done", "_group", "_number", "_plan", "_what")

    def __init__(self, group: Group, plan: Plan, number: int, what: str) -> None:
        self._group, self._plan, self._number, self._what = group, plan, number, what
        self._at = group.board.post(number, plan.place)
        self._done = False
        group.latest[number % SLOTS] = self
        group.progress.pending.append(self)

    def test(self) -> bool:
        return self._done or self._go(0)

    def wait(self) -> None:
        group = self._group
        if self._done or self._go(LOOKS if group.progress.patience else 0):
            return
        if not spin(self.test, group.progress, group.timeout):
            raise late(self, group, self._late())

    def free(self) -> bool:
        """Whether its place on the board can be used anew."""
        return self.test()

    def __str__(self) -> str:
        what = f" of {self._what}" if self._what else ""
        return f"{self._plan.verb}{what} on rank {self._group.rank} of {self._group.size}"

    def _go(self, looks: int) -> bool:
        plan, number = self._plan, self._number
        stands = plan.run(plan.start, number, self._at, looks)
        if stands == shared.MOVED:
            plan.find(number)
            stands = plan.run(plan.start, number, self._at, looks)
        if stands != shared.COMPLETE:
            return False
        self._done = True
        self._group.progress.pending.remove(self)
        self._group.latest[number % SLOTS] = None
        return True

    def _late(self) -> list[int]:
        board, number, others = self._group.board, self._number, self._group.others
        absent = [lane for lane in others if not board.posted(lane, number)]
        return absent or [lane for lane in others if not board.finished(lane, number)]
