"""`open_gloo`, which opens the Gloo backend."""

from __future__ import annotations

from fsdpx.core.base import environment
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import CommunicatorRequest, open_local, set_up_world
from fsdpx.core.comm.message_backend import DEFAULT_TIMEOUT_SECONDS
from fsdpx.ext.gloo.rendezvous import join_rendezvous

__all__ = ["open_gloo"]


def open_gloo(request: CommunicatorRequest) -> Communicator:
    """Open the communicator of all ranks that the launcher has started, or a local communicator if there is only one
    rank. Collective."""
    if request.settings.launcher is None:
        # raises an error if the environment indicates other ranks
        environment.require_single_process_and_get_note()
    if request.settings.launcher is None or request.settings.expected_size == 1:
        return open_local(request)
    rendezvous = join_rendezvous(request.settings)
    # imported here because it needs torch; if torch is missing, join_rendezvous has already raised a clearer error
    from fsdpx.ext.gloo.gloo import GlooCommunicator

    return set_up_world(
        GlooCommunicator(rendezvous, request.settings.timeout or DEFAULT_TIMEOUT_SECONDS),
        request.settings.can_share_memory,
    )
