"""Arrays on a GPU go through the host as a whole: copied there before MPI sees them, and back at the end.
Large ones have `fsdpx.comm.relay`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fsdpx.comm.calls import Call, Handle
from fsdpx.comm.steps import Finish
from fsdpx.comm.verbs import VERBS
from fsdpx.cuda.devices import on

__all__ = ["staged"]


def staged(call: Call, move: Callable[[Call], Handle]) -> Handle:
    """`move(call)`, where `move` knows host arrays only and `call` may be of arrays of any device. Host arrays pass as
    they are. Scratch: a host copy of each array."""
    for array in call.arrays:
        if array is not None and not isinstance(array, np.ndarray):
            return _through_host(call, move)
    return move(call)


def _through_host(call: Call, move: Callable[[Call], Handle]) -> Handle:
    from fsdpx.array.namespace import from_host, namespace_of, to_host

    verb, arrays = VERBS[call.verb], call.arrays
    host = list(arrays)
    for index in {*verb.reads, *verb.writes}:
        if arrays[index] is not None:
            fresh = index not in verb.reads
            host[index] = np.empty(arrays[index].shape, arrays[index].dtype) if fresh else to_host(arrays[index])
    handle = move(call.on(tuple(host)))

    def back() -> None:
        for index in verb.writes:
            if arrays[index] is not None:
                with on(arrays[index]):
                    arrays[index][...] = from_host(namespace_of(arrays[index]), host[index])

    return Finish(handle, back)
