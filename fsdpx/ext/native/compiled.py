"""A function of Python that runs as machine code: taken from disk, or compiled and put there.

Numba is imported only if something has to be compiled, or where machine code cannot be kept (see `image.able`)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from fsdpx.ext.native import code_cache, lazy_numba

__all__ = ["REORDER", "Compiled", "fixed", "jit"]

REORDER = {"reassoc", "nsz", "contract"}
"""Lets LLVM sum a row in vector lanes; the order depends on the row's length only."""

_lock = threading.RLock()  # a thread rank must not compile while another one does
_fixed: dict[Any, Compiled] = {}
_bare: dict[tuple[Any, str], Any] = {}


def jit(function: Callable[..., Any] | None = None, *, fastmath: Any = False, name: str = "") -> Any:
    """Compiled at the first call with arguments of some types, without the GIL and with IEEE division. name: of a
    function that is made more than once, each time around another one."""
    if function is None:
        return functools.partial(jit, fastmath=fastmath)
    function.__qualname__ = name or function.__qualname__  # names the file on disk
    return Compiled(function, fastmath)


def fixed(function: Compiled, arguments: str, formats: tuple[str, ...] = ("float32", "float64")) -> Compiled:
    """`function` for one layout of its arguments instead of every one that it is called with, in `formats`.

    arguments: `i` an int64, `b` a truth value, `A2` an array of two dims in any layout, `C2` one in C order; h after
    it: of the bits of 16-bit numbers; s: of float32; a final r: it is only read, so it may be read-only and lie at any
    byte."""
    made = _fixed.get(function)
    if made is None:
        wanted = functools.partial(code_cache.kinds_declared, arguments.split(), formats)
        made = _fixed.setdefault(function, Compiled(function.function, function.fastmath, wanted))
    return made


class Compiled:
    """A function that is compiled when it is called. wanted: from the arguments of a call to the kinds that it is
    compiled for; None: the kinds of the arguments."""

    def __init__(self, function: Callable[..., Any], fastmath: Any, wanted: Any = code_cache.kinds_of) -> None:
        self.function = function
        self.fastmath = fastmath
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self.freedom = code_cache.freedom(fastmath)
        self._wanted = wanted
        self._dispatcher: Any = None
        self._entries: list[Callable[..., Any]] = []
        self._loaded: dict[tuple[str, ...], Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        for entry in self._entries:
            found = entry(*arguments)
            if found is not NotImplemented:
                return found
        found = self._ready(arguments)(*arguments)
        return self.dispatcher()(*arguments) if found is NotImplemented else found

    def prepare(self, *arguments: Any) -> None:
        """Compile or load it for arguments like these, without a call."""
        self._ready(arguments)

    @property
    def ready(self) -> set[tuple[str, ...]]:
        """The kinds of arguments for which there is machine code."""
        return set(self._loaded)

    def dispatcher(self) -> Any:
        """Numba's, which compiles what no machine code is kept of."""
        with _lock:
            if self._dispatcher is None:
                self._dispatcher = self._made({})
            return self._dispatcher

    def bare(self) -> Any:
        """Numba's, of what compiled code alone calls."""
        key = self.function, self.freedom
        with _lock:
            if key not in _bare:
                _bare[key] = self._made(lazy_numba.BARE)
            return _bare[key]

    def _made(self, entries: Any) -> Any:
        import numba

        from fsdpx.ext.native import compile

        options = {"nogil": True, "error_model": "numpy", "fastmath": self.fastmath, **entries}
        made: Any = numba.njit(**options)(lazy_numba.bound(self.function))
        compile.enable(made, self.function, self.fastmath, bare=bool(entries))
        return made

    def _ready(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """What takes these arguments; Numba's dispatcher if no machine code can be kept for them."""
        wanted = self._wanted(arguments)
        with _lock:
            if wanted is not None and wanted in self._loaded:
                return self._loaded[wanted]
            entry = None
            if wanted is not None and code_cache.able():
                entry = code_cache.load(self.function, self.fastmath, wanted) or self._first(wanted)
            if entry is None:
                from fsdpx.ext.native import compile

                entry = compile.prepared(self.dispatcher(), wanted)
            elif wanted is not None:
                self._loaded[wanted] = entry
            self._entries.append(entry)
            return entry

    def _first(self, wanted: tuple[str, ...]) -> Callable[..., Any] | None:
        """Built, or what another process has built meanwhile."""
        with code_cache.one_at_a_time(self.function, self.fastmath, wanted):
            return code_cache.load(self.function, self.fastmath, wanted) or self._built(wanted)

    def _built(self, wanted: tuple[str, ...]) -> Callable[..., Any] | None:
        from fsdpx.ext.native import compile

        made = compile.build(self.bare(), wanted)
        return None if made is None else code_cache.keep(self.function, self.fastmath, wanted, made)
