"""The extension that keeps compiled kernels as machine code on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdpx.core.array.jit import CompiledFunction
from fsdpx.ext.native.code_cache import can_store_machine_code, holding_compilation_lock, load_code, store_and_load_code

__all__ = ["STORE"]


class DiskCodeStore:
    """Stores the machine code of functions on disk. Implements `fsdpx.core.array.jit.CodeStore`."""

    def load_or_compile(self, function: CompiledFunction, kinds: tuple[str, ...]) -> Callable[..., Any] | None:
        if not can_store_machine_code():
            return None
        known = load_code(function.function, function.fastmath, kinds)
        return known or self._load_or_build_code(function, kinds)

    def _load_or_build_code(self, function: CompiledFunction, kinds: tuple[str, ...]) -> Callable[..., Any] | None:
        """Load the compiled function for these kinds (types) of arguments if another process has just stored it.
        Otherwise, compile and store it.

        Returns None if the code cannot be stored."""
        name = function.function, function.fastmath, kinds
        with holding_compilation_lock(*name):
            if known := load_code(*name):
                return known
            # not imported at the top, because `compile` imports Numba, which is slow
            from fsdpx.ext.native import compile

            made = compile.compile_to_machine_code(function.get_dispatcher_without_python_entry(), kinds)
            return None if made is None else store_and_load_code(*name, made)

    def enable_disk_cache(self, dispatcher: Any, function: Callable[..., Any], fastmath: Any, bare: bool) -> None:
        from fsdpx.ext.native import compile

        compile.enable_disk_cache(dispatcher, function, fastmath, bare)

    def compile_dispatcher(self, dispatcher: Any, kinds: tuple[str, ...] | None) -> Any:
        from fsdpx.ext.native import compile

        return compile.compile_dispatcher(dispatcher, kinds)


STORE = DiskCodeStore()
