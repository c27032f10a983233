"""One test on all ranks: it fails everywhere if it fails anywhere."""

import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from fsdpx.core.base import environment
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.message_backend import MessageBackend

_LAUNCHER = environment.read_environment().launcher
OVER_GLOO = _LAUNCHER is not None and not _LAUNCHER.mpi
"""Whether these tests run without MPI, started by `fsdpx run --backend gloo`."""


def carrier(timeout: float = 30.0) -> MessageBackend:
    """A new communicator of all ranks for messages: of MPI, or without it of Gloo."""
    if OVER_GLOO:
        from fsdpx.ext.gloo import rendezvous
        from fsdpx.ext.gloo.gloo import GlooCommunicator

        return GlooCommunicator(rendezvous.join_rendezvous(environment.read_environment()), timeout)
    from fsdpx.core.comm.mpi.mpi import MpiCommunicator

    return MpiCommunicator(timeout=timeout)


_FOUND: dict[tuple[Any, ...], Any] = {}


def from_rank_0(world: Communicator, make: Callable[..., Any], *arguments: Any) -> Any:
    """What rank 0 alone computes to compare with, told to all: the cores are its own meanwhile. It computes it once for
    each function of a module and its arguments."""
    key, found, failure = (make.__module__, make.__qualname__, *arguments), None, None
    if key in _FOUND:
        return _FOUND[key]
    if world.rank == 0:
        try:
            found = make(*arguments)
        except Exception:
            failure = traceback.format_exc()
    found, failure = world.all_gather_object((found, failure))[0]
    assert failure is None, failure
    if "<locals>" not in make.__qualname__:
        _FOUND[key] = found
    return found


def together(world: Communicator, comm: Communicator, body: Callable[[Communicator], Any]) -> None:
    failure = None
    try:
        body(comm)
    except Exception:
        failure = f"[rank {world.rank}]\n{traceback.format_exc()}"
    failures = [text for text in world.all_gather_object(failure) if text]
    assert not failures, "\n".join(failures)


def on_every_rank(test: Callable[..., None]) -> Callable[..., None]:
    """The test fails on all ranks if it fails on one; its first argument is the communicator of the fixture `world`."""

    @functools.wraps(test)
    def run(world: Communicator, **arguments: Any) -> None:
        together(world, world, functools.partial(test, **arguments))

    first, *others = inspect.signature(test).parameters.values()
    vars(run)["__signature__"] = inspect.Signature([first.replace(name="world"), *others])
    return run
