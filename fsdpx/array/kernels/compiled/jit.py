"""How a kernel is compiled: without the GIL, with IEEE division, kept on disk when a folder can be written."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

__all__ = ["REORDER", "jit"]

REORDER = {"reassoc", "nsz", "contract"}
"""Lets LLVM sum a row in vector lanes; the order depends on the row's length only."""

SOURCES = Path(__file__).parent.parent


def jit(function: Callable[..., Any] | None = None, *, fastmath: Any = False) -> Any:
    """Numba's njit; compiled at the first call, and that from the cache where there is one."""
    if function is None:
        return functools.partial(jit, fastmath=fastmath)
    dispatcher = numba.njit(function, nogil=True, error_model="numpy", fastmath=fastmath)
    try:
        dispatcher._cache = Cache(function)
    except RuntimeError as error:
        _warn(error)
    return dispatcher


class Cache(FunctionCache):
    """Numba's cache, besides: code compiled from other versions of these files is not found, and no disk is no error."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # Numba looks at the file of the kernel only, not at the files it takes its scalar functions from.
        return (*super()._index_key(sig, codegen), _fingerprint())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError as error:
            return _warn(error)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn(error)


@functools.cache
def _fingerprint() -> str:
    files = sorted(SOURCES.glob("*.py")) + sorted(SOURCES.glob("compiled/*.py"))
    return hashlib.blake2b(b"\0".join(f.read_bytes() for f in files), digest_size=16).hexdigest()


_warned = False


def _warn(error: Exception) -> None:
    """Once per process: what it costs and what helps."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"fsdpx: compiled kernels cannot be kept on disk ({error}), so every process compiles them again "
            "(some seconds): set NUMBA_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )
