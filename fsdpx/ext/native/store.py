"""The extension that keeps machine code on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdpx.core.array.jit import Compiled
from fsdpx.ext.native.code_cache import able, keep, load, one_at_a_time

__all__ = ["STORE"]


class DiskStore:
    """What keeps the machine code of functions on disk, see `fsdpx.core.array.jit.CodeStore`."""

    def entry(self, function: Compiled, wanted: tuple[str, ...]) -> Callable[..., Any] | None:
        if not able():
            return None
        known = load(function.function, function.fastmath, wanted)
        return known or self._build(function, wanted)

    def _build(self, function: Compiled, wanted: tuple[str, ...]) -> Callable[..., Any] | None:
        """Built, or what another process has built meanwhile."""
        name = function.function, function.fastmath, wanted
        with one_at_a_time(*name):
            if known := load(*name):
                return known
            from fsdpx.ext.native import compile  # which imports Numba

            made = compile.build(function.bare(), wanted)
            return None if made is None else keep(*name, made)

    def enable(self, dispatcher: Any, function: Callable[..., Any], fastmath: Any, bare: bool) -> None:
        from fsdpx.ext.native import compile

        compile.enable(dispatcher, function, fastmath, bare)

    def prepare(self, dispatcher: Any, wanted: tuple[str, ...] | None) -> Any:
        from fsdpx.ext.native import compile

        return compile.prepared(dispatcher, wanted)


STORE = DiskStore()
