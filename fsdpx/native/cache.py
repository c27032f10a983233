"""Numba's own cache on disk, from which machine code is made for other versions of Python and of NumPy."""

import hashlib
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from fsdpx import environment
from fsdpx.native.image import fingerprint, freedom, seal, unsealed

__all__ = ["enable"]


def enable(dispatcher: Any, function: Callable[..., Any], fastmath: Any, bare: bool) -> None:
    """Keep on disk what the dispatcher of a function, or of a copy of it, compiles. bare: Python cannot call it."""
    try:
        dispatcher._cache = KernelCache(dispatcher.py_func, function, fastmath, bare)
    except RuntimeError as error:
        _warn(error)


class KernelCache(FunctionCache):
    """Numba's cache with one file per function, signature and version of the sources; a failing disk is a warning.

    Numba numbers the signatures of a function, and two ranks that compile at the same time can take the same number;
    and it checks only the kernel's own source file, not those of the functions it calls."""

    def __init__(self, copy: Callable[..., Any], function: Callable[..., Any], fastmath: Any, bare: bool) -> None:
        super().__init__(copy)
        self.made_as = fingerprint(function), freedom(fastmath), bare
        self.objects: dict[Any, bytes] = {}
        """By signature what was loaded: Numba lets go of it."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """As Numba's, without what a function is made around: an intrinsic there is another one in every process, and
        would be compiled in each. The names of functions tell them apart."""
        return sig, codegen.magic_tuple(), self._py_func.__code__.co_code

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """As Numba's, without its `refresh`, which imports everything that only compiling needs."""
        rtsys.initialize(target_context)
        try:
            self._open(sig, target_context.codegen())
            data = self._cache_file.load(self._index_key(sig, target_context.codegen()))
        except OSError as error:
            return _warn(error)
        if data is None:
            return None
        self.objects[sig] = data[0][2][0]
        return self._impl.rebuild(target_context, data)

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
        key = repr((str(sig), codegen.magic_tuple(), self.made_as, environment.compiler()))
        name = f"{self._impl.filename_base}.{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
        self._cache_file: Any = _KeptObject(Path(self._cache_path, f"{name}.kept"))


class _KeptObject:
    """One object in a file, in place of Numba's index and data: it is unpickled only if this user or root has written
    it and its digest fits."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def save(self, key: Any, data: Any) -> None:
        seal(self.file, dumps((key, data)))

    def load(self, key: Any) -> Any:
        content = unsealed(self.file)
        known, data = (None, None) if content is None else pickle.loads(content)
        return data if known == key else None


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
