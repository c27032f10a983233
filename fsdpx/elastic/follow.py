"""Messages to idle ranks from those that train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.comm.communicator import Communicator
from fsdpx.comm.plain import LIMIT, pack, unpack
from fsdpx.errors import CommError

__all__ = ["hear", "tell"]


def tell(comm: Communicator, listeners: Sequence[int], value: Any) -> None:
    """Send `value` to the ranks that `hear` it: two messages to each."""
    if not listeners:
        return
    data = np.frombuffer(pack(value), np.uint8)
    size = np.array([data.size])
    handles = [comm.send(part, rank, what="the result") for rank in listeners for part in (size, data)]
    for handle in handles:
        handle.wait()


def hear(comm: Communicator, source: int) -> Any:
    """The value that rank `source` sends."""
    size = np.empty(1, np.int64)
    comm.recv(size, source, what="the result").wait()
    if not 0 <= size[0] <= LIMIT:
        raise CommError(f"rank {source} says that the result has {size[0]} bytes: at most {LIMIT} go at once")
    data = np.empty(int(size[0]), np.uint8)
    comm.recv(data, source, what="the result").wait()
    return unpack(data)
