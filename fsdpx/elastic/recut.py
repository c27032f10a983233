"""State on its way from the ranks that have it to the ranks that want it: only elements that change hands travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from fsdpx.array.namespace import from_host, namespace_of, to_host
from fsdpx.checkpoint.pieces import BLOCK, Held
from fsdpx.comm.communicator import Communicator, Handle, Survivor, settle
from fsdpx.elastic.descriptors import describe
from fsdpx.elastic.moves import Message, RecutPlan, StridedRuns
from fsdpx.errors import RankLost

__all__ = ["FLIGHT", "let_go", "recut"]

FLIGHT = 8
"""Messages of a rank under way at once."""
_stranded: list[Handle] = []
"""Broken transfers that did not end in time: the memory they may still write to must last as long as the process."""


def recut(comm: Communicator, have: Sequence[Held], want: Sequence[Held], block: int = BLOCK) -> None:
    """Fill the arrays of `want` on every rank from the arrays of `have` on any rank, bit by bit. Collective.

    Every rank may have and want any elements, or none; several may have the same elements, then with equal bits. A rank
    copies the elements it has itself; the rest comes from those that have it, in turns. Arrays of `want` are the same
    memory as those of `have` only where they are the same elements. All that is wanted must be there: ask `missing`
    before. RankLost if a rank dies; `comm` is revoked then, and some of `want` may be filled.

    A rank receives the bytes that it wants and has not, in messages of at most `block` bytes. Beside the arrays it
    needs up to FLIGHT x block, and that only where elements do not follow each other."""
    mine = ([describe(part) for part in have], [describe(part) for part in want])
    everyone = comm.all_gather_plain(mine)
    plan = RecutPlan(comm.rank, [one[0] for one in everyone], [one[1] for one in everyone], block)
    plan.demand_possible()
    given, taken = [_raw(part.array) for part in have], [_raw(part.array) for part in want]
    _travel(comm, plan, given, taken, [part.name for part in have], [part.name for part in want])


def let_go(handles: Iterable[Handle]) -> bool:
    """Wait a while for broken transfers to end, as they may write to their buffers until then; whether all have."""
    left = settle(handles)
    _stranded.extend(left)
    return not left


@dataclass(frozen=True)
class PendingMessage:
    """A message under way. land: what is done when it has come."""

    handle: Handle
    land: Callable[[], None]


def _travel(
    comm: Communicator, plan: RecutPlan, have: list[Any], want: list[Any], have_names: list[str], want_names: list[str]
) -> None:
    """At any time the unfinished message with the least number is under way on both sides: all that either posted
    before it are done. So waiting for the oldest never ends in a circle, also where a send waits for its receive."""
    flying: deque[PendingMessage] = deque()
    spare: list[np.ndarray] = []

    def land() -> None:
        flying[0].handle.wait()
        flying.popleft().land()

    try:
        for message in plan.messages:
            if len(flying) == FLIGHT:
                land()
            arrays, names = (have, have_names) if message.sends else (want, want_names)
            flying.append(_posted(comm, message, arrays, names, spare, plan.block))
        for move in plan.own:
            _copy(move.want.view(want[move.want.part]), move.have.view(have[move.have.part]))
        while flying:
            land()
    except RankLost:
        if isinstance(comm, Survivor):
            comm.revoke()
        let_go(one.handle for one in flying)
        raise


def _posted(
    comm: Communicator, message: Message, arrays: list[Any], names: list[str], spare: list[np.ndarray], block: int
) -> PendingMessage:
    """From or to the array itself where it is one run of host memory, else through a room of its own."""
    what = f"{names[message.rows[0].part]}, re-cut"
    call = comm.send if message.sends else comm.recv
    run = _run(message.rows, arrays)
    if run is not None:
        return PendingMessage(call(run, message.peer, what=what), lambda: None)
    block_memory = spare.pop() if spare else np.empty(block, np.uint8)
    views = [rows.view(arrays[rows.part]) for rows in message.rows]
    ends = [0, *accumulate(view.nbytes for view in views)]
    packed = [
        block_memory[a:b].view(view.dtype).reshape(view.shape)
        for (a, b), view in zip(pairwise(ends), views, strict=True)
    ]

    def unpack() -> None:
        for view, part in zip(views, packed, strict=True):
            _copy(view, part)
        spare.append(block_memory)

    if message.sends:
        for view, part in zip(views, packed, strict=True):
            _copy(part, view)
    handle = call(block_memory[: ends[-1]], message.peer, what=what)
    return PendingMessage(handle, (lambda: spare.append(block_memory)) if message.sends else unpack)


def _run(rows: list[StridedRuns], arrays: list[Any]) -> np.ndarray | None:
    """The bytes of `rows`, if they follow each other in one array on the host."""
    first, stop, array = rows[0], rows[0].at, arrays[rows[0].part]
    if not isinstance(array, np.ndarray):
        return None
    for one in rows:
        if one.part != first.part or not one.solid or one.at != stop:
            return None
        stop += one.elements
    return array[first.at : stop].view(np.uint8)


def _raw(array: Any) -> Any:
    """As integers of the same width: bits that no library takes for numbers."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _copy(target: Any, source: Any) -> None:
    """Between arrays of the host and of a GPU."""
    if isinstance(target, np.ndarray):
        target[...] = to_host(source)
    elif isinstance(source, np.ndarray):
        target[...] = from_host(namespace_of(target), source)
    else:
        target[...] = source
