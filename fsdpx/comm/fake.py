"""Any rank of any size, alone in one process: moves nothing, so a program can be counted anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpx.comm import checks
from fsdpx.comm.backend import Backend
from fsdpx.comm.communicator import DONE, Array, Communicator, Handle, Pieces, ReduceOp
from fsdpx.comm.steps import Progress
from fsdpx.errors import Aborted, ConfigError

__all__ = ["FakeCommunicator"]


class FakeCommunicator(Backend):
    """Rank `rank` of `size` ranks that do not exist. Arguments are checked; arrays keep what they hold."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"fake rank {rank} of {size} does not exist: 0 <= rank < size")
        super().__init__(rank, size, Progress())

    def __repr__(self) -> str:
        return f"FakeCommunicator(rank={self.rank}, size={self.size})"

    def _all_gather(self, send: Array, recv: Array, cut: Pieces, what: str) -> Handle:
        return DONE

    def _reduce_scatter(self, send: Array, recv: Array, op: ReduceOp, cut: Pieces, what: str) -> Handle:
        return DONE

    def _all_reduce(self, buf: Array, op: ReduceOp, what: str) -> Handle:
        return DONE

    def _broadcast(self, buf: Array, root: int, what: str) -> Handle:
        return DONE

    def _reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, what: str) -> Handle:
        return DONE

    def _gather(self, send: Array, recv: Array | None, root: int, cut: Pieces | None, what: str) -> Handle:
        return DONE

    def _scatter(self, send: Array | None, recv: Array, root: int, cut: Pieces | None, what: str) -> Handle:
        return DONE

    def _all_to_all(self, send: Array, recv: Array, sent: Pieces, received: Pieces, what: str) -> Handle:
        return DONE

    def _send(self, buf: Array, dest: int, tag: int, what: str) -> Handle:
        return DONE

    def _recv(self, buf: Array, source: int, tag: int, what: str) -> Handle:
        return DONE

    def _barrier(self, what: str) -> Handle:
        return DONE

    def _ring(self, buf: Array, op: ReduceOp, what: str) -> Handle:
        return DONE

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """None for color None; ConfigError for more than one rank: the colors of the others are unknown."""
        if color is None:
            return None
        if self.size > 1:
            message = "the others do not exist, so their colors are unknown: use subgroup(ranks)"
            checks.complain(ConfigError, "split", self.rank, "", message)
        return FakeCommunicator(0, 1)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        checks.group(self, ranks)
        return FakeCommunicator(list(ranks).index(self.rank), len(ranks))

    def all_gather_object(self, obj: Any) -> list[Any]:
        """As if every rank had given `obj`."""
        return [obj] * self.size

    def close(self) -> None:
        """Nothing to free."""

    def abort(self, code: int = 1) -> None:
        """There is nobody to end but the caller."""
        raise Aborted(f"fake rank {self.rank} of {self.size} aborted with code {code}")
