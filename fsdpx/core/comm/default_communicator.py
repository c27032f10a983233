"""The default communicator of this process (or of each rank that `spawn` runs as a thread), and the rank and size of
this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdpx.core.base import environment
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.comm.communicator import Communicator
from fsdpx.errors import ConfigError

if TYPE_CHECKING:
    from fsdpx.core.comm.call_agreement import CallAgreement

__all__ = [
    "DefaultCommunicator", "RankInfo", "all_gather_plain_value", "comparing_arguments", "describe_comm_for_comparison",
    "get_compared_arguments", "get_default", "get_rank_and_size", "get_rank_info", "get_running_mpi",
    "pop_script_rank_and_size", "record_script_rank_and_size", "require_valid_intracomm", "set_default", "to_mpi4py",
    "using_communicator",
]  # fmt: skip


@dataclass(frozen=True)
class DefaultCommunicator:
    """The communicator that the functional API uses if the caller passes none, together with related information.

    Attributes
    ----------
    local_rank : index of this rank among the ranks on its host
    owned_communicators : communicators that are closed together with `comm`
    of_thread : whether the communicator belongs to a rank that `spawn` runs as a thread
    agreement : compares the calls of the functional API between ranks; None if `comm` itself compares them"""

    comm: Communicator
    local_rank: int
    owned_communicators: tuple[Communicator, ...] = ()
    of_thread: bool = False
    agreement: CallAgreement | None = None


_thread_default: ContextVar[DefaultCommunicator | None] = ContextVar("fsdpx_default", default=None)
_process_default: list[DefaultCommunicator | None] = [None]
_script_communicator: list[tuple[int, int]] = []


@contextmanager
def using_communicator(comm: Communicator) -> Iterator[None]:
    """Context manager that makes `comm` the default communicator of this thread."""
    token = _thread_default.set(DefaultCommunicator(comm, comm.rank, of_thread=True))
    try:
        yield
    finally:
        _thread_default.reset(token)


def set_default(default: DefaultCommunicator | None) -> None:
    """Set the default communicator of this process. None removes it."""
    _process_default[0] = default


def record_script_rank_and_size(comm: Communicator) -> None:
    """Record the rank and size of `comm`, a communicator that the script has passed to fsdpx.
    `pop_script_rank_and_size` returns them later. Do nothing if the default communicator already provides the rank and
    size."""
    opened = get_default()
    if opened is None or not (opened.of_thread or opened.comm.size == comm.size):
        _script_communicator[:] = [(comm.rank, comm.size)]


def pop_script_rank_and_size() -> tuple[int, int] | None:
    """Return the rank and size that `record_script_rank_and_size` recorded, and clear the record. Return None if
    nothing is recorded."""
    return _script_communicator.pop() if _script_communicator else None


def describe_comm_for_comparison(comm: Any) -> str | None:
    """Return a description of the user's argument `comm`. Ranks compare these descriptions to check that all of them
    pass the same kind of communicator. Return None for the default communicator, even if it was passed explicitly."""
    opened, comm = get_default(), to_mpi4py(comm)
    require_valid_intracomm(comm)
    return None if comm is None or (opened is not None and comm is opened.comm) else type(comm).__name__


def to_mpi4py(comm: Any) -> Any:
    """Convert an object with a `tompi4py()` method, such as a `PETSc.Comm`, to an mpi4py communicator. Return any
    other object unchanged."""
    return comm.tompi4py() if hasattr(comm, "tompi4py") else comm


def require_valid_intracomm(comm: Any) -> None:
    """Raise ConfigError if `comm` is an intercommunicator or MPI.COMM_NULL. MPI returns MPI.COMM_NULL to ranks that do
    not belong to a new communicator."""
    if not type(comm).__module__.startswith("mpi4py"):
        return
    if not comm:
        raise ConfigError("comm is MPI.COMM_NULL: this rank is not in it, or it was freed; only ranks in it call this")
    if getattr(comm, "is_inter", True):
        raise ConfigError(f"comm is an MPI.{type(comm).__name__}: the ranks of one Intracomm are needed")


def all_gather_plain_value(comm: Any, value: Any) -> list[Any]:
    """Gather `value` from all ranks of `comm`, in rank order. `comm` may be an mpi4py communicator. Collective."""
    return list(comm.all_gather_value(value) if hasattr(comm, "all_gather_value") else comm.allgather(value))


def get_rank_and_size(comm: Any) -> tuple[int, int]:
    """Return this process's rank in `comm`, and the number of ranks in `comm`. `comm` is an fsdpx or mpi4py
    communicator."""
    return (comm.Get_rank(), comm.Get_size()) if hasattr(comm, "Get_rank") else (comm.rank, comm.size)


def get_default() -> DefaultCommunicator | None:
    """Return the default communicator of this thread. If the thread has none, return the default communicator of this
    process, or None if the process has none either."""
    return _thread_default.get() or _process_default[0]


class RankInfo(NamedTuple):
    """The rank of this process, and the number of ranks.

    Attributes
    ----------
    rank, size : rank of this process, and number of ranks
    local_rank : index of this process among the ranks on its host; None if it is unknown
    world : description of the ranks that are counted, such as "all ranks that the launcher started"
    """

    rank: int
    size: int
    local_rank: int | None
    world: str


def get_rank_info() -> RankInfo:
    """Return the rank and size in the communicator that `fsdpx.init()` opened. Before `fsdpx.init()`, return the rank
    and size in MPI_COMM_WORLD if MPI is initialized, and otherwise the values that the launcher has set in the
    environment.

    Raise LaunchError if the environment shows that this process is one of several ranks, but does not show which one.
    Raise ConfigError if there is a launcher but it has not set rank and size."""
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
        environment.require_single_process_and_get_note()
        return RankInfo(0, 1, 0, "this process alone")
    if launcher.rank is None or settings.expected_size is None:
        raise ConfigError(f"{launcher.name} does not say which rank of how many this is: call fsdpx.init() first")
    return RankInfo(launcher.rank, settings.expected_size, local, "all ranks that the launcher started")


def get_running_mpi() -> Any:
    """Return `mpi4py.MPI` if MPI is loaded, initialized and not finalized, and None otherwise. This never loads MPI."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    # `hasattr` is needed because the module has no attributes yet while it is being imported
    runs = hasattr(mpi, "Is_finalized") and mpi.Is_initialized() and not mpi.Is_finalized()
    return mpi if runs else None


_compared_arguments: ContextVar[Mapping[str, str]] = ContextVar("fsdpx_given", default={})  # noqa: B039


@contextmanager
def comparing_arguments(**choices: Any) -> Iterator[dict[str, str]]:
    """Context manager that yields `choices` as {name: repr of the value}. If a communicator is opened inside the
    context, its ranks check that they all passed the same `choices`."""
    words = {name: repr(value) for name, value in choices.items()}
    token = _compared_arguments.set({**words, **_compared_arguments.get()})
    try:
        yield words
    finally:
        _compared_arguments.reset(token)


def get_compared_arguments() -> Mapping[str, str]:
    """Return the arguments that `comparing_arguments` has registered, as {name: repr of the value}."""
    return _compared_arguments.get()
