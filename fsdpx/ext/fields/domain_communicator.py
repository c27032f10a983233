"""Duplicate a communicator, so that a domain such as a `Grid` has a communicator of its own."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["duplicate_communicator_and_make_finalizer"]

_UNFREED_COMMUNICATORS: list[Any] = []
"""Communicators of garbage-collected domains. They are freed when the next domain is made, because the garbage
collector may run in any thread and must not call MPI."""


def duplicate_communicator_and_make_finalizer(domain: object, comm: Any) -> tuple[Any, Any]:
    """Duplicate an mpi4py communicator for a domain. Return the duplicate, and a finalizer that marks the duplicate as
    no longer needed.

    The domain needs its own communicator, because the solver may free `comm`. A communicator without a `Dup` method is
    returned unchanged, with None instead of a finalizer. This function also frees the communicators of domains that
    have been garbage-collected. If the duplicate still exists when the process exits, MPI frees it."""
    while _UNFREED_COMMUNICATORS:
        _UNFREED_COMMUNICATORS.pop().Free()
    if not hasattr(comm, "Dup"):
        return comm, None
    own = comm.Dup()
    free = weakref.finalize(domain, _UNFREED_COMMUNICATORS.append, own)
    free.atexit = False
    return own, free
