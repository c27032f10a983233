"""Where thread ranks meet: operations that wait for all ranks, messages that wait for their other side."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from fsdpx.comm.communicator import Array
from fsdpx.comm.steps import Progress
from fsdpx.errors import Aborted, CommTimeout, DesyncError

__all__ = ["Message", "Operation", "Transfer", "World"]

_POLL = 0.0005


class World:
    """All thread ranks of one `spawn`: they share one lock, and the first failure ends them all."""

    def __init__(self, timeout: float = 120.0, end: float = math.inf) -> None:
        self.condition = threading.Condition()
        self.failure: BaseException | None = None
        self.timeout = timeout
        self.end = end

    def fail(self, error: BaseException) -> None:
        """Wake every rank; the first failure is the one they hear of."""
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

    def finish(self, *events: Operation | Message) -> None:
        """These are complete: wake who waits for them."""
        with self.condition:
            for event in events:
                event.done = True
            self.condition.notify_all()


class Operation:
    """One collective: what was called, and what each rank gave."""

    def __init__(self, verb: str, what: str, terms: tuple, members: Sequence[int]) -> None:
        self.verb, self.what, self.terms = verb, what, terms
        self.members = members
        self.given: list[Any] = [None] * len(members)
        self.missing = set(range(len(members)))
        self.done = False
        self.result: Any = None

    def __str__(self) -> str:
        what = f" of {self.what}" if self.what else ""
        return f"{self.verb}{what}: ranks {sorted(self.missing)} of {len(self.members)} have not called it"

    def difference(self, rank: int, verb: str, what: str, terms: tuple) -> DesyncError | None:
        """What `rank` calls instead, if it does not call what the others called."""
        if (verb, terms) == (self.verb, self.terms):
            return None
        others = sorted(set(range(len(self.members))) - self.missing)
        mine, theirs = _call(verb, what, terms), _call(self.verb, self.what, self.terms)
        return DesyncError(f"ranks called different collectives: rank {rank} {mine}; ranks {others} {theirs}")

    def arrive(self, rank: int, given: Any) -> bool:
        """Leave what `rank` gives; True for the last one."""
        self.given[rank] = given
        self.missing.discard(rank)
        return not self.missing


class Message:
    """One side of a message between two ranks."""

    __slots__ = ("array", "done", "label", "rank")

    def __init__(self, label: str, array: Array, rank: int) -> None:
        self.label, self.array, self.rank = label, array, rank
        self.done = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.label}: the other side has not called"

    def difference(self, target: Message) -> DesyncError | None:
        """How sender and receiver disagree."""
        sent, wanted = self.array, target.array
        if sent.size == wanted.size and sent.dtype == wanted.dtype:
            return None
        return DesyncError(
            f"rank {self.rank}: {self.label}: {sent.size} elements of {sent.dtype}, but rank {target.rank}: "
            f"{target.label}: {wanted.size} elements of {wanted.dtype}"
        )


class Transfer:
    """The handle of an operation or a message."""

    __slots__ = ("event", "progress", "world")

    def __init__(self, event: Operation | Message, world: World, progress: Progress) -> None:
        self.event, self.world, self.progress = event, world, progress

    def test(self) -> bool:
        if not self.event.done:
            self.world.check()
        return self.event.done

    def wait(self) -> None:
        world, event = self.world, self.event
        deadline = min(time.monotonic() + world.timeout, world.end)
        while not event.done:
            if self.progress.pending:
                self.progress.poke()
            with world.condition:
                if event.done:
                    return
                world.check()
                world.condition.wait(_POLL if self.progress.pending else 0.2)
            if time.monotonic() > deadline and not event.done:
                raise CommTimeout(f"not done after {world.timeout:g} s: {event}")


def _call(verb: str, what: str, terms: tuple) -> str:
    return f"called {verb}{f' of {what}' if what else ''} {terms}"
