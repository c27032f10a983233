"""Start and stop the watchdog, which reports ranks that have been waiting for each other for too long. The watchdog is
used only if there are several ranks, they run as processes, and the environment variable FSDPX_WATCH is not 0."""

from __future__ import annotations

from typing import Any

from fsdpx.core.base import environment
from fsdpx.core.base.extensions import import_declared_extension
from fsdpx.core.comm.communicator import unwrap_communicator
from fsdpx.core.comm.mesh import MeshAxes

__all__ = [
    "can_be_watched",
    "detach_and_return_watchdog",
    "report_call_to_watchdog",
    "start_watchdog_if_possible",
    "start_watching_axes",
]


def can_be_watched(comm: Any) -> bool:
    """Return whether a watchdog is useful for `comm`. There must be several ranks, they must be processes (ranks that
    run as threads detect missing ranks themselves), and FSDPX_WATCH must not be 0."""
    base = unwrap_communicator(comm)
    return bool(base.size > 1 and hasattr(base, "timeout") and environment.read_environment().watch)


def start_watchdog_if_possible(
    comm: Any, *other_comms: Any, timeout: float | None = None, extend_waits: bool = True
) -> Any:
    """Start a watchdog (`fsdpx.ext.watch.watchdog`) for the ranks of `comm`, and return it. Return None if `comm`
    cannot be watched. Collective.

    `other_comms`, `timeout` and `extend_waits` are passed to `start_watchdog`."""
    if not can_be_watched(comm):
        return None
    return import_declared_extension("observer", "watchdog")(
        comm, *other_comms, timeout=timeout, extend_waits=extend_waits
    )


def start_watching_axes(axes: MeshAxes) -> Any:
    """Start a watchdog for all communicators of a mesh. Return the observer that this rank's engine must notify, or
    None if the mesh cannot be watched. Collective."""
    watcher = start_watchdog_if_possible(axes.world, axes.replica, axes.shard, axes.data, axes.pipe, axes.tensor)
    return None if watcher is None else watcher.record


def report_call_to_watchdog(comm: Any, call: str) -> None:
    """Report to the watchdog of `comm`, if there is one, that this rank has reached the collective `call`."""
    watcher = getattr(unwrap_communicator(comm), "watched_by", None)
    if watcher is not None:
        watcher.record.on_collective_call(call)


def detach_and_return_watchdog(comm: Any) -> Any:
    """Stop watching `comm`, because no rank will wait on it any longer. Return its watchdog, or None if it had none."""
    base = unwrap_communicator(comm)
    watcher, base.watched_by = base.watched_by, None
    if watcher is not None:
        watcher.stop_watching_and_remove_records_of_dead(base)
    return watcher
