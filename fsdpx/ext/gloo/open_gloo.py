"""Open a world of ranks that Gloo connects."""

from __future__ import annotations

from fsdpx.core.base import environment
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import CommunicatorRequest, open_local, start_world
from fsdpx.core.comm.message_backend import DEFAULT_TIMEOUT_SECONDS
from fsdpx.ext.gloo.rendezvous import join_rendezvous

__all__ = ["open_gloo"]


def open_gloo(asked: CommunicatorRequest) -> Communicator:
    """Meet the ranks that were started; alone, where there is one rank."""
    if asked.settings.launcher is None:
        environment.check_single_process()  # one that was started as one of several is told what is missing
    if asked.settings.launcher is None or asked.settings.expected_size == 1:
        return open_local(asked)
    called = join_rendezvous(asked.settings)
    from fsdpx.ext.gloo.gloo import GlooCommunicator  # imports torch, which says less where it is missing

    return start_world(
        GlooCommunicator(called, asked.settings.timeout or DEFAULT_TIMEOUT_SECONDS), asked.settings.shares_memory
    )
