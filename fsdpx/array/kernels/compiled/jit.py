"""How a kernel is compiled: without the GIL, with IEEE division, cached on disk if there is a writable folder."""

import functools
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.runtime import rtsys

__all__ = ["REORDER", "jit"]

REORDER = {"reassoc", "nsz", "contract"}
"""Lets LLVM sum a row in vector lanes; the order depends on the row's length only."""

SOURCES = Path(__file__).parent.parent


def jit(function: Callable[..., Any] | None = None, *, fastmath: Any = False, name: str = "") -> Any:
    """Numba's njit; compiled at the first call, or loaded from the cache. name: of a function that is made more than
    once, each time around another one."""
    if function is None:
        return functools.partial(jit, fastmath=fastmath)
    function.__qualname__ = name or function.__qualname__  # names the file in the cache
    dispatcher: Any = numba.njit(function, nogil=True, error_model="numpy", fastmath=fastmath)
    try:
        dispatcher._cache = Cache(function)
    except RuntimeError as error:
        _warn(error)
    return dispatcher


class Cache(FunctionCache):
    """Numba's cache with one file per function, signature and version of the sources; a failing disk is a warning.

    Numba numbers the signatures of a function, and two ranks that compile at the same time can take the same number;
    and it checks only the kernel's own source file, not those of the functions it calls."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """As Numba's, without what a function is made around: an intrinsic there is another one in every process, and
        would be compiled in each. The names of functions tell them apart."""
        return sig, codegen.magic_tuple(), self._py_func.__code__.co_code

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """As Numba's, without its `refresh`, which imports everything that only compiling needs."""
        rtsys.initialize(target_context)
        try:
            self._open(sig, target_context.codegen())
            return self._load_overload(sig, target_context)
        except OSError as error:
            return _warn(error)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn(error)

    def _save_overload(self, sig: Any, data: Any) -> None:
        self._open(sig, data.codegen)
        super()._save_overload(sig, data)

    def _open(self, sig: Any, codegen: Any) -> None:
        """Select the file of this signature; the caller holds the compiler's lock."""
        sources = _fingerprint(Path(self._py_func.__code__.co_filename))
        key = repr((str(sig), codegen.magic_tuple(), sources))
        name = f"{self._impl.filename_base}.{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
        self._cache_file = IndexDataCacheFile(self._cache_path, name, sources)


@functools.cache
def _fingerprint(own: Path) -> str:
    """Of all kernels, and of the file of a function that is none."""
    files = [*sorted(SOURCES.glob("*.py")), *sorted(SOURCES.glob("compiled/*.py")), *([own] if own.exists() else [])]
    return hashlib.blake2b(b"\0".join(f.read_bytes() for f in files), digest_size=16).hexdigest()


_warned = False


def _warn(error: Exception) -> None:
    """Warn once per process."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"fsdpx: compiled kernels cannot be kept on disk ({error}), so every process compiles them again "
            "(some seconds): set NUMBA_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )
