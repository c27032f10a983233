"""Arrays on a GPU go through the host: copied there before MPI sees them, and back at the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from fsdpx.comm.communicator import Handle
from fsdpx.comm.steps import Finish

__all__ = ["staged"]

Primitive = Callable[..., Handle]


def staged(reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> Callable[[Primitive], Primitive]:
    """Let a primitive that knows host arrays only take arrays of any device.

    reads, writes: positions of the arrays it reads and writes. Host arrays pass as they are. Scratch: a host
    copy of each array.
    """
    touched = tuple(sorted({*reads, *writes}))

    def decorate(primitive: Primitive) -> Primitive:
        @wraps(primitive)
        def call(self: Any, *args: Any) -> Handle:
            for index in touched:
                array = args[index]
                if array is not None and not isinstance(array, np.ndarray):
                    return _through_host(primitive, self, args, reads, writes)
            return primitive(self, *args)

        return call

    return decorate


def _through_host(
    primitive: Primitive, self: Any, args: tuple[Any, ...], reads: tuple[int, ...], writes: tuple[int, ...]
) -> Handle:
    from fsdpx.array.namespace import from_host, namespace_of, to_host

    host = list(args)
    for index in {*reads, *writes}:
        if args[index] is not None:
            fresh = index not in reads
            host[index] = np.empty(args[index].shape, args[index].dtype) if fresh else to_host(args[index])
    handle = primitive(self, *host)

    def back() -> None:
        for index in writes:
            if args[index] is not None:
                args[index][...] = from_host(namespace_of(args[index]), host[index])

    return Finish(handle, back)
