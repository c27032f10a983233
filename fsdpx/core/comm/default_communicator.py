"""The default communicator, one per process and for every rank of `spawn`, and this rank's place in the world."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdpx.core.base import environment
from fsdpx.core.comm.communicator import Communicator
from fsdpx.errors import ConfigError

if TYPE_CHECKING:
    from fsdpx.core.comm.call_agreement import Agreement

__all__ = [
    "Default", "Place", "current", "demand_member", "gather_plain", "given_to_call", "kind", "other", "place", "put",
    "running_mpi", "taken", "use", "uses", "with_arguments",
]  # fmt: skip

@dataclass(frozen=True)
class Default:
    """A default communicator, the rank's number on its host, and what is to be closed with it. agreement: how ranks
    agree on calls of the functional API, where the communicator itself does not compare them."""

    comm: Communicator
    local_rank: int
    made: tuple[Communicator, ...] = ()
    of_thread: bool = False
    agreement: Agreement | None = None


_of_thread: ContextVar[Default | None] = ContextVar("fsdpx_default", default=None)
_of_process: list[Default | None] = [None]
_other: list[tuple[int, int]] = []


@contextmanager
def use(comm: Communicator) -> Iterator[None]:
    """`comm` is this thread's default inside the block."""
    token = _of_thread.set(Default(comm, comm.rank, of_thread=True))
    try:
        yield
    finally:
        _of_thread.reset(token)


def put(default: Default | None) -> None:
    """This is the process's default from now on; None forgets it."""
    _of_process[0] = default


def uses(comm: Communicator) -> None:
    """The script has a communicator of its own in use."""
    opened = current()
    if opened is None or not (opened.of_thread or opened.comm.size == comm.size):
        _other[:] = [(comm.rank, comm.size)]


def other() -> tuple[int, int] | None:
    """This rank and the size of such a communicator, the first time that it is asked for."""
    return _other.pop() if _other else None


def kind(comm: Any) -> str | None:
    """What is given as `comm=`, for ranks to compare; None for nothing and for the default, which are the same."""
    opened, comm = current(), taken(comm)
    demand_member(comm)
    return None if comm is None or (opened is not None and comm is opened.comm) else type(comm).__name__


def taken(comm: Any) -> Any:
    """mpi4py's communicator for one of another library that gives it by `tompi4py()`, as `PETSc.Comm` does; others as
    they are."""
    return comm.tompi4py() if hasattr(comm, "tompi4py") else comm


def demand_member(comm: Any) -> None:
    """ConfigError for what mpi4py has for ranks that a communicator leaves out, and for other things than the ranks of
    one group."""
    if not type(comm).__module__.startswith("mpi4py"):
        return
    if not comm:
        raise ConfigError("comm is MPI.COMM_NULL: this rank is not in it, or it was freed; only ranks in it call this")
    if getattr(comm, "is_inter", True):
        raise ConfigError(f"comm is an MPI.{type(comm).__name__}: the ranks of one Intracomm are needed")


def gather_plain(comm: Any, value: Any) -> list[Any]:
    """The plain values of all ranks of `comm`, which may be of mpi4py, by rank. Collective."""
    return list(comm.all_gather_plain(value) if hasattr(comm, "all_gather_plain") else comm.allgather(value))


def current() -> Default | None:
    """The default of this thread, else of this process, else None."""
    return _of_thread.get() or _of_process[0]


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


_given: ContextVar[Mapping[str, str]] = ContextVar("fsdpx_given", default={})  # noqa: B039


@contextmanager
def with_arguments(**choices: Any) -> Iterator[dict[str, str]]:
    """Communicators that are opened inside compare these arguments as well."""
    words = {name: repr(value) for name, value in choices.items()}
    token = _given.set({**words, **_given.get()})
    try:
        yield words
    finally:
        _given.reset(token)


def given_to_call() -> Mapping[str, str]:
    """The arguments of the call that opens a communicator now, by name, as text."""
    return _given.get()
