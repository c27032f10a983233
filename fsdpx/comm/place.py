"""Where this process stands among the ranks of the job, as far as it knows by itself: nothing here communicates."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from fsdpx import environment
from fsdpx.comm import roll
from fsdpx.comm.default import current
from fsdpx.errors import ConfigError

__all__ = ["Place", "have_met", "place", "running_mpi"]


class Place(NamedTuple):
    """rank of size ranks, number local_rank of this host (None: not known). world: which ranks these are, as text."""

    rank: int
    size: int
    local_rank: int | None
    world: str


def place() -> Place:
    """The ranks of `fsdpx.init()`; before it all ranks of MPI, if that runs; else all that the launcher started.

    LaunchError if variables say that this process is one of several but not which."""
    opened = current()
    if opened is not None:
        world = "a thread rank of fsdpx.spawn" if opened.of_thread else "the communicator of fsdpx.init()"
        return Place(opened.comm.rank, opened.comm.size, opened.local_rank, world)
    settings = environment.read()
    launcher, mpi = settings.launcher, running_mpi()
    local = None if launcher is None else launcher.local_rank
    if mpi is not None:
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        return Place(rank, size, 0 if size == 1 else local, "all ranks of MPI (MPI_COMM_WORLD)")
    if launcher is None:
        environment.check_alone()
        return Place(0, 1, 0, "this process alone")
    if launcher.rank is None or settings.expected_size is None:
        raise ConfigError(f"{launcher.name} does not say which rank of how many this is: call fsdpx.init() first")
    return Place(launcher.rank, settings.expected_size, local, "all ranks that the launcher started")


def running_mpi() -> Any:
    """`mpi4py.MPI` between its start and its end; it is not loaded for that."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    runs = hasattr(mpi, "Is_finalized") and mpi.Is_initialized() and not mpi.Is_finalized()  # or it is being loaded
    return mpi if runs else None


def have_met() -> bool:
    """Whether this process is one of several ranks that have met, by MPI or without it."""
    return running_mpi() is not None or bool(roll.opened)
