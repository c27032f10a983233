"""The cores of a host, shared among its ranks: BLAS starts one thread per core in every rank unless told otherwise."""

import os
from typing import Any

from fsdpx import environment
from fsdpx.array import blas, parallel

__all__ = ["cores", "share_cores"]

_limits: list[Any] = []  # keeps the limits in force


def share_cores(ranks_here: int) -> int:
    """Have kernels and BLAS use cores / ranks threads (at least 1), or what the user set. Returns the number.

    Without this, R ranks on a host run R x cores threads that only get in each other's way.
    """
    asked = environment.read().threads
    threads = asked if asked is not None else max(cores() // ranks_here, 1)
    parallel.set_threads(threads)
    blas.threads(threads)
    if asked is None:
        from threadpoolctl import threadpool_limits

        _limits[:] = [threadpool_limits(limits=threads, user_api="blas")]
    return threads


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
