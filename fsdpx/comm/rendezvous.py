"""Where thread ranks meet: operations that wait for all ranks, messages that wait for their other side, votes of the
living ranks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fsdpx.comm.calls import Array, named
from fsdpx.comm.carrier import TIMEOUT
from fsdpx.comm.clock import ranks_text
from fsdpx.comm.steps import Progress
from fsdpx.comm.survivors import loss
from fsdpx.errors import Aborted, CommTimeout, DesyncError, RankLost

__all__ = ["Died", "ThreadCollective", "ThreadGroup", "ThreadMessage", "ThreadTransfer", "ThreadWorld", "Vote"]

_POLL = 0.0005
_LONG_POLL = 0.2


class Died(BaseException):
    """A thread rank ends where it stands, as a killed process would: raise it in that rank. With `spawn(survive=True)`
    the others live on and hear of it as RankLost; otherwise it ends them like any error."""


class ThreadWorld:
    """All thread ranks of one `spawn`: they share one lock, and the first failure ends them all. survive: a death
    (`Died`) is no failure. timeout: seconds of a wait. dead, returned: ranks that have died, and whose function has
    returned."""

    def __init__(self, timeout: float = TIMEOUT, survive: bool = False) -> None:
        self.condition = threading.Condition()
        self.failure: BaseException | None = None
        self.timeout = timeout
        self.survive = survive
        self.dead: set[int] = set()
        self.returned: set[int] = set()

    def fail(self, error: BaseException) -> None:
        """Wake every rank; the first failure is the one they hear of. A death that is survived is none: `bury`."""
        if self.survive and isinstance(error, Died):
            return
        with self.condition:
            if self.failure is None:
                self.failure = error
            self.condition.notify_all()

    def fail_on(self, error: BaseException | None) -> None:
        """Fail with `error` if there is one, here and in every rank."""
        if error is not None:
            self.fail(error)
            raise error

    def check(self) -> None:
        """Raise if a rank has failed: DesyncError as it is, everything else as `Aborted`."""
        failure = self.failure
        if isinstance(failure, DesyncError):
            raise DesyncError(*failure.args)
        if failure is not None:
            raise Aborted(f"another rank failed first: {type(failure).__name__}: {failure}") from failure

    def bury(self, rank: int) -> None:
        """This rank has died, and will not touch any arrays any more: wake the ranks that wait for it."""
        with self.condition:
            self.dead.add(rank)
            self.condition.notify_all()

    def end(self, rank: int) -> None:
        """The function of this rank has returned, and will call nothing any more: wake the ranks that wait for it."""
        with self.condition:
            self.returned.add(rank)
            self.condition.notify_all()

    def stranded(self, missing: Iterable[int], waiting: Sequence[int], call: str) -> DesyncError | None:
        """Why `call`, in which the `waiting` ranks are, will never be complete, if one of the `missing` ranks has
        returned without it."""
        gone = sorted(self.returned.intersection(missing))
        if not gone:
            return None
        self.check()  # a rank that has failed calls nothing any more, either
        who = f"{ranks_text(gone)} {'has' if len(gone) == 1 else 'have'} returned"
        alike = "all ranks make the same calls, in the same order"
        return DesyncError(f"{who} while ranks {sorted(waiting)} wait in {call}: {alike}")

    def finish(self, *events: ThreadCollective | ThreadMessage) -> None:
        """These are complete: wake the ranks that wait for them."""
        with self.condition:
            for event in events:
                event.done = True
            self.condition.notify_all()

    def await_change(self, event: ThreadCollective | ThreadMessage | Vote, progress: Progress, deadline: float) -> None:
        """Sleep, with the lock held, until something has changed or transfers under way want to be poked."""
        self.check()
        self.condition.wait(_POLL if progress.pending else _LONG_POLL)
        if time.monotonic() > deadline and not event.done:
            raise CommTimeout(f"not done after {self.timeout:g} s: {event}")

    def deadline(self) -> float:
        """When a wait that begins now has lasted too long."""
        return time.monotonic() + self.timeout


class ThreadGroup:
    """The shared side of one communicator: operations not yet complete, messages not yet met, votes under way."""

    def __init__(self, world: ThreadWorld, members: Sequence[int]) -> None:
        self.world = world
        self.members = tuple(members)
        self.operations: dict[int, ThreadCollective] = {}
        self.sends: dict[tuple[int, int, int], deque[ThreadMessage]] = {}
        self.recvs: dict[tuple[int, int, int], deque[ThreadMessage]] = {}
        self.votes: dict[int, Vote] = {}
        self.revoked = False

    def lost(self) -> tuple[int, ...]:
        """Ranks of this group that have died."""
        dead = self.world.dead
        return tuple(rank for rank, member in enumerate(self.members) if member in dead) if dead else ()

    def revoke(self) -> None:
        """Nothing begins on this group any more; wake the waiting ranks. Data being moved by others is still
        completed."""
        with self.world.condition:
            self.revoked = True
            self.world.condition.notify_all()

    def check(self, call: str, rank: int, needs: set[int]) -> None:
        """Raise RankLost if a call of `rank` can never complete because a rank it `needs` has died. With the lock."""
        self.world.check()
        lost = self.lost()
        if self.revoked or not needs.isdisjoint(lost):
            raise loss(f"{call} on rank {rank} of {len(self.members)}", lost)

    def stranded(self, event: ThreadCollective | ThreadMessage | Vote) -> DesyncError | None:
        """Why an event that is not done never will be: a rank has returned that it waits for. With the lock."""
        if not self.world.returned:
            return None
        missing, waiting = ([self.members[rank] for rank in ranks] for ranks in (event.missing, event.waiting))
        return self.world.stranded(missing, waiting, event.name)

    def broken(self, event: ThreadCollective | ThreadMessage, rank: int) -> RankLost | None:
        """Why an event that is not done never will be. With the lock. Data that is being moved is completed in a
        revoked group, too, unless the rank that moves it dies: no rank is told that a transfer has failed
        while another thread still writes into its arrays."""
        lost = self.lost()
        if event.needs.isdisjoint(lost) and (event.moving or not self.revoked):
            return None
        return loss(f"{event.name} on rank {rank} of {len(self.members)}", lost)

    def settle(self, number: int, vote: Vote, decide: Callable[[dict[int, Any]], Any]) -> bool:
        """Whether `vote` is decided; decide it if every member has come or died. Once, with the lock: a rank that comes
        or dies later changes nothing."""
        if not vote.done and not vote.missing.difference(self.lost()):
            del self.votes[number]
            vote.result, vote.done = decide(vote.given), True
            self.world.condition.notify_all()
        if not vote.done:
            self.world.fail_on(self.stranded(vote))
        return vote.done


class ThreadCollective:
    """One collective: what was called, and what each rank gave. needs: ranks without which it will not be complete;
    moving: all have come, and the last one moves the data."""

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
        return named(self.verb, self.what)

    @property
    def waiting(self) -> set[int]:
        """Ranks that have called it."""
        return set(range(len(self.members))) - self.missing

    def difference(self, rank: int, verb: str, what: str, terms: tuple) -> DesyncError | None:
        """The different call that `rank` makes, if it does not make the others' call."""
        if (verb, terms) == (self.verb, self.terms):
            return None
        others = sorted(self.waiting)
        mine, theirs = f"called {named(verb, what)} {terms}", f"called {self.name} {self.terms}"
        return DesyncError(f"ranks called different collectives: rank {rank} {mine}; ranks {others} {theirs}")

    def arrive(self, rank: int, given: Any) -> bool:
        """Leave what `rank` gives; True for the last rank, which moves the data."""
        self.given[rank] = given
        self.missing.discard(rank)
        if not self.missing:
            self.needs, self.moving = {rank}, True
        return self.moving


class ThreadMessage:
    """One side of a message between two ranks. needs: the rank of the other side, or, moving, the one that copies."""

    __slots__ = ("array", "done", "moving", "name", "needs", "rank")

    def __init__(self, name: str, array: Array, rank: int, other: int) -> None:
        self.name, self.array, self.rank = name, array, rank
        self.needs = {other}
        self.moving = self.done = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.name}: the other side has not called"

    def meet(self, mover: int) -> None:
        """The other side is there; rank `mover` copies."""
        self.needs, self.moving = {mover}, True

    @property
    def missing(self) -> set[int]:
        """The rank of the other side, until it is there."""
        return set() if self.moving else self.needs

    @property
    def waiting(self) -> set[int]:
        return {self.rank}

    def difference(self, target: ThreadMessage) -> DesyncError | None:
        """How sender and receiver disagree."""
        sent, wanted = self.array, target.array
        if sent.size == wanted.size and sent.dtype == wanted.dtype:
            return None
        return DesyncError(
            f"rank {self.rank}: {self.name}: {sent.size} elements of {sent.dtype}, but rank {target.rank}: "
            f"{target.name}: {wanted.size} elements of {wanted.dtype}"
        )


class Vote:
    """A joint decision of the living members of a group: made when each member has come or died."""

    def __init__(self, verb: str, ranks: int) -> None:
        self.verb = self.name = verb
        self.given: dict[int, Any] = {}
        self.missing = set(range(ranks))
        self.done = False
        self.result: Any = None

    def __str__(self) -> str:
        return f"{self.verb}: ranks {sorted(self.missing)} have neither called it nor died"

    @property
    def waiting(self) -> set[int]:
        return {*self.given}

    def difference(self, rank: int, verb: str) -> DesyncError | None:
        """The different call that `rank` makes."""
        if verb == self.verb:
            return None
        return DesyncError(f"rank {rank} called {verb}; ranks {sorted(self.given)} called {self.verb}")

    def arrive(self, rank: int, given: Any) -> None:
        self.given[rank] = given
        self.missing.discard(rank)


class ThreadTransfer:
    """The handle that one rank has of an operation or a message."""

    __slots__ = ("_group", "_progress", "_rank", "event")

    def __init__(
        self, event: ThreadCollective | ThreadMessage, group: ThreadGroup, rank: int, progress: Progress
    ) -> None:
        self.event, self._group, self._rank, self._progress = event, group, rank, progress

    def test(self) -> bool:
        if not self.event.done:
            self._group.world.check()
            world = self._group.world
            if self._group.revoked or world.dead or world.returned:
                with world.condition:
                    self._check()
        return self.event.done

    def wait(self) -> None:
        world, event, progress = self._group.world, self.event, self._progress
        deadline = world.deadline()
        while not event.done:
            if progress.pending:
                progress.poke()
            with world.condition:
                if event.done:
                    return
                self._check()
                world.await_change(event, progress, deadline)

    def _check(self) -> None:
        """Raise if it will never be complete. With the lock."""
        if not self.event.done:
            if error := self._group.broken(self.event, self._rank):
                raise error
            self._group.world.fail_on(self._group.stranded(self.event))
