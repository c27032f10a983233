"""The base of every backend: calls are checked, width one stays local, the rest is the backend's to move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpx.comm import checks, ring, rounded
from fsdpx.comm.calls import DONE, Call, Handle, pieces
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.messages import COLLECTIVES, Pairs
from fsdpx.comm.plain import LIMIT
from fsdpx.comm.steps import Progress, Steps
from fsdpx.comm.verbs import check
from fsdpx.errors import CommError

__all__ = ["Backend"]


class Backend(Communicator):
    """A communicator that moves bytes itself: write `move`, `split`, `close` and `abort`.

    `move` must know "send" and "recv"; any other verb for which it has no better way it leaves to
    `super().move(call)`."""

    def __init__(self, rank: int, size: int, progress: Progress | None = None) -> None:
        self.rank = rank
        self.size = size
        self.progress = Progress() if progress is None else progress
        self._tags = 0

    def issue(self, call: Call) -> Handle:
        check(self, call)
        if self.size == 1 and call.verb not in ("send", "recv"):
            return _alone(call)
        if call.algorithm == "ring":
            return self._ring(call)
        return self.move(call) if call.wire is None else self.move_rounded(call)

    def move(self, call: Call) -> Handle:
        """Begin a call whose arguments are good, among at least two ranks; a message may be to this rank itself."""
        call.tag = self._tag()
        return COLLECTIVES[call.verb](self, call)

    def move_rounded(self, call: Call) -> Handle:
        """The same for a sum whose summands are rounded to `call.wire` on their way."""
        return rounded.COLLECTIVES[call.verb](self, call)

    def exchange(self, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
        """Messages that belong to one call."""
        messages = [("recv", *pair) for pair in incoming] + [("send", *pair) for pair in outgoing]
        calls = [Call(verb, (part,), call.op, rank, (), call.what, call.tag) for verb, rank, part in messages]
        return Steps(iter([self.move(message) for message in calls]), self.progress)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        checks.group(self, ranks)
        group = self.split(min(ranks), list(ranks).index(self.rank))
        assert group is not None
        return group

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """In two all-gathers, sizes and bytes: so the wait for a missing rank ends here, too."""
        mine = np.frombuffer(data, np.uint8)
        sizes = np.empty(self.size, np.int64)
        self.all_gather(np.array([mine.size]), sizes, what="sizes of objects").wait()
        wrong = [rank for rank, n in enumerate(sizes.tolist()) if not 0 <= n <= LIMIT]
        if wrong:
            raise CommError(f"rank {wrong[0]} says that it sends {sizes[wrong[0]]} bytes: at most {LIMIT} go at once")
        cut = pieces(tuple(int(n) for n in sizes))
        found = np.empty(cut.total, np.uint8)
        self.all_gather(mine, found, cut.counts, what="objects").wait()
        return [cut.part(found, rank).tobytes() for rank in range(self.size)]

    def _ring(self, call: Call) -> Handle:
        call.tag = self._tag()
        return Steps(ring.steps(self.move, self.rank, self.size, call), self.progress)

    def _tag(self) -> int:
        """A tag of the library's own; the same on every rank, as all issue the same collectives in order."""
        self._tags = (self._tags + 1) % (32767 - checks.TAGS)
        return checks.TAGS + self._tags


def _alone(call: Call) -> Handle:
    """All communication there is among one rank; nothing at all when the shard is the full buffer."""
    if len(call.arrays) == 2:
        send, recv = call.arrays
        checks.copy(recv, send)
    return DONE
