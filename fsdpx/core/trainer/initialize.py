"""Open and close the default communicator of a process, and look up the process's rank, local rank and world size."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, Any

from fsdpx.core.base import environment, hooks
from fsdpx.core.base.name_hints import wrap_with_option_check
from fsdpx.core.base.option_names import Backend
from fsdpx.core.comm import default_communicator as defaults
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.default_communicator import RankInfo, comparing_arguments, get_rank_info
from fsdpx.core.comm.desync_check import CheckedCommunicator
from fsdpx.core.comm.init import find_node_communicator, open_world, unwrap_message_backend
from fsdpx.core.comm.message_backend import MessageBackend
from fsdpx.core.comm.watched import detach_and_return_watchdog, start_watchdog_if_possible
from fsdpx.core.trainer.batch import agree_on_call
from fsdpx.errors import ConfigError

if TYPE_CHECKING:
    from fsdpx.core.comm.call_agreement import CallAgreement

__all__ = ["default_communicator", "finalize", "init", "is_initialized", "local_rank", "rank", "world_size"]


@wrap_with_option_check
def init(
    backend: Backend | None = None, comm: Any = None, *, rank: int | None = None, size: int | None = None
) -> Communicator:
    """Open the default communicator and return it. If there is an open default communicator, `init()` without arguments
    returns that communicator. Collective.

    `with fsdpx.init() as comm:` closes the communicator at the end of the block, like `finalize`. If the block raises
    an error, the job is aborted instead.

    With FSDPX_CHECK=1, ranks compare their calls before each collective begins.

    Parameters
    ----------
    backend : "node", "mpi", "local" or another backend of `fsdpx.core.comm.open_world` (default: detected from the
        launcher)
    comm : communicator to use instead of a new one with all ranks: a `Communicator`, or an mpi4py communicator, which
        is duplicated
    rank, size : rank and size of a fake communicator

    Returns
    -------
    Communicator : communicator of all ranks, or of the ranks of `comm`

    Raises
    ------
    ConfigError : if arguments are passed although the default communicator is already open
    """
    existing = defaults.get_default()
    if existing is None:
        with comparing_arguments(comm=defaults.describe_comm_for_comparison(comm), backend=backend):
            opened = _open_default_communicator(backend, comm, rank, size)
        opened.comm.leave = finalize
        defaults.set_default(opened)
        return opened.comm
    if (backend, comm, rank, size) == (None, None, None, None):
        existing.comm.leave = finalize
        if (carrier := unwrap_message_backend(existing.comm)) is not None:
            hooks.install_process_hooks_while_alive(carrier, carrier)
        return existing.comm
    if existing.of_thread:
        raise ConfigError("a rank of spawn has its communicator already: call init() without arguments")
    raise ConfigError("fsdpx is initialized already: call finalize() before init with other arguments")


def _open_default_communicator(
    backend: str | None, comm: Any, rank: int | None, size: int | None
) -> defaults.DefaultCommunicator:
    """Open the communicator for `init`, and determine this process's local rank. Collective."""
    base = open_world(backend, comm, rank=rank, size=size)
    opened = () if base is comm else (base,)
    launcher = environment.read_environment().launcher
    hosts = base.all_gather_value((platform.node(), None if launcher is None else launcher.local_rank))
    local_rank = _compute_local_rank(base.rank, hosts)
    # do not extend timeouts, because ranks report no progress outside of programs
    start_watchdog_if_possible(base, extend_waits=False)
    if not environment.read_environment().check or base.size == 1:
        return defaults.DefaultCommunicator(base, local_rank, opened, agreement=_make_call_agreement(base))
    guarded = CheckedCommunicator(base)
    return defaults.DefaultCommunicator(guarded, local_rank, (guarded, *opened))


def _make_call_agreement(comm: Communicator) -> CallAgreement | None:
    """Return the object that ranks use to compare their calls. Return None if no comparison is needed: the backend for
    ranks that run as threads compares calls itself, and a single rank or fake ranks have nothing to compare."""
    carrier, node = unwrap_message_backend(comm), find_node_communicator(comm)
    if carrier is None or carrier.size == 1:
        return None
    from fsdpx.core.comm.call_agreement import CallAgreement

    apart = carrier.split(0, carrier.rank)
    assert isinstance(apart, MessageBackend)
    return CallAgreement(carrier, apart, node is not None and getattr(node, "inside", False))


def _compute_local_rank(rank: int, hosts: list[tuple[str, int | None]]) -> int:
    """Return the local rank of `rank`. The n ranks of a host get the local ranks 0 to n - 1. If the launcher has
    already assigned these numbers, its assignment is kept. Otherwise, the ranks of the host are numbered in rank order.
    `hosts` lists, for each rank, its host name and its local rank according to the launcher."""
    here = [(other, reported) for other, (host, reported) in enumerate(hosts) if host == hosts[rank][0]]
    ranks, numbers = zip(*here, strict=True)
    local = numbers if {*numbers} == {*range(len(here))} else range(len(here))
    return int(dict(zip(ranks, local, strict=True))[rank])


def is_initialized() -> bool:
    """Return whether this thread has a default communicator."""
    return defaults.get_default() is not None


def finalize() -> None:
    """Close the default communicator of this process, if `init` opened it. Collective. With ULFM, this rank does not
    wait for the other ranks, because some may have died."""
    opened = defaults.get_default()
    if opened is not None and not opened.of_thread:
        defaults.set_default(None)
        # with ULFM, do not wait for other ranks, because some may have died unnoticed
        if not environment.read_environment().ulfm:
            # if ranks have made different calls, this raises an error that names the call of each rank
            agree_on_call(opened.owned_communicators[-1] if opened.owned_communicators else opened.comm, "finalize")
        detach_and_return_watchdog(opened.comm)
        if opened.agreement is not None:
            opened.agreement.close()
        for comm in opened.owned_communicators:
            comm.close()


def default_communicator() -> Communicator:
    """Return the default communicator; open it with `init()` if there is none."""
    opened = defaults.get_default()
    return init() if opened is None else opened.comm


def rank() -> int:
    """Return the rank of this process in the communicator of `init()`. Before `init()`, return its rank among all ranks
    that MPI or the launcher started.

    Like `world_size` and `local_rank`, this function never communicates. If a trainer uses another communicator, this
    process's rank in that communicator is `trainer.call_runner.rank`."""
    return _get_rank_info_and_warn_if_trainer_differs("rank").rank


def world_size() -> int:
    """Return the number of ranks in the communicator of `init()`. Before `init()`, return the number of ranks that MPI
    or the launcher started."""
    return _get_rank_info_and_warn_if_trainer_differs("world_size").size


def local_rank() -> int:
    """Return the rank of this process among the ranks on the same host. Before `init`, raise ConfigError if several
    ranks were started and the launcher has not set local ranks."""
    place = _get_rank_info_and_warn_if_trainer_differs("local_rank")
    if place.local_rank is None:
        raise ConfigError(f"local_rank is not known of {place.world}: call fsdpx.init(), which finds it out, first")
    return place.local_rank


def _get_rank_info_and_warn_if_trainer_differs(name: str) -> RankInfo:
    """Return rank, size and local rank of this process for the function `name`. If the script also has a trainer on a
    communicator of a different size, print once, on one rank, which communicator the result refers to."""
    rank_info, other = get_rank_info(), defaults.pop_script_rank_and_size()
    if other is not None and other[1] != rank_info.size and other[0] == 0:
        print(
            f"fsdpx: {name}() is of {rank_info.world}, {rank_info.size} in number; the communicator given to "
                "distribute() has " f"{other[1]}, and trainer.call_runner.rank is the rank there",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return rank_info
