"""Ranks that are threads of one process: the reference backend.

Threads synchronize in three ways: in collectives, which wait for all ranks; in messages, which wait for the rank on the
other side; and in votes, which wait for all living ranks. The thread that arrives last copies the data of all ranks
directly from array to array. Reductions are computed in rank order."""

from __future__ import annotations

import functools
import operator
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from fsdpx.core.base.messages import format_ranks
from fsdpx.core.comm.backend import Backend, start_through_host
from fsdpx.core.comm.calls import THREAD_POLLS, Array, Call, Handle, Progress, copy_unless_same, format_call_label
from fsdpx.core.comm.communicator import (
    Communicator,
    SurvivorCommunicator,
    get_arguments_to_compare_across_ranks,
    make_rank_lost_error,
)
from fsdpx.core.comm.message_backend import DEFAULT_TIMEOUT_SECONDS
from fsdpx.core.comm.reduction import reduce_in_rank_order_into
from fsdpx.core.comm.windows import ThreadWindow, allocate_aligned
from fsdpx.errors import Aborted, CommTimeout, DesyncError, RankLost

__all__ = [
    "COLLECTIVES", "LocalCommunicator", "RankDied", "ThreadCollective", "ThreadGroup", "ThreadMessage",
    "ThreadTransfer", "ThreadWorld", "Vote", "make_single_rank_communicator",
]  # fmt: skip

_POLL_SECONDS = 0.0005
_LONG_POLL_SECONDS = 0.2


class RankDied(BaseException):
    """An exception that a rank (a thread) raises to die like a killed process. With `spawn(survive=True)`, the other
    ranks continue to run, and calls that need the dead rank raise RankLost. Otherwise, the death ends the other ranks
    like any other error."""


class ThreadWorld:
    """The state that all ranks (threads) of one call to `spawn` share. It contains one lock, and the first failure,
    which ends all ranks.

    Attributes
    ----------
    timeout : maximum time that a rank waits, in seconds
    survive : whether the other ranks continue to run when a rank raises `RankDied`, which then does not count as a
        failure
    dead, returned : ranks that have died, and ranks whose function has returned"""

    def __init__(self, timeout: float = DEFAULT_TIMEOUT_SECONDS, survive: bool = False) -> None:
        self.condition = threading.Condition()
        self.failure: BaseException | None = None
        self.timeout = timeout
        self.survive = survive
        self.dead: set[int] = set()
        self.returned: set[int] = set()

    def record_failure(self, error: BaseException) -> None:
        """Record a failure if it is the first one, and wake all ranks so that they raise an error. Do nothing for a
        death that the other ranks survive, because `record_death` records it."""
        if self.survive and isinstance(error, RankDied):
            return
        with self.condition:
            if self.failure is None:
                self.failure = error
            self.condition.notify_all()

    def raise_in_all_ranks(self, error: BaseException | None) -> None:
        """Raise `error` in this rank, and make all other ranks fail as well. Do nothing if `error` is None."""
        if error is not None:
            self.record_failure(error)
            raise error

    def raise_if_failed(self) -> None:
        """Raise DesyncError if the first failure of any rank was a DesyncError, or Aborted if it was any other
        error."""
        failure = self.failure
        if isinstance(failure, DesyncError):
            raise DesyncError(*failure.args)
        if failure is not None:
            raise Aborted(f"another rank failed first: {type(failure).__name__}: {failure}") from failure

    def record_death(self, rank: int) -> None:
        """Record that `rank` has died and no longer accesses any array, and wake the ranks that wait for it."""
        with self.condition:
            self.dead.add(rank)
            self.condition.notify_all()

    def mark_rank_as_returned(self, rank: int) -> None:
        """Record that the function of `rank` has returned, so that this rank makes no further calls, and wake the ranks
        that wait for it."""
        with self.condition:
            self.returned.add(rank)
            self.condition.notify_all()

    def make_error_if_awaited_rank_returned(
        self, missing: Iterable[int], waiting: Sequence[int], call: str
    ) -> DesyncError | None:
        """Return the error for a call that can never complete because some of the `missing` ranks have already
        returned. Return None if none of the `missing` ranks has returned. `waiting` are the ranks that have made the
        call."""
        gone = sorted(self.returned.intersection(missing))
        if not gone:
            return None
        self.raise_if_failed()  # if a rank has failed, report that failure instead, because it is the cause
        who = f"{format_ranks(gone)} {'has' if len(gone) == 1 else 'have'} returned"
        alike = "all ranks make the same calls, in the same order"
        return DesyncError(f"{who} while ranks {sorted(waiting)} wait in {call}: {alike}")

    def complete_events_and_wake_ranks(self, *events: ThreadCollective | ThreadMessage) -> None:
        """Mark collectives or messages as complete, and wake the ranks that are waiting for them."""
        with self.condition:
            for event in events:
                event.done = True
            self.condition.notify_all()

    def wait_for_change(self, event: ThreadCollective | ThreadMessage, progress: Progress, deadline: float) -> None:
        """Sleep until another thread may have completed `event`, or until it is time to poll pending transfers. Raise
        CommTimeout if `deadline` has passed. The caller must hold the lock."""
        self.raise_if_failed()
        self.condition.wait(_POLL_SECONDS if progress.pending else _LONG_POLL_SECONDS)
        if time.monotonic() > deadline and not event.done:
            raise CommTimeout(f"not done after {self.timeout:g} s: {event}")

    def compute_deadline(self) -> float:
        """Return the `time.monotonic` time at which a wait that begins now times out."""
        return time.monotonic() + self.timeout


class ThreadGroup:
    """The state that the ranks of one communicator share: incomplete collectives, unmatched messages and undecided
    votes."""

    def __init__(self, world: ThreadWorld, members: Sequence[int]) -> None:
        self.world = world
        self.members = tuple(members)
        self.operations: dict[int, ThreadCollective] = {}
        self.sends: dict[tuple[int, int, int], deque[ThreadMessage]] = {}
        self.recvs: dict[tuple[int, int, int], deque[ThreadMessage]] = {}
        self.votes: dict[int, Vote] = {}
        self.revoked = False

    def get_failed_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this group that have died."""
        dead = self.world.dead
        return tuple(rank for rank, member in enumerate(self.members) if member in dead) if dead else ()

    def revoke(self) -> None:
        """Make all new and all waiting calls on this communicator fail. Only transfers whose data is already being
        copied are completed."""
        with self.world.condition:
            self.revoked = True
            self.world.condition.notify_all()

    def raise_if_rank_lost(self, call: str, rank: int, needs: set[int]) -> None:
        """Raise RankLost if the communicator has been revoked, or if a rank that the call must wait for (one of
        `needs`) has died. The error names the call, and the rank `rank` that made it. The caller must hold the lock."""
        self.world.raise_if_failed()
        lost = self.get_failed_ranks()
        if self.revoked or not needs.isdisjoint(lost):
            raise make_rank_lost_error(f"{call} on rank {rank} of {len(self.members)}", lost)

    def make_error_if_awaited_rank_returned(self, event: ThreadCollective | ThreadMessage) -> DesyncError | None:
        """Return the error for a collective or message that can never complete because it waits for a rank whose
        function has returned. Return None if no rank that it waits for has returned. The caller must hold the lock."""
        if not self.world.returned:
            return None
        missing, waiting = ([self.members[rank] for rank in ranks] for ranks in (event.missing, event.waiting_ranks))
        return self.world.make_error_if_awaited_rank_returned(missing, waiting, event.name)

    def make_error_if_call_cannot_complete(self, event: ThreadCollective | ThreadMessage, rank: int) -> RankLost | None:
        """Return the error for a collective or message that can never complete because of a death or a revocation.
        Return None if it can still complete. The caller must hold the lock.

        If data is already being copied, only the death of the copying rank makes the transfer fail. A revocation does
        not, because a rank could otherwise see its transfer fail while another thread is still writing to its
        arrays."""
        lost = self.get_failed_ranks()
        if event.needs.isdisjoint(lost) and (event.moving or not self.revoked):
            return None
        return make_rank_lost_error(f"{event.name} on rank {rank} of {len(self.members)}", lost)

    def decide_if_all_voted(self, number: int, vote: Vote, decide: Callable[[list[Any]], Any]) -> bool:
        """Compute the result of `vote` if every member has voted or died. Return whether the vote is decided. Later
        deaths do not change the result. The caller must hold the lock."""
        if not vote.done and not vote.missing.difference(self.get_failed_ranks()):
            del self.votes[number]
            vote.result, vote.done = decide([vote.given[rank] for rank in sorted(vote.waiting_ranks)]), True
            self.world.condition.notify_all()
        if not vote.done:
            self.world.raise_in_all_ranks(self.make_error_if_awaited_rank_returned(vote))
        return vote.done


class ThreadCollective:
    """The state of one collective. The ranks that take part in the collective share it.

    Attributes
    ----------
    given : the data that each rank has passed, in rank order
    needs : ranks without which the collective cannot complete
    moving : True once all ranks have arrived and the last rank is copying the data"""

    def __init__(self, verb: str, what: str, terms: tuple, members: Sequence[int]) -> None:
        self.verb, self.what, self.terms = verb, what, terms
        self.members = members
        self.given: list[Any] = [None] * len(members)
        self.missing = set(range(len(members)))
        self.needs = set(self.missing)
        self.moving = False
        self.done = False
        self.result: Any = None

    def __str__(self) -> str:
        return f"{self.name}: ranks {sorted(self.missing)} of {len(self.members)} have not called it"

    @property
    def name(self) -> str:
        return format_call_label(self.verb, self.what)

    @property
    def waiting_ranks(self) -> set[int]:
        """The ranks that have arrived at this collective."""
        return set(range(len(self.members))) - self.missing

    def find_mismatch(self, rank: int, verb: str, what: str, terms: tuple) -> DesyncError | None:
        """Return an error if the call of rank `rank` differs from the calls of the ranks that arrived before it.
        Otherwise return None. `terms` are the arguments of the call that must be equal on all ranks."""
        if (verb, terms) == (self.verb, self.terms):
            return None
        others = sorted(self.waiting_ranks)
        own_call, theirs = f"called {format_call_label(verb, what)} {terms}", f"called {self.name} {self.terms}"
        return DesyncError(f"ranks called different collectives: rank {rank} {own_call}; ranks {others} {theirs}")

    def add_arrival(self, rank: int, given: Any) -> bool:
        """Store the data that rank `rank` has passed. Return True if this rank is the last to arrive; the rank must
        then copy the data of all ranks."""
        self.given[rank] = given
        self.missing.discard(rank)
        if not self.missing:
            self.needs, self.moving = {rank}, True
        return self.moving


class ThreadMessage:
    """One side (the send or the receive) of a message between two ranks.

    Attributes
    ----------
    needs : a set with one element: the rank that the message is waiting for. This is the rank on the other side or,
        while the data is being copied (`moving`), the rank that copies it"""

    __slots__ = ("array", "done", "moving", "name", "needs", "rank")

    def __init__(self, name: str, array: Array, rank: int, other: int) -> None:
        self.name, self.array, self.rank = name, array, rank
        self.needs = {other}
        self.moving = self.done = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.name}: the other side has not called"

    def set_copying_rank(self, mover: int) -> None:
        """Record that both sides have arrived, and that rank `mover` copies the data."""
        self.needs, self.moving = {mover}, True

    @property
    def missing(self) -> set[int]:
        """A set that contains the rank on the other side; empty once that rank has arrived."""
        return set() if self.moving else self.needs

    @property
    def waiting_ranks(self) -> set[int]:
        return {self.rank}

    def find_mismatch(self, target: ThreadMessage) -> DesyncError | None:
        """Return an error if the arrays of the send and the receive differ in size or dtype. Otherwise return None."""
        sent, wanted = self.array, target.array
        if sent.size == wanted.size and sent.dtype == wanted.dtype:
            return None
        return DesyncError(
            f"rank {self.rank}: {self.name}: {sent.size} elements of {sent.dtype}, but rank {target.rank}: "
            f"{target.name}: {wanted.size} elements of {wanted.dtype}"
        )


class Vote(ThreadCollective):
    """A joint decision of the ranks of a communicator. It is made as soon as each rank has voted or died."""

    def __str__(self) -> str:
        return f"{self.verb}: ranks {sorted(self.missing)} have neither called it nor died"

    def find_mismatch(self, rank: int, verb: str, what: str = "", terms: tuple = ()) -> DesyncError | None:
        if verb == self.verb:
            return None
        return DesyncError(f"rank {rank} called {verb}; ranks {sorted(self.waiting_ranks)} called {self.verb}")


class ThreadTransfer:
    """The handle that a rank gets for a collective or message that it takes part in."""

    __slots__ = ("_group", "_progress", "_rank", "event")

    def __init__(
        self, event: ThreadCollective | ThreadMessage, group: ThreadGroup, rank: int, progress: Progress
    ) -> None:
        self.event, self._group, self._rank, self._progress = event, group, rank, progress

    def test(self) -> bool:
        if not self.event.done:
            self._group.world.raise_if_failed()
            world = self._group.world
            if self._group.revoked or world.dead or world.returned:
                with world.condition:
                    self._raise_if_broken()
        return self.event.done

    def wait(self) -> None:
        world, event, progress = self._group.world, self.event, self._progress
        deadline = world.compute_deadline()
        while not event.done:
            if progress.pending:
                progress.advance_transfers()
            with world.condition:
                if event.done:
                    return
                self._raise_if_broken()
                world.wait_for_change(event, progress, deadline)

    def _raise_if_broken(self) -> None:
        """Raise an error if the transfer can never complete. The caller must hold the lock."""
        if not self.event.done:
            if error := self._group.make_error_if_call_cannot_complete(self.event, self._rank):
                raise error
            self._group.world.raise_in_all_ranks(self._group.make_error_if_awaited_rank_returned(self.event))


def execute_all_gather(calls: Sequence[Call]) -> None:
    for rank, call in enumerate(calls):
        for other in calls:
            copy_unless_same(call.partitions[0].get_piece(other.arrays[1], rank), call.arrays[0])


def execute_reduce_scatter(calls: Sequence[Call]) -> None:
    # an in-place call overwrites the start of its `send`, but only elements that have already been read
    for rank, call in enumerate(calls):
        parts = [call.partitions[0].get_piece(other.arrays[0], rank) for other in calls]
        reduce_in_rank_order_into(parts, call.op, [call.arrays[1]])


def execute_all_reduce(calls: Sequence[Call]) -> None:
    first = calls[0].arrays[0]
    reduce_in_rank_order_into([call.arrays[0] for call in calls], calls[0].op, [first])
    for call in calls[1:]:
        call.arrays[0][...] = first


def execute_broadcast(calls: Sequence[Call]) -> None:
    source = calls[calls[0].root].arrays[0]
    for call in calls:
        copy_unless_same(call.arrays[0], source)


def execute_reduce(calls: Sequence[Call]) -> None:
    reduce_in_rank_order_into([call.arrays[0] for call in calls], calls[0].op, [calls[calls[0].root].arrays[1]])


def execute_gather(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    for rank, call in enumerate(calls):
        part = call.arrays[0]
        _require_same_size(call, rank, part, call.root, root.partitions[0].counts[rank])
        copy_unless_same(root.partitions[0].get_piece(root.arrays[1], rank), part)


def execute_scatter(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    for rank, call in enumerate(calls):
        part = call.arrays[1]
        _require_same_size(call, rank, part, call.root, root.partitions[0].counts[rank])
        copy_unless_same(part, root.partitions[0].get_piece(root.arrays[0], rank))


def execute_all_to_all(calls: Sequence[Call]) -> None:
    for source, call in enumerate(calls):
        for dest, other in enumerate(calls):
            part, received = call.partitions[0].get_piece(call.arrays[0], dest), other.partitions[1]
            _require_same_size(call, source, part, dest, received.counts[source])
            received.get_piece(other.arrays[1], source)[...] = part


def execute_barrier(calls: Sequence[Call]) -> None:
    """Do nothing: a barrier transfers no data."""


COLLECTIVES: dict[str, Callable[[Sequence[Call]], None]] = {
    f.__name__.removeprefix("execute_"): f
    for f in (
        execute_all_gather, execute_reduce_scatter, execute_all_reduce, execute_broadcast, execute_reduce,
        execute_gather, execute_scatter, execute_all_to_all, execute_barrier
    )
}  # fmt: skip


def _require_same_size(call: Call, source: int, part: Array, dest: int, count: int) -> None:
    if part.size != count:
        raise DesyncError(f"{call.name}: rank {source} has a piece of {part.size}, rank {dest} counts {count}")


class LocalCommunicator(Backend, SurvivorCommunicator):
    """The communicator of a rank that runs as a thread. With `spawn(survive=True)`, it keeps working when other ranks
    die.

    The last rank to arrive at a collective copies the data of all ranks, and thereby completes it. Reductions are
    computed in rank order. A send completes only when the matching receive has been started, so code that relies on
    buffered sends fails with this communicator. For tests, the random number generator `delays` adds sleeps of up to 2
    ms before each call, so that ranks arrive in varying orders."""

    def __init__(
        self, group: ThreadGroup, rank: int, progress: Progress | None = None, delays: random.Random | None = None
    ) -> None:
        super().__init__(rank, len(group.members), progress or Progress(THREAD_POLLS))
        self._group = group
        self.survives = group.world.survive
        self._calls = self._votes = 0
        self._parts: list[LocalCommunicator] = []
        self._delays = delays

    def __repr__(self) -> str:
        return f"LocalCommunicator(rank={self.rank}, size={self.size})"

    def get_timeout_seconds(self) -> float:
        """Return the maximum time that a rank waits for others (the argument `timeout` of `spawn`)."""
        return self._group.world.timeout

    def start_call(self, call: Call) -> Handle:
        return start_through_host(call, self._start_call)

    def _start_call(self, call: Call) -> Handle:
        if call.verb in COLLECTIVES:
            return self._join_collective(
                call.verb,
                call.what,
                tuple(get_arguments_to_compare_across_ranks(call).values()),
                call,
                COLLECTIVES[call.verb],
            )
        if call.verb not in ("send", "recv"):
            return super().start_call(call)  # the base class builds these operations from sends and receives
        sending, (array,) = call.verb == "send", call.arrays
        name = f"{call.name} {'to' if sending else 'from'} rank {call.root}, tag {call.tag}"
        pair = (self.rank, call.root) if sending else (call.root, self.rank)
        return self._post_message(ThreadMessage(name, array, self.rank, call.root), (*pair, call.tag), sending)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        def make_groups(given: list[Any]) -> dict[int, tuple[ThreadGroup, list[int]]]:
            groups = {}
            for wanted in {color for color, _ in given if color is not None}:
                ranks = sorted((key, rank) for rank, (color, key) in enumerate(given) if color == wanted)
                ordered = [rank for _, rank in ranks]
                members = [self._group.members[rank] for rank in ordered]
                groups[wanted] = (ThreadGroup(self._group.world, members), ordered)
            return groups

        groups = self._join_collective_and_wait("split", (color, key), make_groups)
        if color is None:
            return None
        group, ordered = groups[color]
        part = LocalCommunicator(group, ordered.index(self.rank), self.progress, self._delays)
        if self.survives:
            self._parts.append(part)
        return part

    def all_gather_object(self, obj: Any) -> list[Any]:
        return list(self._join_collective_and_wait("all_gather_object", obj, list))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return list(self._join_collective_and_wait("all_gather_bytes", data, list))

    def window(self, nbytes: int) -> ThreadWindow:
        def allocate_parts(given: list[int]) -> tuple[list[Array], list[threading.Lock]]:
            return [allocate_aligned(n) for n in given], [threading.Lock() for _ in given]

        parts, locks = self._join_collective_and_wait("window", nbytes, allocate_parts)
        world, members = self._group.world, self._group.members

        def check_ranks(missing: Callable[[], Sequence[int]], what: str) -> None:
            world.raise_if_failed()
            # read `returned` before `missing`: in the opposite order, a rank that acts and then returns between the two
            # reads would count as both missing and returned
            if returned := set(world.returned):
                gone = returned.intersection(members[rank] for rank in missing())
                error = world.make_error_if_awaited_rank_returned(gone, [members[self.rank]], f"a window for {what}")
                world.raise_in_all_ranks(error)

        return ThreadWindow(self.rank, parts, locks, world.timeout, check_ranks, lambda r: members[r] in world.dead)

    def close(self) -> None:
        """Do nothing. The shared state is freed when no rank refers to it any longer."""

    def abort(self, code: int = 1) -> None:
        """End all ranks of this call to `spawn`. Raise `Aborted` immediately in this rank, and in each other rank when
        it next waits."""
        error = Aborted(f"rank {self._group.members[self.rank]} aborted all ranks with code {code}")
        self._group.world.record_failure(error)
        raise error

    def get_failed_ranks(self) -> tuple[int, ...]:
        return self._group.get_failed_ranks()

    def revoke(self) -> None:
        """Revoke this communicator and all of its subgroups. This includes subgroups that this rank no longer uses,
        because other ranks may still be waiting for this rank in one of them."""
        self._group.revoke()
        for part in self._parts:
            part.revoke()

    def agree_on_flags(self, flags: int) -> int:
        group = self._group
        return self._vote_and_wait(
            "agree", flags, lambda given: 0 if group.get_failed_ranks() else functools.reduce(operator.and_, given)
        )

    def shrink(self) -> LocalCommunicator:
        group = self._group

        def make_surviving_group(given: list[Any]) -> ThreadGroup:
            lost = group.get_failed_ranks()
            return ThreadGroup(group.world, [member for rank, member in enumerate(group.members) if rank not in lost])

        survivors = self._vote_and_wait("shrink", None, make_surviving_group)
        rank = survivors.members.index(group.members[self.rank])
        return LocalCommunicator(survivors, rank, Progress(self.progress.polls_before_yield), self._delays)

    def _vote_and_wait(self, verb: str, given: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Cast the vote `given` in the next joint decision of this communicator, and wait until all living ranks have
        voted. Return the result of calling `decide` with a list of all votes."""
        self._delay_randomly()
        group, number, world = self._group, self._votes, self._group.world
        self._votes += 1
        with world.condition:
            world.raise_if_failed()
            vote = group.votes.setdefault(number, Vote(verb, "", (), group.members))
            world.raise_in_all_ranks(vote.find_mismatch(self.rank, verb))
            vote.add_arrival(self.rank, given)
        deadline = world.compute_deadline()
        while True:
            # ignore RankLost here, because waiting for the affected transfer raises the error again
            with suppress(RankLost):
                self.progress.advance_transfers()
            with world.condition:
                if group.decide_if_all_voted(number, vote, decide):
                    return vote.result
                world.wait_for_change(vote, self.progress, deadline)

    def _join_collective_and_wait(self, verb: str, given: Any, exchange: Callable[[list[Any]], Any]) -> Any:
        transfer = self._join_collective(verb, "", (), given, exchange)
        transfer.wait()
        assert isinstance(transfer.event, ThreadCollective)
        return transfer.event.result

    def _join_collective(
        self, verb: str, what: str, terms: tuple, given: Any, exchange: Callable[[list[Any]], Any]
    ) -> ThreadTransfer:
        """Take part in the next collective of this communicator, and return its handle. `given` is the data that this
        rank passes, and `terms` are the arguments that must be equal on all ranks. The last rank to arrive copies the
        data by calling `exchange` with a list of the data of all ranks."""
        self._delay_randomly()
        group, number = self._group, self._calls
        self._calls += 1
        with group.world.condition:
            operation = group.operations.get(number)
            if operation is None:
                operation = group.operations[number] = ThreadCollective(verb, what, terms, group.members)
            group.raise_if_rank_lost(format_call_label(verb, what), self.rank, operation.needs)
            group.world.raise_in_all_ranks(operation.find_mismatch(self.rank, verb, what, terms))
            last = operation.add_arrival(self.rank, given)
            if last:
                del group.operations[number]
        if last:
            self._run_and_complete_collective(operation, exchange)
        return ThreadTransfer(operation, group, self.rank, self.progress)

    def _run_and_complete_collective(self, operation: ThreadCollective, exchange: Callable[[list[Any]], Any]) -> None:
        world = self._group.world
        try:
            operation.result = exchange(operation.given)
        except BaseException as error:
            world.record_failure(error)
            raise
        operation.given = []
        world.complete_events_and_wake_ranks(operation)

    def _post_message(self, message: ThreadMessage, key: tuple[int, int, int], sending: bool) -> Handle:
        """Match this send or receive with the other side of the message, or queue it until the other side arrives. The
        side that arrives second copies the data. `key` is (source, destination, tag)."""
        self._delay_randomly()
        group = self._group
        own_queue, others = (group.sends, group.recvs) if sending else (group.recvs, group.sends)
        with group.world.condition:
            group.raise_if_rank_lost(message.name, self.rank, message.needs)
            queue = others.get(key)
            other = queue.popleft() if queue else None
            if other is None:
                own_queue.setdefault(key, deque()).append(message)
                return ThreadTransfer(message, group, self.rank, self.progress)
            source, target = (message, other) if sending else (other, message)
            group.world.raise_in_all_ranks(source.find_mismatch(target))
            for side in (source, target):
                side.set_copying_rank(self.rank)
        target.array[...] = source.array
        group.world.complete_events_and_wake_ranks(source, target)
        return ThreadTransfer(message, group, self.rank, self.progress)

    def _delay_randomly(self) -> None:
        if self._delays is not None:
            time.sleep(self._delays.random() * 0.002)


def make_single_rank_communicator() -> LocalCommunicator:
    """Return a communicator of a single rank, without MPI."""
    return LocalCommunicator(ThreadGroup(ThreadWorld(), [0]), 0)
