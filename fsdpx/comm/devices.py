"""Which GPU each rank of a communicator takes: all ranks find out together, and all raise the same error."""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

from fsdpx import environment
from fsdpx.comm import default
from fsdpx.comm.aware import settle
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.place import running_mpi
from fsdpx.cuda import devices
from fsdpx.cuda.devices import DeviceMap
from fsdpx.errors import ConfigError

__all__ = ["Seat", "seats", "shared", "take"]


class Seat(NamedTuple):
    """Where a rank computes. gpu: its number, as the process sees them. bus: its PCI address."""

    host: str
    local_rank: int
    gpu: int
    bus: str


class _RankFacts(NamedTuple):
    """A rank's description of itself. known: its number among all ranks of its host, where the communicator has only
    some of them. why: the reason why it cannot take any GPU."""

    host: str
    process: int
    known: int | None
    buses: tuple[str, ...]
    device_map: DeviceMap
    why: str = ""


def take(world: Communicator, device_map: DeviceMap = None) -> list[Seat]:
    """Give this rank its GPU, and settle how its arrays travel; returns the seats of all ranks.

    Processes of a host take its GPUs in the order of their ranks in `world`, which is MPI's; a part of the ranks, each
    alone perhaps, by the numbers that the launcher gave. Threads of a process share its GPU. Collective; ConfigError on
    all ranks if one of them has none."""
    found = seats(world, device_map)
    devices.take(found[world.rank].gpu)
    settle(world)
    return found


def seats(world: Communicator, device_map: DeviceMap = None) -> list[Seat]:
    """The same without taking it."""
    here, process = platform.node(), os.getpid()
    try:
        mine = _RankFacts(here, process, _known(world.size), devices.gpus(), device_map)
    except ConfigError as error:
        mine = _RankFacts(here, process, None, (), device_map, str(error))
    facts = world.all_gather_plain(mine)
    return [_seat(rank, facts) for rank in range(len(facts))]


def shared(found: list[Seat]) -> list[list[int]]:
    """The groups of ranks that have one GPU between them."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, seat in enumerate(found):
        groups.setdefault((seat.host, seat.bus), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def _seat(rank: int, facts: list[_RankFacts]) -> Seat:
    own = facts[rank]
    who = f"rank {rank} on {own.host}"
    if own.why:
        raise ConfigError(f"{who}: {own.why}")
    here = {one.process: one.known for one in facts if one.host == own.host}
    known = list(here.values())
    complete = None not in known and len({*known}) == len(known)
    local_rank = here[own.process] if complete else list(here).index(own.process)
    assert local_rank is not None
    try:
        gpu = devices.choose(local_rank, len(own.buses), own.device_map)
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None
    return Seat(own.host, local_rank, gpu, own.buses[gpu])


def _known(size: int) -> int | None:
    """This rank's number on its host among more ranks than the `size` of the communicator, if it is known."""
    opened = default.current()
    if opened is not None and not opened.of_thread and opened.comm.size > size:
        return opened.local_rank
    settings, mpi = environment.read(), running_mpi()
    if settings.launcher is None:
        return None
    everyone = (settings.expected_size or 0) if mpi is None else mpi.COMM_WORLD.Get_size()
    return settings.launcher.local_rank if everyone > size else None
