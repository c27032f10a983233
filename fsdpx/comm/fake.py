"""Any rank of any size, alone in one process: moves nothing, so a program can be counted anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpx.comm import checks
from fsdpx.comm.backend import Backend
from fsdpx.comm.calls import DONE, Call, Handle
from fsdpx.comm.communicator import Communicator
from fsdpx.errors import Aborted, ConfigError

__all__ = ["FakeCommunicator"]


class FakeCommunicator(Backend):
    """Rank `rank` of `size` ranks that do not exist. Arguments are checked; arrays keep what they hold."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"fake rank {rank} of {size} does not exist: 0 <= rank < size")
        super().__init__(rank, size)

    def __repr__(self) -> str:
        return f"FakeCommunicator(rank={self.rank}, size={self.size})"

    def move(self, call: Call) -> Handle:
        return DONE

    def _ring(self, call: Call) -> Handle:
        return DONE

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """None for color None; ConfigError for more than one rank: the colors of the others are unknown."""
        if color is None:
            return None
        if self.size > 1:
            why = "the others do not exist, so their colors are unknown: use subgroup(ranks)"
            checks.complain(ConfigError, self, Call("split"), why)
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
        """There is no rank to end but the caller."""
        raise Aborted(f"fake rank {self.rank} of {self.size} aborted with code {code}")
