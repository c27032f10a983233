"""Any rank of any size, alone in one process: moves nothing, so a program can be counted anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpx.comm.backend import Backend, check_group, complain
from fsdpx.comm.calls import DONE, Call, Handle
from fsdpx.comm.communicator import Communicator
from fsdpx.errors import Aborted, ConfigError
from fsdpx.shapes import ShapeArray

__all__ = ["FakeCommunicator", "FakeNode"]


class FakeCommunicator(Backend):
    """Rank `rank` of `size` ranks that do not exist. Arguments are checked; arrays keep what they hold."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size} does not exist: 0 <= rank < size")
        super().__init__(rank, size)

    def __repr__(self) -> str:
        return f"FakeCommunicator(rank={self.rank}, size={self.size})"

    def move(self, call: Call) -> Handle:
        return DONE

    def move_rounded(self, call: Call) -> Handle:
        return DONE

    def _ring(self, call: Call) -> Handle:
        return DONE

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """None for color None; ConfigError for more than one rank: the colors of the others are unknown."""
        if color is None:
            return None
        if self.size > 1:
            why = "the others do not exist, so their colors are unknown: use subgroup(ranks)"
            complain(ConfigError, self, Call("split"), why)
        return FakeCommunicator(0, 1)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        check_group(self, ranks)
        return FakeCommunicator(list(ranks).index(self.rank), len(ranks))

    def all_gather_object(self, obj: Any) -> list[Any]:
        """As if every rank had given `obj`."""
        return [obj] * self.size

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The same."""
        return [data] * self.size

    def close(self) -> None:
        """Nothing to free."""

    def abort(self, code: int = 1) -> None:
        """There is no rank to end but the caller."""
        raise Aborted(f"fake rank {self.rank} of {self.size} aborted with code {code}")


class FakeNode(FakeCommunicator):
    """Ranks that do not exist, on hosts that share memory: code that decides a layout gets the answers that
    `NodeCommunicator` would give. hosts: of each rank."""

    def __init__(self, rank: int, hosts: Sequence[int]) -> None:
        super().__init__(rank, len(hosts))
        self.hosts = tuple(hosts)
        self.machines = [[r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)]
        self.machine = next(machine for machine in self.machines if rank in machine)
        self.shares = len({len(machine) for machine in self.machines}) == 1 and len(self.machine) > 1
        self.inside = self.shares and len(self.machines) == 1

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        check_group(self, ranks)
        return FakeNode(list(ranks).index(self.rank), [self.hosts[rank] for rank in ranks])

    def share(self, nbytes: int) -> ShapeArray:
        """Memory that the others of the host could reach, if there were any."""
        return ShapeArray(nbytes, "uint8")

    share_one = share

    def release(self, array: Any) -> None:
        """Nothing to free."""

    abandon = release
