"""Functions of Python that run as machine code, which Numba compiles.

An extension may keep the code on disk (`CodeStore`): then Numba is imported only if something has to be compiled, or
where code cannot be kept. Without it Numba compiles in each process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from fsdpx.core.array import lazy_numba
from fsdpx.core.base.extensions import find_extension

__all__ = [
    "REORDER",
    "CodeStore",
    "CompiledFunction",
    "format_fastmath",
    "get_argument_kinds",
    "jit",
    "parse_declared_kinds",
    "specialize",
]

REORDER = {"reassoc", "nsz", "contract"}
"""Lets LLVM sum a row in vector lanes; the order depends on the row's length only."""

_lock = threading.RLock()  # a thread rank must not compile while another one does
_fixed: dict[Any, CompiledFunction] = {}
_bare: dict[tuple[Any, str], Any] = {}


def jit(function: Callable[..., Any] | None = None, *, fastmath: Any = False, name: str = "") -> Any:
    """Compiled at the first call with arguments of some types, without the GIL and with IEEE division. name: of a
    function that is made more than once, each time around another one."""
    if function is None:
        return functools.partial(jit, fastmath=fastmath)
    function.__qualname__ = name or function.__qualname__  # names the file on disk
    return CompiledFunction(function, fastmath)


def specialize(
    function: CompiledFunction, arguments: str, formats: tuple[str, ...] = ("float32", "float64")
) -> CompiledFunction:
    """`function` for one layout of its arguments instead of every one that it is called with, in `formats`.

    arguments: `i` an int64, `b` a truth value, `A2` an array of two dims in any layout, `C2` one in C order; h after
    it: of the bits of 16-bit numbers; s: of float32; a final r: it is only read, so it may be read-only and lie at any
    byte."""
    compiled = _fixed.get(function)
    if compiled is None:
        wanted = functools.partial(parse_declared_kinds, arguments.split(), formats)
        compiled = _fixed.setdefault(function, CompiledFunction(function.function, function.fastmath, wanted))
    return compiled


class CodeStore(Protocol):
    """Keeps the machine code of functions on disk. The extension of the kind "code" and the name "disk"."""

    def find_entry(self, function: CompiledFunction, wanted: tuple[str, ...]) -> Callable[..., Any] | None:
        """Return what runs a function for these kinds of arguments, from disk or built; None if it cannot be kept. The
        entry returns NotImplemented for arguments of other kinds."""

    def store_compiled(self, dispatcher: Any, function: Callable[..., Any], fastmath: Any, bare: bool) -> None:
        """Keep on disk what Numba's dispatcher compiles. bare: Python cannot call it."""

    def compile_for(self, dispatcher: Any, wanted: tuple[str, ...] | None) -> Any:
        """Return the dispatcher, compiled for these kinds of arguments; if they are declared, for no others."""


@functools.cache
def _find_code_store() -> CodeStore | None:
    store: CodeStore | None = find_extension("code", "disk", optional=True)
    return store


def format_fastmath(fastmath: Any) -> str:
    """What the compiler may do with sums, as a part of a file's name: code without it has other bits."""
    return " ".join(sorted(fastmath)) if isinstance(fastmath, set) else str(fastmath)


SCALARS: dict[Any, str] = {
    int: "int", float: "float", bool: "bool",
    **{kind: f"numpy.{np.dtype(kind).name}" for kind in (
        np.float32, np.float64, np.int32, np.int64, np.uint32, np.uint64, np.uint16, np.int8, np.uint8,
    )},
}  # fmt: skip


def get_argument_kinds(arguments: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The kinds of the arguments of a call; None if no machine code is kept for one of them."""
    words = [_format_array_kind(a) if type(a) is np.ndarray else SCALARS.get(type(a)) for a in arguments]
    return None if None in words else tuple(word for word in words if word is not None)


def parse_declared_kinds(
    words: Sequence[str], formats: Sequence[str], arguments: tuple[Any, ...]
) -> tuple[str, ...] | None:
    """The kinds that a declaration (see `fixed`) means in the format of the first array whose format is free; None if
    that is none of `formats`."""
    free = (a for a, word in zip(arguments, words, strict=False) if len(word) > 1 and word[2:3] not in ("h", "s"))
    real = next((a.dtype.name for a in free), formats[0])
    return tuple(_parse_word(word, real) for word in words) if real in formats else None


def _parse_word(word: str, real: str) -> str:
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
    """A function that is compiled when it is called. wanted: from the arguments of a call to the kinds that it is
    compiled for; None: the kinds of the arguments."""

    def __init__(self, function: Callable[..., Any], fastmath: Any, wanted: Any = get_argument_kinds) -> None:
        self.function = function
        self.fastmath = fastmath
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self.freedom = format_fastmath(fastmath)
        self._wanted = wanted
        self._dispatcher: Any = None
        self._entries: list[Callable[..., Any]] = []
        self._loaded: dict[tuple[str, ...], Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        for entry in self._entries:
            result = entry(*arguments)
            if result is not NotImplemented:
                return result
        result = self._get_entry(arguments)(*arguments)
        return self.get_dispatcher()(*arguments) if result is NotImplemented else result

    def compile_for(self, *arguments: Any) -> None:
        """Compile or load it for arguments like these, without a call."""
        self._get_entry(arguments)

    @property
    def compiled_kinds(self) -> set[tuple[str, ...]]:
        """The kinds of arguments for which there is machine code."""
        return set(self._loaded)

    def get_dispatcher(self) -> Any:
        """Numba's, which compiles what no machine code is kept of."""
        with _lock:
            if self._dispatcher is None:
                self._dispatcher = self._make_dispatcher({})
            return self._dispatcher

    def get_bare_dispatcher(self) -> Any:
        """Numba's, of what compiled code alone calls."""
        key = self.function, self.freedom
        with _lock:
            if key not in _bare:
                _bare[key] = self._make_dispatcher(lazy_numba.BARE)
            return _bare[key]

    def _make_dispatcher(self, entries: Any) -> Any:
        import numba

        options = {"nogil": True, "error_model": "numpy", "fastmath": self.fastmath, **entries}
        compiled: Any = numba.njit(**options)(lazy_numba.bind_objects(self.function))
        if (store := _find_code_store()) is not None:
            store.store_compiled(compiled, self.function, self.fastmath, bool(entries))
        return compiled

    def _get_entry(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """What takes these arguments; Numba's dispatcher if no machine code can be kept for them."""
        wanted = self._wanted(arguments)
        with _lock:
            if wanted is not None and wanted in self._loaded:
                return self._loaded[wanted]
            store, entry = _find_code_store(), None
            if store is not None and wanted is not None:
                entry = store.find_entry(self, wanted)
            if entry is None:
                entry = self.get_dispatcher() if store is None else store.compile_for(self.get_dispatcher(), wanted)
            elif wanted is not None:
                self._loaded[wanted] = entry
            self._entries.append(entry)
            return entry
