"""The part of a communicator that a relay of GPU arrays needs to carry its messages."""

from __future__ import annotations

from typing import Any, Protocol

from fsdpx.comm.calls import Call, Handle
from fsdpx.comm.messages import Pairs
from fsdpx.comm.steps import Progress

__all__ = ["Carrying", "inside"]


class Carrying(Protocol):
    rank: int
    size: int
    timeout: float
    progress: Progress

    def exchange(self, call: Call, outgoing: Pairs, incoming: Pairs) -> Handle:
        """Send and receive arrays of the host; those between two ranks under one tag stay in order."""


def inside(comm: Any, name: str) -> Any:
    """The communicator with an attribute `name` inside what counts, guards or shares; None: there is none."""
    while comm is not None and not hasattr(comm, name):
        comm = getattr(comm, "comm", None) or getattr(comm, "carrier", None)
    return comm
