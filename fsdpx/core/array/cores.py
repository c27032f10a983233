"""Divide the cores of a host among its ranks, because by default, BLAS would start one thread per core in every
rank."""

import os

from fsdpx.core.array import blas, parallel
from fsdpx.core.base import environment

__all__ = ["count_threads_per_rank", "count_usable_cores", "set_threads_per_rank"]


def set_threads_per_rank(ranks_here: int) -> int:
    """Set the number of threads that fsdpx uses in each rank, and return this number. If the user has not set a number,
    it is the number of cores divided by `ranks_here` (the number of ranks on the host), but at least 1.

    Without this limit, each rank on a host would run one thread per core, and the threads would slow each other down.
    The limit does not apply to matrix products of the user's program."""
    wanted, threads = environment.read_environment().threads, count_threads_per_rank(ranks_here)
    blas.set_thread_limit(threads if wanted is None else None)
    parallel.set_threads(threads)
    blas.set_product_threads(threads)
    return threads


def count_threads_per_rank(ranks_here: int) -> int:
    """Return the number of threads that each rank uses if `ranks_here` ranks share the host."""
    wanted = environment.read_environment().threads
    return wanted if wanted is not None else max(count_usable_cores() // ranks_here, 1)


def count_usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
