"""Limit the thread pools of NumPy's BLAS while fsdpx computes, and restore them afterwards for the user's program.

Ranks on a host share its cores, and when fsdpx splits a matrix product over threads, each part must run on one thread.
Between steps, the user's own matrix products use as many threads as the user has chosen.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fsdpx.core.array.blas import libraries
from fsdpx.core.base import environment

__all__ = ["limit_threads", "set_thread_limit"]


class BlasThreads(NamedTuple):
    """The thread pool of the BLAS library at `path`; `get` and `set` are functions that return and set its number of
    threads."""

    path: str
    get: Callable[[], int]
    set: Callable[[int], object]


class _PoolState:
    """The state of this module, which all threads share.

    Attributes
    ----------
    most : maximum number of threads of each pool while fsdpx computes, or None to keep the number that the user has set
    plan : (pool, maximum number of threads) pairs; None if not yet determined
    inside : number of open `limit_threads` blocks across all threads
    changed : currently limited pools, as (pool, current number of threads, original number of threads)
    """

    most: int | None = None
    pools: list[BlasThreads] | None = None
    plan: list[tuple[BlasThreads, int]] | None = None
    chosen = ""
    inside = 0
    changed: list[tuple[BlasThreads, int, int]]


_state, _lock = _PoolState(), threading.Lock()
_state.changed = []


def set_thread_limit(threads: int | None) -> None:
    """Set the maximum number of threads that NumPy's BLAS uses while fsdpx computes; None means the number that the
    user has set. The limit also applies to BLAS libraries that have been loaded since the last call."""
    with _lock:
        _state.most, _state.pools, _state.plan = threads, None, None


class limit_threads:  # noqa: N801
    """Context manager inside which NumPy's BLAS uses at most as many threads as `set_thread_limit` allows.

    If fsdpx calls NumPy's BLAS directly and splits matrix products over threads itself, the limit is one thread.
    Several Python threads may be inside at the same time; the last one to leave restores the BLAS thread counts set by
    the user's program."""

    __slots__ = ()

    def __enter__(self) -> None:
        with _lock:
            _state.inside += 1
            if _state.inside > 1:
                return
            if _state.plan is None or _state.chosen != libraries.get_selected_library():
                _plan_blas_thread_limits()
            for pool, most in _state.plan or ():
                pool_size = pool.get()
                if pool_size > most:
                    pool.set(most)
                    _state.changed.append((pool, most, pool_size))

    def __exit__(self, *_: object) -> None:
        with _lock:
            _state.inside -= 1
            while _state.changed and not _state.inside:
                pool, now, before = _state.changed.pop()
                # do not overwrite a thread count that the user's program has set in the meantime
                if pool.get() == now:
                    pool.set(before)


def _plan_blas_thread_limits() -> None:
    if _state.pools is None:
        _state.pools = _find_thread_pools()
    _state.chosen = libraries.get_selected_library()
    used = libraries.load_blas_library(_state.chosen) if _state.chosen in libraries.LIBRARY_NAMES else None
    most = [1 if used is not None and Path(pool.path).samefile(used.path) else _state.most for pool in _state.pools]
    _state.plan = [(pool, n) for pool, n in zip(_state.pools, most, strict=True) if n is not None]


def _find_thread_pools() -> list[BlasThreads]:
    """Return the thread pools of the loaded BLAS libraries, except libraries bundled by packages other than NumPy."""
    # importing threadpoolctl sets an OpenMP environment variable, so restore the environment afterwards
    with environment.restoring_environment():
        from threadpoolctl import ThreadpoolController
    loaded = [one for one in ThreadpoolController().lib_controllers if one.user_api == "blas"]
    return [
        BlasThreads(one.filepath, *_get_thread_count_functions(one))
        for one in loaded
        if _may_belong_to_numpy(Path(one.filepath))
    ]


def _may_belong_to_numpy(path: Path) -> bool:
    is_bundled = path.parent.name.endswith(".libs") or path.parent.name == ".dylibs"
    return not is_bundled or "numpy" in path.parts[-2] or "numpy" in path.parts[-3]


def _get_thread_count_functions(library: Any) -> tuple[Callable[[], int], Callable[[int], object]]:
    """Return functions that get and set the number of threads of a library. For OpenBLAS, return the library's own
    functions, because the functions from threadpoolctl take five times as long."""
    if library.internal_api == "openblas":
        # the library is already loaded, so this call only returns a handle to it
        loaded = ctypes.CDLL(library.filepath)
        for name in (f"{a}openblas_{{}}_num_threads{b}" for a in ("", "scipy_") for b in ("", "64_", "_64")):
            get, set = (getattr(loaded, name.format(what), None) for what in ("get", "set"))
            if get is not None and set is not None:
                return get, set
    return library.get_num_threads, library.set_num_threads


def _reset_after_fork() -> None:
    """Reset the state in a forked child process, which may have inherited a held lock and has no other threads."""
    global _lock
    _lock, _state.inside = threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
