"""The cores of a host, divided among its ranks: by default BLAS starts one thread per core in every rank."""

import os
from typing import Any

from fsdpx import environment
from fsdpx.array import blas, parallel

__all__ = ["cores", "share_cores", "threads_of"]

_limits: list[Any] = []  # keeps the limits in force


def share_cores(ranks_here: int) -> int:
    """Let kernels and BLAS use cores / ranks threads (at least 1), or as many as the user set. Returns the number.

    Without this, R ranks on a host run R x cores threads, which slow each other down."""
    wanted, threads = environment.read().threads, threads_of(ranks_here)
    if wanted is None:
        with environment.unchanged():  # it sets a variable for OpenMP when it is loaded
            from threadpoolctl import threadpool_limits

        _limits[:] = [threadpool_limits(limits=threads, user_api="blas")]
    parallel.set_threads(threads)
    blas.threads(threads)  # after the limits: the library that multiplies must run on one thread, or its bits change
    return threads


def threads_of(ranks_here: int) -> int:
    """How many threads each rank uses on a host with `ranks_here` of them."""
    wanted = environment.read().threads
    return wanted if wanted is not None else max(cores() // ranks_here, 1)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
