"""Who watches the ranks of a communicator that wait for each other, if anybody does."""

from __future__ import annotations

from typing import Any

from fsdpx.core.base import environment
from fsdpx.core.base.extensions import load_extension
from fsdpx.core.comm.communicator import unwrap_communicator
from fsdpx.core.comm.mesh import MeshAxes

__all__ = ["can_be_watched", "record_call", "start_watching", "stop_watching", "watch_axes"]


def can_be_watched(comm: Any) -> bool:
    """Whether ranks may wait in vain there: not a single one, and not threads, which find missing ranks themselves; and
    FSDPX_WATCH=0 says no."""
    base = unwrap_communicator(comm)
    return bool(base.size > 1 and hasattr(base, "timeout") and environment.read_environment().watch)


def start_watching(comm: Any, *also: Any, timeout: float | None = None, patient: bool = True) -> Any:
    """Begin to watch the ranks of `comm`, see `fsdpx.ext.watch.watchdog`; None where that cannot be. Collective."""
    if not can_be_watched(comm):
        return None
    return load_extension("observer", "watchdog")(comm, *also, timeout=timeout, patient=patient)


def watch_axes(axes: MeshAxes) -> Any:
    """Watch all communicators of a mesh; the observer of the engine of this rank, or None. Collective."""
    watcher = start_watching(axes.world, axes.replica, axes.shard, axes.data, axes.pipe, axes.tensor)
    return None if watcher is None else watcher.record


def record_call(comm: Any, call: str) -> None:
    """Tell who watches `comm` that this rank has come to `call`, which all of its ranks make."""
    watcher = getattr(unwrap_communicator(comm), "watched_by", None)
    if watcher is not None:
        watcher.record.on_call(call)


def stop_watching(comm: Any) -> Any:
    """Let go of `comm`, which is given up: no rank waits there any more. Returns who watched it, if anybody did."""
    base = unwrap_communicator(comm)
    watcher, base.watched_by = base.watched_by, None
    if watcher is not None:
        watcher.release_communicator(base)
    return watcher
