"""Ranks as threads of this process: the reference backend."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from fsdpx.comm.backend import Backend, staged
from fsdpx.comm.calls import Array, Call, Handle, named
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.direct import COLLECTIVES
from fsdpx.comm.rendezvous import ThreadCollective, ThreadGroup, ThreadMessage, ThreadTransfer, ThreadWorld, Vote
from fsdpx.comm.steps import NOT_ALONE, Progress
from fsdpx.comm.survivors import Survivor
from fsdpx.comm.verbs import terms
from fsdpx.comm.window import ThreadWindow, aligned
from fsdpx.errors import Aborted, RankLost

__all__ = ["LocalCommunicator", "single"]


class LocalCommunicator(Backend, Survivor):
    """One thread rank's side of a group; a `Survivor` where the world survives deaths (`spawn(survive=True)`).

    A collective completes when the last rank arrives; that rank moves the data of all. Reductions are in rank order. A
    send completes when its receive is there: code that relies on buffering in between fails here. `delays` sleeps a
    random time of up to 2 ms before each call, to try other orders of arrival."""

    def __init__(
        self, group: ThreadGroup, rank: int, progress: Progress | None = None, delays: random.Random | None = None
    ) -> None:
        super().__init__(rank, len(group.members), progress or Progress(NOT_ALONE))
        self._group = group
        self.survives = group.world.survive
        self._calls = self._votes = 0
        self._parts: list[LocalCommunicator] = []
        self._delays = delays

    def __repr__(self) -> str:
        return f"LocalCommunicator(rank={self.rank}, size={self.size})"

    def move(self, call: Call) -> Handle:
        return staged(call, self._move)

    def _move(self, call: Call) -> Handle:
        if call.verb in COLLECTIVES:
            return self._meet(call.verb, call.what, tuple(terms(call).values()), call, COLLECTIVES[call.verb])
        sending, (array,) = call.verb == "send", call.arrays
        name = f"{call.name} {'to' if sending else 'from'} rank {call.root}, tag {call.tag}"
        pair = (self.rank, call.root) if sending else (call.root, self.rank)
        return self._post(ThreadMessage(name, array, self.rank, call.root), (*pair, call.tag), sending)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        def move(given: list[Any]) -> dict[int, tuple[ThreadGroup, list[int]]]:
            groups = {}
            for wanted in {color for color, _ in given if color is not None}:
                ranks = sorted((key, rank) for rank, (color, key) in enumerate(given) if color == wanted)
                ordered = [rank for _, rank in ranks]
                members = [self._group.members[rank] for rank in ordered]
                groups[wanted] = (ThreadGroup(self._group.world, members), ordered)
            return groups

        groups = self._meet_and_wait("split", (color, key), move)
        if color is None:
            return None
        group, ordered = groups[color]
        part = LocalCommunicator(group, ordered.index(self.rank), self.progress, self._delays)
        if self.survives:
            self._parts.append(part)
        return part

    def all_gather_object(self, obj: Any) -> list[Any]:
        return list(self._meet_and_wait("all_gather_object", obj, list))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return list(self._meet_and_wait("all_gather_bytes", data, list))

    def window(self, nbytes: int) -> ThreadWindow:
        def make(given: list[int]) -> tuple[list[Array], list[threading.Lock]]:
            return [aligned(n) for n in given], [threading.Lock() for _ in given]

        parts, locks = self._meet_and_wait("window", nbytes, make)
        world, members = self._group.world, self._group.members

        def check(missing: Sequence[int], what: str) -> None:
            world.check()
            who = [members[rank] for rank in missing]
            world.fail_on(world.stranded(who, [members[self.rank]], f"a window for {what}"))

        return ThreadWindow(self.rank, parts, locks, world.timeout, check, lambda r: members[r] in world.dead)

    def close(self) -> None:
        """Nothing to free: the group goes with its last rank."""

    def abort(self, code: int = 1) -> None:
        """End all thread ranks of this world: the next thing they wait for raises `Aborted`, here at once."""
        error = Aborted(f"rank {self._group.members[self.rank]} aborted all ranks with code {code}")
        self._group.world.fail(error)
        raise error

    # -- deaths ----------------------------------------------------------------------------------

    def lost(self) -> tuple[int, ...]:
        return self._group.lost()

    def revoke(self) -> None:
        """Groups too, even those that this rank no longer uses: others may wait in them for it."""
        self._group.revoke()
        for part in self._parts:
            part.revoke()

    def agree(self, flags: int) -> int:
        group = self._group
        return self._vote("agree", flags, lambda given: 0 if group.lost() else all_of(given.values()))

    def shrink(self) -> LocalCommunicator:
        group = self._group

        def remain(given: dict[int, Any]) -> ThreadGroup:
            lost = group.lost()
            return ThreadGroup(group.world, [member for rank, member in enumerate(group.members) if rank not in lost])

        made = self._vote("shrink", None, remain)
        rank = made.members.index(group.members[self.rank])
        return LocalCommunicator(made, rank, Progress(self.progress.patience), self._delays)

    def _vote(self, verb: str, given: Any, decide: Callable[[dict[int, Any]], Any]) -> Any:
        """Take part in this communicator's next vote, and wait until all living ranks have."""
        self._delay()
        group, number, world = self._group, self._votes, self._group.world
        self._votes += 1
        with world.condition:
            world.check()
            vote = group.votes.setdefault(number, Vote(verb, self.size))
            world.fail_on(vote.difference(self.rank, verb))
            vote.arrive(self.rank, given)
        deadline = world.deadline()
        while True:
            with suppress(RankLost):  # the wait for that transfer raises it
                self.progress.poke()
            with world.condition:
                if group.settle(number, vote, decide):
                    return vote.result
                world.await_change(vote, self.progress, deadline)

    # -- meetings --------------------------------------------------------------------------------

    def _meet_and_wait(self, verb: str, given: Any, move: Callable[[list[Any]], Any]) -> Any:
        transfer = self._meet(verb, "", (), given, move)
        transfer.wait()
        assert isinstance(transfer.event, ThreadCollective)
        return transfer.event.result

    def _meet(self, verb: str, what: str, terms: tuple, given: Any, move: Callable[[list[Any]], Any]) -> ThreadTransfer:
        """Arrive at this communicator's next collective; the last to arrive moves the data of all."""
        self._delay()
        group, number = self._group, self._calls
        self._calls += 1
        with group.world.condition:
            operation = group.operations.get(number)
            if operation is None:
                operation = group.operations[number] = ThreadCollective(verb, what, terms, group.members)
            group.check(named(verb, what), self.rank, operation.needs)
            group.world.fail_on(operation.difference(self.rank, verb, what, terms))
            last = operation.arrive(self.rank, given)
            if last:
                del group.operations[number]
        if last:
            self._complete(operation, move)
        return ThreadTransfer(operation, group, self.rank, self.progress)

    def _complete(self, operation: ThreadCollective, move: Callable[[list[Any]], Any]) -> None:
        world = self._group.world
        try:
            operation.result = move(operation.given)
        except BaseException as error:
            world.fail(error)
            raise
        operation.given = []
        world.finish(operation)

    def _post(self, message: ThreadMessage, key: tuple[int, int, int], sending: bool) -> Handle:
        """Meet the other side of a message, or wait for it in the queue; the side that comes second copies."""
        self._delay()
        group = self._group
        mine, others = (group.sends, group.recvs) if sending else (group.recvs, group.sends)
        with group.world.condition:
            group.check(message.name, self.rank, message.needs)
            queue = others.get(key)
            other = queue.popleft() if queue else None
            if other is None:
                mine.setdefault(key, deque()).append(message)
                return ThreadTransfer(message, group, self.rank, self.progress)
            source, target = (message, other) if sending else (other, message)
            group.world.fail_on(source.difference(target))
            for side in (source, target):
                side.meet(self.rank)
        target.array[...] = source.array
        group.world.finish(source, target)
        return ThreadTransfer(message, group, self.rank, self.progress)

    def _delay(self) -> None:
        if self._delays is not None:
            time.sleep(self._delays.random() * 0.002)


def all_of(flags: Iterable[int]) -> int:
    """The bits that are set in all of them."""
    found = -1
    for one in flags:
        found &= one
    return found


def single() -> LocalCommunicator:
    """A communicator of one rank, without MPI."""
    return LocalCommunicator(ThreadGroup(ThreadWorld(), [0]), 0)
