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
    from fsdpx.core.comm.call_agreement import CallAgreement

__all__ = [
    "DefaultCommunicator",
    "RankInfo",
    "all_gather_data_of",
    "as_mpi4py",
    "comm_argument_text",
    "compare_arguments_inside",
    "get_compared_arguments",
    "get_default",
    "get_rank_info",
    "get_running_mpi",
    "note_own_communicator",
    "pop_own_communicator",
    "require_member",
    "set_default",
    "use_communicator",
]  # fmt: skip


@dataclass(frozen=True)
class DefaultCommunicator:
    """A default communicator, the rank's number on its host, and what is to be closed with it. agreement: how ranks
    agree on calls of the functional API, where the communicator itself does not compare them."""

    comm: Communicator
    local_rank: int
    made: tuple[Communicator, ...] = ()
    of_thread: bool = False
    agreement: CallAgreement | None = None


_of_thread: ContextVar[DefaultCommunicator | None] = ContextVar("fsdpx_default", default=None)
_of_process: list[DefaultCommunicator | None] = [None]
_other: list[tuple[int, int]] = []


@contextmanager
def use_communicator(comm: Communicator) -> Iterator[None]:
    """`comm` is this thread's default inside the block."""
    token = _of_thread.set(DefaultCommunicator(comm, comm.rank, of_thread=True))
    try:
        yield
    finally:
        _of_thread.reset(token)


def set_default(default: DefaultCommunicator | None) -> None:
    """This is the process's default from now on; None forgets it."""
    _of_process[0] = default


def note_own_communicator(comm: Communicator) -> None:
    """The script has a communicator of its own in use."""
    opened = get_default()
    if opened is None or not (opened.of_thread or opened.comm.size == comm.size):
        _other[:] = [(comm.rank, comm.size)]


def pop_own_communicator() -> tuple[int, int] | None:
    """This rank and the size of such a communicator, the first time that it is asked for."""
    return _other.pop() if _other else None


def comm_argument_text(comm: Any) -> str | None:
    """What is given as `comm=`, for ranks to compare; None for nothing and for the default, which are the same."""
    opened, comm = get_default(), as_mpi4py(comm)
    require_member(comm)
    return None if comm is None or (opened is not None and comm is opened.comm) else type(comm).__name__


def as_mpi4py(comm: Any) -> Any:
    """mpi4py's communicator for one of another library that gives it by `tompi4py()`, as `PETSc.Comm` does; others as
    they are."""
    return comm.tompi4py() if hasattr(comm, "tompi4py") else comm


def require_member(comm: Any) -> None:
    """ConfigError for what mpi4py has for ranks that a communicator leaves out, and for other things than the ranks of
    one group."""
    if not type(comm).__module__.startswith("mpi4py"):
        return
    if not comm:
        raise ConfigError("comm is MPI.COMM_NULL: this rank is not in it, or it was freed; only ranks in it call this")
    if getattr(comm, "is_inter", True):
        raise ConfigError(f"comm is an MPI.{type(comm).__name__}: the ranks of one Intracomm are needed")


def all_gather_data_of(comm: Any, value: Any) -> list[Any]:
    """The plain values of all ranks of `comm`, which may be of mpi4py, by rank. Collective."""
    return list(comm.all_gather_data(value) if hasattr(comm, "all_gather_data") else comm.allgather(value))


def get_default() -> DefaultCommunicator | None:
    """The default of this thread, else of this process, else None."""
    return _of_thread.get() or _of_process[0]


class RankInfo(NamedTuple):
    """rank of size ranks, number local_rank of this host (None: not known). world: which ranks these are, as text."""

    rank: int
    size: int
    local_rank: int | None
    world: str


def get_rank_info() -> RankInfo:
    """The ranks of `fsdpx.init()`; before it all ranks of MPI, if that runs; else all that the launcher started.

    LaunchError if variables say that this process is one of several but not which."""
    opened = get_default()
    if opened is not None:
        world = "a thread rank of fsdpx.spawn" if opened.of_thread else "the communicator of fsdpx.init()"
        return RankInfo(opened.comm.rank, opened.comm.size, opened.local_rank, world)
    settings = environment.read_environment()
    launcher, mpi = settings.launcher, get_running_mpi()
    local = None if launcher is None else launcher.local_rank
    if mpi is not None:
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        return RankInfo(rank, size, 0 if size == 1 else local, "all ranks of MPI (MPI_COMM_WORLD)")
    if launcher is None:
        environment.check_single_process()
        return RankInfo(0, 1, 0, "this process alone")
    if launcher.rank is None or settings.expected_size is None:
        raise ConfigError(f"{launcher.name} does not say which rank of how many this is: call fsdpx.init() first")
    return RankInfo(launcher.rank, settings.expected_size, local, "all ranks that the launcher started")


def get_running_mpi() -> Any:
    """`mpi4py.MPI` between its start and its end; it is not loaded for that."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    runs = hasattr(mpi, "Is_finalized") and mpi.Is_initialized() and not mpi.Is_finalized()  # or it is being loaded
    return mpi if runs else None


_given: ContextVar[Mapping[str, str]] = ContextVar("fsdpx_given", default={})  # noqa: B039


@contextmanager
def compare_arguments_inside(**choices: Any) -> Iterator[dict[str, str]]:
    """Communicators that are opened inside compare these arguments as well."""
    words = {name: repr(value) for name, value in choices.items()}
    token = _given.set({**words, **_given.get()})
    try:
        yield words
    finally:
        _given.reset(token)


def get_compared_arguments() -> Mapping[str, str]:
    """The arguments of the call that opens a communicator now, by name, as text."""
    return _given.get()
