"""Compile Python functions to machine code with Numba.

An extension may store the machine code on disk (`CodeStore`). Numba is then imported only to compile code that is not
stored yet, or that cannot be stored. Without the extension, Numba compiles in each process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from fsdpx.core.array import lazy_numba
from fsdpx.core.base.extensions import import_extension_if_declared

__all__ = [
    "REORDER", "CodeStore", "CompiledFunction", "format_fastmath_for_file_name", "get_argument_kinds", "jit",
    "parse_declared_kinds", "specialize",
]  # fmt: skip

REORDER = {"reassoc", "nsz", "contract"}
"""Compiler flags that let LLVM sum a row in vector lanes. The order of the additions depends only on the length of the
row."""

_lock = threading.RLock()  # only one thread may compile at a time, and ranks may be threads
_fixed: dict[Any, CompiledFunction] = {}
_bare: dict[tuple[Any, str], Any] = {}


def jit(function: Callable[..., Any] | None = None, *, fastmath: Any = False, name: str = "") -> Any:
    """Decorate a function, so that Numba compiles it on its first call with each combination of argument types. The
    compiled code releases the GIL, and its divisions follow IEEE 754.

    A factory may define the same function several times, each time with a different inner function. Each definition
    then needs a different `name`, because the name becomes part of the cache file name."""
    if function is None:
        return functools.partial(jit, fastmath=fastmath)
    function.__qualname__ = name or function.__qualname__  # this name becomes part of the cache file name
    return CompiledFunction(function, fastmath)


def specialize(
    function: CompiledFunction, arguments: str, formats: tuple[str, ...] = ("float32", "float64")
) -> CompiledFunction:
    """Return `function`, compiled for one declared memory layout of its arguments and for each dtype in `formats`.
    Without this declaration, Numba compiles the function again for every layout that occurs in a call.

    Parameters
    ----------
    function : function to compile
    arguments : one word for each argument: `i` for int64, `b` for bool, `A2` for a 2-D array of any layout, `C2` for a
        2-D array in C order. After the number of dims, `h` means that the array contains the bits of 16-bit numbers,
        and `s` means that the array is float32. A final `r` means that the function only reads the array, so a
        read-only or unaligned array may be passed
    formats : names of the dtypes to compile for; in a call, all arrays without `h` or `s` have one of them
    """
    compiled = _fixed.get(function)
    if compiled is None:
        wanted = functools.partial(parse_declared_kinds, arguments.split(), formats)
        compiled = _fixed.setdefault(function, CompiledFunction(function.function, function.fastmath, wanted))
    return compiled


class CodeStore(Protocol):
    """An on-disk cache of compiled functions. The extension "disk" in `EXTENSIONS["code"]` implements it."""

    def load_or_compile(self, function: CompiledFunction, kinds: tuple[str, ...]) -> Callable[..., Any] | None:
        """Load a function from disk for arguments of these kinds (dtypes and layouts), or compile and store it. Return
        the loaded function, which returns NotImplemented for arguments of other kinds. If the code cannot be stored,
        return None."""

    def enable_disk_cache(self, dispatcher: Any, function: Callable[..., Any], fastmath: Any, bare: bool) -> None:
        """Make the Numba dispatcher write its compiled code to the disk cache. `bare` is true if this code cannot be
        called from Python."""

    def compile_dispatcher(self, dispatcher: Any, kinds: tuple[str, ...] | None) -> Any:
        """Compile the Numba dispatcher for arguments of these kinds, and return the dispatcher. If the kinds were
        declared with `specialize`, the dispatcher accepts no other kinds."""


@functools.cache
def _load_code_store() -> CodeStore | None:
    store: CodeStore | None = import_extension_if_declared("code", "disk", optional=True)
    return store


def format_fastmath_for_file_name(fastmath: Any) -> str:
    """Return the compiler flag `fastmath` as part of a file name. The name must contain the flag, because the flag lets
    the compiler reorder sums, which changes their last bits."""
    return " ".join(sorted(fastmath)) if isinstance(fastmath, set) else str(fastmath)


SCALARS: dict[Any, str] = {
    int: "int", float: "float", bool: "bool",
    **{kind: f"numpy.{np.dtype(kind).name}" for kind in (
        np.float32, np.float64, np.int32, np.int64, np.uint32, np.uint64, np.uint16, np.int8, np.uint8,
    )},
}  # fmt: skip


def get_argument_kinds(arguments: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Return the kind (dtype, number of dims and layout) of each argument of a call. Return None if machine code
    cannot be stored for one of the arguments."""
    words = [_format_array_kind(a) if type(a) is np.ndarray else SCALARS.get(type(a)) for a in arguments]
    return None if None in words else tuple(word for word in words if word is not None)


def parse_declared_kinds(
    words: Sequence[str], formats: Sequence[str], arguments: tuple[Any, ...]
) -> tuple[str, ...] | None:
    """Translate the words of a `specialize` declaration into the kinds (dtype, dims and layout) of these arguments.

    All arrays whose words contain no dtype must have the dtype of the first such array. Return None if this dtype is
    not in `formats`.
    """
    free = (a for a, word in zip(arguments, words, strict=False) if len(word) > 1 and word[2:3] not in ("h", "s"))
    real = next((a.dtype.name for a in free), formats[0])
    return tuple(_parse_declared_kind(word, real) for word in words) if real in formats else None


def _parse_declared_kind(word: str, real: str) -> str:
    if len(word) == 1:
        return {"i": "int", "b": "bool"}[word]
    dtype = {"h": "uint16", "s": "float32"}.get(word[2:3], real)
    return f"{dtype} {word[1]} {'any' if word[0] == 'A' else word[0]}{' r' if word.endswith('r') else ' w'}"


def _format_array_kind(a: np.ndarray) -> str | None:
    flags = a.flags
    layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
    if not (flags.aligned and flags.writeable) or a.dtype.kind not in "biuf" or not a.dtype.isnative:
        return None
    return f"{a.dtype.name} {a.ndim} {layout}"


class CompiledFunction:
    """A Python function that is compiled for the kinds of its arguments when it is called. The kind of an argument is
    its dtype and layout. `wanted` is a function that takes the arguments of a call and returns the kinds to compile for
    (default: the kinds of these arguments)."""

    def __init__(self, function: Callable[..., Any], fastmath: Any, wanted: Any = get_argument_kinds) -> None:
        self.function = function
        self.fastmath = fastmath
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self.freedom = format_fastmath_for_file_name(fastmath)
        self._wanted = wanted
        self._dispatcher: Any = None
        self._entries: list[Callable[..., Any]] = []
        self._loaded: dict[tuple[str, ...], Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        for entry in self._entries:
            result = entry(*arguments)
            if result is not NotImplemented:
                return result
        result = self._get_or_compile_callable(arguments)(*arguments)
        return self.get_dispatcher()(*arguments) if result is NotImplemented else result

    def compile_for_arguments(self, *arguments: Any) -> None:
        """Compile or load the function for arguments that have the same dtypes and layouts as `arguments`, without
        calling it."""
        self._get_or_compile_callable(arguments)

    @property
    def compiled_kinds(self) -> set[tuple[str, ...]]:
        """Argument kinds (dtypes and layouts) for which stored machine code has been loaded."""
        return set(self._loaded)

    def get_dispatcher(self) -> Any:
        """Return the Numba dispatcher that compiles the function in this process."""
        with _lock:
            if self._dispatcher is None:
                self._dispatcher = self._make_dispatcher({})
            return self._dispatcher

    def get_dispatcher_without_python_entry(self) -> Any:
        """Return a Numba dispatcher that omits the entry point for Python, because only compiled code calls the
        function."""
        key = self.function, self.freedom
        with _lock:
            if key not in _bare:
                _bare[key] = self._make_dispatcher(lazy_numba.BARE)
            return _bare[key]

    def _make_dispatcher(self, entries: Any) -> Any:
        import numba

        options = {"nogil": True, "error_model": "numpy", "fastmath": self.fastmath, **entries}
        compiled: Any = numba.njit(**options)(lazy_numba.copy_function_with_real_numba_objects(self.function))
        if (store := _load_code_store()) is not None:
            store.enable_disk_cache(compiled, self.function, self.fastmath, bool(entries))
        return compiled

    def _get_or_compile_callable(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the machine code for these arguments, or Numba's dispatcher if machine code cannot be stored."""
        wanted = self._wanted(arguments)
        with _lock:
            if wanted is not None and wanted in self._loaded:
                return self._loaded[wanted]
            store, entry = _load_code_store(), None
            if store is not None and wanted is not None:
                entry = store.load_or_compile(self, wanted)
            if entry is None:
                entry = (
                    self.get_dispatcher() if store is None else store.compile_dispatcher(self.get_dispatcher(), wanted)
                )
            elif wanted is not None:
                self._loaded[wanted] = entry
            self._entries.append(entry)
            return entry
